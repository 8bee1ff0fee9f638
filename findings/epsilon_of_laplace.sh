#!/bin/sh
# The RDP accountant says more than 1 of Laplace noise whose pure epsilon is 1, and both accountants infinity at delta 0.
#
# Versions: dp-accounting 0.6.0.
# Input: LaplaceDpEvent(1), once: epsilon is 1 at delta = 0 by definition.
# Expected from: Mironov, "Renyi differential privacy" (2017): the order infinity of RDP is pure epsilon, so no conversion
#   need exceed it.
# Guess: at most 1 from both, at every delta, and 1 at delta = 0.
# Seen: RDP 1.0028 at delta = 1e-5 and 1.0186 at 1e-12 (its orders end below infinity); PLD 0.99998. At delta = 0 both say
#   infinity, though the mechanism is purely private. Safe, since it is above; but no account of pure mechanisms.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check dp-accounting==0.6.0
venv/bin/python -W ignore - <<'PYTHON'
from math import inf

from dp_accounting import LaplaceDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

said = {kind.__name__: [kind().compose(LaplaceDpEvent(1.0)).get_epsilon(delta) for delta in (1e-5, 1e-12, 0.0)]
        for kind in (RdpAccountant, PLDAccountant)}
print(said)
rdp, pld = said["RdpAccountant"], said["PLDAccountant"]
assert 1.002 < rdp[0] < 1.004 and 1.018 < rdp[1] < 1.019 and rdp[2] == inf
assert 0.9999 < pld[0] < 1 and 0.9999 < pld[1] < 1 and pld[2] == inf
PYTHON
