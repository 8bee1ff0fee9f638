"""The dashboard of a federation: status of every site, next steps, and a remedy for each known problem."""

import json
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from conftest import REAL, larger_study, make_study, refused
from hospitals import one_installation  # noqa: F401
from test_dossier import words_of
from test_error_advice import PACKAGE, _parses, _texts, ast
from test_federation_plan import made
from test_report import Document
from test_submit import checks, public_summary, submitting, train
from typer.testing import CliRunner

from wsi_fl import __version__
from wsi_fl.cli.main import app
from wsi_fl.hospitals.dashboard import dashboard_page as looking
from wsi_fl.hospitals.dashboard.dashboard_page import _collect_state, dashboard_lines, make_dashboard
from wsi_fl.hospitals.dashboard.next_steps import _COMMANDS, _REMEDIES, FederationMember, FederationState, next_steps
from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.plans.review import review_plan, sign_plan
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, code_digest
from wsi_fl.hospitals.transports.folder_transport import FolderTransport
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.hospitals.trust.root_ca import RootCA, revoke_site
from wsi_fl.hospitals.trust.sealed_messages import MessageSealer
from wsi_fl.stages.runtime.console import print_lines
from wsi_fl.study.folder import Study
from wsi_fl.system.files import append_line
from wsi_fl.types import WsiFlError

DOCS = Path(__file__).parents[2] / "docs" / "how-to"
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
    **{"now": NOW, "me": "coordinator", "over": "server", "plan": "plan.json", "sha256": "a" * 64},
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
        (with_c2(signed=False), f"C2: {SIGN}"),
        (with_c2(connected=False), f"C2: not connected: start: {START}"),
        (with_c2(signed=None), f"coordinator: submit, once all have signed and started: {SUBMIT}"),
        (replace(READY, job="1", running=True), "everybody: wait: the hospitals work: "),
        (replace(READY, run="runs/1", report=REPORT), f"coordinator: done: open {REPORT}: "),
        (
            replace(READY, me="C1", run="runs/00001-proxyfl-a b"),
            "C1: done: make the report: wsi-fl report 'runs/00001-proxyfl-a b'",
        ),
        (replace(READY, me="C1", over="folder", trouble=["the sky fell"]), "C1: the sky fell: "),
        (
            replace(with_c2(signed=False), me="C2", kit="/srv/my kit", plan="federation/plan.json"),
            f"C2: {SIGN.replace('plan.json --kit KIT', OWN)}",
        ),
        (
            with_c2(signed=False, withdrawn=True, until=NOW),
            "coordinator: the key of C2 was withdrawn: make a plan without it, or with its new key: "
            "wsi-fl federation plan --method proxyfl --kit FOUNDED",
        ),
        (replace(READY, me=""), ": give --kit too: without it nothing is known of signatures, server and folder: "),
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
    facts = replace(READY, job="1", reason="site C2 was lost: it fell silent before the others")
    assert steps(facts) == [
        f"C2: start again, unless it runs: {START}",
        f"coordinator: go on from the last common round: {SUBMIT} --resume last",
    ]
    log, _ = steps(replace(facts, reason="site C2 failed; its own log says why (runs/C2.log)"))
    assert log == "C2: look into your own log, runs/C2.log, and fix what it reports: "
    assert steps(replace(facts, over="folder"))[1] == f"everybody: start; to start again is always right: {START}"


def test_a_withdrawn_hospital_is_shown_as_withdrawn_and_has_no_steps(founded, tmp_path):
    folder = shutil.copytree(founded[0], tmp_path / "founded")
    for file in folder.glob("kits/*/federation.json"):
        file.write_text(file.read_text().replace(str(founded[0] / "share"), str(folder / "share")))
    revoke_site("S1", folder / "kits")
    plan = made(founded[1], tmp_path, "proxyfl", "sites=['S0']")
    study = Study(shutil.copytree(founded[1].root, tmp_path / "study"))
    for names in (["S0", "S1"], plan.sites):
        facts = _collect_state(study, Kit.open(folder / "kits" / "coordinator"))
        assert facts.sites == tuple(names)
        document = looking._build_document(facts)
        row = next(looking._member_cells(one, 1) for one in document["members"] if one["name"] == "S1")
        assert row[1] == f"withdrawn {datetime.now(UTC):%Y-%m-%d}"
        asked = [one for one in document["next"] if "S1" in f"{one['who']} {one['what']}"]
        assert [one["who"] for one in asked] == (["coordinator"] if "S1" in names else [])
        shutil.copy(tmp_path / "plan.json", study.root / "plan.json")


def test_over_a_folder_a_site_has_timed_out_after_the_waiting_time():
    late = with_c2(heard=NOW - timedelta(seconds=601))
    assert "C2: silent since 2026-07-01 11:49: start again" in steps(replace(late, over="folder"))[0]
    assert steps(late) == [f"coordinator: all have signed: submit: {SUBMIT}"]
    assert steps(replace(with_c2(heard=NOW - timedelta(seconds=599)), over="folder")) == []


NAME = r"(?P<site>[\w.-]+)"


