"""Real hospitals, each in its own folder: a run discloses only what docs/explanation/privacy.md lists."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import fuzz_peers
import numpy as np
import pytest
import torch
from conftest import REAL, Told, interrupted_after, larger_pair, nightly, refused, write_store
from conftest import larger_study as make_study

from wsi_fl.data.cohort import Cohort
from wsi_fl.data.tasks import score_predictions
from wsi_fl.federation import loop
from wsi_fl.federation.preflight import PreflightDocument
from wsi_fl.hospitals.trust.sealed_messages import Handshake, MessageHeader
from wsi_fl.hospitals.work.client import SiteGreeting
from wsi_fl.learning.local_training import predict_examples, replace_nonfinite
from wsi_fl.oneshot.sync_statistics import StatisticsFile, StatisticsOffer
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.runtime.console import JsonEvents, SilentProgress
from wsi_fl.stages.site.run_context import RunContext, restore_study
from wsi_fl.stages.training import launch, ranks
from wsi_fl.stages.training.resume import RunRequest, RunState, RunStates, _FolderClaim, _RunProposal, select_run
from wsi_fl.stages.training.summary import SummaryRow
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_lines, write_sealed
from wsi_fl.types import UsageError, WsiFlError

pytestmark = pytest.mark.end_to_end

study = larger_pair
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "privacy.md"
SITES = ["S0", "S1", "S2"]
SECRETS = re.compile(r"accuracy|auroc|loss|seconds|_slide_|_patient_", re.IGNORECASE)
RECORDER = """
import json, sys, warnings
from wsi_fl.federation.comm import MpiComm
gather = MpiComm.gather
def recorded(self, documents, kind, **options):
    warnings.warn("S_slide_0 under /secret is odd")
    told = gather(self, documents, kind, **options)
    with open("gathered.jsonl", "a") as file:
        file.writelines(json.dumps(document) + "\\n" for document in documents)
    return told
