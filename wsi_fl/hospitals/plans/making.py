"""The plan's content: everything that hospitals read before they sign, derived from the settings that will run.

The text follows from the settings, the sites and the training data, and from nothing else. So a hospital renders the
same text again, and refuses a plan whose text differs in any character.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from wsi_fl import __version__
from wsi_fl.federation.methods import names_of
from wsi_fl.hospitals.plans.contents import (
    WORDS,
    Learned,
    Leaving,
    filled,
    learned_by,
    leaving,
    shape_of,
    staying,
)
from wsi_fl.hospitals.plans.signed import (
    FORMAT,
    VERSION,
    Plan,
    approval_path,
    code_digest,
    keep_other,
    packages,
)
from wsi_fl.privacy.guarantee import MOST_ATTEMPTS
from wsi_fl.report.words import duration
from wsi_fl.stages.site.account import guarantee_of, spends, weights_of
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training.checks import check
from wsi_fl.stages.work.console import Line, Lines, say
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, pipeline_model
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import dump_toml, validated
from wsi_fl.system.files import write_text
from wsi_fl.types import UsageError

_ROOM = 32_000_000
"""Bytes of the longest message beyond twice the largest payload."""
_UNKNOWN, _UNKNOWN_SUMS = 500_000_000, 10_000_000
"""Assumed size of the largest payload if it is not known yet; class statistics are small."""


class PlannedSite(TypedDict):
    """A site by its own file, in the study where the plan was made.

    Attributes:
        role: "receiver" for an inference-only site, which releases nothing and receives the one-shot global head.
        allow: what it discloses without differential privacy.
        max_epsilon, delta: its budget; None if its file names none.
        key: the fingerprint of its key, which people compare by telephone; None if none is pinned: then anybody with
            the root CA's key can speak for the site.
    """

    name: str
    real: bool
    role: Literal["member", "receiver"]
    allow: list[str]
    max_epsilon: float | None
    delta: float | None
    key: str | None


class _Protection(TypedDict):
    """The guarantee of differential privacy.

    Attributes:
        epsilon: the largest ε that training, or each attempt at a sum, may cost a site; None if each site's max_epsilon
            alone bounds it, and if class statistics are sent that were paid for before.
        delta: of simulated sites that name none.
        says: all this in words.
    """

    differential_privacy: bool
    guarantee: str
    unit: str
    epsilon: float | None
    delta: float
    sigma: float | None
    clip: float | None
    batch_size: int | None
    sampling: str | None
    says: str


def _a_time(text: str) -> str:
    """Return a time in the format of `make_plan`; ValueError for any other text."""
    with suppress(ValueError):
        time = datetime.fromisoformat(text)
        if time.tzinfo is not None and time.isoformat(timespec="seconds") == text:
            return text
    raise ValueError("not a time with its zone, such as 2026-07-01T09:30:00+00:00")


class PlanDocument(TypedDict):
    """The file of a plan; `created` is missing until it is written."""

    format: str
    version: int
    created: NotRequired[Annotated[str, AfterValidator(_a_time)]]
    wsi_fl: str
    code: str
    packages: dict[str, str]
    method: str
    pipeline: str
    does: str
    sites: list[PlannedSite]
    learns: Learned
    rounds: int
    epochs_per_round: int
    waits: str
    privacy: _Protection
    leaves: list[Leaving]
    stays: list[str]
    most_bytes: int
    settings: str


def make_plan(
    study: Study,
    *,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    out: Path,
    keys: Mapping[str, str] | None = None,
) -> Plan:
    """Write the plan of a method for all sites of a study, and return it.

    A different plan in its place, and approvals of one, are copied first; see `keep_other`.

    Args:
        out: the file to write.
        keys: the fingerprint of each site's key.

    Raises:
        UsageError: when the method shares nothing, or the settings or site files do not go together.
    """
    name = study.pipeline_name(pipeline_name)
    with RunContext.of(study, study.pipeline(name, overrides), method) as party:
        if not party.method.shares:
            others = names_of(lambda row: bool(row.shares))
            raise UsageError(
                f"{party.name} shares nothing between hospitals and needs no plan; plans are for {others}"
            )
        check(party, "mpi", stores=False)
        said = described(party, name, learned_by(party), keys or {})
    plan = Plan(text_of(said, datetime.now(UTC).isoformat(timespec="seconds")))
    kept = [keep_other(path, plan) for path in (out, *(approval_path(study, name) for name in plan.sites))]
    if there := [path for path in kept if path]:
        say(f"  files of the previous plan are kept: {', '.join(there)}")
    write_text(out, plan.text)
    return plan


def text_of(said: PlanDocument, created: str) -> str:
    """Return the text of a plan's file, unique for each document and time."""
    head = {"format": said["format"], "version": said["version"], "created": created}
    return json.dumps(head | said, indent=2, ensure_ascii=False) + "\n"


