"""The status of a federation: who is there, next steps, and a remedy for each kind of failure."""

import json
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import pytest
from conftest import REAL, larger_study, make_study
from federation_fixtures import command
from hospitals import one_installation  # noqa: F401
from test_error_advice import parse_stated_command
from test_federation_plan import made
from test_submit import checks, public_summary, submitting, train

from wsi_fl import __version__
from wsi_fl.hospitals.faults import Fault, FaultCode, mark_fault
from wsi_fl.hospitals.plans import installed_code
from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.plans.review import review_plan, sign_plan
from wsi_fl.hospitals.plans.signed_plan import FederationPlan
from wsi_fl.hospitals.status import collect
from wsi_fl.hospitals.status.collect import collect_state, status_document, status_lines
from wsi_fl.hospitals.status.next_steps import (
    COMMANDS,
    REMEDIES,
    FederationMember,
    FederationState,
    Trouble,
    next_steps,
)
from wsi_fl.hospitals.transports.folder_transport import FolderTransport
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.hospitals.trust.root_ca import RootCA, revoke_site
from wsi_fl.hospitals.trust.sealed_messages import MessageSealer
from wsi_fl.hospitals.work.job_log import empty_entry, log_end, log_submission
from wsi_fl.stages.runtime.console import print_lines
from wsi_fl.study.folder import Study
from wsi_fl.types import WsiFlError

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
YEAR = NOW + timedelta(days=365)


def hospital(name, **given):
    return FederationMember(name, "hospital", **({"until": YEAR, "signed": True, "connected": True} | given))


READY = FederationState(
    {
        "coordinator": FederationMember("coordinator", "coordinator", until=YEAR),
        "C1": hospital("C1"),
        "C2": hospital("C2"),
    },
    **{"moment": NOW, "me": "coordinator", "over": "server", "plan": "plan.json", "sha256": "a" * 64},
    **{"sites": ("C1", "C2"), "method": "proxyfl", "rounds": 3, "patience_s": 600.0, "kit": "fed/coordinator"},
)


def with_c2(**given):
    return replace(READY, members={**READY.members, "C2": hospital("C2", **given)})


def steps(facts):
    return [f"{one.who}: {one.what}: {one.command}" for one in next_steps(facts)]


SIGN = "sign the plan, and send the approval to the coordinator: wsi-fl federation approve plan.json --kit KIT"
PLANNING = "make the plan, and send it to every hospital: wsi-fl federation plan --method proxyfl --kit FOUNDED"
OWN = "federation/plan.json --kit '/srv/my kit'"
REPORT = "result-1/report.html"
SUBMIT = "wsi-fl federation submit --kit fed/coordinator --plan plan.json"


START = "wsi-fl federation start KIT --study DIR"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (READY, f"coordinator: all have signed: submit: {SUBMIT}"),
        (replace(READY, plan=""), f"coordinator: {PLANNING}"),
        (replace(READY, plan="", study=""), ": give --study DIR too: without it nothing is known of the plan: "),
        (with_c2(signed=False), f"C2: {SIGN}"),
        (with_c2(connected=False), f"C2: not connected: start: {START}"),
        (with_c2(signed=None), f"coordinator: submit, once all have signed and started: {SUBMIT}"),
        (replace(READY, job="1", running=True), "everybody: wait: the hospitals work: "),
        (replace(READY, run="runs/1", report=REPORT), f"coordinator: done: open {REPORT}: "),
        (
            replace(READY, me="C1", run="runs/00001-proxyfl-a b"),
            "C1: done: make the report: wsi-fl report 'runs/00001-proxyfl-a b'",
        ),
        (replace(READY, me="C1", over="folder", troubles=[Trouble("the sky fell")]), "C1: the sky fell: "),
        (
            replace(with_c2(signed=False), me="C2", kit="/srv/my kit", plan="federation/plan.json"),
            f"C2: {SIGN.replace('plan.json --kit KIT', OWN)}",
        ),
        (
            with_c2(signed=False, withdrawn=True, until=NOW),
            "coordinator: the key of C2 was withdrawn: make a plan without it, or with its new key: "
            "wsi-fl federation plan --method proxyfl --kit FOUNDED",
        ),
        (replace(with_c2(connected=None), over="folder"), f"C2: if it has not run yet: {START}"),
        (replace(with_c2(connected=False), over="folder"), f"C2: not connected: start: {START}"),
        (
            replace(READY, members=READY.members | {"C9": FederationMember("C9", "hospital", until=YEAR)}),
            f"coordinator: all have signed: submit: {SUBMIT}",
        ),
    ],
)
def test_next_steps_follow_from_the_status_of_the_sites(facts, said):
    """Over a folder no connection is known, and a site outside the plan delays nobody."""
    assert steps(facts) == [said]


