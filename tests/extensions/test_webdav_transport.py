"""The folder transport over a real WebDAV server on 127.0.0.1: sealed messages both ways, refusals, a restart."""

import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from wsi_fl.hospitals.transports.folder_transport import FolderTransport
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder

pytestmark = pytest.mark.end_to_end

TOPIC = "cd" * 32
PAUSES = {"pauses_s": (0.02, 0.2), "settled_s": 0.5}
USER, PASSWORD = "lymph", "not-a-secret"


@contextmanager
def webdav(folder):
    """A share by wsgidav, and the settings of fsspec for it."""
    from cheroot.wsgi import Server
    from wsgidav.wsgidav_app import WsgiDAVApp

    users = {"*": {USER: {"password": PASSWORD}}}
    given = {"provider_mapping": {"/": str(folder)}, "simple_dc": {"user_mapping": users}, "verbose": 0}
    application = WsgiDAVApp(given | {"http_authenticator": {"domain_controller": None}})
    server = Server(("127.0.0.1", 0), application)
    server.prepare()
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield {"base_url": f"http://127.0.0.1:{server.bind_addr[1]}", "auth": (USER, PASSWORD)}
    finally:
        server.stop()


@pytest.fixture
def line_of(tmp_path, monkeypatch):
    """Build ends of the transport over a server, whose address holds no password."""
    from fsspec.config import conf

    (tmp_path / "lymph").mkdir()
    made = []
    with webdav(tmp_path) as told:
        monkeypatch.setitem(conf, "webdav", told)

        def make(name):
            made.append(FolderTransport("webdav://", name, TOPIC, **PAUSES))
            return made[-1]

        yield make
        for line in made:
            line.close()


@pytest.mark.parametrize(("status", "expected"), [(404, FileNotFoundError), (500, RuntimeError)])
def test_a_file_that_is_removed_before_reading_counts_as_gone(status, expected):
    """Its sender may withdraw a handshake after a listing, and webdav4 raises an HTTP error for it."""
    share = SharedFolder("memory://gone")

    def read(fs, root):
        error = RuntimeError("not found")
        error.response = SimpleNamespace(status_code=status)
        raise error

    with pytest.raises(expected):
        share.run_action(read)
    assert (share._connection is not None) == (status == 404)


def until(true, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
    return found


def send(line, to, place, letter):
    """Send a sealed message until it has arrived, and return its fate."""
    while "not collected" in (said := line.send(to, place, letter, 5.0)):
        time.sleep(0.02)
    return said


HERE = all(map(find_spec, ("wsgidav", "cheroot", "webdav4")))


@pytest.mark.skipif(not HERE, reason="needs wsgidav, cheroot and webdav4")
def test_messages_go_both_ways_are_refused_and_survive_a_restart(line_of):
    answers, seen = {"C1": "taken", "C2": "taken"}, {"C1": [], "C2": []}

    def desk(name):
        def take(letter):
            seen[name].append(bytes(letter))
            return answers[name]

        return take

    first, second = line_of("C1"), line_of("C2")
    first.listen(desk("C1"))
    second.listen(desk("C2"))
    # both ways, one of them of a megabyte
    assert (first.send("C2", "hello", b"I am C1", 5.0), first.trouble) == ("", "")
    until(lambda: seen["C2"] == [b"I am C1"])
    assert second.waiting() == {"C1"}
    for line, to, letter in ((first, "C2", b"one" * 400_000), (second, "C1", b"two")):
        assert send(line, to, "g0", letter) == "", line.trouble
        assert seen[to][-1] == letter
    # refused, and taken the second time
    answers["C1"] = "refused"
    assert send(second, "C1", "x1.0", b"three") == "site C1 refused it"
    answers["C1"] = "taken"
    assert send(second, "C1", "x1.0", b"three") == ""
    # C2 is stopped, a letter waits, and what it left for others goes when it begins again
    second.send("C1", "hello", b"I am C2", 5.0)
    until(lambda: first.waiting() == {"C2"})
    second.close()
    assert first.waiting() == set()
    assert "has not collected it" in first.send("C2", "x2.0", b"four", 0.2)
    again = line_of("C2")
    again.listen(desk("C2"))
    until(lambda: b"four" in seen["C2"])
    assert send(again, "C1", "x2.0", b"five") == ""
    assert first.trouble == second.trouble == again.trouble == ""
