"""Sites that leave, drop out, return or send malformed models: the others continue, and every account stays correct."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import larger, metrics, nightly, refused
from conftest import larger_study as make_study
from file_changes import edit, site_file
from safetensors.torch import load_file
from test_train import processes_of, wait_for_file
from training_runs import assert_resumes, trained

from wsi_fl.federation import loop
from wsi_fl.federation.comm import LocalComm
from wsi_fl.federation.methods import METHODS
from wsi_fl.privacy.accounting import epsilon, plan_mechanism
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.training import launch
from wsi_fl.stages.training import train as stage
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.types import WsiFlError

study = larger

SEEDED = "privacy.insecure_seed=1"


def spent(rounds):
    return epsilon([plan_mechanism(36, 8, rounds, 1.4, 0.7)], 1e-5)


def limit(study, site, rounds):
    edit(site_file(study, site), more=f"max_epsilon = {spent(rounds) + 1e-6 if rounds else 1e-3}\n")


def rounds_of(summary):
    return [row["rounds"] for row in summary["sites"]]


def push_of(path, site, round_):
    state = load_file(path / "sites" / site / "state" / f"round_{round_:05d}.safetensors")
    return state.get("push/x")


class Cut(BaseException):
    pass


@contextmanager
def cut_at(name, number):
    """Interrupt training before a site's checkpoint of a round, within the context."""
    real = loop.write_checkpoint

    def cut(site, round_):
        if (site.name, round_) == (name, number):
            raise Cut
        real(site, round_)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        patch.setattr(loop, "write_checkpoint", cut)
        yield


def interrupted(study, *cuts, method="proxyfl", overrides=()):
    """Interrupt a run before each (site, checkpoint), without some sites; return the final summary with all sites."""
    for number, (site, round_, *without) in enumerate(cuts):
        with cut_at(site, round_):
            if number:
                resume_run(study, "1", without=without, backend="local")
            else:
                trained(study, method, *overrides)
    return resume_run(study, "1", backend="local")


ACCOUNTED = {
    name
    for name, row in METHODS.items()
    if not (row.bare_disclosures or row.payload.is_single_release or row.learns_from == "everybody")
}


@pytest.mark.parametrize("method", ["proxyfl", *nightly(*sorted(ACCOUNTED - {"proxyfl"}))])
def test_a_site_whose_budget_ends_leaves_and_the_others_finish_also_after_a_restart(study, method):
    limit(study, "S1", 2)
    path, _ = assert_resumes(study, method, SEEDED, "train.rounds=4", interruption=cut_at("S2", 3))
    summary = RunFolder(path).require_summary()
    assert rounds_of(summary) == [4, 2, 4, 4] and summary["lost"] == []
    assert [row["epsilon"] for row in summary["sites"]] == pytest.approx([spent(n) for n in (4, 2, 4, 4)])
    lines = metrics(path, "S1")
    assert [line["takes_part"] for line in lines] == [True, True, False, False]
    assert evaluate(study, path.name)["merged"]["accuracy"]["mean"] > 0
    page = write_report(study, path.name).read_text()
    assert "S1 took part in 2 rounds: the next would have exceeded its max_epsilon of" in page
    if method == "proxyfl":  # it trains locally, and its mass was handed over
        assert lines[3]["loss"]["private"] is not None and lines[3]["loss"]["proxy"] is None
        assert lines[3]["messages"] == 0 and [push_of(path, "S1", round_) for round_ in (3, 4)] == [None, None]
        kept = [RunFolder(path).site_folder(f"S{k}").load_checkpoint(3)[1] for k in range(4)]
        assert [document["weight"] for document in kept] == [1, None, 2, 1]


def test_a_run_that_no_site_can_afford_is_refused_and_leaves_nothing(study):
    for site in study.site_names():
        limit(study, site, 0)
    for attempt in (lambda: trained(study, "proxyfl"), lambda: dry_run(study, method="proxyfl")):
        refused(attempt, "sites/S0.toml: max_epsilon = 0.001 is enough for 0 of 3 rounds")
    assert not list(study.runs_path.glob("0*"))


def test_a_dry_run_reports_affordable_rounds_and_a_site_without_one_never_takes_part(study, capsys):
    for site, rounds in (("S1", 2), ("S2", 0)):
        limit(study, site, rounds)
    planned = dry_run(study, method="proxyfl")["sites"]
    assert [row["affordable_rounds"] for row in planned] == [3, 2, 0, 3]
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"sites/S1\.toml: max_epsilon = .* is enough for 2 of 3 rounds; .*then it leaves", said)
    summary = trained(study, "proxyfl")
    assert rounds_of(summary) == [3, 2, 0, 3] and summary["sites"][2]["epsilon"] is None
    assert summary["communication"]["messages"] == 3 + 3 + 2 + 1  # S1 hands its mass over