def test_renewing_an_expiring_certificate_takes_a_step_of_hospital_and_coordinator(tmp_path):
    renew, join, submit = next_steps(with_c2(until=NOW + timedelta(days=12, hours=1)))
    ends = "the certificate of C2 ends in 12 days: approve its request again, send it back"
    assert renew == ("coordinator", ends, "wsi-fl federation approve request-C2.json --kit FOUNDED")
    put = "wsi-fl federation join certificate-C2.json --kit KIT"
    assert join == ("C2", "put the new certificate into the kit", put)
    assert submit.what == "all have signed: submit"
    assert "ended on 2026-06-30" in next_steps(with_c2(until=NOW - timedelta(days=1)))[0].what


def test_a_failed_job_is_shown_with_who_repairs_it_and_how_it_resumes():
    facts = replace(READY, job="1", failure=Trouble("any words", Fault("lost", "C2")))
    assert steps(facts) == [
        f"C2: start again, unless it runs: {START}",
        f"coordinator: go on from the last common round: {SUBMIT} --resume last",
    ]
    log, _ = steps(replace(facts, failure=Trouble("any words", Fault("failed", "C2"))))
    assert log == "C2: look into your own log, runs/C2.log, and fix what it reports: "
    assert steps(replace(facts, over="folder"))[1] == f"everybody: start; to start again is always right: {START}"


@pytest.mark.usefixtures("lone_exchange")
def test_a_withdrawn_hospital_is_shown_as_withdrawn_and_has_no_steps(founded, tmp_path):
    folder = shutil.copytree(founded[0], tmp_path / "founded")
    for file in folder.glob("kits/*/federation.json"):
        file.write_text(file.read_text().replace(str(founded[0] / "share"), str(folder / "share")))
    revoke_site("S1", folder / "kits")
    plan = made(founded[1], tmp_path, "proxyfl", "sites=['S0']")
    study = Study(shutil.copytree(founded[1].root, tmp_path / "study"))
    for names in (["S0", "S1"], plan.sites):
        state = collect_state(study, Kit.open(folder / "kits" / "coordinator"))
        document = status_document(state)
        assert (document["sha256"] == plan.digest) == ("S1" not in names)
        (row,) = [one for one in document["members"] if one["name"] == "S1"]
        assert row["withdrawn_on"].startswith(f"{datetime.now(UTC):%Y-%m-%d}")
        assert f"withdrawn {datetime.now(UTC):%Y-%m-%d}" in "".join(map(str, status_lines(state)))
        asked = [one for one in document["next"] if "S1" in f"{one['who']} {one['what']}"]
        assert [one["who"] for one in asked] == (["coordinator"] if "S1" in names else [])
        shutil.copy(tmp_path / "plan.json", study.root / "plan.json")


def test_over_a_folder_a_site_has_timed_out_after_the_waiting_time():
    late = with_c2(heard=NOW - timedelta(seconds=601))
    assert "C2: silent since 2026-07-01 11:49: start again" in steps(replace(late, over="folder"))[0]
    assert steps(late) == [f"coordinator: all have signed: submit: {SUBMIT}"]
    assert steps(replace(with_c2(heard=NOW - timedelta(seconds=599)), over="folder")) == []


def test_every_kind_of_failure_has_a_remedy_with_valid_commands():
    assert set(REMEDIES) == set(get_args(FaultCode)) - {""}
    for line in COMMANDS.values():
        parse_stated_command(line.format(kit="K", study="S", plan="P", method="M", founded="F", site="C1", run="R"))
    assert {name for steps in REMEDIES.values() for _, _, name in steps} <= {*COMMANDS, ""}


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    """(folder of the startup kits, study of S0, its plan): S0 and S1 over a shared folder; S0 has signed."""
    root = tmp_path_factory.mktemp("board")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        (root / "share").mkdir()
        provision_federation(root / "kits", federation="one", shared_folder=str(root / "share"), sites=["S0", "S1"])
        study = larger_study(root / "study", n_sites=2, site_extra=REAL)
        keys = RootCA.open(root / "kits").load_keys()
        plan = make_plan(study, method="proxyfl", out=study.root / "plan.json", keys=keys)
        sign_plan(study, review_plan(study, plan, "S0"), Kit.open(root / "kits" / "S0").load_identity())
        yield root, study, plan


