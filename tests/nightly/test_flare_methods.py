"""Every method over NVIDIA FLARE makes the models that it makes in one process."""

import json
from importlib.util import find_spec

import pytest
import test_mpcpa
from conftest import write_features
from hospitals import Bed, digests
from test_oneshot import HEADS, rows_of
from test_replay import plant

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nvflare") is None, reason="needs pip install 'wsi-fl[flare]'"),
]
NO_DP = ("privacy.enabled=false",)


def heads(study, site, k):
    x, labels = rows_of(40, k, (0.0, 1.0, 0.5)[k])
    write_features(study, site, x, labels, [f"p{i // 3}" for i in range(40)], ["train"] * 30 + ["test"] * 10)


def planted(study, site, k):
    plant(study, site, seed=k)


@pytest.mark.parametrize(
    ("method", "settings", "given"),
    [
        ("fedavg", ("train.rounds=2",), {}),
        ("cwt", ("train.rounds=2",), {}),
        ("avgpush", ("train.rounds=2",), {}),
        ("replay", ("train.rounds=2", *NO_DP), {"furnish": planted, "extra": "[replay]\nbuffer = 10\n"}),
        ("oneshot", tuple(HEADS), {"furnish": heads}),
        ("mpcpa", (), {}),
    ],
)
def test_a_method_over_flare(tmp_path, method, settings, given):
    if method == "mpcpa":
        given = {"whole": test_mpcpa.make_study(tmp_path / "whole")}
    bed = Bed(tmp_path, 3, **given)
    bed.sign(method, *settings)
    with bed.running():
        said = bed.submit("--plan", str(bed.study(bed.sites[0]).root / "federation" / "plan.json"))
    assert said.returncode == 0, said.stderr
    summary = json.loads(said.stdout)
    expected = bed.locally(method, *settings)
    for site in bed.sites:
        assert expected[site]
        assert digests(bed.root / site / summary["run"], site) == expected[site]
    print(method, summary["communication"])
