"""Files that the end of a run leaves in its place, beside directories."""

from dipaco_jax.config import owners, settings as settings_lib
from dipaco_jax.islands.island import Island
from dipaco_jax.storage import publishing


def restore_config(island: Island):
  """Writes config.json into the workdir, unless it is there: a cleaner of /tmp may have removed it."""
  file = island.run.workdir / 'config.json'
  if not file.exists():
    [fact] = island.registry.facts('config')
    publishing.write_json(file, settings_lib.recorded(settings_lib.of_run(fact.meta['config'])))


def write_grown_config(island: Island):
  """Writes config.json with the owners that have joined, for commands that use the finished run."""
  if island.members.joined:
    [fact] = island.registry.facts('config')
    settings = owners.join(settings_lib.of_run(fact.meta['config']), island.members.joined)
    publishing.write_json(island.run.workdir / 'config.json', settings_lib.recorded(settings))


def upload(island: Island, name: str):
  """Uploads a file of the workdir if it exists, unless the workdir is the storage."""
  file = island.run.workdir / name
  if island.storage.local_path(name) is None and file.exists():
    island.storage.write(name, file.read_bytes())
