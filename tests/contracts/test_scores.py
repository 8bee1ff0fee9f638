"""Hospitals that keep their test parts score each other's models at home, and only counts leave them."""

import json
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from conftest import REAL, make_study, nightly, planned, refused, write_features
from sklearn.metrics import roc_auc_score

from wsi_fl.federation import cross_site_evaluation as between
from wsi_fl.federation.comm import LocalComm
from wsi_fl.learning.counts import (
    FEWEST,
    _scores_of,
    count,
    n_bytes,
    nothing,
    packed,
    results,
    unpacked,
)
from wsi_fl.learning.tasks import scored
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy import accounting
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.guarantee import Terms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.report.between import render_coordinator, section
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.training import checks
from wsi_fl.stages.training.train import resume, train
from wsi_fl.types import WsiFlError

SITES = ["S0", "S1", "S2"]
ALLOWED = REAL + '\nallow = ["scores"]'
SEEDED = ["train.rounds=8", "privacy.insecure_seed=3"]
QUIET = ["train.rounds=2", "privacy.sigma=4"]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    """Real hospitals in one process, which only a test may have."""
    real = checks._wrong
    monkeypatch.setattr(
        checks, "_wrong", lambda *given: (one for one in real(*given) if "whose store" not in one)
    )


def hospitals(root, allow=ALLOWED, **kinds):
    """A study of three hospitals; `kinds` names site files that differ."""
    study = make_study(root, n_sites=3, site_extra=allow)
    for site, text in kinds.items():
        path = study.root / "sites" / f"{site}.toml"
        path.write_text(path.read_text().replace(allow, text))
    return study


def run(study, method, *overrides):
    return RunFolder(
        study.root / train(study, method=method, overrides=overrides or QUIET, backend="local")["run"]
    )


def told(folder, site="S0"):
    return folder.site(site).kept("scores")


def lines(study, site):
    return [json.loads(line) for line in study.ledger(site).read_text().splitlines()]


def left(study, site):
    return [line["released"] for line in lines(study, site) if str(line.get("released")).startswith("scores")]


# counts


