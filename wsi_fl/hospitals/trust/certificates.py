"""Who is who between hospitals: one root per federation, and a certificate for everybody who takes part.

Keys never leave the machine they were made on. A hospital sends a request, whoever founded the federation approves it,
and the hospital puts the certificate beside its key (RFC 2986, RFC 5280). The root's key can name anybody.

The root also signs a numbered list of keys whose certificates it has withdrawn, a CRL (RFC 5280, section 5). What is
*trusted* is one PEM text: the root's certificate, and after it that list, where there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import (
    RSAPrivateKey,
    RSAPublicKey,
    generate_private_key,
)
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
"""NVIDIA FLARE 2.9 has room for keys of this length alone in what it encrypts from end to end."""
_EXPONENT = 65537
"""The only public exponent that is taken: who may choose one soon finds a key whose fingerprint begins like another's,
or one whose signatures need no private key."""
_ROOT_DAYS, _CERTIFICATE_DAYS = 3650, 730
_SKEW = timedelta(minutes=10)
"""A certificate holds from a little before it was made, for clocks that are slow."""
_FLARE_ROLE = {"coordinator": "project_admin"}
"""What FLARE reads of a certificate to know what its holder may do."""
_KEY_OF, _OCTETS = x509.ObjectIdentifier("2.25.226721314452911909386262347428626637672"), b"\x04\x20"
"""The extension of an entry of the list that holds the SHA-256 of the key, for plans pin keys, and how DER begins its
32 bytes. The identifier is a UUID (ITU-T X.667)."""
_PADDING = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


class NotTrusted(KnownToAll):
    """Something was not signed by whom it says it comes from."""


@dataclass(frozen=True)
class Identity:
    """A key, its certificate and the root of the federation: what one needs to speak for a site.

    Attributes:
        name: the site's, as the certificate has it.
        certificate: PEM.
        root: what is trusted, PEM.
    """

    name: str
    key: RSAPrivateKey
    certificate: str
    root: str

    @staticmethod
    def load(key: str, certificate: str, root: str, *, now: datetime | None = None) -> Identity:
        """Return the identity that three PEM texts make up.

        Raises:
            UsageError: when they do not belong together, or the certificate does not hold now.
        """
        try:
            private = _private(key)
            holder = verified(certificate, root, now=now)
        except (ValueError, NotTrusted) as error:
            raise UsageError(f"this kit cannot be used: {error}") from None
        if _certificate(certificate).public_key() != private.public_key():
            raise UsageError("this kit cannot be used: its certificate belongs to another key")
        return Identity(holder.name, private, certificate, root)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of some bytes (RSASSA-PSS with SHA-256, RFC 8017)."""
        return self.key.sign(data, _PADDING, SHA256())


@dataclass(frozen=True)
class Holder:
    """Whom a certificate names.

    Attributes:
        until: when the certificate ends.
    """

    name: str
    organization: str
    until: datetime
    _key: RSAPublicKey

    def check(self, signature: bytes, data: bytes) -> None:
        """Refuse what this holder did not sign.

        Raises:
            NotTrusted: when the signature is not that of these bytes by the holder's key.
        """
        try:
            self._key.verify(signature, data, _PADDING, SHA256())
        except InvalidSignature:
            raise NotTrusted(f"a message in the name of {self.name} was not signed by it") from None


def verified(certificate: str, root: str, *, now: datetime | None = None) -> Holder:
    """Return whom a certificate names, once it is known to be one of the federation that holds now.

    Args:
        certificate: PEM.
        root: what is trusted, PEM.
        now: the time it must hold at; default: now.

    Raises:
        NotTrusted: in one line that says what is wrong.
    """
    if not issued_by(certificate, root):
        raise NotTrusted("a certificate does not belong to this federation")
    found, above = _certificate(certificate), _certificate(root)
    name, organization = (
        _named(found.subject, NameOID.COMMON_NAME),
        _named(found.subject, NameOID.ORGANIZATION_NAME),
    )
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
    if _is_authority(found):
        raise NotTrusted(f"the certificate of {name} may sign others, so no site may use it")
    _usual(above.public_key(), "the federation's root")
    key = _usual(found.public_key(), f"the certificate of {name}")
    return Holder(name, organization, found.not_valid_after_utc, key)


@dataclass(frozen=True)
class Withdrawn:
    """The list of withdrawn certificates.

    Attributes:
        number: of the list; of two the higher holds. 0 where there is none.
        keys: when each key was withdrawn, by its fingerprint.
        text: the list and nothing else, PEM; "" where there is none.
    """

    number: int
    keys: Mapping[str, datetime]
    text: str


