"""Messages for an untrusted transport: sealed for the receiver, signed by the sender, bound to session and sequence id.

A message has a public header, a signature of the header by the sender's key, and a body for the receiver alone: HPKE
(RFC 9180) with X25519, HKDF-SHA256 and ChaCha20-Poly1305, for a key that the receiver made when its process began. The
header names sender, receiver, session, sequence id (`place`) and the body's SHA-256.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.documents import Digest, Name, NotAgreed, Words, decoded, encoded
from wsi_fl.hospitals.trust.certificates import Holder, Identity, NotTrusted, verified

_MAGIC = b"wsi-fl letter 1\n"
_PREFIX = struct.Struct(f"<{len(_MAGIC)}sII")
"""magic, bytes of the header, bytes of the signature; header, signature and body follow."""
_MOST_HEAD, _MOST_SIGNATURE = 8192, 1024
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
HELLO = "hello"
"""The sequence id of each process's first message, signed and not sealed, with its certificate and key."""
EVERYBODY = "everybody"
Buffer = bytes | bytearray | memoryview


class Head(TypedDict):
    """The public header of a message.

    Attributes:
        to: the receiver; "everybody" for a handshake.
        session: derived from all sites' handshakes; of a handshake the signed plan, or empty.
        place: the sequence id: "hello", "g4" for the fifth gathering, "x3.0" for hop 0 of round 3, "end", or
            "withdrawn" for an end because the hospital revoked its approval.
        digest: SHA-256 of the body as it travels.
    """

    sender: Name
    to: Name
    session: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    place: Annotated[str, Field(pattern=r"^(hello|end|withdrawn|g\d{1,9}|x\d{1,9}\.\d)$")]
    digest: Digest


class Hello(TypedDict):
    """A site's first message, to all.

    Attributes:
        certificate: PEM.
        public: its X25519 key for this session.
        time: seconds since 1970 by its clock.
        version: of wsi-fl.
        code: SHA-256 of the installed package.
        gone: site → time of the handshake of its process that the sender believes dropped out.
    """

    certificate: Annotated[str, Field(max_length=4000)]
    public: Digest
    time: Annotated[float, Field(ge=0, le=1e11)]
    version: Words
    code: Digest
    gone: dict[Name, Annotated[float, Field(ge=0, le=1e11)]]


@dataclass(frozen=True)
class Letter:
    """A message that arrived, not yet verified."""

    head: Head
    signed: bytes
    signature: bytes
    body: memoryview

    @staticmethod
    def read(data: Buffer) -> Letter:
        """Parse a message; NotAgreed if it is none."""
        view = memoryview(data)
        if len(view) < _PREFIX.size or bytes(view[: len(_MAGIC)]) != _MAGIC:
            raise NotAgreed("something arrived that is no message of wsi-fl")
        _, n_head, n_signature = _PREFIX.unpack_from(view)
        if n_head > _MOST_HEAD or n_signature > _MOST_SIGNATURE:
            raise NotAgreed("a message with too long a header arrived")
        start = _PREFIX.size
        signed, signature = bytes(view[start : start + n_head]), bytes(view[start + n_head :][:n_signature])
        head = decoded(signed, Head, "of a message")
        return Letter(head, signed, signature, view[start + n_head + n_signature :])

    def check(self, sender: Holder) -> None:
        """Refuse (NotTrusted) a message whose name, signature or body is not its sender's."""
        if self.head["sender"] != sender.name:
            raise NotTrusted(f"{sender.name} signed a message in the name of {self.head['sender']}")
        sender.check(self.signature, _MAGIC + self.signed)
        if hashlib.sha256(self.body).hexdigest() != self.head["digest"]:
            raise NotTrusted(f"a message of {sender.name} was altered on its way")

    def hello(self, root: str) -> tuple[Hello, Holder]:
        """Return a handshake and its signer; NotAgreed or NotTrusted if it is none of this federation."""
        said = decoded(bytes(self.body), Hello, self.head["sender"])
        holder = verified(said["certificate"], root)
        self.check(holder)
        return said, holder


@dataclass(frozen=True)
class Writer:
    """Seals and opens the messages of one site in one process, which began at a time in seconds since 1970.

    It holds the time of the newest handshake of each site that the process has met; older ones are of processes that
    ended.
    """

    identity: Identity
    since: float = field(default_factory=time.time)
    heard: dict[str, float] = field(default_factory=dict, compare=False)
    _private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)

    def anew(self, after: float) -> Writer:
        """Return a sealer with a new handshake, later than now and than a time, that keeps those of others."""
        return Writer(self.identity, max(time.time(), after + 0.001), self.heard)

    @property
    def public(self) -> str:
        """The X25519 key for messages to this process, in hexadecimal digits."""
        return self._private.public_key().public_bytes_raw().hex()

    def hello(self, said: Hello, plan: str) -> bytes:
        """Return the message that introduces this process to all, under a signed plan."""
        return self._signed(EVERYBODY, plan, HELLO, encoded(said, Hello, self.identity.name))

    def letter(self, to: str, public: str, session: str, place: str, content: Sequence[Buffer]) -> bytes:
        """Return a message, of parts joined in order, sealed with the receiver's public key."""
        info = _bound(self.identity.name, to, session, place)
        key = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return self._signed(to, session, place, _SUITE.encrypt(b"".join(content), key, info))

    def open(self, letter: Letter) -> memoryview:
        """Return the content of a verified message; NotTrusted if it was not sealed for this process."""
        head = letter.head
        info = _bound(head["sender"], self.identity.name, head["session"], head["place"])
        try:
            return memoryview(_SUITE.decrypt(bytes(letter.body), self._private, info))
        except (InvalidTag, ValueError):
            raise NotTrusted(f"a message of {head['sender']} was not sealed for this process") from None

    def _signed(self, to: str, session: str, place: str, body: bytes) -> bytes:
        head: Head = {
            "sender": self.identity.name,
            "to": to,
            "session": session,
            "place": place,
            "digest": hashlib.sha256(body).hexdigest(),
        }
        text = encoded(head, Head, self.identity.name)
        signature = self.identity.sign(_MAGIC + text)
        return b"".join([_PREFIX.pack(_MAGIC, len(text), len(signature)), text, signature, body])


def session_of(hellos: Sequence[tuple[str, str]], plan: str) -> str:
    """Return the session of all sites' handshakes, (site, public key) in any order, and the plan's SHA-256 (or "").

    So messages of an earlier process cannot pass for messages of this one.
    """
    said = "\n".join([plan, *(f"{site} {public}" for site, public in sorted(hellos))])
    return hashlib.sha256(said.encode()).hexdigest()


def _bound(sender: str, to: str, session: str, place: str) -> bytes:
    return f"wsi-fl {session} {sender} {to} {place}".encode()
