"""Identities of hospitals: one root CA per federation, and a certificate for every participant.

Keys never leave the machine they were made on. A hospital sends a request, the holder of the root CA approves it, and
the hospital puts the certificate beside its key (RFC 2986, RFC 5280). The root CA's key can name anybody.

The root CA also signs a numbered list of keys whose certificates it has revoked, a CRL (RFC 5280, section 5). The
*trusted* text is one PEM text: the root CA's certificate, followed by that list if there is one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from wsi_fl.types import KnownToAll, UsageError, printable

Role = Literal["server", "coordinator", "hospital"]
_KEY_BITS = 2048
"""The only key length that fits NVIDIA FLARE 2.9's end-to-end encryption."""
_EXPONENT = 65537
"""The only accepted public exponent: with a free choice it is easy to find a key whose fingerprint begins like
another's, or one whose signatures need no private key."""
_ROOT_DAYS, _CERTIFICATE_DAYS = 3650, 730
_SKEW = timedelta(minutes=10)
"""Validity of a certificate before its creation, for slow clocks."""
_FLARE_ROLE = {"coordinator": "project_admin"}
"""The role that FLARE reads from a certificate."""
_KEY_OF, _OCTETS = x509.ObjectIdentifier("2.25.226721314452911909386262347428626637672"), b"\x04\x20"
"""The extension of a list entry with the SHA-256 of the key, since plans pin keys, and the DER prefix of its 32 bytes.
The identifier is a UUID (ITU-T X.667)."""
_PADDING = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


class NotTrusted(KnownToAll):
    """Something was not signed by its alleged sender."""


@dataclass(frozen=True)
class Identity:
    """A key, its certificate (PEM) and the trusted text (PEM), with which a process speaks for a site."""

    name: str
    key: RSAPrivateKey
    certificate: str
    root: str

    @staticmethod
    def load(key: str, certificate: str, root: str) -> Identity:
        """Return the identity of three PEM texts; UsageError if they do not belong together or are not valid now."""
        try:
            private = _private(key)
            holder = verified(certificate, root)
        except (ValueError, UsageError, NotTrusted) as error:
            raise UsageError(f"this kit cannot be used: {error}") from None
        if _certificate(certificate).public_key() != private.public_key():
            raise UsageError("this kit cannot be used: its certificate belongs to another key")
        return Identity(holder.name, private, certificate, root)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of bytes (RSASSA-PSS with SHA-256, RFC 8017)."""
        return self.key.sign(data, _PADDING, SHA256())

    def signed(self, document: Mapping[str, Any], purpose: bytes) -> dict[str, object]:
        """Return a document with its signer's certificate and a signature that is valid for one purpose alone."""
        signature = self.sign(_signed_bytes(document, purpose))
        return {**document, "certificate": self.certificate, "signature": signature.hex()}


@dataclass(frozen=True)
class Holder:
    """The holder that a certificate names, its serial number, and its last day."""

    name: str
    organization: str
    number: int
    until: datetime
    _key: RSAPublicKey

    def check(self, signature: bytes, data: bytes) -> None:
        """Refuse (NotTrusted) data that this holder's key did not sign."""
        try:
            self._key.verify(signature, data, _PADDING, SHA256())
        except InvalidSignature:
            raise NotTrusted(f"a message in the name of {self.name} was not signed by it") from None


def signer_of(document: Mapping[str, Any], root: str, purpose: bytes, what: str) -> Holder:
    """Return the signer of a document after verifying all of it; UsageError otherwise.

    Args:
        root: the trusted text, PEM.
        label: the name of the document, for messages.
    """
    try:
        holder = verified(str(document["certificate"]), root)
        holder.check(bytes.fromhex(str(document["signature"])), _signed_bytes(document, purpose))
    except (KeyError, ValueError, NotTrusted) as error:
        why = str(error) if isinstance(error, NotTrusted) else "it is incomplete"
        raise UsageError(f"{what} cannot be used: {why}") from None
    return holder


def _signed_bytes(document: Mapping[str, Any], purpose: bytes) -> bytes:
    said = {key: value for key, value in document.items() if key not in ("certificate", "signature")}
    return purpose + json.dumps(said, sort_keys=True).encode()


