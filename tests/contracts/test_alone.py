"""Joining never costs: beside every method a site keeps the model that it would have alone."""

import json

import numpy as np
import pytest
import torch
from conftest import LARGER, make_study, nightly, write_features
from safetensors.torch import load_file
from test_oneshot import HEADS, rows_of
from trained import trained

from wsi_fl.federation import loop
from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.training.train import resume
from wsi_fl.stores.patches import PatchStore

TALKING = ["proxyfl", "fedavg", *nightly("fml", "avgpush", "cwt")]
SEEDED = ("privacy.insecure_seed=1", "train.rounds=2")
KINDS = {"heads": HEADS, "networks": ["train.val_fraction=0.34", "train.seed=2"]}


def run(study, method, *overrides):
    return study.root / trained(study, method, *SEEDED, *overrides)["run"]


def kept(path, role):
    return {file.parent.name: load_file(file) for file in sorted(path.glob(f"sites/*/{role}.safetensors"))}


def same(one, other):
    assert one.keys() == other.keys() and one
    for site, tensors in one.items():
        assert all(torch.equal(value, other[site][name]) for name, value in tensors.items())


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Two sites each: with features of 60 patients in training, and with tiny patches."""
    found = {
        kind: make_study(tmp_path_factory.mktemp(kind) / "study", n_sites=2, text=LARGER) for kind in KINDS
    }
    for k, share in enumerate((0.2, 0.5)):
        x, labels = rows_of(60, k, share, d=40)
        more, theirs = rows_of(60, 10 + k, d=40)
        patients, splits = [f"p{i}" for i in range(120)], ["train"] * 60 + ["test"] * 60
        rows, of = np.concatenate([x, more]), np.concatenate([labels, theirs])
        write_features(found["heads"], f"S{k}", rows, of, patients, splits)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", TALKING)
def test_the_lone_model_learns_beside_the_others_and_changes_none_of_them(studies, kind, method):
    study, settings = studies[kind], KINDS[kind]
    with_it, without = (run(study, method, *settings, f"train.alone={said}") for said in ("true", "false"))
    for role in ("private", *["proxy"] * (method in ("proxyfl", "fml"))):
        same(kept(with_it, role), kept(without, role))
    assert len(kept(with_it, "alone")) == 2 and not kept(without, "alone")
    document = evaluate(study, str(with_it))
    for row in document["sites"]:
        choice = json.loads((with_it / "sites" / row["site"] / "choice.json").read_text())
        assert choice["stack"]["own"] == "alone" and choice["stack"]["weight"] <= 2 / 3
        assert row["with"] == choice["with"] == ("stack" if choice["stack"]["weight"] else "alone")
        assert row["accuracy"] == row["models"][row["with"]]["accuracy"]
        assert choice["n"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_model_that_training_alone_gives(studies, kind):
    study, tune = studies[kind], f"train.tune={str(kind == 'heads').lower()}"
    held = [one for one in KINDS[kind] if "val_fraction" not in one]
    joined = run(study, "fedavg", *held)
    alone = run(study, "regular", *held, "privacy.enabled=false", tune)
    same(kept(joined, "alone"), kept(alone, "private"))


def test_models_that_stay_have_a_rate_of_their_own(studies):
    study, slow = studies["networks"], "train.private_lr=0.0005"
    joined, proxies = (run(study, "proxyfl", "train.lr=0.03", *more) for more in ([slow], []))
    alone = run(study, "regular", "train.lr=0.0005", "privacy.enabled=false")
    same(kept(joined, "alone"), kept(alone, "private"))
    same(kept(run(study, "regular", slow, "privacy.enabled=false"), "private"), kept(alone, "private"))
    same(kept(joined, "proxy"), kept(proxies, "proxy"))  # in strict mode it sees no private model
    with_noise = [kept(run(study, "regular", *more), "private") for more in ([slow], [])]
    same(*with_noise)


def test_a_tuned_network_judges_its_mixture_by_all_of_its_rows(studies):
    study = studies["networks"]
    path = run(study, "proxyfl", "train.tune=true")
    same(
        kept(path, "alone"),
        kept(run(study, "regular", "train.tune=true", "privacy.enabled=false"), "private"),
    )
    for row in evaluate(study, str(path))["sites"]:
        folder = path / "sites" / row["site"]
        choice = json.loads((folder / "choice.json").read_text())
        with PatchStore(study.store(row["site"])) as store:
            assert choice["n"] == (store.table.split == "train").sum()
        assert choice["stack"]["own"] == "alone" and choice["stack"]["shared"] == "proxy"


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_keeps_the_same_lone_model_and_answers_alike(studies, kind, monkeypatch):
    study, settings = studies[kind], [*KINDS[kind], "train.rounds=3"]
    whole = run(study, "proxyfl", *settings)
    finish, calls = loop._log_round, []

    def die(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return finish(*args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "_log_round", die)
        run(study, "proxyfl", *settings)
    broken = sorted(study.runs.glob("0*"))[-1]
    resume(study, broken.name, backend="local")
    for role in ("alone", "private", "proxy"):
        same(kept(whole, role), kept(broken, role))
    for site in ("S0", "S1"):
        one, other = ((path / "sites" / site / "choice.json").read_text() for path in (whole, broken))
        assert one == other


def test_what_is_never_sent_is_not_counted_and_does_not_leave(studies):
    path = run(studies["heads"], "fedavg", *HEADS)
    without = run(studies["heads"], "fedavg", *HEADS, "train.alone=false")
    sent = [
        [json.loads(line)["bytes"] for line in (one / "sites/S0/metrics.jsonl").read_text().splitlines()]
        for one in (path, without)
    ]
    assert sent[0] == sent[1]
