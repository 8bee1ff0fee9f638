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

from wsi_fl.federation.documents import Digest, PrintableText, ProtocolError, SiteName, decode_document, encode_document
from wsi_fl.hospitals.trust.certificates import Holder, Identity, NotTrusted, verify_certificate

_MAGIC = b"wsi-fl letter 1\n"
_PREFIX = struct.Struct(f"<{len(_MAGIC)}sII")
"""magic, bytes of the header, bytes of the signature; header, signature and body follow."""
_MAX_HEADER_BYTES, _MAX_SIGNATURE_BYTES = 8192, 1024
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
HANDSHAKE = "hello"
"""The sequence id of each process's first message, signed and not sealed, with its certificate and key."""
ALL_RECEIVERS = "everybody"
Buffer = bytes | bytearray | memoryview


class MessageHeader(TypedDict):
    """The public header of a message.

    Attributes:
        to: the receiver; "everybody" for a handshake.
        session: derived from all sites' handshakes; of a handshake the signed plan, or empty.
        place: the sequence id: "hello", "g4" for the fifth gathering, "x3.0" for hop 0 of round 3, "end", or
            "withdrawn" for an end because the hospital revoked its approval.
        digest: SHA-256 of the body as it travels.
    """

    sender: SiteName
    to: SiteName
    session: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    place: Annotated[str, Field(pattern=r"^(hello|end|withdrawn|g\d{1,9}|x\d{1,9}\.\d)$")]
    digest: Digest


class Handshake(TypedDict):
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
    version: PrintableText
    code: Digest
    gone: dict[SiteName, Annotated[float, Field(ge=0, le=1e11)]]


@dataclass(frozen=True)
class SealedMessage:
    """A message that arrived, not yet verified."""

    header: MessageHeader
    header_bytes: bytes
    signature: bytes
    body: memoryview

    @staticmethod
    def read(data: Buffer) -> SealedMessage:
        """Parse a message; ProtocolError if it is none."""
        view = memoryview(data)
        if len(view) < _PREFIX.size or bytes(view[: len(_MAGIC)]) != _MAGIC:
            raise ProtocolError("something arrived that is no message of wsi-fl")
        _, n_header, n_signature = _PREFIX.unpack_from(view)
        if n_header > _MAX_HEADER_BYTES or n_signature > _MAX_SIGNATURE_BYTES:
            raise ProtocolError("a message with too long a header arrived")
        start = _PREFIX.size
        header_bytes, signature = (bytes(view[start : start + n_header]), bytes(view[start + n_header :][:n_signature]))
        header = decode_document(header_bytes, MessageHeader, "of a message")
        return SealedMessage(header, header_bytes, signature, view[start + n_header + n_signature :])

    def verify_sender(self, sender: Holder) -> None:
        """Refuse (NotTrusted) a message whose name, signature or body is not its sender's."""
        if self.header["sender"] != sender.name:
            raise NotTrusted(f"{sender.name} signed a message in the name of {self.header['sender']}")
        sender.verify_signature(self.signature, _MAGIC + self.header_bytes)
        if hashlib.sha256(self.body).hexdigest() != self.header["digest"]:
            raise NotTrusted(f"a message of {sender.name} was altered on its way")

    def read_handshake(self, root: str) -> tuple[Handshake, Holder]:
        """Return a handshake and its signer; ProtocolError or NotTrusted if it is none of this federation."""
        handshake = decode_document(bytes(self.body), Handshake, self.header["sender"])
        holder = verify_certificate(handshake["certificate"], root)
        self.verify_sender(holder)
        return handshake, holder


@dataclass(frozen=True)
class MessageSealer:
    """Seals and opens the messages of one site in one process, which began at a time in seconds since 1970.

    It holds the time of the newest handshake of each site that the process has met; older ones are of processes that
    ended.
    """

    identity: Identity
    started_at: float = field(default_factory=time.time)
    latest_handshakes: dict[str, float] = field(default_factory=dict, compare=False)
    _private_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)

    def renew_handshake(self, earliest: float) -> MessageSealer:
        """Return a sealer with a new handshake, later than now and than a time, that keeps those of others."""
        return MessageSealer(self.identity, max(time.time(), earliest + 0.001), self.latest_handshakes)

    @property
    def public(self) -> str:
        """The X25519 key for messages to this process, in hexadecimal digits."""
        return self._private_key.public_key().public_bytes_raw().hex()

    def write_handshake(self, handshake: Handshake, plan: str) -> bytes:
        """Return the message that introduces this process to all, under a signed plan."""
        return self._sign_message(
            ALL_RECEIVERS, plan, HANDSHAKE, encode_document(handshake, Handshake, self.identity.name)
        )

    def seal_message(
        self, receiver: str, receiver_key: str, session: str, sequence_id: str, content: Sequence[Buffer]
    ) -> bytes:
        """Return a message, of parts joined in order, sealed with the receiver's public key."""
        info = _binding_context(self.identity.name, receiver, session, sequence_id)
        recipient_key = X25519PublicKey.from_public_bytes(bytes.fromhex(receiver_key))
        return self._sign_message(
            receiver, session, sequence_id, _SUITE.encrypt(b"".join(content), recipient_key, info)
        )

    def open(self, message: SealedMessage) -> memoryview:
        """Return the content of a verified message; NotTrusted if it was not sealed for this process."""
        header = message.header
        info = _binding_context(header["sender"], self.identity.name, header["session"], header["place"])
        try:
            return memoryview(_SUITE.decrypt(bytes(message.body), self._private_key, info))
        except (InvalidTag, ValueError):
            raise NotTrusted(f"a message of {header['sender']} was not sealed for this process") from None

    def _sign_message(self, receiver: str, session: str, sequence_id: str, body: bytes) -> bytes:
        header: MessageHeader = {
            "sender": self.identity.name,
            "to": receiver,
            "session": session,
            "place": sequence_id,
            "digest": hashlib.sha256(body).hexdigest(),
        }
        text = encode_document(header, MessageHeader, self.identity.name)
        signature = self.identity.sign(_MAGIC + text)
        return b"".join([_PREFIX.pack(_MAGIC, len(text), len(signature)), text, signature, body])


def derive_session(handshakes: Sequence[tuple[str, str]], plan: str) -> str:
    """Return the session of all sites' handshakes, (site, public key) in any order, and the plan's SHA-256 (or "").

    So messages of an earlier process cannot pass for messages of this one.
    """
    transcript = "\n".join([plan, *(f"{site} {public}" for site, public in sorted(handshakes))])
    return hashlib.sha256(transcript.encode()).hexdigest()


def _binding_context(sender: str, receiver: str, session: str, sequence_id: str) -> bytes:
    return f"wsi-fl {session} {sender} {receiver} {sequence_id}".encode()
