"""Kinds of failures between hospitals, as codes that travel beside the sentence for people.

Programs decide by the code, so every sentence may change. A code says nothing of records.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

FaultCode = Literal[
    "",
    "aborted",
    "affordability",
    "certificate_refused",
    "clock",
    "failed",
    "folder",
    "kit",
    "ledger",
    "lost",
    "name",
    "no_answer",
    "no_flare",
    "no_route",
    "not_begun",
    "not_connected",
    "older_key",
    "other_code",
    "other_key",
    "other_store",
    "revoked",
    "second_run",
    "server_certificate",
    "server_lost",
    "server_stopped",
    "site_ended",
    "site_terms",
    "unsigned",
    "withdrew",
]
"""The kind of a failure; "" for one that has no code."""
RETRYABLE: frozenset[FaultCode] = frozenset(("clock", "failed", "lost", "other_code", "revoked", "withdrew"))
"""Failures of a single hospital after which a further job may succeed, if need be without it."""

_E = TypeVar("_E", bound=BaseException)


class Fault(NamedTuple):
    """The kind of a failure, and the hospital that is concerned; "" for none."""

    code: FaultCode = ""
    site: str = ""


NO_FAULT = Fault()


def mark_fault(error: _E, code: FaultCode, site: str = "") -> _E:
    """Return an error with the kind of its failure attached."""
    error.__dict__["fault"] = Fault(code, site)
    return error


def find_fault(error: BaseException | None) -> Fault:
    """Return the kind of a failure, also of one that was raised again with another class; empty if it has none."""
    while error is not None:
        if "fault" in error.__dict__:
            return Fault(*error.__dict__["fault"])
        error = error.__cause__ or error.__context__
    return NO_FAULT
