"""What launch/ and docs/islands.md say can be typed and applied: manifests, command lines, names, the image."""

import json
import math
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml
from repository import ROOT

from dipaco_jax import local
from dipaco_jax.command_line import command as command_lib, supervision
from dipaco_jax.islands import roles
from dipaco_jax.planning import topology
from dipaco_jax.registry import registry, registry_url

KUBERNETES = ROOT / 'launch' / 'kubernetes'
VERSION = '1.31'  # of the schemas
OVERLAYS = ('cpu', 'gpu', 'tpu')
MANIFESTS = [*sorted((KUBERNETES / 'base').glob('[!k]*.yaml')), KUBERNETES / 'secret.yaml']
PAGE = (ROOT / 'docs' / 'islands.md').read_text()
BLOCKS = re.findall(r'```(?:\w*)\n(.*?)```', PAGE, re.DOTALL)
LINES = [line.strip() for line in '\n'.join(BLOCKS).replace('\\\n', ' ').splitlines()]


def load(file: pathlib.Path):
  return yaml.safe_load(file.read_text())


def pod(manifest: dict) -> dict:
  return manifest['spec']['template']['spec']


BASE = {file.stem: load(file) for file in MANIFESTS}
ROLES = {name: manifest for name, manifest in BASE.items() if name != 'secret'}


def built(overlay: str) -> list[dict]:
  """An overlay's manifests, by whichever program is there."""
  for command in (['kustomize', 'build'], ['kubectl', 'kustomize']):
    if shutil.which(command[0]):
      done = subprocess.run([*command, KUBERNETES / overlay], capture_output=True, text=True, check=True)
      return list(yaml.safe_load_all(done.stdout))
  pytest.skip('neither kustomize nor kubectl is installed')


def parsed(*command_lines: list[str]):
  """Has main's flag parsing look at command lines; it ends the process where one is wrong."""
  program = (
    'import json, sys\nfrom dipaco_jax import main\nfor line in json.loads(sys.argv[1]):\n'
    '  main.FLAGS.unparse_flags()\n  main.parse(["main", *line])\n  print(main.FLAGS.role)'
  )
  command = [sys.executable, '-c', program, json.dumps(command_lines)]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  return done.stdout.split()


def test_manifests_are_valid():
  assert set(ROLES) == set(roles.ROLES)
  for manifest in BASE.values():
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_worker_of_several_hosts_has_its_manifest():
  """A JobSet is an extension; what it makes is a job like any other."""
  made = load(KUBERNETES / 'hosts' / 'jobset.yaml')
  (replicated,) = made['spec']['replicatedJobs']
  job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': made['metadata'], **replicated['template']}
  kubernetes_validate.validate(job, VERSION, strict=True)
  (container,), (single,) = pod(job)['containers'], pod(BASE['worker'])['containers']
  assert parsed(line_of(container)) == ['worker'] and '--distributed' in container['args']
  assert all(container[field] == single[field] for field in ('envFrom', 'volumeMounts'))
  check_disk(pod(job))
  check_opens_tpus(pod(job))
  chips = int(container['resources']['limits']['google.com/tpu']) * job['spec']['completions']
  assert pod(job)['nodeSelector']['cloud.google.com/gke-tpu-topology'] == '4x4' and chips == 16
  check_what_ends_it(made, job)


def check_disk(spec: dict):
  """What a pod may write is asked for, or it is evicted where its node's disk is small."""
  (container,), (volume,) = spec['containers'], spec['volumes']
  assert container['resources']['requests']['ephemeral-storage'] == volume['emptyDir']['sizeLimit']


def check_opens_tpus(spec: dict):
  """The files of the devices belong to root, and their driver locks memory."""
  (container,) = spec['containers']
  assert spec['securityContext']['runAsUser'] == 0 and not spec['securityContext'].get('runAsNonRoot')
  capabilities = container['securityContext']['capabilities']
  assert capabilities == {'drop': ['ALL'], 'add': ['IPC_LOCK', 'SYS_RESOURCE']}


def check_what_ends_it(made: dict, job: dict):
  """What another start would say again ends a JobSet; a bucket may be back by then."""
  (rule,), (container,) = job['spec']['podFailurePolicy']['rules'], pod(job)['containers']
  assert rule['action'] == 'FailJob' and rule['onExitCodes']['values'] == [2, command_lib.DIVERGED]
  assert rule['onExitCodes']['containerName'] == container['name'] and pod(job)['restartPolicy'] == 'Never'
  (rule,) = made['spec']['failurePolicy']['rules']
  assert rule['action'] == 'FailJobSet' and rule['onJobFailureReasons'] == ['PodFailurePolicy']


