"""A hospital's replies to the server and the coordinator of a job: one of four agreed documents, and nothing else.

Neither side trusts the other: the server validates a hospital's reply before storing it, and the coordinator validates
the server's. An invalid reply ends the job in one line that names the hospital.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from wsi_fl.federation.documents import Amount, Name, NotAgreed, Words, decoded
from wsi_fl.learning.counts import N_BINS, Scores
from wsi_fl.stages.training.summary import Summary
from wsi_fl.types import printable

_LONGEST = 1000
_MOST_VALUES = 1 << 21
"""Of a reply: a hundred models counted by a hundred hospitals."""


class _Ready(TypedDict):
    """A hospital's process listens."""


class _Failed(TypedDict):
    """Why a hospital did not do its job."""

    error: Words


class Reached(TypedDict):
    """The peers that a hospital reached in a connection check."""

    site: Name
    peers: list[Name]
    seconds: Amount


class _Done(Summary):
    """The summary of a run, and the counts that left the hospitals; None if none did."""

    scores: Scores | None


_KINDS: dict[str, Any] = {"ready": _Ready, "check": Reached, "work": _Done}


def failed(text: str) -> _Failed:
    """Return a failure document with its reason: one printable line of at most 1000 characters."""
    return {"error": printable(" ".join(text.split()))[:_LONGEST]}


def answered(text: str, site: str, what: str) -> dict[str, Any]:
    """Return a hospital's JSON reply after validation; NotAgreed, with the hospital's name, otherwise.

    Args:
        job_kind: the kind of job: "ready", "check" or "work".
    """
    said: dict[str, Any] = decoded(
        text.encode(errors="surrogatepass"), _KINDS[what], site, most_values=_MOST_VALUES
    )
    if said.get("scores") is not None and not _whole(said["scores"]):
        raise NotAgreed(f"site {site} told what was not agreed on: scores that do not fit together")
    return said


def agreed(told: Any, sites: Sequence[str], what: str) -> dict[str, Any]:
    """Return the replies that the server passed on, by hospital, or NotAgreed; failures alone if any hospital failed.

    Args:
        replies: by site; a site without a reply is missing, or has an empty document.
        sites: of the job.
        job_kind: the kind of job.
    """
    if not isinstance(told, Mapping) or not set(told) <= set(sites):
        raise NotAgreed(
            "the server handed on what was not agreed on: answers of sites that are not in this job"
        )
    texts = {site: json.dumps(one) for site, one in told.items() if one != {}}
    failures = [site for site in texts if isinstance(told[site], Mapping) and "error" in told[site]]
    if failures:
        return {site: decoded(texts[site].encode(), _Failed, site) for site in failures}
    return {site: answered(text, site, what) for site, text in texts.items()}


def _whole(scores: Scores) -> bool:
    """Return whether every model has counts of every hospital, in the shape of the number of classes."""
    n, hospitals = len(scores["classes"]), set(scores["hospitals"])
    bins = N_BINS if n == 2 else 0
    return set(scores["counts"]) == set(scores["models"]) and all(
        set(held) == hospitals
        and all(
            [len(row) for row in one["confusion"]] == [n] * n
            and len(one["positives"]) == len(one["negatives"]) == len(one.get("high", [])) == bins
            for one in held.values()
        )
        for held in scores["counts"].values()
    )