def described(party: RunContext, name: str, learned: Learned, keys: Mapping[str, str]) -> PlanDocument:
    """Return the content of a plan without its time, the same for the same run context and training data.

    Args:
        name: of the pipeline.
        keys: the fingerprint of each site's key, if pinned.
    """
    pipeline = party.pipeline.model_copy(update={"sites": party.names})
    rows = leaving(party, shape_of(learned), len(learned["classes"] or ()) or None)
    sizes = [row["bytes"] for row in rows if row["large"]]
    unknown = _UNKNOWN_SUMS if party.method.once else _UNKNOWN
    patience = duration(pipeline.comm.timeout_s)
    largest = max((unknown if size is None else size for size in sizes), default=0)
    return {
        "format": FORMAT,
        "version": VERSION,
        "wsi_fl": __version__,
        "code": code_digest(),
        "packages": packages(),
        "method": party.name,
        "pipeline": name,
        "does": f"{party.method.name}: {party.method.does}.",
        "sites": [
            PlannedSite(
                name=site.name,
                real=site.real,
                role=site.role,
                allow=list(site.allow),
                max_epsilon=site.max_epsilon,
                delta=site.delta,
                key=keys.get(site.name),
            )
            for site in party.sites
        ],
        "learns": learned,
        "rounds": pipeline.train.rounds,
        "epochs_per_round": pipeline.train.epochs_per_round,
        "waits": " ".join(
            filled(WORDS["texts"]["waits"], n=len(party.names), patience=patience, train=pipeline.train)
        ),
        "privacy": _protection(party),
        "leaves": rows,
        "stays": staying(party),
        "most_bytes": 2 * largest + _ROOM,
        "settings": settings_text(pipeline),
    }


def settings_text(pipeline: Pipeline) -> str:
    """Return settings as TOML that survives reading unchanged: default numbers are formatted like written ones."""
    return dump_toml(validated(pipeline_model(), tomllib.loads(dump_toml(pipeline)), "plan"))


def document_of(plan: Plan) -> PlanDocument:
    """Return a plan's content; UsageError if something is missing, wrong or hidden."""
    if odd := next((text for text in _texts(plan.document) if not text.isprintable()), None):
        raise UsageError(f"this plan hides something: {ascii(odd)[:60]} cannot be shown; do not sign it")
    try:
        said = TypeAdapter(PlanDocument).validate_python(plan.document, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"this plan is damaged: {where}: {first['msg'].lower()}; ask for it again") from None
    if "created" not in said:
        raise UsageError("this plan is damaged: it does not say when it was created; ask for it again")
    return said


def left_by(document: PlanDocument, site: str) -> list[Leaving]:
    """Return the disclosures of one of a plan's sites: all of the plan, without statistics and scores of a receiver."""
    roles = {one["name"]: one["role"] for one in document["sites"]}
    of_all = {WORDS[name]["what"] for name in ("documents", "tallies", "final")}
    return [row for row in document["leaves"] if roles[site] == "member" or row["what"] in of_all]


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a document except its settings, which have lines."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            yield from () if key == "settings" else _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def sites_of(document: PlanDocument) -> tuple[SiteFile, ...]:
    """Return the site files that a plan's table of sites amounts to: terms alone, and no paths."""
    return tuple(
        validated(SiteFile, {k: v for k, v in site.items() if v is not None and k != "key"}, "plan: sites")
        for site in document["sites"]
    )


_SAMPLED = "Poisson: each of n units enters a batch with probability 1 / ceil(n / batch_size)"


def _protection(party: RunContext) -> _Protection:
    """Return the guarantee of differential privacy in a plan, in numbers and in words."""
    privacy, train = party.pipeline.privacy, party.pipeline.train
    on, own = spends(party.pipeline), privacy.target_epsilon is not None
    anew = on and not party.by_files
    sampled, guarantee = on and not party.method.once, guarantee_of(party.method, party.pipeline)
    known = {"privacy": privacy, "own": own, "guarantee": guarantee, "attempts": MOST_ATTEMPTS}
    known["by_files"] = party.by_files
    says = filled(WORDS["texts"]["promise"], beta=weights_of(party.pipeline).beta, **known)
    return {
        "differential_privacy": on,
        "guarantee": guarantee,
        "unit": privacy.unit,
        "epsilon": privacy.target_epsilon if anew else None,
        "delta": privacy.delta,
        "sigma": privacy.sigma if anew and not own else None,
        "clip": privacy.clip if anew else None,
        "batch_size": train.batch_size if sampled and not own else None,
        "sampling": _SAMPLED if sampled else None,
        "says": " ".join(says),
    }


def made_lines(document: dict[str, Any]) -> Lines:
    """Report where a plan is, and what to do with it."""
    yield Line(
        f"{document['plan']}: plan {document['sha256'][:8]} for {', '.join(document['sites'])}; send it to every "
        f"hospital, which signs it with `wsi-fl federation approve {Path(document['plan']).name} --kit KIT`"
    )
