"""Tests of cross-site evaluation: hospitals score each other's models locally and release only counts."""

import json
import shutil
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from conftest import REAL, make_study, nightly, planned, refused, write_features
from file_changes import edit, site_file
from sklearn.metrics import recall_score, roc_auc_score

from wsi_fl.data.cross_site_counts import (
    MIN_EXAMPLES,
    _score_counts,
    count_predictions,
    empty_counts,
    pack_counts,
    score_cross_site,
    size_in_bytes,
    unpack_counts,
)
from wsi_fl.data.tasks import score_predictions
from wsi_fl.federation import cross_site_evaluation as between
from wsi_fl.federation.comm import LocalComm
from wsi_fl.hospitals.work.job_replies import _is_complete
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy import accounting
from wsi_fl.privacy.accounting import epsilon
from wsi_fl.privacy.guarantee import PrivacyTerms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.report.cross_site_section import build_cross_site_section, render_coordinator
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.evaluation_lines import render_cross_site_lines
from wsi_fl.stages.training import checks
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.study.folder import Study
from wsi_fl.types import WsiFlError

SITES = ["S0", "S1", "S2"]
ALLOWED = REAL + '\nallow = ["scores"]'
SEEDED = ["train.rounds=3", "privacy.insecure_seed=3"]
QUIET = ["train.rounds=2", "privacy.sigma=4"]
SUMMARY = {"run": "r", "method": "proxyfl", "seconds": 1, "sites": [], "losses": [], "lost": [], "communication": {}}


@pytest.fixture(scope="module", autouse=True)
def _one_process():
    """Allow real hospitals in one process, for tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_check_stores_stay_apart", lambda *_: None)
        yield


def hospitals(root, allow=ALLOWED, **kinds):
    """Make a study of three hospitals; `kinds` has site files that differ."""
    study = make_study(root, n_sites=3, site_extra=allow)
    for site, text in kinds.items():
        edit(site_file(study, site), allow, text)
    return study


@pytest.fixture
def three(tmp_path):
    return hospitals(tmp_path / "three")


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Return a study and its run of ProxyFL, of which tests change copies only."""
    study = hospitals(tmp_path_factory.mktemp("scored") / "study")
    return study, run(study)


def run(study, method="proxyfl", *overrides):
    overrides = overrides or QUIET
    return RunFolder(study.root / train(study, method=method, overrides=overrides, backend="local")["run"])


def read_received_counts(folder, site="S0"):
    return folder.site_folder(site).read_document("scores")


def lines(study, site):
    return [json.loads(line) for line in study.ledger_path(site).read_text().splitlines()]


def left(study, site):
    return [line for line in lines(study, site) if str(line.get("released")).startswith("scores")]


def pair_probabilities(positive):
    """Return probabilities of two classes."""
    return np.stack([1 - positive, positive], axis=1)