def test_every_remedy_matches_a_message_of_the_code():
    files = [*(PACKAGE / "hospitals").rglob("*.py"), PACKAGE / "stages" / "site" / "privacy_account.py"]
    trees = [ast.parse(path.read_text("utf-8")) for path in files if path.parent.name != "dashboard"]
    said = "\n".join(" ".join(text.split()) for tree in trees for _, text in _texts(tree))
    for problem, _ in _REMEDIES:
        assert re.search(problem.replace(NAME, "(?:1|S1)"), said), problem


def test_every_failure_in_the_docs_has_a_remedy_with_valid_commands():
    table = (DOCS / "operate-federation.md").read_text("utf-8").split("### Federation")[1].split("\n### ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.count("|") > 3]
    lines = [one for row in rows for one in re.findall(r"\*([^*]+)\*", row)]
    assert len(lines) >= 8
    for line in lines:
        assert any(re.search(problem, line) for problem, _ in _REMEDIES), line
    for command in _COMMANDS.values():
        _parses(command.format(kit="K", study="S", plan="P", method="M", founded="F", site="C1", run="R"))
    assert {step.command for _, steps in _REMEDIES for step in steps} <= {*_COMMANDS, ""}


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


def dashboard_of(founded, name):
    return _collect_state(founded[1], kit_of(founded, name))


def test_a_hospital_sees_its_own_status_and_unsent_status_stays_unknown(founded):
    facts = dashboard_of(founded, "S0")
    me, other = facts.members["S0"], facts.members["S1"]
    assert (me.signed, me.connected, me.version) == (True, False, __version__)
    assert (me.spent, me.budget, me.labels) == (0.0, 50.0, ("healthy", "tumor"))
    assert abs(me.until - facts.now - timedelta(days=730)) < timedelta(hours=1)
    assert (other.signed, other.version, other.spent, other.labels) == (None, None, None, None)
    assert facts.trouble == [] and facts.sha256 == founded[2].digest


def test_the_coordinator_sees_who_has_not_signed(founded):
    facts = dashboard_of(founded, "coordinator")
    signed = {one.name: one.signed for one in facts.members.values()}
    assert signed == {"coordinator": None, "S0": True, "S1": False}
    asked = [(one.who, one.what.partition(",")[0]) for one in next_steps(facts)]
    assert asked == [("S0", "if it has not run yet"), ("S1", "sign the plan")]
    board = make_dashboard(founded[1], kit=kit_of(founded, "coordinator").path)
    assert "connected" in board["unknown"]["the hospital"]


@contextmanager
def send_handshake(founded, plan=None, by="S1"):
    """The transport of S1, which has sent S0 its handshake."""
    digest, identity = plan or founded[2].digest, kit_of(founded, by).load_identity()
    line, writer = (FolderTransport(str(founded[0] / "share"), "S1", founded[2].digest), MessageSealer(identity))
    said = {"certificate": identity.certificate, "public": writer.public, "time": 1.78e9, "version": "9.9"}
    hello = writer.write_handshake({**said, "code": code_digest(), "gone": {}}, digest)
    assert line.send("S0", "hello", hello, 0.0) == ""
    yield line
    line.close()
    shutil.rmtree(next((founded[0] / "share").iterdir()))


def test_a_handshake_in_the_folder_holds_version_and_start_time(founded):
    with send_handshake(founded) as line:
        line.send("S0", "x2.0", b"a letter", 0.0)
        one = dashboard_of(founded, "S0").members["S1"]
    assert (one.connected, one.version, one.round) == (True, "9.9", 2)
    assert one.since == datetime.fromtimestamp(1.78e9, UTC)
    assert abs(one.heard - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize("wrong", [{"plan": "f" * 64}, {"by": "coordinator"}])
def test_a_handshake_of_another_plan_or_of_a_stranger_does_not_count(founded, wrong):
    with send_handshake(founded, **wrong):
        one = dashboard_of(founded, "S0").members["S1"]
    assert (one.connected, one.version) == (None, None)


def test_a_running_hospital_is_shown_as_connected_and_the_dashboard_changes_no_file(founded):
    def files():
        return {p: p.read_bytes() for p in founded[0].rglob("*") if p.is_file() and p.name != ".lock"}

    before = files()
    with kit_of(founded, "S0").lock_kit():
        assert dashboard_of(founded, "S0").members["S0"].connected
    assert files() == before


def test_a_local_problem_is_shown_with_its_remedy(founded, monkeypatch):
    share = founded[0] / "share"
    share.rename(founded[0] / "away")
    try:
        facts = dashboard_of(founded, "S0")
    finally:
        (founded[0] / "away").rename(share)
    assert len(facts.trouble) == 1 and "mount the share" in facts.trouble[0]
    assert next_steps(facts)[0].what == "mount the share, or give its address"
    monkeypatch.setattr("wsi_fl.hospitals.plans.signed_plan.code_digest", lambda: "0" * 64)
    assert next_steps(dashboard_of(founded, "S0"))[0].what.startswith("install what the plan names")


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
        patch.setattr(submitting, "_run_job", lambda *_: answers)
        kit = Kit.open(root / "kits" / "coordinator")
        submitting.submit_plan(kit, plan, parent_folder=study.root)
        submitting._log_submission(kit, "job-1", plan, {"what": "work"}, plan.sites)
        submitting._log_end(kit, "job-1", run=summary["run"])
        job = {"id": "job-1", "status": "FINISHED:COMPLETED", "reason": None}
        patch.setattr(looking, "load_status", lambda _: {"connected": ["S0"], "jobs": [job]})
        patch.setattr(looking, "check_connection", lambda _: iter(()))
        yield root / "kits" / "coordinator", study, summary


@pytest.fixture(scope="module")
def board(finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "board.html"
    return make_dashboard(finished[1], kit=finished[0], out=out), out


def test_the_finished_run_has_its_matrix_and_its_report(finished, board):
    found, summary = board[0], finished[2]
    assert found["run"] == summary["run"] and found["next"][-1]["what"].startswith("done: open result-")
    assert set(found["scores"]["models"]) == {"S0", "S1"}
    members = {one["name"]: one for one in found["members"]}
    assert (members["S0"]["connected"], members["S1"]["connected"]) == (True, False)
    row = next(row for row in summary["sites"] if row["site"] == "S1")
    assert members["S1"]["spent"] == pytest.approx(row["lifetime_epsilon"]) and members["S1"]["round"] == 1
    assert json.loads(json.dumps(found)) == found


def test_a_failed_job_is_shown_with_its_remedy(finished, monkeypatch):
    kit, study, _ = finished
    kept = (kit / "jobs.jsonl").read_text()
    try:
        line = {"id": "job-2", "what": "work", "plan": FederationPlan.load(study.root / "plan.json").digest}
        append_line(kit / "jobs.jsonl", line)
        append_line(kit / "jobs.jsonl", {"id": "job-2", "reason": "site S1 took nothing (timeout) for 20 s"})
        down = WsiFlError("no way through to localhost port 1 (refused): is the server up")
        monkeypatch.setattr(looking, "load_status", lambda _: (_ for _ in ()).throw(down))
        found = make_dashboard(study, kit=kit)
    finally:
        (kit / "jobs.jsonl").write_text(kept)
    whats = [one["what"] for one in found["next"]]
    assert whats[0].startswith("done: open result-") and whats[1].startswith("start the server")
    assert whats[-2:] == ["start again, unless it runs", "go on from the last common round"]
    assert found["job"] == "job-2" and found["members"][-1]["connected"] is None


def test_while_a_job_runs_the_next_step_is_to_wait(finished, monkeypatch):
    kit, study, _ = finished
    job = {"id": "job-1", "status": "RUNNING", "reason": None}
    monkeypatch.setattr(looking, "load_status", lambda _: {"connected": ["S0", "S1"], "jobs": [job]})
    found = make_dashboard(study, kit=kit)
    assert found["running"] and found["next"][-1]["what"] == "wait: the hospitals work"
    job |= {"status": "DEAD", "reason": "the server was stopped while it ran"}
    assert make_dashboard(study, kit=kit)["next"][-1]["command"].endswith("--resume last")


def test_the_page_is_self_contained_and_escapes_names_and_the_terminal_agrees(board, finished, capsys):
    html = board[1].read_text()
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in Document(html).tags}
    assert str(finished[1].root) not in html
    said = words_of(html)
    assert "done: open result-" in said and "outlined cells are models" in said
    assert "The hospital can know: " in said and "ε spent" in said
    assert "<script>" not in looking._render_page(board[0] | {"trouble": ["<script>alert(1)</script>"]})
    print_lines(dashboard_lines(board[0]))
    said = capsys.readouterr().err
    assert "next:" in said and "  coordinator: done: open result-" in said
    assert re.search(r"S0 .* yes .*", said) and "is known by the hospital: version" in said


def test_the_command_prints_the_json_and_writes_the_page(founded, tmp_path, monkeypatch):
    root, study, out = *founded[:2], tmp_path / "board.html"
    given = ["--kit", root / "kits" / "S0", "--study", study.root, "--out", out, "--json"]
    done = CliRunner().invoke(app, ["federation", "board", *map(str, given)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["me"] == "S0" and {step["who"] for step in found["next"]} == {"S0", "S1"}
    assert out.is_file()
    refused(lambda: make_dashboard(study, kit=tmp_path), "this is no kit")


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH nor in CHROMIUM: the page is not looked at")
def test_a_browser_without_scripts_shows_the_page_without_requests(board, tmp_path):
    with browser(tmp_path / "profile") as page:
        page.call("Emulation.setScriptExecutionDisabled", value=True)
        for width in (1280, 400):
            page.size(width, 900)
            page.goto(board[1].as_uri())
            page.until("document.querySelectorAll('ol.steps li').length")
            assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
        assert page.run("document.querySelectorAll('#results table.heat').length") >= 1
        assert page.said == [] and {url.split(":")[0] for url in page.asked} <= {"file", "about"}
