"""Documents between sites: JSON of an agreed type, bounded in length, depth and number of values.

Peers are not trusted: each document is validated here before any use. An agreed type is a `TypedDict` (that of
typing_extensions, which pydantic needs before Python 3.12) whose fields have bounds; other keys are refused, and no
value is converted to the expected type.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from wsi_fl.types import ReportableError

_T = TypeVar("_T")

MAX_BYTES = 16 << 20
"""The longest text of a document."""
_MAX_VALUES = 1 << 18
"""A short text may take much memory: `[[],[],…` a hundred times its length."""
_MAX_ERRORS, _MAX_KEY_CHARS, _MAX_ERROR_CHARS = 1000, 100, 250
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
"""Name of a site, valid as part of a path."""
PrintableText = Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$", max_length=1000)]
"""A printable line."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""SHA-256."""
Count = Annotated[int, Field(ge=0, le=1 << 53)]
RoundNumber = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Amount = Annotated[float, Field(ge=0)]


class ProtocolError(ReportableError):
    """A peer broke the protocol."""


def encode_document(document: _T, kind: type[_T], site: object) -> bytes:
    """Return the text of a document of an agreed TypedDict, after the checks that peers will make.

    Raises:
        ProtocolError: when it is not of this kind, too long, or holds a non-finite number.
    """
    try:
        text = json.dumps(document, allow_nan=False).encode()
    except ValueError:
        raise ProtocolError(f"site {site} would send a number that is not finite") from None
    check_length(len(text), site)
    decode_document(text, kind, site)
    return text


def check_length(n_bytes: int, site: object) -> None:
    """Refuse an announced length before memory is allocated for it.

    Raises:
        ProtocolError: when it is negative, or more than MOST_BYTES.
    """
    if not 0 <= n_bytes <= MAX_BYTES:
        raise ProtocolError(f"site {site} announced a document of {n_bytes} bytes; at most {MAX_BYTES}")


def decode_document(text: bytes, kind: type[_T], site: object, *, max_values: int = _MAX_VALUES) -> _T:
    """Parse the text of a document of an agreed TypedDict; messages name its sender `site`.

    Raises:
        ProtocolError: in one line of at most 500 characters, when it is no JSON in UTF-8, nested more than 200 deep,
            has too many values, or is not of this kind.
    """
    check_length(len(text), site)
    n_values = sum(text.count(mark) for mark in b"[{,")
    if n_values > max_values:
        raise ProtocolError(f"site {site} told a document of {n_values} values; at most {max_values}")
    agreed: Any = kind
    try:
        document: _T = _type_adapter(agreed).validate_json(text)
    except ValidationError as error:
        raise ProtocolError(f"site {site} told what was not agreed on: {_describe_error(error)}") from None
    return document


@cache
def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a TypedDict."""
    return TypeAdapter(with_config(_STRICT)(kind))


def _describe_error(error: ValidationError) -> str:
    """Describe the first error of a document in printable text; keys are chosen by the peer."""
    if error.error_count() > _MAX_ERRORS:  # a list of them takes memory
        return f"{error.error_count()} errors"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:_MAX_KEY_CHARS]
    text = f"{where}: {first['msg']}" if where else first["msg"]
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_ERROR_CHARS])