def test_counts_of_parts_add_up_to_the_scores_of_the_whole_and_older_versions_are_read():
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 500)
    p = pair_probabilities(np.clip(rng.normal(0.4 + 0.2 * label, 0.2), 0, 1))
    parts = [count_predictions(p[rows], label[rows]) for rows in np.array_split(np.arange(500), 3)]
    found, exact = _score_counts(parts), score_predictions(p, label)
    assert (found["n"], found["accuracy"]) == (exact["n"], exact["accuracy"])
    assert found["macro_accuracy"] == pytest.approx(exact["macro_accuracy"], abs=1e-12)
    assert abs(found["auroc"] - exact["auroc"]) <= found["auroc_within"] < 0.02
    assert _score_counts([count_predictions(p, label)])["auroc"] == pytest.approx(exact["auroc"], abs=1e-12)
    halves = [[0] * 50 + [1] * 50, [1] * 50 + [0] * 50]
    old = {"n": 100, "confusion": [[40, 10], [10, 40]], "positives": halves[0], "negatives": halves[1]}
    found = _score_counts([old, old])
    assert (found["n"], found["auroc"], found["auroc_within"]) == (200, 1.0, 0.0)


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("apart", [0.3, 2.0])
def test_counts_of_a_hundred_patients_give_the_auroc_to_0_02(scale, apart):
    """Holds for probabilities all near one half and for those all near 0 and 1."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        label = np.arange(100) % 2
        positive = 1 / (1 + np.exp(-scale * (rng.normal(size=100) + apart * (label - 0.5))))
        p = pair_probabilities(positive)
        (one,) = unpack_counts(pack_counts([count_predictions(p, label)]), 1, 2)
        exact, found = roc_auc_score(label, positive), _score_counts([one])
        assert (found["auroc"], found["auroc_within"]) == (pytest.approx(exact, abs=1e-12), 0.0)
        bins = np.add(one["positives"], one["negatives"])
        assert bins[bins > 0].min() >= MIN_EXAMPLES and bins.sum() == 100
        found = _score_counts([count_predictions(p[rows], label[rows]) for rows in np.split(np.arange(100), 2)])
        assert abs(found["auroc"] - exact) <= min(0.02, found["auroc_within"] + 1e-12)
        assert found["auroc_within"] < 0.08


def test_small_counts_are_not_disclosed():
    rng = np.random.default_rng(0)
    label = np.repeat([0, 1], [50, MIN_EXAMPLES - 1])
    few = count_predictions(rng.dirichlet(np.ones(2), len(label)), label)
    assert few["n"] == 50 and few["confusion"][1] == [0, 0] and _score_counts([few])["auroc"] is None
    who = np.array([f"p{k % 10}" for k in range(200)])
    score = np.where(who == "p0", 0.99, 0.0) + 0.01 * rng.random(200)  # one patient apart from all others
    for low, high in pairwise([0.0, *count_predictions(pair_probabilities(score), np.arange(200) % 2, who)["high"]]):
        inside = who[(low <= score) & (score < high)]
        assert len(inside) == 0 or len(set(inside)) >= MIN_EXAMPLES
    found = _score_counts([count_predictions(np.full((60, 2), 0.5), np.arange(60) % 2)])
    assert (found["auroc"], found["auroc_within"]) == (0.5, 0.0)


@pytest.mark.parametrize("n_classes", [2, 5])
def test_counts_travel_as_bytes_of_a_known_length(n_classes):
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(n_classes), 40)
    some = [count_predictions(p, rng.integers(0, n_classes, 40)), empty_counts(n_classes)]
    values = pack_counts(some)
    assert values.dtype == np.uint8 and len(values) == size_in_bytes(2, n_classes)
    assert unpack_counts(values, 2, n_classes) == some


def test_impossible_counts_are_refused():
    good = count_predictions(np.tile([0.2, 0.8], (MIN_EXAMPLES, 1)), np.ones(MIN_EXAMPLES, int))
    refused(lambda: unpack_counts(pack_counts([good]), 2, 2), "bytes", error=ValueError)
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
        bad = pack_counts([good | change])
        with pytest.raises(ValueError, match=r"impossibly large|different examples|bins overlap|pairs"):
            unpack_counts(bad, 1, 2)


@pytest.mark.parametrize(("method", "models"), [*nightly(("fedavg", ["central"]), ("cwt", SITES)), ("proxyfl", SITES)])
def test_every_site_keeps_the_counts_of_its_sent_model_at_every_hospital(scored, three, method, models):
    study, folder = scored if method == "proxyfl" else (three, run(three, method))
    document = read_received_counts(folder)
    assert list(document["models"]) == models and document["hospitals"] == SITES
    for site in SITES:
        (line,) = left(study, site)
        assert line["mechanism"] is None and line["round"] == document["round"] == 3
        assert read_received_counts(folder, site) == document
    for model in models:
        assert [document["counts"][model][site]["n"] for site in SITES] == [12, 12, 12]


def test_no_cross_site_scores_without_sent_models_or_permission_or_with_merged_test_parts(
    three, tmp_path, study, monkeypatch
):
    shut = hospitals(tmp_path / "shut", allow=REAL)
    for one, method in ((three, "regular"), (shut, "proxyfl"), (study, "fedavg")):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"user of {method}"))
        folder = run(one, method)
        assert read_received_counts(folder) is None and not left(one, "S0")
        assert not any(line.get("again") for line in lines(one, "S0"))
        assert evaluate(one, folder.name)["cross_site"] is None


@pytest.mark.parametrize("method", [*nightly("fedavg"), "proxyfl"])
def test_cross_site_scores_change_neither_epsilon_nor_its_guarantee(tmp_path, monkeypatch, method):
    found = []
    for name, allow in (("open", ALLOWED), ("shut", REAL)):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"{name}-user"))  # other patients of the same names
        study = hospitals(tmp_path / name, allow=allow)
        once, again = (run(study, method).read("summary")["sites"] for _ in range(2))
        rows = [{k: v for k, v in row.items() if k not in ("messages", "bytes")} for row in once]
        found.append((rows, [row["lifetime_epsilon"] for row in again]))
    assert found[0] == found[1]
    (first, *_), lifetime = found[0]
    assert first["guarantee"] == first["lifetime_guarantee"] == "guaranteed"
    assert first["epsilon"] is not None and lifetime[0] > first["epsilon"]


def test_a_hospital_without_permission_discloses_no_scores_and_receives_all(tmp_path):
    study = hospitals(tmp_path / "study", S1=REAL)
    folder = run(study, "proxyfl")
    assert not left(study, "S1") and left(study, "S0") and left(study, "S2")
    for site in SITES:
        document = read_received_counts(folder, site)
        assert document["hospitals"] == ["S0", "S2"] and list(document["models"]) == SITES
        assert all(list(counts) == ["S0", "S2"] for counts in document["counts"].values())
    assert folder.site_folder("S1").read_document("counts") is None


def test_private_models_are_never_sent(three, monkeypatch):
    heard, real = [], between.CrossSiteScoring.run

    def listened(scoring):
        scoring.comm.sent = []
        heard.append((scoring.comm, {site.index: site for site in scoring.sites}))
        real(scoring)

    monkeypatch.setattr(between.CrossSiteScoring, "run", listened)
    run(three)
    ((comm, sites),) = heard
    assert isinstance(comm, LocalComm) and len(comm.sent) == 12
    assert {(m.sender, m.receiver) for m in comm.sent} == set(permutations(range(3), 2))
    every = [line for site in SITES for line in lines(three, site)]
    known = {line["released"].split()[1] for line in every if line.get("released")}
    for message in comm.sent:
        assert between.digest_values(message.vector) in known
        assert message.vector.size != sites[message.sender].learners["private"].parameter_vector().size


@pytest.mark.parametrize("method", ["fedavg", *nightly("proxyfl")])
def test_scores_are_those_of_evaluate_where_the_same_sites_are_simulated(tmp_path, method):
    study = hospitals(tmp_path / "real", allow='real = true\nallow = ["model", "scores"]')
    simulated = hospitals(tmp_path / "simulated", allow="real = false")
    found, reference = (evaluate(one, run(one, method, *SEEDED).name) for one in (study, simulated))
    assert reference["cross_site"] is None and reference["merged"] is not None
    # a ring: a proxy that is held is another's last release
    held = [row["models"]["proxy" if method == "proxyfl" else "private"] for row in reference["sites"]]
    for model in found["cross_site"]["models"].values():
        whole = model["merged"]
        same = [one for one in held if all(one[key] == whole[key] for key in ("n", "accuracy"))]
        near = [abs(one["auroc"] - whole["auroc"]) <= whole["auroc_within"] + 1e-9 for one in same]
        assert whole["n"] == 36 and any(near)
    for site in SITES if method == "fedavg" else ():
        part = found["cross_site"]["models"]["central"]["hospitals"][site]
        exact = reference["sites"][0]["parts"][site]
        assert (part["n"], part["accuracy"]) == (exact["n"], exact["accuracy"])


def draw_rows(k):
    """Return 60 training and 40 test rows of features of a hospital with their labels."""
    labels = np.arange(100) % 2
    x = np.random.default_rng(k).normal(size=(100, 16)) + 0.6 * np.outer(2 * labels - 1, np.arange(16) < 3)
    return x.astype(np.float32), labels


def make_feature_study(root, allow):
    """Make three hospitals of 60 training and 40 test rows of features."""
    study = hospitals(root, allow=allow)
    patients, splits = [f"p{i}" for i in range(100)], ["train"] * 60 + ["test"] * 40
    for k, site in enumerate(SITES):
        write_features(study, site, *draw_rows(k), patients, splits)
    return study


@pytest.mark.parametrize("noise", [*nightly("own"), "shared"])
def test_a_head_of_all_class_statistics_is_one_model_without_local_statistics(tmp_path, noise):
    """Every site solves the same head from the released statistics; this head is scored."""
    options = ["train.data=features", f"privacy.noise={noise}", "privacy.enabled=false"]
    study = make_feature_study(tmp_path / "real", 'real = true\nallow = ["model", "shared", "scores"]')
    folder = run(study, "oneshot", *options)
    found = evaluate(study, folder.name)["cross_site"]["models"]
    whole = found["shared"]["merged"]
    assert list(found) == ["shared"] and whole["n"] == 120
    x, labels = (np.concatenate([draw_rows(k)[part][60:] for k in range(3)]) for part in (0, 1))
    for site in SITES:
        head = SharedHead(2, 16)
        head.load_state_dict(folder.site_folder(site).load_model("shared"))
        said = head.solve_released_head()(torch.from_numpy(x)).argmax(1).numpy()
        assert whole["accuracy"] == pytest.approx((said == labels).mean())


def test_distributed_noise_keeps_its_guarantee_with_cross_site_scores(tmp_path):
    study = make_feature_study(tmp_path / "real", REAL + '\nallow = ["shared", "scores"]')
    folder = run(study, "oneshot", "train.data=features", "privacy.noise=shared", "privacy.sigma=3.0")
    assert list(read_received_counts(folder)["models"]) == ["shared"]
    assert {row["guarantee"] for row in folder.read("summary")["sites"]} == {"shared"}


def test_a_site_with_an_exhausted_budget_scores_the_models_of_the_others(tmp_path):
    cost = epsilon([accounting.plan_mechanism(36, 18, 1, 4.0, 0.7)], 1e-5)
    folder = run(hospitals(tmp_path / "study", S2=ALLOWED.replace("50.0", f"{cost + 1e-6}")))
    document = read_received_counts(folder)
    assert list(document["models"]) == ["S0", "S1"] and document["hospitals"] == SITES
    assert document["counts"]["S0"]["S2"]["n"] == 12
    row = folder.read("summary")["sites"][2]
    assert row["rounds"] == 1 and row["epsilon"] == pytest.approx(cost)


@pytest.mark.slow
def test_ranks_of_two_hospitals_score_each_other(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2, site_extra=ALLOWED)
    summary = train(study, method="proxyfl", overrides=["train.rounds=1", "privacy.sigma=4"])
    folder = RunFolder(study.root / summary["run"])
    document = read_received_counts(folder)
    assert document == read_received_counts(folder, "S1") and list(document["models"]) == ["S0", "S1"]
    assert all(one["n"] == 12 for counts in document["counts"].values() for one in counts.values())
    assert {row["guarantee"] for row in summary["sites"]} == {"guaranteed"}
    sent = [(line["what"], line["to"]) for line in folder.site_folder("S0").list_transfers()]
    assert sent == [("model to be scored", "S1"), ("scores", "S1")]
    assert summary["communication"]["messages"] == 2 + 4


def test_counts_of_test_patients_are_no_part_of_epsilon_and_need_their_own_permission(tmp_path):
    """All other releases without noise are part of ε."""

    def opened(run, **terms):
        known = {"site": "C1", "run": run, "terms": PrivacyTerms(delta=1e-5, **terms)}
        return PrivacyLedger(tmp_path / f"{run}.jsonl", **known)

    def release(ledger, round_, vector, mechanism, content):
        ledger.release(round_, vector, schema="0" * 64, mechanism=mechanism, content=content)
        return ledger.epsilon(), ledger.guarantee(), ledger.count_rounds(), ledger.list_mechanisms()

    counts, ledger = np.ones(8, np.uint8), opened("a", allow=("scores", "model"), guarantee="guaranteed")
    before = release(ledger, 1, np.ones(2, np.float32), planned(36, 8), "model")
    assert release(ledger, 2, counts, None, "scores") == before
    assert before[1] == "guaranteed" == ledger.guarantee(lifetime=True)
    assert ledger.epsilon(lifetime=True) == before[0] is not None
    assert release(ledger, 3, np.ones(2, np.float32), None, "model")[:2] == (None, "none")
    shut = opened("b")
    refused(lambda: release(shut, 1, counts, None, "scores"), 'allow = ["scores"]', error=WsiFlError)
    assert not shut.entries


@pytest.mark.parametrize("moment", ["_release_counts", "_pass_counts", "_build_scores"])
def test_the_same_counts_leave_the_site_after_a_restart(three, monkeypatch, moment):
    real, calls = getattr(between.CrossSiteScoring, moment), []

    def cut(*given):
        calls.append(given)
        if moment != "_release_counts" or len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(between.CrossSiteScoring, moment, cut)
        run(three)
    folder = RunFolder(three.find_run("1"))
    before = {site: left(three, site) for site in SITES}
    kept = folder.site_folder("S0").read_document("counts")
    assert before["S0"] and kept and read_received_counts(folder) is None
    monkeypatch.setattr(between, "count_predictions", lambda *_, **__: empty_counts(2))  # nothing is counted anew
    resume_run(three, folder.name, backend="local")
    assert read_received_counts(folder)["hospitals"] == SITES
    assert folder.site_folder("S0").read_document("counts") == kept
    for site, known in before.items():
        assert left(three, site)[: len(known)] == known and len(left(three, site)) == 1
        assert [line["round"] for line in lines(three, site) if line.get("again")].count(3) == len(known)
    assert folder.read("summary")["sites"][0]["guarantee"] == "guaranteed"


def test_models_changed_since_a_restart_are_not_scored(scored, tmp_path):
    three = Study(shutil.copytree(scored[0].root, tmp_path / "study"))
    folder = RunFolder(three.find_run("1"))
    (folder.path / "summary.json").unlink()
    kept = folder.site_folder("S1").read_document("counts")
    folder.site_folder("S1").write_document("counts", kept | {"schema": "0" * 64})
    before = read_received_counts(folder)
    resume_run(three, folder.name, backend="local")
    assert read_received_counts(folder) == before and all(len(left(three, site)) == 1 for site in SITES)
    assert "none is scored again" in folder.site_folder("S0").log_path.read_text()


def test_counts_that_differ_from_their_announcement_are_excluded(three, monkeypatch):
    real, calls = between.unpack_counts, []

    def strange(values, *shape):
        calls.append(values)
        if len(calls) == 4:  # the first message, after three that are a site's own
            raise ValueError("they hold a negative or an impossibly large number")
        return real(values, *shape)

    monkeypatch.setattr(between, "unpack_counts", strange)
    folder = run(three, "fedavg")
    assert [read_received_counts(folder, site)["hospitals"] for site in SITES] == [SITES, ["S1", "S2"], SITES]
    assert "the counts of site S0 are left out" in folder.site_folder("S1").log_path.read_text()
    assert score_cross_site(read_received_counts(folder, "S1"))["models"]["central"]["merged"]["n"] == 24


def make_counts_document(counts, classes):
    """Return the document of counts that sites receive."""
    hospitals = list(next(iter(counts.values())))
    models = {site: f"{k}" * 64 for k, site in enumerate(counts)}
    return {"classes": classes, "round": 4, "models": models, "hospitals": hospitals, "counts": counts}


def make_uneven_counts():
    """Return counts of three models at two hospitals, with a class whose name is markup."""
    rng = np.random.default_rng(0)
    label, counts = np.arange(60) % 2, {}
    for shift, site in zip((0.1, 0.2, 0.3), SITES, strict=True):
        drawn = [np.clip(rng.normal(0.4 + shift * label, 0.2), 0, 1) for _ in range(2)]
        counts[site] = {
            one: count_predictions(pair_probabilities(p), label) for one, p in zip(("S0", "S2"), drawn, strict=True)
        }
    return make_counts_document(counts, ["healthy", "<tumor>"])


@pytest.mark.parametrize("n_classes", [1, 3, 5])
def test_other_than_two_classes_have_both_accuracies_but_no_auroc(n_classes):
    """Covers models that reached some or no hospital, on the pages of sites and coordinator."""
    rng, names = np.random.default_rng(0), [f"grade {k}" for k in range(n_classes)]
    truth = rng.integers(0, n_classes, 80)
    said = {site: rng.dirichlet(np.ones(n_classes), 80) for site in SITES}
    halves = np.split(np.arange(80), 2)
    part = [count_predictions(said[site][rows], truth[rows]) for site in ("S0", "S1") for rows in halves]
    told = unpack_counts(pack_counts([*part[:3], *[empty_counts(n_classes)] * 3]), 6, n_classes)
    counts = {site: {"S0": told[2 * k], "S2": told[2 * k + 1]} for k, site in enumerate(SITES)}
    document = make_counts_document(counts, names)
    assert _is_complete(document)  # what a coordinator asks of what hospitals send
    models = score_cross_site(document)["models"]
    called = said["S0"].argmax(1)
    assert models["S0"]["merged"] == {
        "n": 80,
        "n_classes": n_classes,
        "accuracy": (called == truth).mean(),
        "macro_accuracy": pytest.approx(recall_score(truth, called, average="macro")),
        "auroc": None,
        "auroc_within": None,
    }
    assert (models["S1"]["merged"]["n"], models["S2"]["merged"]["accuracy"]) == (40, None)
    tables = build_cross_site_section(score_cross_site(document))["tables"]
    assert [table["title"] for table in tables] == ["Accuracy", "Macro-accuracy"]
    assert list(render_cross_site_lines(score_cross_site(document)))
    page = render_coordinator(SUMMARY, document)
    assert all(name in page for name in names)


def test_the_matrix_has_every_model_at_every_hospital_and_over_all():
    document = score_cross_site(make_uneven_counts())
    found = build_cross_site_section(document)
    assert (found["hospitals"], found["n"], found["one"]) == (["S0", "S2"], 120, None)
    rows = found["tables"][0]["rows"]
    assert [(row["model"], row["own"]) for row in rows] == [("S0", 0), ("S1", None), ("S2", 1)]
    shown = [[one["value"] for one in (*row["cells"], row["merged"])] for row in rows]
    model = document["models"]["S1"]
    where = [model["hospitals"]["S0"], model["hospitals"]["S2"], model["merged"]]
    assert shown[1] == [scores["accuracy"] for scores in where]
    score, best = max((row[-1], site) for row, site in zip(shown, SITES, strict=True))
    assert (found["best"]["models"], found["best"]["accuracy"]) == ([best], score)
    assert build_cross_site_section(None) is None


def make_counts(**tables):
    """Return counts of several models at one hospital from their confusion matrices."""
    known = {"n": 24, "positives": [13], "negatives": [11], "high": [1.0]}
    counts = {site: {"S0": known | {"confusion": table}} for site, table in tables.items()}
    return make_counts_document(counts, ["normal", "tumour"])


def test_models_with_constant_predictions_never_win():
    always = [[0, 11], [0, 13]]
    documents = make_counts(S0=always, S1=always), make_counts(S0=always, S1=[[11, 0], [13, 0]])
    for document in documents:
        page = " ".join(render_coordinator(SUMMARY, document).split())
        assert "There no model does better than always predicting tumour, which has an accuracy of 0.542." in page
        assert "does best" not in page
    assert "Darker is higher" not in render_coordinator(SUMMARY, documents[0])


def test_the_coordinators_page_is_rendered_from_two_documents_alone(scored):
    summary = scored[1].read("summary")
    text = render_coordinator(summary, make_uneven_counts())
    assert "&lt;tumor&gt;" in text and "<tumor>" not in text
    assert text.startswith("<!doctype html>") and "src=" not in text and "<script" not in text
    accuracy = score_cross_site(make_uneven_counts())["models"]["S2"]["merged"]["accuracy"]
    assert f"{accuracy:.3f}" in text and "guaranteed" in text
    assert str(scored[0].root) not in text and "_patient_" not in text and "_slide_" not in text
    bare = render_coordinator(summary, None)
    assert "No hospital released counts" in bare and "of models at hospitals" not in bare
