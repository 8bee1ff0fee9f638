"""A federation's certificates and kits, and an in-process transport that can disturb sealed messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import inf

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from wsi_fl.hospitals.transports.transport import Receipt
from wsi_fl.hospitals.trust.certificates import (
    Identity,
    build_request,
    build_root_certificate,
    generate_key,
    issue_certificate,
)
from wsi_fl.hospitals.trust.sealed_messages import Buffer

NAMES = ("C1", "C2", "C3")
needs_flare = pytest.mark.skipif(find_spec("nvflare") is None, reason="needs the extra flare")


def command(*arguments):
    """Run a command of `wsi-fl federation` in this process, with --json."""
    from wsi_fl.cli.main import app

    return CliRunner().invoke(app, ["federation", *map(str, arguments), "--json"])


class Federation:
    """A root CA with the identities and kits of sites."""

    def __init__(self) -> None:
        self.key = generate_key()
        self.root = build_root_certificate(self.key, "a federation")

    def identity(self, name, **given):
        key = generate_key()
        certificate = issue_certificate(build_request(key, name, "org"), self.key, self.root, role="hospital", **given)
        return Identity.load(key, certificate, self.root)

    def kit(self, folder, name, identity=None, /, **more):
        """Return the folder of a hospital's kit with the parts that tests need."""
        identity = identity or self.identity(name)
        startup = folder / "startup"
        startup.mkdir(parents=True)
        key = identity.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (startup / "client.key").write_bytes(key)
        (startup / "client.crt").write_text(identity.certificate)
        (startup / "rootCA.pem").write_text(self.root)
        (folder / "federation.json").write_text(json.dumps({"name": name, "role": "hospital", **more}))
        return folder


def at_once(work, names, limit_s=120.0):
    """Return each site's value or error by name; each site works in a thread of its name."""
    found = {}

    def be(name):
        try:
            found[name] = work(name)
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=be, args=(name,), name=name, daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive()
    return found


class Wire:
    """An in-process transport whose messages tests can delay, lose, repeat and alter.

    Args:
        name: the site at this end.
        ends: all ends by name, shared by all; an end adds itself when it listens.
        meddle: given (sender, receiver, name, letter), return the letters that arrive in its place.
    """

    lag_s = 0.0

    def __init__(
        self,
        name: str,
        ends: dict[str, Callable[[Buffer], Receipt]],
        meddle: Callable[[str, str, str, bytes], Sequence[bytes]] | None = None,
    ) -> None:
        self._name, self._ends, self._meddle = name, ends, meddle
        self._down = ""

    def listen(self, take: Callable[[Buffer], Receipt]) -> None:
        self._ends[self._name] = take

    def send(self, to: str, name: str, letter: bytes, timeout_s: float) -> str:
        del timeout_s
        arriving = [letter] if self._meddle is None else self._meddle(self._name, to, name, letter)
        take = self._ends.get(to)
        if take is None:
            return "nobody is there"
        answers = [take(one) for one in arriving]
        return "" if "taken" in answers else "it was not taken"

    def cut(self, why: str) -> None:
        """Stop all transport of messages."""
        self._down = why

    def failure_reason(self) -> str:
        return self._down

    def silence_s(self, site: str) -> float:
        del site
        return inf

    def close(self) -> None:
        self._ends.pop(self._name, None)