LIES = (
    (lambda m: replace(m, vector=m.vector * np.float32("nan")), "not finite"),
    (lambda m: replace(m, vector=m.vector * np.float32(1e6)), "lies .* from the local model"),
    (lambda m: replace(m, weight=1e9), r"its weight is 1e\+09"),
    (lambda m: replace(m, weight=0.0), "its weight is 0"),
    (lambda m: replace(m, refused="it has 2 values", vector=m.vector[:2]), "it has 2 values"),
    (lambda m: replace(m, schema="00" * 32), "another architecture"),
)


class Liar(LocalComm):
    """Changes the messages of site 2, in another way in every round."""

    def exchange(self, outgoing, expected, *, round_, **given):
        messages = super().exchange(outgoing, expected, round_=round_, **given)
        return [LIES[round_ - 1][0](m) if m.sender == 2 else m for m in messages]


@pytest.mark.parametrize("method", ["proxyfl", *nightly("fedavg")])
def test_a_broken_model_is_rejected_and_training_continues(study, monkeypatch, method):
    monkeypatch.setattr(stage, "LocalComm", lambda n, running: Liar(n))
    summary = trained(study, method, f"train.rounds={len(LIES)}")
    path, rejected = study.root / summary["run"], {}
    for k in range(4):
        for line in metrics(path, f"S{k}"):
            rejected.setdefault(line["round"], []).extend(line.get("rejected", ()))
        for tensors in path.glob(f"sites/S{k}/p*.safetensors"):
            assert all(bool(value.isfinite().all()) for value in load_file(tensors).values())
    for round_, (_, words) in enumerate(LIES, 1):
        assert rejected[round_]
        assert all(re.search(f"^site 2: .*{words}", line) for line in rejected[round_]), rejected
    assert sum(row["rejected"] for row in summary["sites"]) == sum(map(len, rejected.values()))
    receiver = "S3" if method == "proxyfl" else "S0"
    assert "rejected the model from site 2" in (path / "sites" / receiver / "log.txt").read_text()


def pid_of(job, rank):
    """The process of a rank of a job, while it is at work."""
    word = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    return next(pid for pid in processes_of(job.pid) if word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


@pytest.mark.parametrize("sign", [signal.SIGKILL, *nightly(signal.SIGSTOP)])
def test_a_dropped_out_rank_is_named_the_others_finish_and_it_returns(tmp_path, sign):
    study = make_study(tmp_path / "study", n_sites=3)
    command = [
        sys.executable,
        "-m",
        "wsi_fl",
        "train",
        "--json",
        "--set",
        "train.rounds=6",
        "--set",
        "comm.timeout_s=3",
    ]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command, cwd=study.root, start_new_session=True, **piped)
    wait_for_file(study.runs_path, "00001-proxyfl-small/sites/S2/state/round_0000[2-6].safetensors")
    os.kill(pid_of(job, 2), sign)
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    summary = json.loads(out)
    (loss,) = summary["losses"]
    when = f"in round {loss['round']}"
    assert summary["lost"] == ["S2"] == [loss["site"]] and 2 <= loss["round"] <= 6
    assert ("SIGKILL" if sign == signal.SIGKILL else "no sign of life") in loss["reason"]
    assert (
        f"S2 was lost {when}" in err and f"S2 dropped out {when}: " in write_report(study, summary["run"]).read_text()
    )
    for row, site in zip(summary["sites"], ("S0", "S1"), strict=True):
        assert (row["site"], row["rounds"]) == (site, 6) and row["epsilon"] == pytest.approx(spent(6))
    document = evaluate(study, summary["run"])
    assert [row["site"] for row in document["sites"]] == ["S0", "S1"]
    assert document["sites"][0]["n"] == 36  # the merged test set stays whole
    back = resume_run(study, summary["run"], backend="local")
    assert back["lost"] == [] and [row["site"] for row in back["sites"]] == study.site_names()
    lost = back["sites"][2]
    assert lost["rounds"] == len(metrics(study.root / back["run"], "S2")) >= 2
    assert lost["epsilon"] >= spent(lost["rounds"]) - 1e-6  # a round on its account may never have been sent
    assert evaluate(study, back["run"])["sites"][2]["site"] == "S2"


def test_a_returning_site_gets_a_share_and_takes_part_from_then_on(study):
    summary = interrupted(study, ("S3", 2), ("S3", 6, "S1"), overrides=["train.rounds=8"])
    path = study.root / summary["run"]
    took_part = {line["round"]: line["takes_part"] for line in metrics(path, "S1")}
    assert took_part == {1: True, 5: False, 6: False, 7: True, 8: True}  # others had trained round 6 already
    assert rounds_of(summary) == [8, 3, 8, 8]
    weights = [RunFolder(path).site_folder(f"S{k}").load_checkpoint(8)[1]["weight"] for k in range(4)]
    assert sorted(weights) == [0.5, 0.5, 1, 1]  # the mass of S1 was lost with it
    costs = [row["epsilon"] for row in summary["sites"][:2]]
    assert costs == pytest.approx([spent(8), spent(4)])  # round 2 was trained, then lost