def verified(certificate: str, root: str, *, now: datetime | None = None) -> Holder:
    """Return the holder of a certificate (PEM) after verifying that it is of the federation and valid at a time.

    NotTrusted, by the trusted text (PEM), with one line on the fault.
    """
    if not _issued_by(certificate, root):
        raise NotTrusted("a certificate does not belong to this federation")
    found, above = _certificate(certificate), _certificate(root)
    name, organization = _names(found.subject)
    if (since := withdrawn(root).keys.get(fingerprint(certificate))) is not None:
        raise NotTrusted(
            f"the certificate of {name} was withdrawn on {since:%Y-%m-%d}; {name} needs a new key"
        )
    today = now or datetime.now(UTC)
    for one, whose in ((found, name), (above, "the federation's root")):
        if not one.not_valid_before_utc <= today <= one.not_valid_after_utc:
            raise NotTrusted(
                f"the certificate of {whose} holds from {one.not_valid_before_utc:%Y-%m-%d %H:%M} to "
                f"{one.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and this clock says {today:%Y-%m-%d %H:%M}; set the "
                "clock, or request a new certificate"
            )
    if any(isinstance(one.value, x509.BasicConstraints) and one.value.ca for one in found.extensions):
        raise NotTrusted(f"the certificate of {name} may sign others, so no site may use it")
    _usual(above.public_key(), "the federation's root")
    key = _usual(found.public_key(), f"the certificate of {name}")
    return Holder(name, organization, found.serial_number, found.not_valid_after_utc, key)


@dataclass(frozen=True)
class Withdrawn:
    """A revocation list: its number (the higher of two holds), the time of each key's revocation by fingerprint, and
    the list itself as PEM. Without one: 0, nothing and "".
    """

    number: int
    keys: Mapping[str, datetime]
    text: str


def withdrawn(trusted: str) -> Withdrawn:
    """Return the list in a trusted PEM text; NotTrusted if the root CA did not sign it."""
    root, end, rest = trusted.partition("-----END CERTIFICATE-----")
    if not rest.strip():
        return Withdrawn(0, {}, "")
    try:
        found, above = x509.load_pem_x509_crl(rest.encode()), _certificate(root + end)
        if found.issuer != above.subject or not found.is_signature_valid(_usual(above.public_key(), "it")):
            raise ValueError
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        held = ((one, one.extensions.get_extension_for_oid(_KEY_OF).value.public_bytes()) for one in found)
        keys = {_spelled(digest.removeprefix(_OCTETS)): one.revocation_date_utc for one, digest in held}
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        raise NotTrusted(
            "the list of withdrawn certificates was not signed by this federation's root"
        ) from None
    return Withdrawn(number, keys, found.public_bytes(Encoding.PEM).decode())


def longer_list(trusted: str, root_key: str, more: Mapping[int, str]) -> str:
    """Return the next list, PEM: the previous one and further certificates, key fingerprints by serial number."""
    before, above, now = withdrawn(trusted), _certificate(trusted), datetime.now(UTC)
    made = x509.CertificateRevocationListBuilder(above.subject, now - _SKEW, above.not_valid_after_utc)
    made = made.add_extension(x509.CRLNumber(before.number + 1), critical=False)
    for entry in x509.load_pem_x509_crl(before.text.encode()) if before.text else ():
        made = made.add_revoked_certificate(entry)
    for number, key in more.items():
        digest = x509.UnrecognizedExtension(_KEY_OF, _OCTETS + bytes.fromhex(key.replace(":", "")))
        entry = x509.RevokedCertificateBuilder(number, now).add_extension(digest, critical=False).build()
        made = made.add_revoked_certificate(entry)
    return made.sign(_private(root_key), SHA256()).public_bytes(Encoding.PEM).decode()


def new_key() -> str:
    """Return a fresh private key as PEM."""
    key = generate_private_key(public_exponent=_EXPONENT, key_size=_KEY_BITS)
    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()


def new_root(key: str, federation: str) -> str:
    """Return the root CA's certificate (PEM) of a federation, signed by its own key (PEM)."""
    private = _private(key)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, federation)])
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    never = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **never)
    return _issued(private, name, name, private.public_key(), _ROOT_DAYS, ca=True, extra=usage)


def new_request(key: str, name: str, organization: str) -> str:
    """Return a certificate request (PEM) for a key (PEM)."""
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, name),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization),
        ]
    )
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(_private(key), SHA256())
    return request.public_bytes(Encoding.PEM).decode()


