"""Hospitals that go away in the middle of a shared sum, over a line that is not trusted."""

import pytest
from conftest import nightly
from test_lost import NAMES, PHASES, check, killed_before, together
from wires import Wire

from wsi_fl.hospitals.lines.relayed import RelayedComm

TIMEOUT_S = 3.0


@pytest.mark.parametrize(
    ("phase", "ends"), [(PHASES[0], "ends"), *nightly(*((one, "is gone") for one in PHASES))]
)
def test_the_others_wait_for_it_and_read_their_sum_before_they_end(tmp_path, federation, phase, ends):
    """Whether it is just gone, or says that it ended, which is a word that ends all that comes after the sum."""
    identities, wires = {name: federation.identity(name) for name in NAMES}, {}

    def comm_of(k):
        comm = RelayedComm(identities[NAMES[k]], NAMES, range(4), Wire(NAMES[k], wires), TIMEOUT_S)
        comm.leave = comm.abort if ends == "ends" else comm.close
        return killed_before(comm, phase) if k == 2 else comm

    sites, raised = together(tmp_path, comm_of)
    check(sites, raised, 2, [0, 1, 3] if phase in PHASES[:3] else [0, 1, 2, 3])
