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

from wsi_fl.hospitals.faults import mark_fault
from wsi_fl.types import ReportableError, UsageError, make_printable

Role = Literal["server", "coordinator", "hospital"]
_KEY_BITS = 2048
"""The only key length that fits NVIDIA FLARE 2.9's end-to-end encryption."""
_EXPONENT = 65537
"""The only accepted public exponent: with a free choice it is easy to find a key whose fingerprint begins like
another's, or one whose signatures need no private key."""
_ROOT_DAYS, _CERTIFICATE_DAYS = 3650, 730
_CLOCK_SKEW = timedelta(minutes=10)
"""Validity of a certificate before its creation, for slow clocks."""
_FLARE_ROLE = {"coordinator": "project_admin"}
"""The role that FLARE reads from a certificate."""
_KEY_EXTENSION, _OCTETS_PREFIX = (x509.ObjectIdentifier("2.25.226721314452911909386262347428626637672"), b"\x04\x20")
"""The extension of a list entry with the SHA-256 of the key, since plans pin keys, and the DER prefix of its 32 bytes.
The identifier is a UUID (ITU-T X.667)."""
_SIGNATURE_PADDING = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


class NotTrusted(ReportableError):
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
            private = _load_private_key(key)
            holder = verify_certificate(certificate, root)
        except (ValueError, UsageError, NotTrusted) as error:
            raise UsageError(f"this kit cannot be used: {error}") from None
        if _parse_certificate(certificate).public_key() != private.public_key():
            raise UsageError("this kit cannot be used: its certificate belongs to another key")
        return Identity(holder.name, private, certificate, root)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of bytes (RSASSA-PSS with SHA-256, RFC 8017)."""
        return self.key.sign(data, _SIGNATURE_PADDING, SHA256())

    def sign_document(self, document: Mapping[str, Any], purpose: bytes) -> dict[str, object]:
        """Return a document with its signer's certificate and a signature that is valid for one purpose alone."""
        signature = self.sign(_bytes_to_sign(document, purpose))
        return {**document, "certificate": self.certificate, "signature": signature.hex()}


@dataclass(frozen=True)
class Holder:
    """The holder that a certificate names, its serial number, and its last day."""

    name: str
    number: int
    until: datetime
    _key: RSAPublicKey

    def verify_signature(self, signature: bytes, data: bytes) -> None:
        """Refuse (NotTrusted) data that this holder's key did not sign."""
        try:
            self._key.verify(signature, data, _SIGNATURE_PADDING, SHA256())
        except InvalidSignature:
            raise NotTrusted(f"a message in the name of {self.name} was not signed by it") from None


def verify_document(document: Mapping[str, Any], root: str, purpose: bytes, label: str) -> Holder:
    """Return the signer of a document after verifying all of it; UsageError otherwise.

    Args:
        root: the trusted text, PEM.
        label: the name of the document, for messages.
    """
    try:
        holder = verify_certificate(str(document["certificate"]), root)
        holder.verify_signature(bytes.fromhex(str(document["signature"])), _bytes_to_sign(document, purpose))
    except (KeyError, ValueError, NotTrusted) as error:
        reason = str(error) if isinstance(error, NotTrusted) else "it is incomplete"
        raise UsageError(f"{label} cannot be used: {reason}") from None
    return holder


def _bytes_to_sign(document: Mapping[str, Any], purpose: bytes) -> bytes:
    content = {key: value for key, value in document.items() if key not in ("certificate", "signature")}
    return purpose + json.dumps(content, sort_keys=True).encode()


def verify_certificate(certificate: str, root: str) -> Holder:
    """Return the holder of a certificate (PEM) after verifying that it is of the federation and valid now.

    NotTrusted, by the trusted text (PEM), with one line on the fault.
    """
    if not _is_issued_by(certificate, root):
        raise NotTrusted("a certificate does not belong to this federation")
    leaf, issuer = _parse_certificate(certificate), _parse_certificate(root)
    name, _ = _subject_names(leaf.subject)
    if (revoked_on := parse_revocation_list(root).keys.get(key_fingerprint(certificate))) is not None:
        raise NotTrusted(f"the certificate of {name} was withdrawn on {revoked_on:%Y-%m-%d}; {name} needs a new key")
    today = datetime.now(UTC)
    for link, owner in ((leaf, name), (issuer, "the federation's root")):
        if not link.not_valid_before_utc <= today <= link.not_valid_after_utc:
            text = (
                f"the certificate of {owner} holds from {link.not_valid_before_utc:%Y-%m-%d %H:%M} to "
                f"{link.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and this clock says {today:%Y-%m-%d %H:%M}; set the "
                "clock, or request a new certificate"
            )
            raise mark_fault(NotTrusted(text), "certificate_refused")
    if any(isinstance(extension.value, x509.BasicConstraints) and extension.value.ca for extension in leaf.extensions):
        raise NotTrusted(f"the certificate of {name} may sign others, so no site may use it")
    _require_rsa_key(issuer.public_key(), "the federation's root")
    key = _require_rsa_key(leaf.public_key(), f"the certificate of {name}")
    return Holder(name, leaf.serial_number, leaf.not_valid_after_utc, key)


