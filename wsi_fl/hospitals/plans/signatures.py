"""Documents that a kit's key signs: an approval of a plan, a frame of plans, a census."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from wsi_fl.hospitals.trust.certificates import Holder, Identity, NotTrusted, verified
from wsi_fl.types import UsageError


def sign_document(document: Mapping[str, Any], identity: Identity, purpose: bytes) -> dict[str, Any]:
    """Return a document with its signer's certificate and a signature that is good for one purpose alone."""
    signature = identity.sign(_signed(document, purpose))
    return {**document, "certificate": identity.certificate, "signature": signature.hex()}


def signer_of(document: Mapping[str, Any], root: str, purpose: bytes, what: str) -> Holder:
    """Return who signed a document, once every word of it is known to be what was signed.

    Args:
        root: the federation's root certificate, PEM.
        what: the document is, for messages.

    Raises:
        UsageError: in one line that says what is wrong.
    """
    try:
        holder = verified(str(document["certificate"]), root)
        holder.check(bytes.fromhex(str(document["signature"])), _signed(document, purpose))
    except (KeyError, ValueError, NotTrusted) as error:
        why = str(error) if isinstance(error, NotTrusted) else "it is incomplete"
        raise UsageError(f"{what} cannot be used: {why}") from None
    return holder


def _signed(document: Mapping[str, Any], purpose: bytes) -> bytes:
    said = {key: value for key, value in document.items() if key not in ("certificate", "signature")}
    return purpose + json.dumps(said, sort_keys=True).encode()
