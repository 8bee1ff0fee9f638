"""A hospital's replies to the server and the coordinator of a job: one of four agreed documents, and nothing else.

Neither side trusts the other: the server validates a hospital's reply before storing it, and the coordinator validates
the server's. An invalid reply ends the job in one line that names the hospital.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.data.cross_site_counts import N_BINS, CrossSiteCounts
from wsi_fl.federation.documents import Amount, PrintableText, ProtocolError, SiteName, decode_document
from wsi_fl.hospitals.faults import NO_FAULT, Fault, FaultCode
from wsi_fl.stages.training.summary import Summary
from wsi_fl.types import make_printable

_MAX_ERROR_CHARS = 1000
_MAX_VALUES = 1 << 21
"""Of a reply: a hundred models counted by a hundred hospitals."""


class _ReadyReply(TypedDict):
    """A hospital's process listens."""


class _FailureReply(TypedDict):
    """Why a hospital did not do its job: in words, as a code, and the hospital that is concerned, "" for none."""

    error: PrintableText
    code: FaultCode
    site: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$", max_length=200)]


class ReachabilityReply(TypedDict):
    """The peers that a hospital reached in a connection check."""

    site: SiteName
    peers: list[SiteName]
    seconds: Amount


class _RunReply(Summary):
    """The summary of a run, and the counts that left the hospitals; None if none did."""

    scores: CrossSiteCounts | None


Reply = Mapping[str, Any]
"""A validated document: that of the job, or a `_FailureReply`."""
_REPLY_TYPES: Mapping[str, Any] = {"ready": _ReadyReply, "check": ReachabilityReply, "work": _RunReply}


def failure_reply(text: str, fault: Fault = NO_FAULT) -> _FailureReply:
    """Return a failure document with its reason: one printable line of at most 1000 characters."""
    return {"error": make_printable(" ".join(text.split()))[:_MAX_ERROR_CHARS], "code": fault.code, "site": fault.site}


def parse_failure(text: str, site: str) -> _FailureReply:
    """Return a hospital's failure document after validation; ProtocolError, with the hospital's name, otherwise."""
    return decode_document(text.encode(errors="surrogatepass"), _FailureReply, site)


def parse_reply(text: str, site: str, job_kind: str) -> Reply:
    """Return a hospital's JSON reply after validation; ProtocolError, with the hospital's name, otherwise.

    Args:
        job_kind: the kind of job: "ready", "check" or "work".
    """
    reply: Reply = decode_document(
        text.encode(errors="surrogatepass"), _REPLY_TYPES[job_kind], site, max_values=_MAX_VALUES
    )
    if reply.get("scores") is not None and not _is_complete(reply["scores"]):
        raise ProtocolError(f"site {site} told what was not agreed on: scores that do not fit together")
    return reply


def validate_replies(replies: Any, sites: Sequence[str], job_kind: str) -> dict[str, Reply]:
    """Return the replies that the server passed on, by hospital, or ProtocolError; failures alone if any hospital
    failed.

    Args:
        replies: by site; a site without a reply is missing, or has an empty document.
        sites: of the job.
        job_kind: the kind of job.
    """
    if not isinstance(replies, Mapping) or not set(replies) <= set(sites):
        raise ProtocolError("the server handed on what was not agreed on: answers of sites that are not in this job")
    texts = {site: json.dumps(reply) for site, reply in replies.items() if reply != {}}
    failures = [site for site in texts if isinstance(replies[site], Mapping) and "error" in replies[site]]
    if failures:
        return {site: parse_failure(texts[site], site) for site in failures}
    return {site: parse_reply(text, site, job_kind) for site, text in texts.items()}


def _is_complete(scores: CrossSiteCounts) -> bool:
    """Return whether every model has counts of every hospital, in the shape of the number of classes."""
    n, hospitals = len(scores["classes"]), set(scores["hospitals"])
    bins = N_BINS if n == 2 else 0
    return set(scores["counts"]) == set(scores["models"]) and all(
        set(by_hospital) == hospitals
        and all(
            [len(row) for row in counts["confusion"]] == [n] * n
            and len(counts["positives"]) == len(counts["negatives"]) == len(counts.get("high", [])) == bins
            for counts in by_hospital.values()
        )
        for by_hospital in scores["counts"].values()
    )
