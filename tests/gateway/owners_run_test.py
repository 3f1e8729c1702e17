"""Whole runs of owners, in one process: those behind a gateway end with the bits of direct access."""

import dataclasses

import one_process
import owners_run
import pytest
from owners_run import OWNERS, OwnersRun

pytestmark = pytest.mark.slow
SEVERAL = {'owner': OWNERS, 'topic': 2}
# Grid, levels and fields of the outer step.
RUNS = {
  'one path each': ({'owner': OWNERS}, owners_run.LEVELS, {}),
  'two paths each': (
    SEVERAL,
    (('shared', 'embed|final', ()), ('of_owner', 'block_0', ('owner',)), ('own', 'block_1', ('owner', 'topic'))),
    {},
  ),
  'two replicas each': (SEVERAL, owners_run.LEVELS, {}),
  'in 4 bits': ({'owner': OWNERS}, owners_run.LEVELS, {'compress': 'int4'}),
}


@pytest.mark.parametrize('name', RUNS)
def test_owners_behind_a_gateway_end_with_the_bits_of_direct_access(name, tmp_path):
  grid, levels, outer = RUNS[name]
  owners_run.write_text(tmp_path)
  settings = owners_run.settings(tmp_path, outer=outer)
  settings = dataclasses.replace(settings, grid=tuple(grid.items()), levels=levels)
  outcomes = []
  with one_process.one_device():
    for names in ((), OWNERS):
      folder = tmp_path / f'behind-{len(names)}'
      folder.mkdir()
      for owner in OWNERS:
        owners_run.own_file(folder, owner).hardlink_to(owners_run.own_file(tmp_path, owner))
      run = OwnersRun(folder, settings, outcomes[0][1] if outcomes else {})
      with run.behind_gateway(*names), run.members() as members:
        run.to('finished', members)
        for member in members[1:]:
          owners_run.owner_workdir.complete(member.island)
        assert [member.island.registry.__class__.__name__ for member in members[1:]] == (
          ['GatewayRegistry' if names else 'Registry'] * len(OWNERS)
        )
      outcomes.append((run.outcome(), run.programs))
  assert outcomes[0][0] == outcomes[1][0] and len(outcomes[0][0]) > 10