def test_a_run_on_slices():
  """As above; all hosts run `main`, in one bucket."""
  made = load(KUBERNETES / 'slices' / 'jobset.yaml')
  (replicated,) = made['spec']['replicatedJobs']
  job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': made['metadata'], **replicated['template']}
  kubernetes_validate.validate(job, VERSION, strict=True)
  (container,) = pod(job)['containers']
  assert parsed(container['args']) == ['None'] and '--distributed' in container['args']
  assert '--workdir=gs://BUCKET/runs/one' in container['args']
  assert container['envFrom'] == [{'secretRef': {'name': load(KUBERNETES / 'secret.yaml')['metadata']['name']}}]
  mounts = {mount['name']: mount['mountPath'] for mount in container['volumeMounts']}
  scratch = [mounts[volume['name']] for volume in pod(job)['volumes'] if 'emptyDir' in volume]  # of each pod its own
  assert [f'--scratch={path}' for path in scratch] == [arg for arg in container['args'] if 'scratch' in arg]
  check_what_ends_it(made, job)
  check_disk(pod(job))
  check_opens_tpus(pod(job))
  chips = int(container['resources']['limits']['google.com/tpu']) * job['spec']['completions']
  shape = pod(job)['nodeSelector']['cloud.google.com/gke-tpu-topology']
  assert shape in topology.SHAPES['v5e'].split() and chips == math.prod(map(int, shape.split('x')))
  assert job['spec']['parallelism'] == job['spec']['completions']


def test_the_validation_validates():
  wrong = load(KUBERNETES / 'base' / 'worker.yaml')
  wrong['spec']['paralelism'] = 3
  with pytest.raises(kubernetes_validate.ValidationError):
    kubernetes_validate.validate(wrong, VERSION, strict=True)


@pytest.mark.parametrize('overlay', OVERLAYS)
def test_overlays_are_valid(overlay):
  manifests = built(overlay)
  for manifest in manifests:
    kubernetes_validate.validate(manifest, VERSION, strict=True)
  workers = [m for m in manifests if m['metadata']['name'] == 'worker']
  (container,) = pod(workers[0])['containers']
  limits = {name for name in container['resources']['limits'] if '/' in name}
  assert limits == {'cpu': set(), 'gpu': {'nvidia.com/gpu'}, 'tpu': {'google.com/tpu'}}[overlay]
  assert container['image'] == f'REGISTRY/dipaco-jax:{ {"gpu": "cuda"}.get(overlay, overlay) }'
  assert len(manifests) == 1 + len(ROLES)


@pytest.mark.parametrize('overlay', OVERLAYS)
def test_overlays_name_what_there_is(overlay):
  """Without kustomize, too."""
  found = load(KUBERNETES / overlay / 'kustomization.yaml')
  assert found['resources'] == ['../base']
  images = {container['image'] for role in ROLES.values() for container in pod(role)['containers']}
  assert {image['name'] for image in found['images']} == images
  tags = re.findall(r'-t dipaco-jax:(\w+)', (ROOT / 'launch' / 'Dockerfile').read_text())
  assert {image['newTag'] for image in found['images']} <= set(tags)
  for patch in found['patches']:
    assert BASE[patch['target']['name']]['kind'] == patch['target']['kind']
    for change in yaml.safe_load(patch['patch']):
      place = BASE[patch['target']['name']]
      for part in change['path'].split('/')[1:-1]:
        place = place[int(part)] if isinstance(place, list) else place[part]
      assert change['op'] == 'add' and isinstance(place, (dict, list))


def test_workers_on_tpus_may_open_them():
  """As patched by hand: kustomize may not be installed."""
  (patch,) = load(KUBERNETES / 'tpu' / 'kustomization.yaml')['patches']
  worker = load(KUBERNETES / 'base' / 'worker.yaml')
  for change in yaml.safe_load(patch['patch']):
    *folders, last = change['path'].replace('~1', '|').split('/')[1:]
    place = worker
    for part in folders:
      place = place[int(part)] if isinstance(place, list) else place[part]
    if isinstance(place, list):
      place.append(change['value'])
    else:
      place[last.replace('|', '/')] = change['value']
  kubernetes_validate.validate(worker, VERSION, strict=True)
  check_opens_tpus(pod(worker))
  assert pod(worker)['containers'][0]['resources']['limits']['google.com/tpu'] == '4'


def test_base_has_all_roles():
  assert sorted(load(KUBERNETES / 'base' / 'kustomization.yaml')['resources']) == sorted(f'{n}.yaml' for n in ROLES)


def told() -> dict[str, str]:
  """What the config map and the secret set."""
  (generator,) = load(KUBERNETES / 'base' / 'kustomization.yaml')['configMapGenerator']
  for role in ROLES.values():
    for container in pod(role)['containers']:
      names = [source[kind]['name'] for source in container['envFrom'] for kind in source]
      assert names == [generator['name'], BASE['secret']['metadata']['name']]
  return dict(line.split('=', 1) for line in generator['literals']) | BASE['secret']['stringData']


def line_of(container: dict) -> list[str]:
  """Arguments as the container gets them."""
  values = told() | {env['name']: env.get('value', '0') for env in container.get('env', ())}
  return [re.sub(r'\$\((\w+)\)', lambda m: values[m[1]], arg) for arg in container['args']]


def test_command_lines_are_accepted():
  assert parsed(*(line_of(pod(manifest)['containers'][0]) for manifest in ROLES.values())) == list(ROLES)


