"""HTTP proxies on 127.0.0.1 as hospitals have them: proxy.py, and one whose connections can be cut."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import pytest

needs_proxy = pytest.mark.skipif(find_spec("proxy") is None, reason="needs pip install proxy.py")

KNOWN, FORBIDDEN = "fl.hospital.test", 9
"""A name that the proxy alone knows, as one of 127.0.0.1, and a port that it lets nobody through to."""
RULES = f"""
from proxy.http.exception import HttpRequestRejected
from proxy.http.proxy import HttpProxyBasePlugin

class Rules(HttpProxyBasePlugin):
    def resolve_dns(self, host, port):
        return ("127.0.0.1" if host == {KNOWN!r} else None), None

    def before_upstream_connection(self, request):
        if request.port == {FORBIDDEN}:
            raise HttpRequestRejected(status_code=403, reason=b"Forbidden")
        return request
"""


@contextmanager
def proxying(folder, password=None):
    """Yield the port of a logging proxy, which requires the password of `user` where one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.py").write_text(RULES)
    told, log = folder / "port", folder / "proxy.log"
    command = [sys.executable, "-m", "proxy", "--hostname", "127.0.0.1", "--port", "0", "--threaded"]
    command += ["--num-workers", "1", "--num-acceptors", "1", "--timeout", "90"]
    command += ["--port-file", str(told), "--plugins", "rules.Rules"]
    command += ["--basic-auth", f"user:{password}"] if password else []
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 20
        while not (told.exists() and told.read_text().strip()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield int(told.read_text())
    finally:
        process.terminate()
        process.wait(10)


class CutLine(threading.Thread):
    """A CONNECT proxy to one server, whose connections can be cut.

    Args:
        port: of the server, on 127.0.0.1.
    """

    def __init__(self, port):
        super().__init__(daemon=True)
        self.server, self.cut = port, False
        self._listener, self._ends = socket.create_server(("127.0.0.1", 0)), []
        self.proxy = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def run(self):
        while True:
            near, _ = self._listener.accept()
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def break_(self):
        """Cut all connections and refuse new ones until `cut` is False."""
        self.cut = True
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _join(self, near):
        with suppress(OSError):
            asked = b""
            while not asked.endswith(b"\r\n\r\n") and (more := near.recv(4096)):
                asked += more
            if self.cut or not asked.startswith(b"CONNECT "):
                near.close()
                return
            far = socket.create_connection(("127.0.0.1", self.server), 10)
            far.settimeout(None)
            near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            self._ends += [near, far]
            threading.Thread(target=_hand_on, args=(near, far), daemon=True).start()
            _hand_on(far, near)


def _hand_on(one, other):
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
