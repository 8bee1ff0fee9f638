"""Joining never costs: beside every method a site keeps the model that it would have alone."""

import numpy as np
import pytest
from conftest import LARGER, interrupted_after, make_study, metrics, nightly, same, write_features
from safetensors.torch import load_file
from test_oneshot import HEADS, rows_of
from trained import of_site, trained

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


def alike(one, other):
    assert one.keys() == other.keys() and one
    assert all(same(tensors, other[site]) for site, tensors in one.items())


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
        alike(kept(with_it, role), kept(without, role))
    assert len(kept(with_it, "alone")) == 2 and not kept(without, "alone")
    document = evaluate(study, str(with_it))
    for row in document["sites"]:
        choice = of_site(with_it, row["site"], "choice")
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
    alike(kept(joined, "alone"), kept(alone, "private"))


def test_models_that_stay_have_a_rate_of_their_own(studies):
    study, slow = studies["networks"], "train.private_lr=0.0005"
    joined, proxies = (run(study, "proxyfl", "train.lr=0.03", *more) for more in ([slow], []))
    alone = run(study, "regular", "train.lr=0.0005", "privacy.enabled=false")
    alike(kept(joined, "alone"), kept(alone, "private"))
    alike(kept(run(study, "regular", slow, "privacy.enabled=false"), "private"), kept(alone, "private"))
    alike(kept(joined, "proxy"), kept(proxies, "proxy"))  # in strict mode it sees no private model
    with_noise = [kept(run(study, "regular", *more), "private") for more in ([slow], [])]
    alike(*with_noise)


def test_a_tuned_network_judges_its_mixture_by_all_of_its_rows(studies):
    study = studies["networks"]
    path = run(study, "proxyfl", "train.tune=true")
    alike(
        kept(path, "alone"),
        kept(run(study, "regular", "train.tune=true", "privacy.enabled=false"), "private"),
    )
    for row in evaluate(study, str(path))["sites"]:
        choice = of_site(path, row["site"], "choice")
        with PatchStore(study.store(row["site"])) as store:
            assert choice["n"] == (store.table.split == "train").sum()
        assert choice["stack"]["own"] == "alone" and choice["stack"]["shared"] == "proxy"


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_keeps_the_same_lone_model_and_answers_alike(studies, kind):
    study, settings = studies[kind], [*KINDS[kind], "train.rounds=3"]
    whole = run(study, "proxyfl", *settings)
    with interrupted_after(4):
        run(study, "proxyfl", *settings)
    broken = sorted(study.runs.glob("0*"))[-1]
    resume(study, broken.name, backend="local")
    for role in ("alone", "private", "proxy"):
        alike(kept(whole, role), kept(broken, role))
    for site in ("S0", "S1"):
        assert of_site(whole, site, "choice") == of_site(broken, site, "choice")


def test_what_is_never_sent_is_not_counted_and_does_not_leave(studies):
    runs = [run(studies["heads"], "fedavg", *HEADS, f"train.alone={said}") for said in ("true", "false")]
    sent = [[line["bytes"] for line in metrics(path, "S0")] for path in runs]
    assert sent[0] == sent[1]