def withdrawn(trusted: str) -> Withdrawn:
    """Return what the list says in a PEM text that is trusted.

    Raises:
        NotTrusted: when what follows the root's certificate is no list that the root signed.
    """
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
    """Return the next list, PEM: that of before and more certificates: by number, the fingerprints of their keys."""
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
    """Return the root certificate (PEM) of a federation, signed by its own key (PEM)."""
    private, now = _private(key), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, federation)])
    identifier = x509.SubjectKeyIdentifier.from_public_key(private.public_key())
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    made = (
        _begun(name, name, private.public_key(), now, _ROOT_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .sign(private, SHA256())
    )
    return _pem(made)


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
    """Return the certificate (PEM) for a request.

    Args:
        request, root_key: PEM.
        root: what is trusted, PEM.
        role: what its holder is.
        hosts: names under which a server is reached.
        days: how long it holds.

    Raises:
        UsageError: when the request was not signed by the key that it is for, or the key is withdrawn or unusual.
    """
    try:
        asked, above, private = (
            x509.load_pem_x509_csr(request.encode()),
            _certificate(root),
            _private(root_key),
        )
    except ValueError:
        raise UsageError("this is no certificate request") from None
    if not asked.is_signature_valid:
        raise UsageError("this request was not signed by its own key")
    try:
        key = _usual(asked.public_key(), "this request")
    except NotTrusted as error:
        raise UsageError(str(error)) from None
    name = _named(asked.subject, NameOID.COMMON_NAME)
    if fingerprint(request) in withdrawn(root).keys:
        raise UsageError(f"the key of this request was withdrawn; {name} needs a new one, in a new kit")
    subject = [  # of the request nothing but these: whatever else it says could give its holder a role
        x509.NameAttribute(NameOID.COMMON_NAME, name),
        x509.NameAttribute(
            NameOID.ORGANIZATION_NAME, _named(asked.subject, NameOID.ORGANIZATION_NAME) or name
        ),
    ]
    if role in _FLARE_ROLE:
        subject.append(x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, _FLARE_ROLE[role]))
    identifier = x509.SubjectKeyIdentifier.from_public_key(private.public_key())
    made = (
        _begun(x509.Name(subject), above.subject, key, datetime.now(UTC), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([_general(host) for host in hosts or (name,)]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .sign(private, SHA256())
    )
    return _pem(made)


def issued_by(certificate: str, root: str) -> bool:
    """Return whether a root certificate signed another one (PEM)."""
    try:
        _certificate(certificate).verify_directly_issued_by(_certificate(root))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def names_in(certificate: str) -> tuple[str, str]:
    """Return (subject, issuer) of any certificate (PEM), each as a short text that steers no terminal."""
    found = _certificate(certificate)
    texts = (" ".join(one.rfc4514_string().split())[:200] for one in (found.subject, found.issuer))
    subject, issuer = (printable(text) or "nobody" for text in texts)
    return subject, issuer


def request_names(request: str) -> tuple[str, str]:
    """Return (name, organization) of a certificate request (PEM).

    Raises:
        UsageError: when it is none.
    """
    try:
        subject = x509.load_pem_x509_csr(request.encode()).subject
    except ValueError:
        raise UsageError("this is no certificate request") from None
    return _named(subject, NameOID.COMMON_NAME), _named(subject, NameOID.ORGANIZATION_NAME)


def fingerprint(pem: str) -> str:
    """Return SHA-256 of the public key in a certificate or a request (PEM), for people to compare by telephone.

    Example:
        >>> len(fingerprint(new_request(new_key(), "C1", "a hospital")))
        95
    """
    try:
        key = (x509.load_pem_x509_csr(pem.encode()) if "REQUEST" in pem else _certificate(pem)).public_key()
    except ValueError:
        raise UsageError("this is neither a certificate nor a request") from None
    return _spelled(
        hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    )


def serial_number(certificate: str) -> int:
    """Return the number that the root gave a certificate (PEM)."""
    return _certificate(certificate).serial_number


def _spelled(digest: bytes) -> str:
    return digest.hex(":").upper()


def _begun(
    subject: x509.Name, issuer: x509.Name, key: RSAPublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _general(host: str) -> x509.GeneralName:
    """A host's name or IP address, as clients compare it with the one that they call."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(pem: str) -> RSAPrivateKey:
    key = load_pem_private_key(pem.encode(), None)
    if not isinstance(key, RSAPrivateKey):
        raise UsageError("this is no RSA key")
    return key


def _usual(key: object, whose: str) -> RSAPublicKey:
    """Return a public key, once it is an RSA key with the usual exponent."""
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


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        return False


def _named(subject: x509.Name, what: x509.ObjectIdentifier) -> str:
    """One attribute of a name, empty where it has none or several."""
    found = subject.get_attributes_for_oid(what)
    return str(found[0].value) if len(found) == 1 else ""