@dataclass(frozen=True)
class RevocationList:
    """A revocation list: its number (the higher of two holds), the time of each key's revocation by fingerprint, and
    the list itself as PEM. Without one: 0, nothing and "".
    """

    number: int
    keys: Mapping[str, datetime]
    text: str


def parse_revocation_list(trusted: str) -> RevocationList:
    """Return the list in a trusted PEM text; NotTrusted if the root CA did not sign it."""
    root, end, list_pem = trusted.partition("-----END CERTIFICATE-----")
    if not list_pem.strip():
        return RevocationList(0, {}, "")
    try:
        revocations, issuer = x509.load_pem_x509_crl(list_pem.encode()), _parse_certificate(root + end)
        if revocations.issuer != issuer.subject or not revocations.is_signature_valid(
            _require_rsa_key(issuer.public_key(), "it")
        ):
            raise ValueError
        number = revocations.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        keys: dict[str, datetime] = {}
        for entry in revocations:
            digest = entry.extensions.get_extension_for_oid(_KEY_EXTENSION).value.public_bytes()
            keys[_format_digest(digest.removeprefix(_OCTETS_PREFIX))] = entry.revocation_date_utc
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        raise NotTrusted("the list of withdrawn certificates was not signed by this federation's root") from None
    return RevocationList(number, keys, revocations.public_bytes(Encoding.PEM).decode())


def extend_revocation_list(trusted: str, root_key: str, additions: Mapping[int, str]) -> str:
    """Return the next list, PEM: the previous one and further certificates, key fingerprints by serial number."""
    previous, issuer, issued_on = (parse_revocation_list(trusted), _parse_certificate(trusted), datetime.now(UTC))
    builder = x509.CertificateRevocationListBuilder(issuer.subject, issued_on - _CLOCK_SKEW, issuer.not_valid_after_utc)
    builder = builder.add_extension(x509.CRLNumber(previous.number + 1), critical=False)
    for entry in x509.load_pem_x509_crl(previous.text.encode()) if previous.text else ():
        builder = builder.add_revoked_certificate(entry)
    for number, key in additions.items():
        digest = x509.UnrecognizedExtension(_KEY_EXTENSION, _OCTETS_PREFIX + bytes.fromhex(key.replace(":", "")))
        entry = x509.RevokedCertificateBuilder(number, issued_on).add_extension(digest, critical=False).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(_load_private_key(root_key), SHA256()).public_bytes(Encoding.PEM).decode()


def generate_key() -> str:
    """Return a fresh private key as PEM."""
    key = generate_private_key(public_exponent=_EXPONENT, key_size=_KEY_BITS)
    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()


def build_root_certificate(key: str, federation: str) -> str:
    """Return the root CA's certificate (PEM) of a federation, signed by its own key (PEM)."""
    private, name = _load_private_key(key), _subject_of(federation)
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    denied_usages = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **denied_usages)
    return _sign_certificate(private, name, name, private.public_key(), _ROOT_DAYS, ca=True, extra=usage)


def build_request(key: str, name: str, organization: str) -> str:
    """Return a certificate request (PEM) for a key (PEM)."""
    subject = _subject_of(name, organization)
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(_load_private_key(key), SHA256())
    return request.public_bytes(Encoding.PEM).decode()


