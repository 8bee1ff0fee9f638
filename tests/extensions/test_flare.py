"""Hospitals over NVIDIA FLARE get the models of one process, and clients accept nothing but jobs."""

import json
import subprocess
import sys
from contextlib import nullcontext
from io import BytesIO
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from federation_fixtures import needs_flare
from hospitals import Bed, digests
from open_tracing import opening

from wsi_fl.hospitals.demo import find_free_port
from wsi_fl.hospitals.faults import Fault, mark_fault
from wsi_fl.hospitals.trust.kit import REVOCATIONS_FILE, Kit, check_connection
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.hospitals.trust.root_ca import install_revocation_list, revoke_site
from wsi_fl.hospitals.work.job_replies import failure_reply
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.types import ReportableError, SiteFailed

pytestmark = [pytest.mark.end_to_end, needs_flare]


def test_two_hospitals_train_together_over_flare(tmp_path):
    bed = Bed(tmp_path, 2)
    plan = bed.sign("proxyfl", "train.rounds=2")
    with bed.running(watched=True):
        said = bed.submit("--plan", bed.plan_file())
    assert said.returncode == 0, said.stderr
    summary, local = json.loads(said.stdout), bed.require_the_same("proxyfl", "train.rounds=2")
    for site in bed.sites:
        assert set(digests(bed.run(site), site)) == {"private.safetensors", "proxy.safetensors"}
        other = next(name for name in bed.sites if name != site)
        assert not list((bed.root / site / "runs").rglob(f"sites/{other}/*"))
        entries = LedgerFile(bed.study(site).ledger_path(site)).entries
        assert {entry.agreement for entry in entries if entry.mechanism} == {plan.digest}
    assert summary["communication"]["bytes"] == local["communication"]["bytes"]
    assert "slide" not in said.stderr and "patient" not in said.stderr
    _nobody_opened_a_file_of_another(bed)


def _nobody_opened_a_file_of_another(bed):
    for name in ("server", *bed.sites):
        assert not bed.strangers(name)
        seen = bed.opened.below(bed.root, name, but=[bed.opened.folder])
        assert bed.root / "kits" / name / "startup" / "rootCA.pem" in seen
        if name in bed.sites:
            assert bed.root / name / "federation" / "plan.json" in seen
            # HDF5 is read by a library of C
            assert bed.study(name).store_path(name) in seen or not bed.opened.strace
    store = bed.study("S1").store_path("S1")
    subprocess.run(bed.opened.watched("S0", opening(store)), check=True)
    assert bed.strangers("S0") == [store]


def test_the_server_refuses_a_withdrawn_certificate(tmp_path):
    provision_federation(
        tmp_path / "kits", federation="trial", server=f"localhost:{find_free_port()}", sites=["S0", "S1"]
    )
    revoke_site("S1", tmp_path / "kits")
    assert install_revocation_list(tmp_path / "kits" / "root" / REVOCATIONS_FILE, tmp_path / "kits" / "server")["newer"]
    command = [sys.executable, "-m", "wsi_fl", "federation", "start", str(tmp_path / "kits" / "server")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert "listens on port" in server.stderr.readline()
            steps = {name: list(check_connection(Kit.open(tmp_path / "kits" / name))) for name in ("S0", "S1")}
        finally:
            server.terminate()
    assert [step.ok for step in steps["S0"]] == [True] * 4
    assert (steps["S1"][-1].what, steps["S1"][-1].ok) == ("mutual TLS", False)
    assert "the server refused this kit's certificate" in steps["S1"][-1].said


@pytest.fixture
def processors(monkeypatch):
    """What is left of FLARE's processors, by topic."""
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

    from wsi_fl.hospitals.flare import processes

    before = list(ClientRequestProcessors.request_processors)
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", before)
    processes.restrict_client()
    return {topic: one for one in ClientRequestProcessors.request_processors for topic in one.get_topics()}


def test_no_processor_is_left_that_reads_files_or_deletes_folders(processors):
    from nvflare.private.defs import SysCommandTopic, TrainingTopic

    refused = {SysCommandTopic.SHELL, SysCommandTopic.SYS_INFO, TrainingTopic.DELETE_RUN, TrainingTopic.SHUTDOWN}
    assert not refused & set(processors)
    assert {TrainingTopic.DEPLOY, TrainingTopic.START_JOB, TrainingTopic.ABORT} <= set(processors)


USUAL = ("config/config_fed_client.json", "config/config_fed_server.json", ".__nvfl_sig.json")


def archive(*names):
    content = BytesIO()
    with ZipFile(content, "w") as file:
        for name in names:
            file.writestr(name, "{}")
    return content.getvalue()


@pytest.mark.parametrize("job", ["startup", "local", "..", "", "../../etc", None])
def test_a_job_whose_name_is_no_id_is_refused(processors, job):
    from nvflare.private.defs import TrainingTopic

    request = SimpleNamespace(get_header=lambda key, default=None: job, body=archive(*USUAL))
    for topic in (TrainingTopic.DEPLOY, TrainingTopic.ABORT, TrainingTopic.START_JOB):
        assert "is no job" in processors[topic].process(request, None).body


def test_a_job_that_brings_files_is_refused():
    from wsi_fl.hospitals.flare.processes import explain_extra_files

    names = ("evil/config.toml", "custom/x.py", "config/x.json", "../config_fed_client.json")
    assert explain_extra_files(archive(*USUAL)) == ""
    for more in (*names, "a/b/config_fed_client.json"):
        assert "is refused" in explain_extra_files(archive(*USUAL, more))
    assert "is refused" in explain_extra_files(b"no archive")
    assert "is refused" in explain_extra_files(bytes(2 << 20))


def raising(error):
    def raise_error(*_):
        raise error

    return raise_error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (mark_fault(ReportableError("any words"), "lost", "S2"), failure_reply("any words", Fault("lost", "S2"))),
        (ReportableError("sites disagree"), failure_reply("sites disagree")),
        (SiteFailed("a log says why"), failure_reply("a log says why", Fault("failed", "S1"))),
        (KeyError("slide 7"), failure_reply("site S1 failed; its own log says why", Fault("failed", "S1"))),
    ],
)
def test_a_failure_travels_with_its_code_and_nothing_else(tmp_path, monkeypatch, error, expected):
    from wsi_fl.hospitals.flare import roles

    monkeypatch.setenv(roles.STUDY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(roles, "_send_signs_of_life", lambda *_: nullcontext())
    monkeypatch.setattr(roles.HospitalExecutor, "_run_request", raising(error))
    context = SimpleNamespace(get_engine=dict, get_job_id=str, get_identity_name=lambda: "S1")
    reply = roles.HospitalExecutor().execute("work", {"job": {}}, context, None)
    told, panics = SimpleNamespace(result=reply, client=SimpleNamespace(name="S1")), []
    told.task = SimpleNamespace(name="work")
    controller = roles.JobController(["S1"], {"what": "work"})
    monkeypatch.setattr(controller, "_write_replies", lambda _: None)
    monkeypatch.setattr(controller, "system_panic", lambda text, _: panics.append(text))
    controller._receive_reply(told, None)
    assert (controller._replies, panics) == ({"S1": expected}, [expected["error"]])
    reply["said"] = json.dumps(expected | {"site": "../S2"})
    controller._receive_reply(told, None)
    assert controller._replies["S1"]["error"].startswith("site S1 told what was not agreed on")