def approved(
    request: str,
    root_key: str,
    root: str,
    *,
    role: Role,
    hosts: tuple[str, ...] = (),
    days: int = _CERTIFICATE_DAYS,
) -> str:
    """Return the certificate (PEM) for a request (PEM).

    Args:
        root: the trusted text, PEM.
        hosts: names under which a server is reached.

    Raises:
        UsageError: when the request was not signed by its own key, or the key is revoked or unusual.
    """
    asked = _request(request)
    if not asked.is_signature_valid:
        raise UsageError("this request was not signed by its own key")
    try:
        key = _usual(asked.public_key(), "this request")
    except NotTrusted as error:
        raise UsageError(str(error)) from None
    name, organization = _names(asked.subject)
    if fingerprint(request) in withdrawn(root).keys:
        raise UsageError(f"the key of this request was withdrawn; {name} needs a new one, in a new kit")
    subject = [  # of the request these fields alone: others could give its holder a role
        x509.NameAttribute(NameOID.COMMON_NAME, name),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization or name),
    ]
    if role in _FLARE_ROLE:
        subject.append(x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, _FLARE_ROLE[role]))
    reached = x509.SubjectAlternativeName([_general(host) for host in hosts or (name,)])
    issuer = _certificate(root).subject
    return _issued(_private(root_key), issuer, x509.Name(subject), key, days, ca=False, extra=reached)


def stranger(certificate: str, root: str) -> tuple[str, str] | None:
    """Return (subject, issuer) of a certificate (PEM), short printable texts; None for one of the root CA."""
    if _issued_by(certificate, root):
        return None
    found = _certificate(certificate)
    texts = (" ".join(one.rfc4514_string().split())[:200] for one in (found.subject, found.issuer))
    subject, issuer = (printable(text) or "nobody" for text in texts)
    return subject, issuer


def request_names(request: str) -> tuple[str, str]:
    """Return (name, organization) of a certificate request (PEM); UsageError if it is none."""
    return _names(_request(request).subject)


def fingerprint(pem: str) -> str:
    """Return SHA-256 of the public key in a certificate or a request (PEM), for people to compare by telephone.

    Example:
        >>> len(key_fingerprint(build_request(generate_key(), "C1", "a hospital")))
        95
    """
    try:
        key = (x509.load_pem_x509_csr(pem.encode()) if "REQUEST" in pem else _certificate(pem)).public_key()
    except ValueError:
        raise UsageError("this is neither a certificate nor a request") from None
    return _spelled(
        hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    )


def _spelled(digest: bytes) -> str:
    return digest.hex(":").upper()


def _issued(
    private: RSAPrivateKey,
    issuer: x509.Name,
    subject: x509.Name,
    key: RSAPublicKey,
    days: int,
    *,
    ca: bool,
    extra: x509.ExtensionType,
) -> str:
    """Return a certificate (PEM) for a key, signed by another or the same one."""
    now, above = datetime.now(UTC), private.public_key()
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(extra, critical=ca)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(above), critical=False)
    )
    return made.sign(private, SHA256()).public_bytes(Encoding.PEM).decode()


def _issued_by(certificate: str, root: str) -> bool:
    """Return whether a root CA's certificate signed another one (PEM)."""
    try:
        _certificate(certificate).verify_directly_issued_by(_certificate(root))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _general(host: str) -> x509.GeneralName:
    """Return a host's name or IP address in the form that clients compare with the called host."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


@lru_cache(maxsize=32)
def _private(pem: str) -> RSAPrivateKey:
    """Return a private key; the check when it is loaded takes a quarter of a second."""
    with suppress(ValueError):
        if isinstance(key := load_pem_private_key(pem.encode(), None), RSAPrivateKey):
            return key
    raise UsageError("this is no RSA key")


def _usual(key: object, whose: str) -> RSAPublicKey:
    """Return a public key after verifying that it is an RSA key with the usual exponent."""
    if not isinstance(key, RSAPublicKey):
        raise NotTrusted(f"{whose} has no RSA key")
    if (exponent := key.public_numbers().e) != _EXPONENT:
        raise NotTrusted(
            f"{whose} has a key with the exponent {exponent}, but {_EXPONENT} is required; make a key with `wsi-fl "
            "federation request`"
        )
    return key


def _certificate(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


def _request(pem: str) -> x509.CertificateSigningRequest:
    try:
        return x509.load_pem_x509_csr(pem.encode())
    except ValueError:
        raise UsageError("this is no certificate request") from None


def _names(subject: x509.Name) -> tuple[str, str]:
    """Return (name, organization), each empty if a certificate has none or several."""
    found = (subject.get_attributes_for_oid(one) for one in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME))
    name, organization = (str(one[0].value) if len(one) == 1 else "" for one in found)
    return name, organization