def issue_certificate(
    request: str, root_key: str, root: str, *, role: Role, hosts: tuple[str, ...] = (), days: int = _CERTIFICATE_DAYS
) -> str:
    """Return the certificate (PEM) for a request (PEM).

    Args:
        root: the trusted text, PEM.
        hosts: names under which a server is reached.

    Raises:
        UsageError: when the request was not signed by its own key, or the key is revoked or unusual.
    """
    signing_request = _parse_request(request)
    if not signing_request.is_signature_valid:
        raise UsageError("this request was not signed by its own key")
    try:
        key = _require_rsa_key(signing_request.public_key(), "this request")
    except NotTrusted as error:
        raise UsageError(str(error)) from None
    name, organization = _subject_names(signing_request.subject)
    if key_fingerprint(request) in parse_revocation_list(root).keys:
        raise UsageError(f"the key of this request was withdrawn; {name} needs a new one, in a new kit")
    # of the request these fields alone: others could give its holder a role
    subject = _subject_of(name, organization or name, _FLARE_ROLE.get(role))
    alternative_names = x509.SubjectAlternativeName([_general_name(host) for host in hosts or (name,)])
    issuer = _parse_certificate(root).subject
    return _sign_certificate(_load_private_key(root_key), issuer, subject, key, days, ca=False, extra=alternative_names)


def describe_foreign_certificate(certificate: str, root: str) -> tuple[str, str] | None:
    """Return (subject, issuer) of a certificate (PEM), short printable texts; None for one of the root CA."""
    if _is_issued_by(certificate, root):
        return None
    parsed = _parse_certificate(certificate)
    texts = (" ".join(name.rfc4514_string().split())[:200] for name in (parsed.subject, parsed.issuer))
    subject, issuer = (make_printable(text) or "nobody" for text in texts)
    return subject, issuer


def read_request_names(request: str) -> tuple[str, str]:
    """Return (name, organization) of a certificate request (PEM); UsageError if it is none."""
    return _subject_names(_parse_request(request).subject)


def key_fingerprint(pem: str) -> str:
    """Return SHA-256 of the public key in a certificate or a request (PEM), for people to compare by telephone.

    Example:
        >>> len(key_fingerprint(build_request(generate_key(), "C1", "a hospital")))
        95
    """
    try:
        key = (x509.load_pem_x509_csr(pem.encode()) if "REQUEST" in pem else _parse_certificate(pem)).public_key()
    except ValueError:
        raise UsageError("this is neither a certificate nor a request") from None
    return _format_digest(hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest())


def _format_digest(digest: bytes) -> str:
    return digest.hex(":").upper()


def _sign_certificate(
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
    issued_on, issuer_key = datetime.now(UTC), private.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(issued_on - _CLOCK_SKEW)
        .not_valid_after(issued_on + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(extra, critical=ca)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )
    return builder.sign(private, SHA256()).public_bytes(Encoding.PEM).decode()


def _is_issued_by(certificate: str, root: str) -> bool:
    """Return whether a root CA's certificate signed another one (PEM)."""
    with suppress(ValueError, TypeError, InvalidSignature):
        _parse_certificate(certificate).verify_directly_issued_by(_parse_certificate(root))
        return True
    return False


def _general_name(host: str) -> x509.GeneralName:
    """Return a host's name or IP address in the form that clients compare with the called host."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


@lru_cache(maxsize=32)
def _load_private_key(pem: str) -> RSAPrivateKey:
    """Return a private key; the check when it is loaded takes a quarter of a second."""
    with suppress(ValueError):
        if isinstance(key := load_pem_private_key(pem.encode(), None), RSAPrivateKey):
            return key
    raise UsageError("this is no RSA key")


def _require_rsa_key(key: object, owner: str) -> RSAPublicKey:
    """Return a public key after verifying that it is an RSA key with the usual exponent."""
    if not isinstance(key, RSAPublicKey):
        raise NotTrusted(f"{owner} has no RSA key")
    if (exponent := key.public_numbers().e) != _EXPONENT:
        raise NotTrusted(
            f"{owner} has a key with the exponent {exponent}, but {_EXPONENT} is required; make a key with `wsi-fl "
            "federation request`"
        )
    return key


def _parse_certificate(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


def _parse_request(pem: str) -> x509.CertificateSigningRequest:
    try:
        return x509.load_pem_x509_csr(pem.encode())
    except ValueError:
        raise UsageError("this is no certificate request") from None


def _subject_of(name: str, organization: str | None = None, role: str | None = None) -> x509.Name:
    oids = (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME, NameOID.UNSTRUCTURED_NAME)
    texts = zip(oids, (name, organization, role), strict=True)
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in texts if text is not None])


def _subject_names(subject: x509.Name) -> tuple[str, str]:
    """Return (name, organization), each empty if a certificate has none or several."""
    attributes = (subject.get_attributes_for_oid(oid) for oid in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME))
    name, organization = (str(values[0].value) if len(values) == 1 else "" for values in attributes)
    return name, organization
