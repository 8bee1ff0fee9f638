"""Hospitals over NVIDIA FLARE: real processes, own kits, a signed plan; the same models as in one process."""

import json
import subprocess
from importlib.util import find_spec

import pytest
from hospitals import Bed, digests
from opened import opening

from wsi_fl.privacy.ledger_file import LedgerFile

pytestmark = pytest.mark.skipif(find_spec("nvflare") is None, reason="needs pip install 'wsi-fl[flare]'")


def test_two_hospitals_learn_together_over_flare(tmp_path):
    bed = Bed(tmp_path, 2)
    plan = bed.sign("proxyfl", "train.rounds=2")
    with bed.running(watched=True):
        said = bed.submit("--plan", str(bed.root / "S0" / "federation" / "plan.json"))
    assert said.returncode == 0, said.stderr
    summary = json.loads(said.stdout)
    expected = bed.locally("proxyfl", "train.rounds=2")
    for site in bed.sites:
        assert digests(bed.root / site / summary["run"], site) == expected[site]
        assert set(expected[site]) == {"private.safetensors", "proxy.safetensors"}
        other = next(name for name in bed.sites if name != site)
        assert not list((bed.root / site / "runs").rglob(f"sites/{other}/*"))
        entries = LedgerFile(bed.study(site).ledger(site)).entries
        assert entries
        assert {entry.agreement for entry in entries if entry.mechanism} == {plan.digest}
    local = json.loads((bed.simulated / summary["run"] / "summary.json").read_text())
    assert summary["communication"]["bytes"] == local["communication"]["bytes"]
    assert "slide" not in said.stderr and "patient" not in said.stderr
    _nobody_opened_a_file_of_another(bed)


def _nobody_opened_a_file_of_another(bed):
    for name in ("server", *bed.sites):
        assert not bed.strangers(name)
        seen = bed.opened.below(bed.root, name, but=[bed.opened.folder])
        assert bed.root / "kits" / name / "startup" / "rootCA.pem" in seen
        if name in bed.sites:
            assert bed.root / name / "federation" / "plan.json" in seen
            assert (
                bed.study(name).store(name) in seen or not bed.opened.strace
            )  # HDF5 is read by a library of C
    store = bed.study("S1").store("S1")
    subprocess.run(bed.opened.watched("S0", opening(store)), check=True)
    assert bed.strangers("S0") == [store]
