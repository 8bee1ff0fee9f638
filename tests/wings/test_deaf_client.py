"""A hospital's client of NVIDIA FLARE answers to nothing but jobs, whoever asks."""

from io import BytesIO
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from wires import needs_flare

pytestmark = needs_flare


@pytest.fixture
def processors(monkeypatch):
    """What is left of FLARE's processors, by topic."""
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

    from wsi_fl.hospitals.flare import processes

    before = list(ClientRequestProcessors.request_processors)
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", before)
    processes.narrow()
    return {topic: one for one in ClientRequestProcessors.request_processors for topic in one.get_topics()}


def test_nobody_is_left_who_reads_files_or_deletes_folders(processors):
    from nvflare.private.defs import SysCommandTopic, TrainingTopic

    refused = {
        SysCommandTopic.SHELL,
        SysCommandTopic.SYS_INFO,
        TrainingTopic.DELETE_RUN,
        TrainingTopic.SHUTDOWN,
    }
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
def test_a_job_by_another_name_than_an_id_is_refused(processors, job):
    from nvflare.private.defs import TrainingTopic

    request = SimpleNamespace(get_header=lambda key, default=None: job, body=archive(*USUAL))
    for topic in (TrainingTopic.DEPLOY, TrainingTopic.ABORT, TrainingTopic.START_JOB):
        assert "is no job" in processors[topic].process(request, None).body


def test_a_job_that_brings_files_is_refused():
    from wsi_fl.hospitals.flare.processes import brings_more

    names = ("evil/config.toml", "custom/x.py", "config/x.json", "../config_fed_client.json")
    assert brings_more(archive(*USUAL)) == ""
    for more in (*names, "a/b/config_fed_client.json"):
        assert "is refused" in brings_more(archive(*USUAL, more))
    assert "is refused" in brings_more(b"no archive")
    assert "is refused" in brings_more(bytes(2 << 20))