def kit_of(founded, name):
    return Kit.open(founded[0] / "kits" / name)


def state_of(founded, name):
    return collect_state(founded[1], kit_of(founded, name))


def test_a_hospital_sees_its_own_status_and_unsent_status_stays_unknown(founded):
    facts = state_of(founded, "S0")
    me, other = facts.members["S0"], facts.members["S1"]
    assert (me.signed, me.connected, me.version) == (True, False, __version__)
    assert (me.spent, me.budget) == (0.0, 50.0)
    assert abs(me.until - facts.moment - timedelta(days=730)) < timedelta(hours=1)
    assert (other.signed, other.version, other.spent) == (None, None, None)
    assert facts.troubles == [] and facts.sha256 == founded[2].digest


def test_the_coordinator_sees_who_has_not_signed(founded):
    facts = state_of(founded, "coordinator")
    signed = {one.name: one.signed for one in facts.members.values()}
    assert signed == {"coordinator": None, "S0": True, "S1": False}
    asked = [(one.who, one.what.partition(",")[0]) for one in next_steps(facts)]
    assert asked == [("S0", "if it has not run yet"), ("S1", "sign the plan")]


@contextmanager
def send_handshake(founded, plan=None, by="S1"):
    """The transport of S1, which has sent S0 its handshake."""
    digest, identity = plan or founded[2].digest, kit_of(founded, by).load_identity()
    line, writer = (FolderTransport(str(founded[0] / "share"), "S1", founded[2].digest), MessageSealer(identity))
    said = {"certificate": identity.certificate, "public": writer.public, "time": 1.78e9, "version": "9.9"}
    hello = writer.write_handshake({**said, "code": "0" * 64, "gone": {}}, digest)
    assert line.send("S0", "hello", hello, 0.0) == ""
    yield line
    line.close()
    shutil.rmtree(next((founded[0] / "share").iterdir()))