def test_the_dropout_of_all_sites_is_an_error(study, monkeypatch):
    def lose_everyone(running, *_, **__):
        raise launch.SitesLost(dict.fromkeys(running, "gone"))

    monkeypatch.setattr(launch, "run_ranks", lose_everyone)
    words = "all sites were lost; continue with `wsi-fl train --resume"
    refused(lambda: train(study, method="proxyfl"), words, error=WsiFlError)


@pytest.mark.parametrize(
    "text",
    [
        b"prterun noticed that process rank 1 with PID 4711 on node x exited on\nsignal 9 (Killed).",
        b"mpirun noticed that process rank 2 with PID 4711 on node y exited on signal 9 (Killed).",
        b"=   BAD TERMINATION\n=   PID 4711 RUNNING AT x\n=   EXIT CODE: 9\n",
    ],
)
def test_a_killed_rank_is_found_in_the_output_of_launchers(text):
    ranks = launch._Ranks(stage.SilentProgress(), 10.0)
    ranks.follow_events([b'{"site": "S1", "pid": 4711}\n', b"noise\n"])
    assert ranks.find_killed(text) == {"S1": "its process was killed by SIGKILL"}
    assert ranks.find_killed(text.replace(b"4711", b"4712")) == {}


def test_sites_that_all_dropped_out_resume_from_the_most_advanced(larger_pair):
    cuts = [("S1", 3), ("S0", 5, "S1"), ("S1", 9), ("S1", 11, "S0")]
    assert interrupted(larger_pair, *cuts, overrides=["train.rounds=12"])["lost"] == []
    for site in larger_pair.site_names():
        lines = [json.loads(line) for line in larger_pair.ledger_path(site).read_text().splitlines()]
        sent = [line["round"] for line in lines if line.get("sending") and not line.get("again")]
        assert sent == sorted(set(sent))


@pytest.mark.parametrize(
    ("method", "rounds"), [("proxyfl", 3), *nightly(("proxyfl", 5)), ("regular", 3), *nightly(("joint", 3))]
)
def test_a_run_continues_without_a_site_which_catches_up_at_the_end_and_may_be_interrupted(study, method, rounds):
    """At once, after rounds that are not on its ledger, and where no site waits for it."""

    def resumed(*without):
        return resume_run(study, "1", without=without, backend="local")

    with cut_at("S3", 2):
        trained(study, method, f"train.rounds={rounds}")
    summary = resumed("S1")
    assert summary["lost"] == ["S1"] and rounds_of(summary) == [rounds] * 3
    refused(lambda: resumed("S9"), "unknown site 'S9'; the run has S0")
    refused(lambda: resumed(*study.site_names()), "leaves no site")
    assert resumed("S1") == summary  # finished; S1 stays away
    if method == "proxyfl":
        with cut_at("S1", rounds):
            resumed()
    back = resumed()
    assert [row["site"] for row in back["sites"]] == study.site_names() and back["lost"] == []
    assert method == "proxyfl" or rounds_of(back) == [rounds] * 4


@pytest.mark.slow
def test_a_raised_budget_counts_from_the_next_round_on(study):
    limit(study, "S1", 1)
    with cut_at("S3", 2):
        trained(study, "proxyfl")
    file = site_file(study, "S1")
    file.write_text(re.sub("max_epsilon.*", "max_epsilon = 100.0", file.read_text()))
    assert rounds_of(resume_run(study, "1", backend="local")) == [3, 1, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "overrides"), [("proxyfl", ()), ("fedavg", ("privacy.enabled=false", "topology.self_weight=0.5"))]
)
def test_models_of_a_long_absent_site_are_not_rejected(study, method, overrides):
    overrides = ["train.rounds=40", *overrides]
    rows = interrupted(study, ("S3", 7), ("S3", 30, "S1"), method=method, overrides=overrides)["sites"]
    assert [row["rejected"] for row in rows] == [0, 0, 0, 0]
    assert rows[1]["rounds"] > 10


def test_a_site_is_late_only_while_another_site_reports_it(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(launch.time, "monotonic", lambda: now[0])
    ranks = launch._Ranks(stage.SilentProgress(), timeout_s=4.0)
    ranks.follow_events([b'{"site": "S1", "pid": 1}\n', b"1\n", b'{"site": "S0", "late": ["S1"]}\n'])
    assert ranks.find_hanging() == {}
    now[0] = 3.0
    assert ranks.find_hanging() == {"S1": "no sign of life for 3 s"}
    now[0] = 30.0  # nobody has said so for long
    assert ranks.find_hanging() == {}
    for now[0] in range(100, 200):
        ranks.follow_events([b'{"site": "S0", "late": ["S1"]}\n', b'{"site": "S1"}\n'])
    assert ranks.is_deadlocked()
    assert ranks.find_hanging() == {}