MpiComm.gather = recorded
from wsi_fl.__main__ import main
main()
"""


def hospitals(root):
    """A folder for each hospital, with all site files and only its own store."""
    studies = [make_study(root / f"H{k}", n_sites=0) for k in range(len(SITES))]
    for k, study in enumerate(studies):
        for site in SITES:
            (study.root / "sites" / f"{site}.toml").write_text(f'name = "{site}"\n{REAL}\n')
        write_store(study, SITES[k], seed=k)
    return [study.root for study in studies]


def together(folders, *arguments):
    """mpiexec with one rank in each folder."""
    recorder = folders[0].parent / "recorder.py"
    recorder.write_text(RECORDER)
    command = [launch.find_mpiexec(), "--oversubscribe", "--bind-to", "none"]
    for k, folder in enumerate(folders):
        command += [":"] * (k > 0) + ["-n", "1", "--wdir", str(folder), sys.executable, str(recorder)]
        command += ["train", *arguments, "--set", "train.rounds=2", "--set", "privacy.sigma=4"]
    given = {"capture_output": True, "text": True, "env": launch.rank_environment(len(folders))}
    return subprocess.run(command, check=False, timeout=240, **given)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folders = hospitals(tmp_path_factory.mktemp("hospitals"))
    early = folders[1] / "runs" / "00001-proxyfl-small"  # of its own, an earlier one of that name
    early.mkdir(parents=True)
    (early / "config.toml").write_text("[train]\nrounds = 9\n")
    write_sealed(early / "manifest.json", {"id": "old", "config_sha256": "", "method": "proxyfl"})
    return folders, together(folders)


def test_a_new_run_has_a_number_that_is_free_at_every_hospital(finished):
    folders, done = finished
    assert done.returncode == 0, done.stderr
    runs = [folder / "runs" / "00002-proxyfl-small" for folder in folders]
    assert len({RunFolder(path).id for path in runs}) == 1
    for k, path in enumerate(runs):
        assert [p.name for p in (path / "sites").iterdir() if (p / "metrics.jsonl").exists()] == [f"S{k}"]
        line = json.loads(Study(folders[k]).ledger_path(f"S{k}").read_text().splitlines()[0])
        assert line["run"].split() == [path.name, RunFolder(path).id]
    earlier = folders[1] / "runs" / "00001-proxyfl-small" / "config.toml"
    assert earlier.read_text() == "[train]\nrounds = 9\n"


def table_of(page):
    """The cells of «Everything that is disclosed»."""
    rows = page.split("## Everything that is disclosed")[1].split("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows if line[:1] == "|"][2:]


def test_hospitals_disclose_to_each_other_only_what_the_table_lists(finished):
    folders, _ = finished
    listed = {key for what, *_ in table_of(PAGE.read_text()) for key in re.findall(r"`([a-z0-9_]+)`", what)}
    elsewhere = ("wsi_fl.hospitals.work.job_replies", "wsi_fl.stages.runtime.rank_job")  # coordinator; one machine
    kinds = [kind for kind in fuzz_peers.kinds(slow=True).values() if kind.__module__ not in elsewhere]
    assert SummaryRow in kinds
    assert {key for kind in kinds for key in get_type_hints(kind)} <= listed
    for folder in folders:
        documents = read_lines(folder / "gathered.jsonl")
        told = {key for document in documents for key in document}
        assert {"affordable", "state", "claimed", "lifetime_epsilon"} <= told <= listed
        assert not SECRETS.search(json.dumps([list(d.values()) for d in documents])), documents
        (row,) = [document for document in documents if "trained_seconds" in document]
        assert [row[key] for key in ("trained_seconds", "communication_seconds", "group")] == [None] * 3
        assert set(row) == set(SummaryRow.__annotations__)


def first_numbers():
    """The keys of «Numbers that leave before the ledger has a line»."""
    title = "### Numbers that leave before the ledger has a line"
    rows = PAGE.read_text().split(title)[1].split("\n#")[0].splitlines()
    return {key for line in rows if line[:3] == "| `" for key in re.findall(r"`([a-z_]+)`", line.split("|")[1])}


FIRST = (_RunProposal, _FolderClaim, RunState, RunStates, StatisticsOffer, StatisticsFile, PreflightDocument)
FIRST += (Handshake, MessageHeader, SiteGreeting)
"""What sites tell each other before anything is charged."""


def is_number(kind):
    return any(is_number(one) for one in get_args(kind)) if get_args(kind) else kind in (int, float)


def numbers_in(document):
    """The keys of a document whose values are numbers, or lists and tables that hold some."""

    def holds(value):
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return any(map(holds, inside)) or (isinstance(value, int | float) and not isinstance(value, bool))

    return {key for key, value in document.items() if holds(value)}


def test_numbers_released_before_any_charge_are_in_one_table(finished):
    folders, _ = finished
    listed = first_numbers()
    typed = {key for kind in FIRST for key, one in get_type_hints(kind).items() if is_number(one)}
    assert typed <= listed <= {key for kind in FIRST for key in get_type_hints(kind)}
    for k, folder in enumerate(folders):
        documents = read_lines(folder / "gathered.jsonl")
        last = next(n for n, document in enumerate(documents) if "affordable" in document)
        told = [*documents[: last + 1]]
        assert {"number", "units", "sigma"} <= {key for one in told for key in numbers_in(one)} <= listed
        assert told[last]["units"] == 36  # three patients of twelve patches
        log = (folder / "runs" / f"S{k}.log").read_text()  # at home there is a line of it: what, to whom, in which run
        (line,) = [one for one in log.splitlines() if "preflight of" in one]
        others = ", ".join(name for name in SITES if name != f"S{k}")
        assert (
            f"00002-proxyfl-small {RunFolder(folder / 'runs' / '00002-proxyfl-small').id}: disclosed to {others}"
            in line
        )
        assert json.loads(line[line.index("{") :]) == told[last]


def test_the_output_of_hospitals_holds_only_what_the_table_lists(finished):
    _, done = finished
    public = (
        r"  S\d: 2 rounds, ε = [\d.]+ \(guaranteed\) at δ = 1e-05, per row; ever spent [\d.]+ of 50 \(guaranteed\); "
        r"B = 8, σ = 4",
        r"  of 100 rows in it, .* identifies at most [\d.]+, at a false positive rate of 1 %",
        r"  \d+ messages, [\d.]+ MB, 0\.0 s of communication",
        r"wsi-fl train: starting …",
        r"\S+ done in \d+ s; next: wsi-fl evaluate \S+",
    )
    for line in (done.stdout + done.stderr).splitlines():
        assert not line.strip() or any(re.fullmatch(words, line) for words in public), line
        assert not SECRETS.search(line) and "/" not in line.replace("runs/0", ""), line


def test_the_local_log_of_a_hospital_holds_the_accuracy(finished):
    folders, _ = finished
    log = (folders[0] / "runs" / "00002-proxyfl-small" / "sites" / "S0" / "log.txt").read_text()
    assert "accuracy" in log and "loss" in log
    assert "UserWarning: S_slide_0 under /secret is odd" in (folders[0] / "runs" / "S0.log").read_text()


@pytest.mark.slow
def test_a_failure_names_the_hospital_and_its_log_and_no_slide(finished, tmp_path):
    copies = [shutil.copytree(folder, tmp_path / folder.name) for folder in finished[0]]
    next((copies[1] / "stores" / "S1" / "slides").glob("*_0.h5")).unlink()
    done = together(copies)
    assert done.returncode != 0
    lines = done.stderr.replace("\0", "").splitlines()  # Open MPI adds a 0 at times
    said = [line.strip() for line in lines if "wsi-fl: error" in line]
    assert said == ["wsi-fl: error: site S1 failed; its own log says why (runs/S1.log)"], done.stderr
    assert not SECRETS.search(done.stdout + done.stderr)
    assert "S1_slide_0" in (copies[1] / "runs" / "S1.log").read_text()


@pytest.mark.parametrize(("real", "kinds"), [(True, 1), (False, 2)])
def test_the_failure_message_of_a_real_hospital_hides_the_kind_of_failure(tmp_path, real, kinds):
    """A wrong value of its table, a damaged store and a defect of the code look alike."""
    study, seen = (make_study(tmp_path / "study", n_sites=1, site_extra=REAL if real else "real = false"), set())
    for error in (UsageError("slide S0_slide_1"), WsiFlError("slide S0_slide_1"), KeyError("S0_slide_1")):

        def work(_, error=error):
            raise error

        told = []
        comm = SimpleNamespace(abort=told.append)
        with pytest.raises(WsiFlError) as caught:
            ranks._run_guarded(
                comm, study, study.load_site("S0"), lambda: None, work, lambda *given, told=told: told.append(given)
            )
        seen.add((type(caught.value), told[-1]))
        assert real is ("slide_1" not in str(caught.value))
        assert not real or told == [("site S0 failed; its own log says why (runs/S0.log)", False), 1]
    assert len(seen) == kinds
    assert not real or (study.runs_path / "S0.log").read_text().count("S0_slide_1") >= 3


def test_events_of_a_real_hospital_hold_only_rounds(capsys):
    notes = []
    events = JsonEvents(write_log=notes.append)
    events.update("S0", 1.37, 3, "accuracy 0.9 ε 1.2")
    events.print_message("S0: slide X is strange")
    events.print_message("S1 leaves after 2 rounds", public=True)
    SilentProgress(notes.append).print_message("slide Y")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told == [{"part": "S0", "done": 1, "total": 3, "note": ""}, {"say": "S1 leaves after 2 rounds"}]
    assert notes == ["S0: slide X is strange", "slide Y"]


@pytest.mark.parametrize("fails", [True, *nightly(False)])
def test_a_launcher_receives_no_accuracy_and_no_reason_of_a_real_hospital(tmp_path, fails):
    study, heard = make_study(tmp_path / "study", n_sites=2, site_extra=REAL), []
    watcher = SimpleNamespace(update=lambda *given: heard.append(given), print_message=lambda *_, **__: None)
    settings = ["train.rounds=2", "privacy.sigma=4"]
    trained = partial(train, study, method="proxyfl", overrides=settings, watcher=watcher)

    if fails:
        next((study.root / "stores" / "S1" / "slides").glob("*_0.h5")).unlink()
        refused(trained, "site S1 failed; its own log says why (runs/S1.log)", error=WsiFlError)
    else:
        trained()
        assert {done for _, done, *_ in heard} <= {0, 1, 2}
    assert not any(note for *_, note in heard)
    assert not any(SECRETS.search(log.read_text()) for log in study.runs_path.glob("*/mpi.log"))


@pytest.mark.parametrize("weight", [np.nan, pytest.param(1e25, marks=pytest.mark.slow)])
def test_a_diverged_private_model_is_frozen_and_its_proxy_continues(study, monkeypatch, weight):
    """The proxies equal those of a run without divergence, and the site continues after a restart."""

    def proxies(path):
        return [RunFolder(path).site_folder(name).load_model("proxy") for name in study.site_names()]

    options = ["train.rounds=3", "train.local_baseline=false", "privacy.insecure_seed=5"]
    calm = study.root / train(study, method="proxyfl", overrides=options, backend="local")["run"]
    real = loop._train_round

    def diverges(site, recipe, round_, report):
        losses = real(site, recipe, round_, report)
        if (site.name, round_) == ("S1", 2):
            learner = site.learners["private"]
            learner.load_vector(np.full_like(learner.parameter_vector(), weight))
        return losses

    monkeypatch.setattr(loop, "_train_round", diverges)
    summary = train(study, method="proxyfl", overrides=options, backend="local")
    path = study.root / summary["run"]
    assert "private model was no longer finite" in (path / "sites" / "S1" / "log.txt").read_text()
    assert "finite" not in json.dumps(summary)
    for a, b in zip(proxies(path), proxies(calm), strict=True):
        assert all(np.array_equal(a[key], b[key]) for key in a)
    site = RunFolder(path).site_folder("S1")
    frozen, last = site.load_checkpoint(2), site.load_checkpoint(3)
    assert frozen[1]["diverged"] == last[1]["diverged"] == ["private"]
    weights = [key for key in last[0] if key.startswith("private/model")]
    assert all(np.array_equal(frozen[0][key], last[0][key]) for key in weights)
    assert evaluate(study, summary["run"])["sites"][1]["own"]["accuracy"] is not None


def test_a_model_with_nan_logits_predicts_equal_probabilities():
    images = np.zeros((4, 1, 1, 2), np.float32)
    allowed = np.array([[True, True, True], [True, False, True], [True, True, True], [False, True, False]])
    examples = Cohort.from_columns(images.__getitem__, np.array([0, 2, 1, 1]), np.full(4, ""), np.full(4, ""), allowed)
    logits = torch.tensor([[np.nan, 0, 0], [np.inf, 0, 1], [-np.inf] * 3, [0, np.nan, 0]])
    answers = predict_examples(lambda x: logits[: len(x)], examples, torch.device("cpu"))
    assert np.isnan(answers).any(1).all()  # `predict` refuses to draw that
    said = replace_nonfinite(answers, examples)
    third = [1 / 3] * 3
    np.testing.assert_allclose(said, [third, [0.5, 0, 0.5], third, [0, 1, 0]])
    json.dumps(score_predictions(said, examples.label), allow_nan=False)


def test_a_peer_cannot_choose_where_a_hospital_writes(study):
    party = RunContext.create(study, study.load_pipeline("small"), "proxyfl")
    before = {*study.root.parent.rglob("*"), study.runs_path}
    for name in ("../../PWNED/00001-x", "/tmp/x", "proxyfl-..\\x", "proxyfl-a/b", "", "PROXYFL-\x07"):
        told = Told(_RunProposal(number=3, name=name, identity="0" * 32))
        refused(partial(select_run, party, RunRequest("small"), told), "no name of a run", error=WsiFlError)
        assert set(study.root.parent.rglob("*")) <= before


def test_a_run_number_that_another_job_has_taken_is_not_reused(study):
    def describe(run):
        run.write_manifest({"id": "2", "config_sha256": ""})

    def late():
        RunFolder.claim_folder(study.runs_path, 1, "fedavg-other", "2" * 32, describe)
        return _RunProposal(number=1, name="proxyfl-small", identity="1" * 32)

    second = _RunProposal(number=1, name="proxyfl-small", identity="3" * 32)
    comm = Told(late, _FolderClaim(claimed=True), second, _FolderClaim(claimed=True))
    run = select_run(RunContext.create(study, study.load_pipeline("small"), "proxyfl"), RunRequest("small"), comm)
    assert (run.name, len(run.id)) == ("00002-proxyfl-small", 32)
    assert run.id not in ("1" * 32, "3" * 32)  # nobody gives it the id of an earlier run
    assert sorted(p.name for p in study.runs_path.glob("0*")) == ["00001-fedavg-other", "00002-proxyfl-small"]


def test_a_run_keeps_its_site_files_names_changes_and_honors_withdrawals(study, capsys):
    run = train(study, method="regular", overrides=["train.rounds=1"], backend="local")["run"]
    before, file = evaluate(study, run), study.root / "sites" / "S1.toml"
    began = file.read_text()
    assert before["merged"] is not None
    file.write_text(began + 'private_model = "cnn2"\nmax_epsilon = 2.0\n')
    capsys.readouterr()
    assert evaluate(study, run) == before
    said = capsys.readouterr().err
    assert "sites/S1.toml has changed since the run began" in said
    assert 'private_model = "cnn2" now, not set in this run' in said
    file.unlink()  # a hospital that is no longer listed has taken part all the same
    assert evaluate(study, run) == before
    file.write_text(began.replace("real = false", REAL))
    assert evaluate(study, run)["merged"] is None
    site = restore_study(study, RunFolder(study.find_run(run))).load_site("S1")
    assert (site.real, site.allow, site.max_epsilon) == (True, [], 50.0)


def test_a_resumed_run_obeys_a_smaller_budget_and_refuses_a_smaller_delta(tmp_path, lone_exchange):
    study = make_study(tmp_path / "real", n_sites=1, site_extra=REAL)
    with interrupted_after(1):
        train(study, method="proxyfl", overrides=["train.rounds=3", "privacy.sigma=4"], backend="local")
    once = epsilon([Mechanism(4.0, 0.7, 0.2, 5)], 1e-5) + 1e-9
    file = study.root / "sites" / "S0.toml"
    began = file.read_text()
    file.write_text(began.replace("delta = 1e-5", "delta = 1e-6"))
    words = "delta = 1e-06 is below the 1e-05 of this run"
    refused(lambda: resume_run(study, "1", backend="local"), words)
    file.write_text(began.replace("max_epsilon = 50.0", f"max_epsilon = {once}"))
    row = resume_run(study, "1", backend="local")["sites"][0]
    assert (row["rounds"], row["max_epsilon"]) == (1, once) and row["lifetime_epsilon"] <= once


@pytest.mark.parametrize(
    "other", ['model.private="lenet5"', *nightly("train.alpha=0.9", "train.beta=0.5", "predict.model=proxy")]
)
def test_strict_proxies_do_not_depend_on_private_models(study, other):
    def released(*overrides):
        fixed = ["train.rounds=2", "train.local_baseline=false", "privacy.insecure_seed=5"]
        run = train(study, method="proxyfl", overrides=[*fixed, *overrides], backend="local")["run"]
        lines = [line for site in study.site_names() for line in read_lines(study.ledger_path(site))]
        mine = [line for line in lines if line["run"].startswith(Path(run).name)]
        return [line["released"] for line in mine if line.get("released")]

    first = released()
    assert first == released(other) and len(first) == 4
    if "private" in other:
        assert released("privacy.mode=paper") != released("privacy.mode=paper", other)
