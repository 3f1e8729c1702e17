#!/usr/bin/env bash
# Tests what setup.cfg claims of versions, in a new environment that is removed in the end:
#   bash tests/helpers/versions.sh oldest python3.11   # every lower bound
#   bash tests/helpers/versions.sh newest python3.13   # what pip installs today
# Tests of most rooms, or the files that follow, and the run of configs/tiny.py. Warnings are no errors here: old libraries give
# them with newer ones that they need, and new ones announce what will change.
set -euo pipefail
cd "$(dirname "$0")/../.."
case ${1-} in
  oldest) resolution=lowest-direct ;;
  newest) resolution=highest ;;
  *) echo 'versions.sh: give oldest or newest, a Python, and files of tests, if not all' >&2; exit 2 ;;
esac
python=${2-python3} files=("${@:3}")
rooms=(core models routing storage training huggingface inference)
(( ${#files[@]} )) || files=("${rooms[@]/#/tests/}" tests/commands/main_test.py)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv "$place/venv"
"$place/venv/bin/pip" install -q uv
"$place/venv/bin/uv" pip install -q --python="$place/venv" --resolution="$resolution" -e '.[test]'
"$place/venv/bin/uv" pip freeze --python="$place/venv" | grep -E '^(flax|jax|numpy|optax|orbax-checkpoint)='
"$place/venv/bin/python" -m pytest -q -o filterwarnings=default "${files[@]}"
"$place/venv/bin/python" -m dipaco_jax.main --config=configs/tiny.py --workdir="$place/run"
