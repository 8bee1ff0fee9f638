"""The line of a folder over real servers of WebDAV and SFTP, on 127.0.0.1: letters both ways, refusals, a restart."""

import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from wsi_fl.hospitals.lines.folder_line import FolderLine
from wsi_fl.hospitals.lines.share import Share

TOPIC = "cd" * 32
PAUSES = {"pauses_s": (0.02, 0.2), "settled_s": 0.5}
USER, PASSWORD = "lymph", "not-a-secret"


def lacks(*modules):
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@contextmanager
def webdav(folder):
    """A share by wsgidav, and what fsspec is told of it."""
    from cheroot.wsgi import Server
    from wsgidav.wsgidav_app import WsgiDAVApp

    users = {"*": {USER: {"password": PASSWORD}}}
    application = WsgiDAVApp(
        {
            "provider_mapping": {"/": str(folder)},
            "simple_dc": {"user_mapping": users},
            "http_authenticator": {"domain_controller": None},
            "verbose": 0,
        }
    )
    server = Server(("127.0.0.1", 0), application)
    server.prepare()
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.bind_addr[1]}"
        yield "webdav://", {"webdav": {"base_url": base, "auth": (USER, PASSWORD)}}
    finally:
        server.stop()


@contextmanager
def sftp(folder):
    """A share by asyncssh, and what fsspec is told of it."""
    import asyncio

    import asyncssh

    class Guard(asyncssh.SSHServer):
        def begin_auth(self, username):
            return True

        def password_auth_supported(self):
            return True

        def validate_password(self, username, password):
            return (username, password) == (USER, PASSWORD)

    loop, port = asyncio.new_event_loop(), []

    async def serve():
        server = await asyncssh.create_server(
            Guard,
            "127.0.0.1",
            0,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=str(folder).encode()),
        )
        port.append(server.sockets[0].getsockname()[1])

    async def stop():
        mine = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not mine]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    loop.run_until_complete(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        told = {"port": port[0], "username": USER, "password": PASSWORD}
        yield "sftp://127.0.0.1/lymph", {"sftp": told}
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


SERVERS = [
    pytest.param(webdav, marks=lacks("wsgidav", "cheroot", "webdav4")),
    pytest.param(sftp, marks=lacks("asyncssh", "paramiko")),
]


@pytest.fixture(params=SERVERS)
def line_of(request, tmp_path, monkeypatch):
    """Makes ends of the line over a server, whose address holds no password."""
    from fsspec.config import conf

    (tmp_path / "lymph").mkdir()
    made = []
    with request.param(tmp_path) as (address, told):
        for protocol, options in told.items():
            monkeypatch.setitem(conf, protocol, options)

        def make(name):
            made.append(FolderLine(address, name, TOPIC, **PAUSES))
            return made[-1]

        yield make
        for line in made:
            line.close()


@pytest.mark.parametrize(("status", "expected"), [(404, FileNotFoundError), (500, RuntimeError)])
def test_a_file_that_goes_before_it_is_read_is_gone_and_no_failure(status, expected):
    """Its sender may take a hello back after a look into the folder, and webdav4 has an error of HTTP for that."""
    share = Share("memory://gone")

    def read(fs, root):
        error = RuntimeError("not found")
        error.response = SimpleNamespace(status_code=status)
        raise error

    with pytest.raises(expected):
        share.do(read)
    assert (share._connected is not None) == (status == 404)


def until(true, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
    return found


def send(line, to, place, letter):
    """What became of a letter, which is sent until it has arrived."""
    return until(
        lambda: [said] if "not collected" not in (said := line.send(to, place, letter, 5.0)) else []
    )[0]


def test_letters_go_both_ways_are_refused_and_survive_a_restart(line_of):
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
