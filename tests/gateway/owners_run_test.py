"""Whole runs of owners, in one process: those behind a gateway end with the bits of direct access."""

import one_process
import owners_run
import pytest
from owners_run import OWNERS, OwnersRun

pytestmark = pytest.mark.slow


def test_owners_behind_a_gateway_end_with_the_bits_of_direct_access(tmp_path):
  owners_run.write_text(tmp_path)
  outcomes = []
  with one_process.one_device():
    for names in ((), OWNERS):
      folder = tmp_path / f'behind-{len(names)}'
      folder.mkdir()
      for owner in OWNERS:
        owners_run.own_file(folder, owner).hardlink_to(owners_run.own_file(tmp_path, owner))
      run = OwnersRun(folder, owners_run.settings(tmp_path), outcomes[0][1] if outcomes else {})
      with run.behind_gateway(*names), run.members() as members:
        run.to('finished', members)
        for member in members[1:]:
          owners_run.owner_workdir.complete(member.island)
        assert [member.island.registry.__class__.__name__ for member in members[1:]] == (
          ['GatewayRegistry' if names else 'Registry'] * len(OWNERS)
        )
      outcomes.append((run.outcome(), run.programs))
  assert outcomes[0][0] == outcomes[1][0] and len(outcomes[0][0]) > 10
