"""Reports of jobs to the coordinator stay correct and bounded, also when hospitals or the server drop out."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import refused
from federation_fixtures import needs_flare

from wsi_fl.hospitals.faults import RETRYABLE, Fault, find_fault
from wsi_fl.hospitals.flare import jobs
from wsi_fl.hospitals.status import collect
from wsi_fl.hospitals.status.collect import ask_server, collect_state, status_lines
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.hospitals.work import submit as submitting
from wsi_fl.hospitals.work.job_replies import failure_reply
from wsi_fl.stages.runtime.console import print_lines
from wsi_fl.types import UsageError, WsiFlError

pytestmark = needs_flare

SITES = ["C1", "C2"]
SETTINGS = SimpleNamespace(comm=SimpleNamespace(timeout_s=300.0), train=SimpleNamespace(min_sites=None))
PLAN = SimpleNamespace(sites=SITES, keys={}, digest="ab" * 32, method="proxyfl", text="{}", pipeline=lambda: SETTINGS)
FAILED = ("7", "FINISHED:EXECUTION_EXCEPTION")
WORK = {"what": "work", "plan": PLAN.digest, "resume": None, "without": []}


class Server:
    """A session with a simulated server; its time passes while the coordinator waits.

    Attributes:
        status: of the job, by the second.
        away: which clients do not answer, by the second; the server lists them all the same.
        at_work: whose jobs have a process, by the second.
    """

    def __init__(self, *, status, away=lambda now: (), at_work=lambda now: ("7",), said=None, listed=()):
        self.now, self.ended, self.fetched = 0.0, [], []
        self._status, self._away, self._at_work, self._said = status, away, at_work, said
        self._listed = listed

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 10_000, "it waits for ever"

    def submit_job(self, _):
        return "7"

    def get_job_status(self, _):
        return self._status(self.now)

    def abort_job(self, job):
        self.ended.append(job)

    def get_system_info(self):
        return SimpleNamespace(job_info=[SimpleNamespace(job_id=one) for one in self._at_work(self.now)])

    def get_connected_client_list(self):
        return [SimpleNamespace(name=site) for site in SITES]

    def get_client_job_status(self, names):
        from nvflare.fuel.flare_api.api_spec import NoConnection

        away = self._away(self.now)
        if away == "slow":
            raise NoConnection("cannot connect to server")
        jobs = [name for name in names if name not in away] * 2  # a row for each job of a client
        rows = [{"client_name": name, "status": "started"} for name in jobs]
        return rows + [{"client_name": name, "status": "no_reply"} for name in away]

    def list_jobs(self, **_):
        known = {"job_name": "wsi-fl work", "submit_time": 1767322800.5}
        return [{"job_id": job, "status": status, **known} for job, status in self._listed]

    def download_job_result(self, job, place):
        self.fetched.append(job)
        (Path(place) / "said.json").write_text(json.dumps(self._said))
        return place


@pytest.fixture(scope="module")
def federation_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs") / "kits"
    provision_federation(folder, federation="one", server="localhost:1")
    return folder / "coordinator"


@pytest.fixture
def kit(federation_folder, tmp_path):
    return Kit.open(Path(shutil.copytree(federation_folder, tmp_path / "kit")))


@pytest.fixture
def query_server(monkeypatch, kit):
    """Query this server, whose clock drives everything."""

    def ask(server):
        monkeypatch.setattr(jobs, "_open_session", lambda _: nullcontext(server))
        monkeypatch.setattr(jobs, "time", server)
        return server

    return ask


def submit(kit, job=WORK):
    return submitting.run_plan_job(kit, PLAN, SITES, job, submitting.SilentProgress())


def run_job(kit, sites, **given):
    return jobs.run_job(kit, sites, WORK, on_submit=lambda _: None, on_wait=lambda _: None, **given)


def test_a_stopped_hospital_counts_as_absent_although_the_server_lists_it(query_server, kit):
    server = query_server(Server(status=lambda _: "SUBMITTED", away=lambda _: ("C2",)))
    refused(lambda: submit(kit), "C2 not connected", "(connected: C1)", error=UsageError)
    assert server.now == 0 and ask_server(kit)[0] == ["C1"]
    query_server(Server(status=lambda _: "", away=lambda now: "slow" if now < 2 else ("C1",)))
    assert ask_server(kit)[0] == ["C2"]


AWAY = {"away": lambda now: ("C2",) if now > 5 else ()}
LOST = {"away": lambda now: ("C2",) if now > 100 else ()}
BEHIND = {"at_work": lambda now: ("6",) if now < 1000 else ()}
STOPPED = {"at_work": lambda now: ("7",) if now < 100 else ()}


@pytest.mark.parametrize(
    ("status", "server", "words", "seconds"),
    [
        ("SUBMITTED", AWAY, ("C2 not connected any more", "submit again"), (0, 60)),
        ("SUBMITTED", {"at_work": lambda _: ()}, ["has not begun within 120 s"], (120, 150)),
        ("SUBMITTED", BEHIND, ["has not begun within 120 s"], (1100, 1150)),  # once the other one is done
        ("RUNNING", LOST, ("site C2 was lost", "--resume last"), (430, 470)),
        ("RUNNING", STOPPED, ("the server was stopped while job 7 ran", "--resume last"), (0, 150)),
    ],
    ids=["leaves before it begins", "never begins", "waits for another", "away for long", "server stopped"],
)
def test_a_job_that_cannot_continue_is_ended_in_time_and_reported(query_server, kit, status, server, words, seconds):
    asked = query_server(Server(status=lambda _: status, **server))
    refused(lambda: submit(kit), *words, error=WsiFlError)
    assert seconds[0] <= asked.now < seconds[1] and asked.ended == ["7"]


def test_ctrl_c_of_submit_says_that_the_job_goes_on_and_how_to_follow_or_end_it(query_server, kit):
    def interrupt(_):
        raise KeyboardInterrupt

    server = query_server(Server(status=interrupt))
    words = ("job 7 goes on at the hospitals", "federation abort 7", "submit --resume last")
    refused(lambda: submit(kit), *words, error=WsiFlError)
    assert server.ended == []


def test_a_hospital_that_returns_in_time_has_not_dropped_out(query_server, kit):
    said = {site: {"site": site, "peers": [], "seconds": 0.5} for site in SITES}
    away = lambda now: ("C2",) if 100 < now < 350 else ()  # noqa: E731
    status = lambda now: "RUNNING" if now < 500 else "FINISHED:COMPLETED"  # noqa: E731
    query_server(Server(status=status, away=away, said=said))
    assert submit(kit, {"what": "check", "plan": PLAN.digest}) == said


def test_a_job_ends_for_a_withdrawn_certificate_and_for_a_site_that_is_back_long_enough(query_server, kit):
    server = query_server(Server(status=lambda _: "RUNNING"))
    with pytest.raises(jobs.SiteReconnected, match="C2 is there again"):
        run_job(kit, ["C1"], awaited={"C2": 60.0})
    assert server.now == 70
    with pytest.raises(jobs.JobFailed, match="site C2 has a certificate that was withdrawn") as told:
        run_job(kit, SITES, list_revoked=lambda: ["C2"])
    assert (told.value.blamed, server.ended) == (("C2",), ["7", "7"])


@pytest.mark.parametrize(
    ("code", "goes_on"),
    [*((code, True) for code in sorted(RETRYABLE)), ("unsigned", False), ("site_terms", False), ("", False)],
)
def test_others_continue_after_a_temporary_failure_of_one_hospital(query_server, kit, code, goes_on):
    """The code decides and the sentence does not; a site that only saw another one end is not blamed."""
    saw = failure_reply("another one is gone", Fault("site_ended", "C2"))
    said = {"C1": saw, "C2": failure_reply("some sentence", Fault(code, "C2"))}
    query_server(Server(status=lambda _: "FINISHED:ABORTED", said=said))
    with pytest.raises(jobs.JobFailed, match="some sentence") as told:
        run_job(kit, SITES)
    assert (told.value.blamed, told.value.can_retry) == (("C2",) if goes_on else (), goes_on)
    assert find_fault(told.value) == (code, "C2")


@pytest.mark.parametrize("evil", [{"error": "\x1b[2Jhello"}, {"site": "C1", "peers": [], "seconds": 0, "x": 1}])
def test_a_job_hands_only_its_reply_to_the_coordinator(query_server, kit, evil):
    query_server(Server(status=lambda _: "FINISHED:COMPLETED", said={"C1": evil}))
    refused(lambda: run_job(kit, ["C1"]), "site C1 told what was not agreed on", error=WsiFlError)


def test_status_shows_no_dead_job_as_running_and_reports_why_jobs_failed(query_server, kit, capsys, monkeypatch):
    why = "site C2 failed; its own log says why"
    said = {"C1": failure_reply("ended by others", Fault("aborted")), "C2": failure_reply(why, Fault("failed", "C2"))}
    listed = [("9", "RUNNING"), ("8", "RUNNING"), FAILED, ("6", "FINISHED:ABORTED")]
    server = query_server(Server(status=lambda _: "", at_work=lambda _: ("9",), said=said, listed=listed))
    monkeypatch.setattr(collect, "check_connection", lambda _: [])
    state = collect_state(None, kit)
    states = {job["id"]: job["status"] for job in state.jobs}
    assert states == dict(listed) | {"8": "DEAD"}
    reasons = {job["id"]: job["reason"] for job in state.jobs}
    assert (reasons["9"], reasons["7"], server.fetched) == (None, why, ["7", "6"])
    assert reasons["8"].startswith("the server was stopped while it ran")
    print_lines(status_lines(state))
    shown = capsys.readouterr().err
    assert "8: the server was stopped while it ran" in shown and "2026-01-02 03:00" in shown


def test_status_describes_jobs_that_were_submitted_from_this_machine(query_server, kit):
    failed = {"C1": {}, "C2": failure_reply("it is 26.0 h ahead", Fault("clock", "C2"))}
    query_server(Server(status=lambda _: "FINISHED:EXECUTION_EXCEPTION", said=failed))
    refused(lambda: submit(kit), "it is 26.0 h ahead", error=WsiFlError)
    server = query_server(Server(status=lambda _: "", listed=[FAILED]))
    (job,) = ask_server(kit)[1]
    assert (job["what"], job["plan"], job["method"], job["sites"]) == ("work", PLAN.digest, "proxyfl", SITES)
    assert (job["reason"], job["code"], job["site"]) == ("it is 26.0 h ahead", "clock", "C2") and not server.fetched


@pytest.mark.parametrize("said", [None, [], "x", {"C1": {"error": "\x1b[2J"}}, {"\x1b": failure_reply("fine")}])
def test_a_malformed_failure_report_of_the_server_is_not_shown(query_server, kit, said):
    server = query_server(Server(status=lambda _: "", said=said, listed=[FAILED]))
    (job,) = ask_server(kit)[1]
    assert server.fetched == ["7"]
    assert "no hospital said why" in job["reason"] or job["reason"] == "fine"


def test_a_dead_server_is_reported_as_unreachable(kit):
    refused(lambda: ask_server(kit), "no way through to localhost port 1", error=WsiFlError)
