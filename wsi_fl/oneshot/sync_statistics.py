"""Synchronisation of released class statistics (see `statistics`) over the network, in place of people.

Each site announces its files. A site that lacks another's statistics gets them from that site only, checks and stores
them as a file that people copied. The run then uses the files.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.federation.comm import Comm
from wsi_fl.federation.documents import Digest, ProtocolError, SiteName
from wsi_fl.oneshot.released_statistics import (
    STATISTICS_RUN,
    ReleasedStatistics,
    build_header,
    encode_file,
    read_statistics,
    refuse_mismatch,
    require_statistics,
    statistics_of,
)
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import digest_values
from wsi_fl.stages.site.privacy_account import build_terms, find_guarantee
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_ledger import open_ledger, require_release
from wsi_fl.system.files import atomic_path
from wsi_fl.types import ReportableError, UsageError, WsiFlError

_MAX_TEXT_CHARS = 8 << 20
"""The longest file as base64: 1000 classes along 1536 directions. All files of a job are in memory at once."""
_SiteNames = Annotated[list[SiteName], Field(max_length=10_000)]


class StatisticsOffer(TypedDict):
    """The files of class statistics at a site, by SHA-256.

    Attributes:
        own: of the site; "" for none.
        held: by site of the plan, itself included.
        began: the sites whose statistics its run began with, where it resumes a run of a signed plan.
    """

    own: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    held: Annotated[dict[SiteName, Digest], Field(max_length=10_000)]
    began: _SiteNames | None


class StatisticsFile(TypedDict):
    """The file of a site's class statistics in base64; "" where all have it."""

    letter: Annotated[str, Field(max_length=_MAX_TEXT_CHARS)]


def sync_statistics(context: RunContext, comm: Comm) -> RunContext:
    """Send each site the files that it lacks from present sites; return the context of the common statistics.

    A file of an absent site is used where all have the same. Nothing is disclosed where heads use no files.

    Raises:
        ReportableError: when there are fewer statistics than agreed.
        WsiFlError: when local statistics may not leave, or others' are invalid.
    """
    if not context.uses_files:
        return context
    names, local_names = [context.names[k] for k in comm.running], [context.names[k] for k in comm.sites]
    file_digests = {
        name: sha256(encode_file(statistics)).hexdigest() for name, statistics in statistics_of(context).items()
    }
    released_before = (
        context.run.site_folder(local_names[0]).read_statistics_digests() if context.run.agreement_digest else None
    )
    begun_names = None if released_before is None else sorted(released_before)
    local_offers = [
        StatisticsOffer(own=file_digests.get(name, ""), held=file_digests, began=begun_names) for name in local_names
    ]
    offers = dict(zip(names, comm.gather(local_offers, StatisticsOffer), strict=True))
    missing_names = [name for name in names if offers[name]["own"] and _is_missing(offers, name)]
    if missing_names:
        local_files = [
            StatisticsFile(letter=_encode_statistics(context, name) if name in missing_names else "")
            for name in local_names
        ]
        files = dict(zip(names, comm.gather(local_files, StatisticsFile), strict=True))
        for name in missing_names:
            if name not in local_names:
                _keep_statistics(context, local_names[0], name, files[name]["letter"])
    context = replace(context, common_sites=frozenset(_find_common(offers, context.names)))
    try:
        require_statistics(context)
    except WsiFlError as error:
        raise ReportableError(str(error)) from None
    return context


def _is_missing(offers: Mapping[str, StatisticsOffer], name: str) -> bool:
    """Return whether a site lacks the current file of another."""
    return any(offer["held"].get(name) != offers[name]["own"] for offer in offers.values())


def _find_common(offers: Mapping[str, StatisticsOffer], names: Sequence[str]) -> list[str]:
    """Return the sites whose statistics all sites have after synchronisation, and had when the run began."""
    absent_digests = {
        name: {offer["held"].get(name, "") for offer in offers.values()} for name in names if name not in offers
    }
    available = [name for name in names if (offers[name]["own"] if name in offers else absent_digests[name] - {""})]
    begun = [offer["began"] for offer in offers.values() if offer["began"] is not None]
    return [
        name
        for name in available
        if len(absent_digests.get(name, "1")) == 1 and all(name in begun_names for begun_names in begun)
    ]


def load_local_statistics(context: RunContext, name: str) -> tuple[ReleasedStatistics, PrivacyLedger, int]:
    """Return a site's class statistics, its ledger, and the round of their release, after checks that they may leave.

    Raises:
        UsageError: when there are none, or they have no differential privacy and the site no longer allows that.
        WsiFlError: when they were edited, or are not final in the ledger.
    """
    study, site = context.study, context.find_site(name)
    label = study.relative_path(study.release_path(name))
    if (statistics := statistics_of(context).get(name)) is None:
        raise UsageError(
            f"site {name} has released no statistics, and this plan sends them; there: `wsi-fl statistics "
            f"--site {name}` with the plan's settings"
        )
    terms = build_terms(site, context.pipeline, find_guarantee(context.method, context.pipeline))
    ledger = open_ledger(study, site, STATISTICS_RUN, terms)
    round_ = require_release(ledger, STATISTICS_RUN, digest_values(statistics.vector), label)
    if not round_.final:
        raise WsiFlError(
            f"{label}: not final in the ledger, so that it may not leave; run `wsi-fl statistics --site {name}`, which "
            "spends nothing then"
        )
    if ledger.epsilon() is None and not site.allows("model"):
        raise UsageError(
            f"sites/{name}.toml: statistics without differential privacy may not leave this site; add allow = "
            '["model"] there'
        )
    return statistics, ledger, round_.number


def _encode_statistics(context: RunContext, name: str) -> str:
    """Return a site's class statistics as base64, recorded in its ledger; nothing is spent."""
    statistics, ledger, round_ = load_local_statistics(context, name)
    text = b64encode(encode_file(statistics)).decode()
    if len(text) > _MAX_TEXT_CHARS:
        raise WsiFlError(
            f"the statistics of site {name} are too long for a network; copy them to the others' statistics/"
        )
    ledger.release_again(round_, statistics.vector, schema="sums", agreement=context.run.agreement_digest)
    return text


def _keep_statistics(context: RunContext, local_site: str, name: str, text: str) -> None:
    """Store another site's class statistics after checks."""
    study, label = context.study, f"the statistics of site {name}"
    try:
        content = b64decode(text, validate=True)
    except ValueError:
        raise ProtocolError(f"site {name} told what was not agreed on: no statistics") from None
    with atomic_path(study.release_path(name)) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_bytes(content)
        statistics = read_statistics(temporary, label, name)
        refuse_mismatch(statistics.header, build_header(context.open_data(local_site)), label)