def test_a_handshake_in_the_folder_holds_version_and_start_time(founded):
    with send_handshake(founded) as line:
        line.send("S0", "x2.0", b"a letter", 0.0)
        one = state_of(founded, "S0").members["S1"]
    assert (one.connected, one.version, one.round) == (True, "9.9", 2)
    assert abs(one.heard - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize("wrong", [{"plan": "f" * 64}, {"by": "coordinator"}])
def test_a_handshake_of_another_plan_or_of_a_stranger_does_not_count(founded, wrong):
    with send_handshake(founded, **wrong):
        one = state_of(founded, "S0").members["S1"]
    assert (one.connected, one.version) == (None, None)


def test_a_running_hospital_is_shown_as_connected_and_status_changes_no_file(founded):
    def files():
        return {p: p.read_bytes() for p in founded[0].rglob("*") if p.is_file() and p.name != ".lock"}

    before = files()
    with kit_of(founded, "S0").lock_kit():
        assert state_of(founded, "S0").members["S0"].connected
    assert files() == before


def test_a_local_problem_is_shown_with_its_remedy(founded, monkeypatch):
    share = founded[0] / "share"
    share.rename(founded[0] / "away")
    try:
        facts = state_of(founded, "S0")
    finally:
        (founded[0] / "away").rename(share)
    (trouble,) = facts.troubles
    assert "mount the share" in trouble.text
    assert next_steps(facts)[0].what == "mount the share, or give its address"
    monkeypatch.setattr(installed_code, "code_digest", lambda _: "0" * 64)
    assert next_steps(state_of(founded, "S0"))[0].what.startswith("install what the plan names")


@pytest.fixture(scope="module")
def finished(founded, tmp_path_factory):
    """(coordinator's startup kit, its study) after a finished job with scores, and a server that lists its clients."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        patch.setattr(checks, "_check_stores_stay_apart", lambda *_: None)
        provision_federation(root / "kits", federation="one", server="localhost:1", sites=["S0", "S1"])
        study = make_study(root / "study", 2, site_extra=REAL + '\nallow = ["scores"]')
        overrides = ["train.rounds=1", "privacy.sigma=4"]
        plan = made(study, study.root, "proxyfl", *overrides)
        summary = train(study, method="proxyfl", overrides=overrides, backend="local")
        answers = {site: public_summary(study, site, dict(summary)) for site in ("S0", "S1")}
        patch.setattr(submitting, "run_plan_job", lambda *_: answers)
        kit = Kit.open(root / "kits" / "coordinator")
        submitting.submit_plan(kit, plan, parent_folder=study.root)
        log_submission(kit, "job-1", plan, {"what": "work"}, plan.sites)
        log_end(kit, "job-1", run=summary["run"])
        patch.setattr(collect, "ask_server", lambda _: (["S0"], [job_row("FINISHED:COMPLETED")]))
        patch.setattr(collect, "check_connection", lambda _: [])
        yield kit, study, summary


def job_row(status, **why):
    return empty_entry() | {"id": "job-1", "status": status, "name": "x", "submitted": None} | why


def fails(error):
    """A function that raises the error."""

    def failing(*_):
        raise error

    return failing


def test_the_finished_run_has_its_values_and_its_report_and_the_terminal_agrees(finished, capsys):
    kit, study, summary = finished
    state = collect_state(study, kit)
    found = status_document(state)
    assert found["run"] == summary["run"] and found["next"][-1]["what"].startswith("done: open result-")
    members = {one["name"]: one for one in found["members"]}
    assert (members["S0"]["connected"], members["S1"]["connected"]) == (True, False)
    row = next(row for row in summary["sites"] if row["site"] == "S1")
    assert members["S1"]["spent"] == pytest.approx(row["lifetime_epsilon"]) and members["S1"]["round"] == 1
    assert json.loads(json.dumps(found)) == found
    print_lines(status_lines(state))
    said = capsys.readouterr().err
    assert "connected: S0" in said and "next:" in said and "  coordinator: done: open result-" in said
    assert re.search(r"S0 .* yes .*", said) and "finished:completed" in said


def test_a_failed_job_and_a_dead_server_are_shown_with_their_remedies(finished, monkeypatch, tmp_path):
    kit, study, _ = finished
    kit = Kit.open(Path(shutil.copytree(kit.path, tmp_path / "kit")))
    log_submission(kit, "job-2", FederationPlan.load(study.root / "plan.json"), {"what": "work"}, ["S0", "S1"])
    log_end(kit, "job-2", reason="any words", fault=Fault("lost", "S1"))
    down = mark_fault(WsiFlError("nobody is there"), "no_route")
    monkeypatch.setattr(collect, "ask_server", fails(down))
    found = status_document(collect_state(study, kit))
    whats = [one["what"] for one in found["next"]]
    assert whats[0].startswith("done: open result-") and whats[1].startswith("start the server")
    assert whats[-2:] == ["start again, unless it runs", "go on from the last common round"]
    assert found["trouble"] == ["nobody is there"] and found["connected"] is None
    assert found["members"][-1]["connected"] is None


def test_while_a_job_runs_the_next_step_is_to_wait(finished, monkeypatch):
    kit, study, _ = finished
    monkeypatch.setattr(collect, "ask_server", lambda _: (["S0", "S1"], [job_row("RUNNING")]))
    found = collect_state(study, kit)
    assert found.running and next_steps(found)[-1].what == "wait: the hospitals work"
    dead = job_row("DEAD", reason="the server was stopped while it ran", code="server_stopped")
    monkeypatch.setattr(collect, "ask_server", lambda _: (["S0", "S1"], [dead]))
    assert next_steps(collect_state(study, kit))[-1].command.endswith("--resume last")


def test_the_command_prints_the_json_and_fails_without_its_server(founded, finished, tmp_path, monkeypatch):
    root, study, _ = founded
    done = command("status", "--kit", root / "kits" / "S0", "--study", study.root)
    assert done.exit_code == 0, done.output
    assert {step["who"] for step in json.loads(done.stdout)["next"]} == {"S0", "S1"}
    monkeypatch.setattr(collect, "ask_server", fails(WsiFlError("nobody is there")))
    done = command("status", "--kit", finished[0].path, "--study", finished[1].root)
    assert done.exit_code == 1 and json.loads(done.stdout)["trouble"] == ["nobody is there"]