def test_no_command_line_has_the_registry():
  assert registry_url.VARIABLE in told()
  assert not [file for file in KUBERNETES.rglob('*.yaml') if '--registry' in file.read_text()]


def test_every_executor_has_its_share():
  outer = ROLES['outer']
  (share,) = [arg for arg in pod(outer)['containers'][0]['args'] if arg.startswith('--share')]
  assert share == f'--share=$(INDEX)/{outer["spec"]["replicas"]}'


@pytest.mark.parametrize('name', ROLES)
def test_pods(name):
  manifest, spec = ROLES[name], pod(ROLES[name])
  (container,) = spec['containers']
  assert manifest['metadata']['name'] == container['name'] == manifest['spec']['template']['metadata']['labels']['role']
  assert 'ports' not in container
  assert 2 < spec['terminationGracePeriodSeconds'] <= 15  # a task is handed over in 2; spot nodes of GKE grant 15
  assert {mount['name'] for mount in container['volumeMounts']} == {volume['name'] for volume in spec['volumes']}
  assert {'cpu', 'memory'} <= set(container['resources']['requests'])
  assert spec['securityContext']['runAsNonRoot'] and container['securityContext']['capabilities'] == {'drop': ['ALL']}
  check_disk(spec)
  if name == 'worker':
    rules = manifest['spec']['podFailurePolicy']['rules']
    assert {rule['onExitCodes']['containerName'] for rule in rules if 'onExitCodes' in rule} == {container['name']}
    assert spec['restartPolicy'] == 'Never'  # what a failure policy needs
  else:
    assert manifest['spec']['selector']['matchLabels'] == manifest['spec']['template']['metadata']['labels']


def test_image():
  text = (ROOT / 'launch' / 'Dockerfile').read_text()
  copied = [name for line in re.findall(r'^COPY (.*) \S+$', text, re.MULTILINE) for name in line.split()]
  assert 'dipaco_jax' in copied and all((ROOT / name).exists() for name in copied)
  ignored = (ROOT / 'launch' / 'Dockerfile.dockerignore').read_text()
  assert set(re.findall(r'^!(\S+)', ignored, re.MULTILINE)) == set(copied)
  assert 'ARG RUN_AS=1000:1000\n' in text and 'USER $RUN_AS\n' in text
  assert re.findall(r' -t dipaco-jax:(\w+) .* RUN_AS=0:0 ', text) == ['tpu']
  assert 'ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 NVIDIA_DRIVER_CAPABILITIES=compute,utility\n' in text
  assert (ROOT / told()['CONFIG']).is_file() and told()['CONFIG'].split('/')[0] in copied


# -- the page


def commands(program: str) -> list[list[str]]:
  found = [shlex.split(line.replace('$i', '0')) for line in LINES if program in line]
  return [' '.join(words[words.index(program) + 1 :]).split(' & ')[0].split() for words in found if program in words]


def test_the_pages_command_lines_are_accepted():
  lines = commands('dipaco_jax.main')
  assert len(lines) >= 4
  assert set(parsed(*lines)) == {*roles.ROLES, 'None'}, 'one replay is in one process'


ENDS = (17.123, 0, 'perplexity 17.12'), (None, command_lib.DIVERGED, 'training diverged')


@pytest.mark.parametrize('perplexity, status, words', ENDS)
def test_how_local_ends(perplexity, status, words, tmp_path, capsys):
  facts = registry.Registry(f'sqlite:///{tmp_path}/registry.db')
  facts.put([registry.Fact('finished', '', 0, '', '', {'perplexity': perplexity})])
  assert supervision.supervise([], facts) == status and words in ''.join(capsys.readouterr())
  facts.close()


def test_local_ends_where_the_run_has_diverged_since_it_was_resumed(tmp_path, capsys):
  facts = registry.Registry(f'sqlite:///{tmp_path}/registry.db')
  facts.put([registry.Fact('diverged', '', 0, '', '', {'why': 'train diverged in phase 3: all'})])
  assert supervision.supervise([], facts) == 65
  assert 'local.py: train diverged in phase 3: all; the same command resumes' in capsys.readouterr().err
  facts.put([registry.Fact('finished', '', 0, '', '', {'perplexity': 9.0})])
  assert supervision.supervise([], facts, resumed=1) == 0
  facts.close()


def test_the_pages_options_of_local_are_there():
  lines = commands('dipaco_jax.local')
  assert lines
  for line in lines:
    before, sys.argv = sys.argv, ['local.py', *line]
    try:
      assert local.parse_options()[0].config == 'tiny'
    finally:
      sys.argv = before


def test_the_page_names_what_there_is():
  links = [link for link in re.findall(r'\]\(([^)#]+)\)', PAGE) if not link.startswith('https://')]
  assert links and not [link for link in links if not (ROOT / 'docs' / link).exists()]
  folders = [line.split()[-1] for line in LINES if line.startswith('kubectl') and ' -k ' in line]
  assert folders and all((ROOT / folder).is_dir() for folder in folders)
  described = ' '.join(re.findall(r'kubectl \w+ (?:job|deployment|statefulset)[/ ](\w+)', PAGE))
  assert set(described.split()) <= set(ROLES)
