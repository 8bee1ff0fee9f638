"""An HTTP proxy as hospitals have one, by proxy.py, as a process of its own on 127.0.0.1."""

import subprocess
import sys
import time
from contextlib import contextmanager
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
    """The port of a proxy, which asks for a password where one is given (the user is `user`); its log is there too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.py").write_text(RULES)
    told, log = folder / "port", folder / "proxy.log"
    command = [
        sys.executable,
        "-m",
        "proxy",
        "--hostname",
        "127.0.0.1",
        "--port",
        "0",
        "--port-file",
        str(told),
    ]
    command += [
        "--num-workers",
        "1",
        "--num-acceptors",
        "1",
        "--threaded",
        "--timeout",
        "90",
        "--plugins",
        "rules.Rules",
    ]
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