def test_counts_of_parts_add_up_to_the_scores_of_the_whole():
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 500)
    positive = np.clip(rng.normal(0.4 + 0.2 * label, 0.2), 0, 1)
    p = np.stack([1 - positive, positive], axis=1)
    parts = [count(p[rows], label[rows]) for rows in np.array_split(np.arange(500), 3)]
    found, exact = _scores_of(parts), scored(p, label)
    assert (found["n"], found["accuracy"]) == (exact["n"], exact["accuracy"])
    assert found["macro_accuracy"] == pytest.approx(exact["macro_accuracy"], abs=1e-12)
    assert abs(found["auroc"] - exact["auroc"]) <= found["auroc_within"] < 0.02
    assert _scores_of([count(p, label)])["auroc"] == pytest.approx(exact["auroc"], abs=1e-12)


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("apart", [0.3, 1.0, 2.0])
def test_with_a_hundred_patients_the_auroc_is_known_to_0_02(scale, apart):
    """Whether probabilities lie all near one half, or all near 0 and 1."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        label = np.arange(100) % 2
        positive = 1 / (1 + np.exp(-scale * (rng.normal(size=100) + apart * (label - 0.5))))
        p = np.stack([1 - positive, positive], axis=1)
        (told,) = unpacked(packed([count(p, label)]), 1, 2)
        exact, found = roc_auc_score(label, positive), _scores_of([told])
        assert (found["auroc"], found["auroc_within"]) == (pytest.approx(exact, abs=1e-12), 0.0)
        bins = np.add(told["positives"], told["negatives"])
        assert bins[bins > 0].min() >= FEWEST and bins.sum() == 100
        halves = [count(p[rows], label[rows]) for rows in np.split(np.arange(100), 2)]
        found = _scores_of(halves)
        assert abs(found["auroc"] - exact) <= min(0.02, found["auroc_within"] + 1e-12)
        assert found["auroc_within"] < 0.08


def test_nothing_small_is_told():
    rng = np.random.default_rng(0)
    label = np.repeat([0, 1], [50, FEWEST - 1])
    p = rng.dirichlet(np.ones(2), len(label))
    few = count(p, label)
    assert few["n"] == 50 and few["confusion"][1] == [0, 0] and _scores_of([few])["auroc"] is None
    label = np.arange(200) % 2
    who = np.array([f"p{k % 10}" for k in range(200)])
    score = np.where(who == "p0", 0.99, 0.0) + 0.01 * rng.random(200)  # one patient apart from all others
    told = count(np.stack([1 - score, score], axis=1), label, who)
    edges = [0.0, *told["high"]]
    for low, high in pairwise(edges):
        inside = who[(low <= score) & (score < high)]
        assert len(inside) == 0 or len(set(inside)) >= FEWEST
    equal = count(np.full((60, 2), 0.5), np.arange(60) % 2)
    found = _scores_of([equal])
    assert (found["auroc"], found["auroc_within"]) == (0.5, 0.0)


def test_counts_of_earlier_versions_are_read():
    table = [[40, 10], [10, 40]]
    old = {"n": 100, "confusion": table, "positives": [0] * 50 + [1] * 50, "negatives": [1] * 50 + [0] * 50}
    found = _scores_of([old, old])
    assert (found["n"], found["auroc"], found["auroc_within"]) == (200, 1.0, 0.0)


@pytest.mark.parametrize("n_classes", [2, 5])
def test_counts_travel_as_bytes_of_a_known_length(n_classes):
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(n_classes), 40)
    some = [count(p, rng.integers(0, n_classes, 40)), nothing(n_classes)]
    values = packed(some)
    assert values.dtype == np.uint8 and len(values) == n_bytes(2, n_classes)
    assert unpacked(values, 2, n_classes) == some


def test_what_cannot_be_counts_is_refused():
    good = count(np.tile([0.2, 0.8], (FEWEST, 1)), np.ones(FEWEST, int))
    refused(lambda: unpacked(packed([good]), 2, 2), "bytes", error=ValueError)
    for change in (
        {"confusion": [[0, 0], [0, -1]]},
        {"confusion": [[1, 0], [0, 0]]},
        {"positives": [2**60] * 100},
        {"high": [0.5, 0.4, *good["high"][2:]]},
        {"high": [0.0] * 100},
        {"concordant": 2},
        {"high": [np.nan] * 100},
        {"high": [*good["high"][:99], 1.5]},
    ):
        bad = packed([good | change])
        with pytest.raises(ValueError, match=r"impossibly large|different examples|bins overlap|pairs"):
            unpacked(bad, 1, 2)


# between hospitals


@pytest.mark.parametrize(
    ("method", "models"),
    [*nightly(("fedavg", ["central"]), ("cwt", SITES)), ("proxyfl", SITES)],
)
def test_every_site_keeps_the_counts_of_what_travelled_at_every_hospital(tmp_path, method, models):
    study = hospitals(tmp_path / "study")
    folder = run(study, method)
    documents = [told(folder, site) for site in SITES]
    assert documents[0] == documents[1] == documents[2]
    assert list(documents[0]["models"]) == models and documents[0]["hospitals"] == SITES
    for site in SITES:
        (line,) = [line for line in lines(study, site) if str(line.get("released")).startswith("scores")]
        assert line["mechanism"] is None and line["round"] == documents[0]["round"] == 3
    for model in models:
        assert [documents[0]["counts"][model][site]["n"] for site in SITES] == [12, 12, 12]


def test_nothing_happens_where_nothing_travels(tmp_path):
    study = hospitals(tmp_path / "study")
    folder = run(study, "regular")
    assert told(folder) is None and not left(study, "S0")
    assert evaluate(study, folder.name)["between"] is None


def test_nothing_happens_where_nobody_allows_it_or_where_test_parts_are_merged(tmp_path, study):
    shut = hospitals(tmp_path / "shut", allow=REAL)
    folder = run(shut, "proxyfl")
    assert told(folder) is None and not any(line.get("again") for line in lines(shut, "S0"))
    folder = run(study, "fedavg")
    assert told(folder) is None and not left(study, "S0")


@pytest.mark.parametrize("method", [*nightly("fedavg"), "proxyfl"])
def test_epsilon_and_its_guarantee_stay_what_they_are(tmp_path, monkeypatch, method):
    rows = []
    for name, allow in (("open", ALLOWED), ("shut", REAL)):
        state = str(tmp_path / f"{name}-user")  # other patients of the same names
        monkeypatch.setenv("XDG_STATE_HOME", state)
        study = hospitals(tmp_path / name, allow=allow)
        summary = train(study, method=method, overrides=QUIET, backend="local")
        sent = ("messages", "bytes")
        rows.append([{k: v for k, v in row.items() if k not in sent} for row in summary["sites"]])
        again = train(study, method=method, overrides=QUIET, backend="local")
        rows[-1] += [row["lifetime_epsilon"] for row in again["sites"]]
    assert rows[0] == rows[1]
    assert rows[0][0]["guarantee"] == rows[0][0]["lifetime_guarantee"] == "guaranteed"
    assert rows[0][0]["epsilon"] is not None and rows[0][3] > rows[0][0]["epsilon"]


def test_a_hospital_that_does_not_allow_it_tells_nothing_and_is_told_all(tmp_path):
    study = hospitals(tmp_path / "study", S1=REAL)
    folder = run(study, "proxyfl")
    assert not left(study, "S1") and left(study, "S0") and left(study, "S2")
    for site in SITES:
        document = told(folder, site)
        assert document["hospitals"] == ["S0", "S2"] and list(document["models"]) == SITES
        assert all(list(counts) == ["S0", "S2"] for counts in document["counts"].values())
    assert folder.site("S1").kept("counts") is None


def test_private_models_are_sent_to_nobody(tmp_path, monkeypatch):
    comms, real = [], between.CrossSiteScoring.run

    def listened(scoring):
        scoring.comm.sent = []
        comms.append((scoring.comm, {site.index: site for site in scoring.sites}))
        real(scoring)

    monkeypatch.setattr(between.CrossSiteScoring, "run", listened)
    study = hospitals(tmp_path / "study")
    run(study, "proxyfl")
    ((comm, sites),) = comms
    assert isinstance(comm, LocalComm)
    assert len(comm.sent) == 12
    assert {(m.sender, m.receiver) for m in comm.sent} == set(permutations(range(3), 2))
    every = [line for site in SITES for line in lines(study, site)]
    known = {line["released"].split()[1] for line in every if line.get("released")}
    for message in comm.sent:
        assert between.digest(message.vector) in known
        assert message.vector.size != sites[message.sender].learners["private"].vector().size


@pytest.mark.parametrize("method", ["fedavg", *nightly("proxyfl")])
def test_scores_are_those_of_evaluate_where_the_same_sites_are_simulated(tmp_path, method):
    study = hospitals(tmp_path / "real", allow='real = true\nallow = ["model", "scores"]')
    simulated = hospitals(tmp_path / "simulated", allow="real = false")
    folder, other = run(study, method, *SEEDED), run(simulated, method, *SEEDED)
    found, reference = evaluate(study, folder.name)["between"], evaluate(simulated, other.name)
    assert reference["between"] is None and reference["merged"] is not None
    # a ring: a proxy that is held is another's last release
    role = "proxy" if method == "proxyfl" else "private"
    held = [row["models"][role] for row in reference["sites"]]
    for model in found["models"].values():
        whole = model["merged"]
        same = [one for one in held if all(one[key] == whole[key] for key in ("n", "accuracy"))]
        assert whole["n"] == 36 and any(
            abs(one["auroc"] - whole["auroc"]) <= whole["auroc_within"] + 1e-9 for one in same
        )
    if method == "fedavg":
        for site in SITES:
            part, exact = found["models"]["central"]["hospitals"][site], reference["sites"][0]["parts"][site]
            assert (part["n"], part["accuracy"]) == (exact["n"], exact["accuracy"])


def rows_of(k):
    """60 training and 40 test rows of features of a hospital, with their labels."""
    labels = np.arange(100) % 2
    x = np.random.default_rng(k).normal(size=(100, 16)) + 0.6 * np.outer(2 * labels - 1, np.arange(16) < 3)
    return x.astype(np.float32), labels


def features_of(root, allow):
    """Three hospitals of 60 training and 40 test rows of features."""
    study = hospitals(root, allow=allow)
    for k, site in enumerate(SITES):
        x, labels = rows_of(k)
        splits = ["train"] * 60 + ["test"] * 40
        write_features(study, site, x, labels, [f"p{i}" for i in range(100)], splits)
    return study


@pytest.mark.parametrize("noise", [*nightly("own"), "shared"])
def test_a_head_made_of_all_sums_is_one_model_without_any_site_s_own_part(tmp_path, noise):
    """Every site makes the same head of what was released, and that one is scored."""
    options = ["train.data=features", f"privacy.noise={noise}", "privacy.enabled=false"]
    study = features_of(tmp_path / "real", 'real = true\nallow = ["model", "shared", "scores"]')
    folder = run(study, "oneshot", *options)
    found = evaluate(study, folder.name)["between"]["models"]
    whole = found["shared"]["merged"]
    assert list(found) == ["shared"] and whole["n"] == 120
    x, labels = (np.concatenate([rows_of(k)[part][60:] for k in range(3)]) for part in (0, 1))
    for site in SITES:
        head = SharedHead(2, 16)
        head.load_state_dict(folder.site(site).load_model("proxy"))
        said = head.as_released()(torch.from_numpy(x)).argmax(1).numpy()
        assert whole["accuracy"] == pytest.approx((said == labels).mean())


def test_noise_that_is_added_once_in_all_stays_what_it_is_worth(tmp_path):
    study = features_of(tmp_path / "real", REAL + '\nallow = ["shared", "scores"]')
    folder = run(study, "oneshot", "train.data=features", "privacy.noise=shared", "privacy.sigma=3.0")
    assert list(told(folder)["models"]) == ["shared"]
    assert {row["guarantee"] for row in folder.summary()["sites"]} == {"shared"}


def test_a_site_whose_budget_ended_scores_what_the_others_released(tmp_path):
    cost = epsilon([plan_of_store(1)], 1e-5)
    study = hospitals(tmp_path / "study", S2=ALLOWED.replace("50.0", f"{cost + 1e-6}"))
    folder = run(study, "proxyfl", "train.rounds=2", "privacy.sigma=4")
    document = told(folder)
    assert list(document["models"]) == ["S0", "S1"] and document["hospitals"] == SITES
    assert document["counts"]["S0"]["S2"]["n"] == 12
    row = folder.summary()["sites"][2]
    assert row["rounds"] == 1 and row["epsilon"] == pytest.approx(cost)


def plan_of_store(rounds):
    return accounting.plan(36, 18, rounds, 4.0, 0.7)


@pytest.mark.slow
def test_ranks_of_two_hospitals_score_each_other(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2, site_extra=ALLOWED)
    summary = train(study, method="proxyfl", overrides=["train.rounds=1", "privacy.sigma=4"])
    folder = RunFolder(study.root / summary["run"])
    document = told(folder)
    assert document == told(folder, "S1") and list(document["models"]) == ["S0", "S1"]
    assert all(one["n"] == 12 for counts in document["counts"].values() for one in counts.values())
    assert {row["guarantee"] for row in summary["sites"]} == {"guaranteed"}
    transfers = folder.site("S0").transfers()
    sent = [(line["what"], line["to"]) for line in transfers]
    assert sent == [("model to be scored", "S1"), ("scores", "S1")]
    assert summary["communication"]["messages"] == 2 + 4


# the ledger


def test_counts_of_test_patients_are_no_part_of_epsilon_and_everything_else_bare_is(tmp_path):
    terms = Terms(delta=1e-5, allow=("scores", "model"), guarantee="guaranteed")
    ledger = PrivacyLedger(tmp_path / "C1.jsonl", site="C1", run="a", terms=terms)
    ledger.release(1, np.ones(2, np.float32), schema="0" * 64, mechanism=planned(36, 8), content="model")
    before = ledger.epsilon(), ledger.guarantee(), ledger.n_rounds(), ledger.mechanisms()
    ledger.release(2, np.ones(8, np.uint8), schema="0" * 64, mechanism=None, content="scores")
    assert (ledger.epsilon(), ledger.guarantee(), ledger.n_rounds(), ledger.mechanisms()) == before
    assert before[1] == "guaranteed" == ledger.guarantee(lifetime=True)
    assert ledger.epsilon(lifetime=True) == before[0] is not None
    ledger.release(3, np.ones(2, np.float32), schema="0" * 64, mechanism=None, content="model")
    assert (ledger.epsilon(), ledger.guarantee()) == (None, "none")


def test_counts_leave_only_where_the_site_allows_them_by_name(tmp_path):
    ledger = PrivacyLedger(tmp_path / "C1.jsonl", site="C1", run="a", terms=Terms(delta=1e-5))
    given = {"schema": "0" * 64, "mechanism": None, "content": "scores"}
    refused(lambda: ledger.release(1, np.ones(8, np.uint8), **given), 'allow = ["scores"]', error=WsiFlError)
    assert not ledger.entries


# after a restart


class PowerCut(BaseException):
    pass


@pytest.mark.parametrize("moment", ["_release", "_pass_counts", "_document"])
def test_after_a_restart_the_same_counts_leave(tmp_path, monkeypatch, moment):
    study = hospitals(tmp_path / "study")
    real, calls = getattr(between.CrossSiteScoring, moment), []

    def cut(*given):
        calls.append(given)
        if moment != "_release" or len(calls) == 2:
            raise PowerCut
        return real(*given)

    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(between.CrossSiteScoring, moment, cut)
        run(study, "proxyfl")
    folder = RunFolder(study.run("1"))
    before = {site: left(study, site) for site in SITES}
    kept = folder.site("S0").kept("counts")
    assert before["S0"] and kept and told(folder) is None
    monkeypatch.setattr(between.CrossSiteScoring, "_count", lambda *_: nothing(2))  # nothing is counted anew
    resume(study, folder.name, backend="local")
    assert told(folder)["hospitals"] == SITES and folder.site("S0").kept("counts") == kept
    for site in SITES:
        assert left(study, site)[: len(before[site])] == before[site] and len(left(study, site)) == 1
        assert [line["round"] for line in lines(study, site) if line.get("again")].count(3) == len(
            before[site]
        )
    row = json.loads((folder.path / "summary.json").read_text())["sites"][0]
    assert row["guarantee"] == "guaranteed"


def test_other_models_than_those_of_before_a_restart_are_not_scored(tmp_path):
    study = hospitals(tmp_path / "study")
    folder = run(study, "proxyfl")
    (folder.path / "summary.json").unlink()
    kept = folder.site("S1").kept("counts")
    folder.site("S1").keep("counts", kept | {"schema": "0" * 64})
    before = told(folder)
    resume(study, folder.name, backend="local")
    assert told(folder) == before and all(len(left(study, site)) == 1 for site in SITES)
    assert "none is scored again" in folder.site("S0").log_path.read_text()


def test_counts_that_are_not_what_was_announced_are_left_out(tmp_path, monkeypatch):
    study, real = hospitals(tmp_path / "study"), between.unpacked
    calls = []

    def strange(values, *shape):
        calls.append(values)
        if len(calls) == 4:  # the first message, after three that are a site's own
            raise ValueError("they hold a negative or an impossibly large number")
        return real(values, *shape)

    monkeypatch.setattr(between, "unpacked", strange)
    folder = run(study, "fedavg")
    assert [told(folder, site)["hospitals"] for site in SITES] == [SITES, ["S1", "S2"], SITES]
    assert "the counts of site S0 are left out" in folder.site("S1").log_path.read_text()
    assert results(told(folder, "S1"))["models"]["central"]["merged"]["n"] == 24


# pages


def uneven():
    """Counts of three models at two hospitals, and a class whose name is markup."""
    rng = np.random.default_rng(0)
    label = np.arange(60) % 2
    counts = {}
    for shift, site in zip((0.1, 0.2, 0.3), SITES, strict=True):
        counts[site] = {}
        for hospital in ("S0", "S2"):
            score = np.clip(rng.normal(0.4 + shift * label, 0.2), 0, 1)
            counts[site][hospital] = count(np.stack([1 - score, score], axis=1), label)
    return {
        "classes": ["healthy", "<tumor>"],
        "round": 4,
        "models": {site: f"{k}" * 64 for k, site in enumerate(SITES)},
        "hospitals": ["S0", "S2"],
        "counts": counts,
    }


def test_the_matrix_has_every_model_at_every_hospital_and_all_together():
    document = results(uneven())
    found = section(document)
    assert (found["hospitals"], found["n"], found["one"]) == (["S0", "S2"], 120, None)
    table = found["tables"][0]
    assert [(row["model"], row["own"]) for row in table["rows"]] == [("S0", 0), ("S1", None), ("S2", 1)]
    shown = [[one["value"] for one in (*row["cells"], row["merged"])] for row in table["rows"]]
    model = document["models"]["S1"]
    where = [model["hospitals"]["S0"], model["hospitals"]["S2"], model["merged"]]
    assert shown[1] == [scores["accuracy"] for scores in where]
    best, score = max(((site, shown[k][-1]) for k, site in enumerate(SITES)), key=lambda pair: pair[1])
    assert found["verdict"] == f"There the model of {best} does best, with an accuracy of {score:.3f}."
    assert section(None) is None


def answered(tables):
    """Counts of several models at one hospital, by their confusion matrices."""
    return {
        "classes": ["normal", "tumour"],
        "round": 1,
        "models": {site: site for site in tables},
        "hospitals": ["S0"],
        "counts": {
            site: {"S0": {"n": 24, "confusion": table, "positives": [13], "negatives": [11], "high": [1.0]}}
            for site, table in tables.items()
        },
    }


def test_models_that_always_say_the_same_are_no_winners():
    always = [[0, 11], [0, 13]]
    document = answered(dict.fromkeys(SITES, always))
    said = section(results(document))["verdict"]
    assert said == "There no model does better than always saying tumour, which has an accuracy of 0.542."
    assert section(results(answered({"S0": always, "S1": [[11, 0], [13, 0]]})))["verdict"] == said
    summary = {"run": "r", "method": "proxyfl", "seconds": 1, "sites": [], "losses": [], "lost": []}
    page = render_coordinator(
        summary | {"communication": {"messages": 0, "bytes": 0, "seconds": 0}}, document
    )
    assert "always saying tumour" in page and "does best" not in page and "Darker is higher" not in page


def test_the_page_of_a_coordinator_is_made_of_two_documents_and_nothing_else(tmp_path):
    study = hospitals(tmp_path / "study")
    folder = run(study, "proxyfl")
    summary = folder.summary()
    text = render_coordinator(summary, uneven())
    assert "&lt;tumor&gt;" in text and "<tumor>" not in text
    assert text.startswith("<!doctype html>") and "src=" not in text and "<script" not in text
    merged_accuracy = results(uneven())["models"]["S2"]["merged"]["accuracy"]
    assert f"{merged_accuracy:.3f}" in text and "guaranteed" in text
    assert str(study.root) not in text and "_patient_" not in text and "_slide_" not in text
    bare = render_coordinator(summary, None)
    assert "No hospital let counts" in bare and "of models at hospitals" not in bare
