#!/usr/bin/env bash
# What tpu_vm.sh has each host do: install EXTRAS PLACE | run PLACE OPTION ... | stop | logs | status
# A run outlives the connection that started it. While it is on, the same `run` joins it, and ends as it ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
RUN=$HOME/dipaco_run  # lock, which a run holds; its command, pid and log; in the end its status, and if it was stopped
PLACE=/mnt/dipaco
DISK=/dev/disk/by-id/google-persistent-disk-1
STOPPING_S=600

install() {
  mount_place "$2"
  # The images' own Python is too old; uv brings one. With constraints.txt, a host that is created again after a
  # preemption gets the versions with which the run began.
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --allow-existing --python 3.12 .venv
  python3 -m uv pip install --quiet --python .venv/bin/python -c constraints.txt -e ".[$1]"
}

mount_place() {  # of '', which is nothing; disk; or HOST:/SHARE
  [[ $1 ]] || return 0
  ! mountpoint -q "$PLACE" || return 0
  sudo mkdir -p "$PLACE"
  if [[ $1 == disk ]]; then
    # Only what is proved blank is formatted: a new disk is all zeros, a file system begins with something else.
    if sudo cmp -s -n 4194304 "$DISK" /dev/zero; then sudo mkfs.ext4 -q "$DISK"; fi
    sudo mount "$DISK" "$PLACE"
  else
    sudo apt-get -qq install -y nfs-common
    sudo mount -t nfs -o lookupcache=positive "$1" "$PLACE"  # what another host has just written is there
  fi
  sudo chown "$(id -u)" "$PLACE"
}

run() {
  mount_place "$1"  # a host that was started anew has nothing there
  shift
  exec 9>> "$RUN/lock"
  if flock --nonblock 9; then
    start "$@"
  elif [[ $(< "$RUN/command") != "$*" ]]; then
    echo "$(hostname): another run is on, stop it first: $(< "$RUN/command")" >&2
    exit 2
  fi
  exec 9>&-
  tail -n +1 -f --pid="$(< "$RUN/pid")" "$RUN/log"
  [[ ! -e $RUN/stopped ]] || exit 130
  local status=''
  [[ ! -s $RUN/status ]] || status=$(< "$RUN/status")
  exit "${status:-1}"  # a job that was killed could not tell
}

start() {
  rm -f "$RUN/status" "$RUN/stopped"
  echo "$*" > "$RUN/command"
  : > "$RUN/log"  # before anybody looks at it
  setsid bash launch/tpu_host.sh job "$@" >> "$RUN/log" 2>&1 < /dev/null &  # it has the lock, by the open file
  echo $! > "$RUN/pid"
}

job() {
  local status=0
  trap : TERM  # is for the program; this shell is to tell how it ended
  PYTHONUNBUFFERED=1 .venv/bin/python -m dipaco_jax.main --distributed "$@" || status=$?
  echo "$status" > "$RUN/status"
}

is_on() { ! flock --nonblock "$RUN/lock" true; }

stop() {
  if ! is_on; then echo "$(hostname): nothing runs"; return; fi
  touch "$RUN/stopped"
  kill -TERM -- "-$(< "$RUN/pid")" || true  # it may be over by now
  flock --timeout "$STOPPING_S" "$RUN/lock" true || kill -KILL -- "-$(< "$RUN/pid")"
}

logs() {
  echo "$(hostname):"
  [[ ! -e $RUN/log ]] || tail -n 50 "$RUN/log"
}

status() {
  if is_on; then echo "$(hostname): runs $(< "$RUN/command")"
  elif [[ -e $RUN/status ]]; then echo "$(hostname): ended with status $(< "$RUN/status"): $(< "$RUN/command")"
  else echo "$(hostname): nothing has run"
  fi
}

mkdir -p "$RUN"
case $1 in
  install) install "$2" "$3" ;;
  run) run "${@:2}" ;;
  job) job "${@:2}" ;;
  stop) stop ;;
  logs) logs ;;
  status) status ;;
esac; exit
