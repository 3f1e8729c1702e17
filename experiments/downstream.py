"""(8) Downstream: small tasks made of validation text, scored through the LM Evaluation Harness, by kind of text.

`next`: which of four pieces continues a text; the other three are from other sources of its kind. `word`: which of four
words continues a text. The runs are those of table (1); their workdirs must exist. Needs
`pip install -e '.[harness]'`.
"""

import gzip
import json
import pathlib
import random
import re
import sys
import tempfile

import common
import methods
import pictures
import runs
from absl import flags
from common import Column
from runs import Row

from dipaco_jax.command_line import command
from dipaco_jax.processes import stopping

METHODS = ('dense', 'diloco', 'kmeans', 'own', 'flat', 'dense_px')
CONTEXT, PIECE, CHOICES = 200, 100, 4  # characters; pieces to choose from
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{answers}}}}"
doc_to_target: "{{{{right}}}}"
target_delimiter: ""
metric_list: [{{metric: acc_norm, aggregation: mean, higher_is_better: true}}]
"""


def rows(size: str) -> list[Row]:
  found = {row.name: row for row in methods.rows(size)}
  return [found[name] for name in METHODS]


def pieces(text: str) -> tuple[str, str, str] | None:
  """Returns a document's beginning, the next piece and the next word, or None if it is too short."""
  cut = text.find(' ', CONTEXT)
  end = text.find(' ', cut + PIECE)
  word = re.compile(r'\s+\S+').match(text, cut) if cut > 0 else None
  return (text[:cut], text[cut:end], word[0]) if word and cut < end else None


def questions(lines, seed: int = 0) -> dict[str, list[dict]]:
  """{'next' or 'word': questions, with the kind of each}."""
  by_kind: dict[str, list[tuple[str, str, str, str]]] = {}
  for number, line in enumerate(lines):
    text = json.loads(line)
    if found := pieces(text['text']):
      by_kind.setdefault(text['domain'], []).append((*found, text.get('source', str(number))))
  rng = random.Random(seed)
  made: dict[str, list[dict]] = {'next': [], 'word': []}
  for kind, texts in sorted(by_kind.items()):
    for context, *right, source in texts:
      for name, answer, part in zip(made, right, (1, 2), strict=True):
        others = sorted({other[part] for other in texts if other[-1] != source} - {answer})
        if len(others) >= CHOICES - 1:
          answers = [answer, *rng.sample(others, CHOICES - 1)]
          rng.shuffle(answers)
          question = {'question': context, 'answers': answers, 'right': answers.index(answer), 'kind': kind}
          made[name].append(question)
  return made


def write_tasks(validation: str, folder: pathlib.Path) -> list[str]:
  """A task for each kind of question and of text; their names."""
  with gzip.open(validation, 'rt') as lines:
    made = questions(lines)
  names = []
  for name, asked in made.items():
    for kind in sorted({question['kind'] for question in asked}):
      task = f'{name}_{kind}'
      mine = [question for question in asked if question['kind'] == kind]
      (folder / f'{task}.jsonl').write_text(''.join(json.dumps(question) + '\n' for question in mine))
      (folder / f'{task}.yaml').write_text(TASK.format(name=task, file=folder / f'{task}.jsonl'))
      names.append(task)
  return names


def score(run: runs.Run, workdirs: pathlib.Path, tasks: list[str], folder: pathlib.Path) -> dict[str, float]:
  """{task: accuracy}, and means over kinds by `next` and `word`; without a router all paths are alike."""
  out = folder / 'out.json'
  line = [
    f'--workdir={runs.workdir(run, workdirs)}',
    f'--tasks={",".join(tasks)}',
    f'--include_path={folder}',
    f'--out={out}',
  ]
  path = ['--path=0'] if run.settings.routing.method == 'random' else []
  if status := stopping.run_process([sys.executable, '-m', 'dipaco_jax.harness', *line, '--batch_size=32', *path]):
    sys.exit(status)
  found = {task: scores['acc_norm,none'] for task, scores in json.loads(out.read_text()).items()}
  for name in ('next', 'word'):
    mine = [accuracy for task, accuracy in found.items() if task.startswith(name)]
    found[name] = sum(mine) / len(mine)
  return found


COLUMNS = (
  Column('next piece, mean of kinds', 'downstream.next', '.3f'),
  Column('minus dense, by seed', 'downstream.next', '+.3f', 'dense'),
  Column('next word, mean of kinds', 'downstream.word', '.3f'),
  Column('minus dense, by seed ', 'downstream.word', '+.3f', 'dense'),
  Column('next piece of German law', 'downstream.next_law_de', '.3f'),
  Column('perplexity', 'perplexity'),
)

TABLE = common.Table('downstream', 'Tasks made of validation text', rows, COLUMNS, pictures.dots)


def main() -> int:
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    tasks = write_tasks(flags.FLAGS.validation, folder)
    return common.score_finished(TABLE, 'downstream', lambda run, workdirs: score(run, workdirs, tasks, folder))


if __name__ == '__main__':
  common.define_flags()
  command.run(main)
