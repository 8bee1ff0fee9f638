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
from wsi_fl.federation.methods import list_names
from wsi_fl.hospitals.plans import installed_code
from wsi_fl.hospitals.plans.disclosures import (
    PLAN_TEXTS,
    DataDescription,
    PlannedDisclosure,
    describe_data,
    fill_plan_text,
    input_shape,
    list_disclosures,
    list_retained,
)
from wsi_fl.hospitals.plans.signed_plan import FORMAT, VERSION, FederationPlan, approval_path, archive_other_plan
from wsi_fl.privacy.guarantee import MAX_ATTEMPTS
from wsi_fl.report.formatting import format_duration
from wsi_fl.stages.runtime.console import Lines, TextLine, print_message
from wsi_fl.stages.site.privacy_account import costs_epsilon, find_guarantee, loss_weights
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.checks import check_run
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, pipeline_model
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import dump_toml, validate_model
from wsi_fl.system.files import write_text
from wsi_fl.types import UsageError

_MESSAGE_OVERHEAD = 32_000_000
"""Bytes of the longest message beyond twice the largest payload."""
_DEFAULT_BYTES, _DEFAULT_STATISTICS_BYTES = 500_000_000, 10_000_000
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


class _PlannedPrivacy(TypedDict):
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


def _validate_time(text: str) -> str:
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
    created: NotRequired[Annotated[str, AfterValidator(_validate_time)]]
    wsi_fl: str
    code: str
    packages: dict[str, str]
    method: str
    pipeline: str
    does: str
    sites: list[PlannedSite]
    learns: DataDescription
    rounds: int
    epochs_per_round: int
    waits: str
    privacy: _PlannedPrivacy
    leaves: list[PlannedDisclosure]
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
) -> FederationPlan:
    """Write the plan of a method for all sites of a study, and return it.

    A different plan in its place, and approvals of one, are copied first; see `archive_other_plan`.

    Args:
        out: the file to write.
        keys: the fingerprint of each site's key.

    Raises:
        UsageError: when the method shares nothing, or the settings or site files do not go together.
    """
    name = study.pipeline_name(pipeline_name)
    with RunContext.create(study, study.load_pipeline(name, overrides), method) as context:
        if not context.method.disclosures:
            others = list_names(lambda row: bool(row.disclosures))
            raise UsageError(
                f"{context.name} shares nothing between hospitals and needs no plan; plans are for {others}"
            )
        check_run(context, "mpi", stores=False)
        document = describe_plan(context, name, describe_data(context), keys or {})
    plan = FederationPlan(render_plan_text(document, datetime.now(UTC).isoformat(timespec="seconds")))
    archives = [archive_other_plan(path, plan) for path in (out, *(approval_path(study, name) for name in plan.sites))]
    if archived_paths := [path for path in archives if path]:
        print_message(f"  files of the previous plan are kept: {', '.join(archived_paths)}")
    write_text(out, plan.text)
    return plan


def render_plan_text(document: PlanDocument, created: str) -> str:
    """Return the text of a plan's file, unique for each document and time."""
    head = {"format": document["format"], "version": document["version"], "created": created}
    return json.dumps(head | document, indent=2, ensure_ascii=False) + "\n"


def describe_plan(
    context: RunContext, name: str, training_data: DataDescription, keys: Mapping[str, str]
) -> PlanDocument:
    """Return the content of a plan without its time, the same for the same run context and training data.

    Args:
        name: of the pipeline.
        keys: the fingerprint of each site's key, if pinned.
    """
    pipeline = context.pipeline.model_copy(update={"sites": context.names})
    rows = list_disclosures(context, input_shape(training_data), len(training_data["classes"] or ()) or None)
    sizes = [row["bytes"] for row in rows if row["large"]]
    unknown = _DEFAULT_STATISTICS_BYTES if context.method.payload.is_single_release else _DEFAULT_BYTES
    patience = format_duration(pipeline.comm.timeout_s)
    largest = max((unknown if size is None else size for size in sizes), default=0)
    return {
        "format": FORMAT,
        "version": VERSION,
        "wsi_fl": __version__,
        "code": installed_code.code_digest(context.name),
        "packages": installed_code.package_versions(),
        "method": context.name,
        "pipeline": name,
        "does": f"{context.method.name}: {context.method.summary}.",
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
            for site in context.sites
        ],
        "learns": training_data,
        "rounds": pipeline.train.rounds,
        "epochs_per_round": pipeline.train.epochs_per_round,
        "waits": " ".join(
            fill_plan_text(PLAN_TEXTS["texts"]["waits"], n=len(context.names), patience=patience, train=pipeline.train)
        ),
        "privacy": _plan_privacy(context),
        "leaves": rows,
        "stays": list_retained(context),
        "most_bytes": 2 * largest + _MESSAGE_OVERHEAD,
        "settings": settings_text(pipeline),
    }


def settings_text(pipeline: Pipeline) -> str:
    """Return settings as TOML that survives reading unchanged: default numbers are formatted like written ones."""
    return dump_toml(validate_model(pipeline_model(), tomllib.loads(dump_toml(pipeline)), "plan"))


def parse_plan_document(plan: FederationPlan) -> PlanDocument:
    """Return a plan's content; UsageError if something is missing, wrong or hidden."""
    if hidden_text := next((text for text in _iterate_texts(plan.document) if not text.isprintable()), None):
        raise UsageError(f"this plan hides something: {ascii(hidden_text)[:60]} cannot be shown; do not sign it")
    try:
        document = TypeAdapter(PlanDocument).validate_python(plan.document, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"this plan is damaged: {location}: {first['msg'].lower()}; ask for it again") from None
    if "created" not in document:
        raise UsageError("this plan is damaged: it does not say when it was created; ask for it again")
    return document


def site_disclosures(document: PlanDocument, site: str) -> list[PlannedDisclosure]:
    """Return the disclosures of one of a plan's sites: all of the plan, without statistics and scores of a receiver."""
    roles = {row["name"]: row["role"] for row in document["sites"]}
    common_kinds = {PLAN_TEXTS[name]["what"] for name in ("documents", "tallies", "final")}
    return [row for row in document["leaves"] if roles[site] == "member" or row["what"] in common_kinds]


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield all texts of a document except its settings, which have lines."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from () if key == "settings" else _iterate_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_texts(item)


def parse_site_files(document: PlanDocument) -> tuple[SiteFile, ...]:
    """Return the site files that a plan's table of sites amounts to: terms alone, and no paths."""
    return tuple(
        validate_model(SiteFile, {k: v for k, v in site.items() if v is not None and k != "key"}, "plan: sites")
        for site in document["sites"]
    )


_SAMPLING_TEXT = (
    "Poisson: each of n units enters a batch with probability 1 / ceil(n / batch_size); a site's own file may set its "
    "batch_size"
)


def _plan_privacy(context: RunContext) -> _PlannedPrivacy:
    """Return the guarantee of differential privacy in a plan, in numbers and in words."""
    privacy, train = context.pipeline.privacy, context.pipeline.train
    is_private, site_chosen = costs_epsilon(context.pipeline), privacy.target_epsilon is not None
    is_new_release = is_private and not context.uses_files
    is_sampled = is_private and not context.method.payload.is_single_release
    guarantee, beta = find_guarantee(context.method, context.pipeline), loss_weights(context.pipeline).beta
    facts = {"privacy": privacy, "own": site_chosen, "guarantee": guarantee, "attempts": MAX_ATTEMPTS, "beta": beta}
    says = fill_plan_text(PLAN_TEXTS["texts"]["promise"], by_files=context.uses_files, **facts)
    return {
        "differential_privacy": is_private,
        "guarantee": guarantee,
        "unit": privacy.unit,
        "epsilon": privacy.target_epsilon if is_new_release else None,
        "delta": privacy.delta,
        "sigma": privacy.sigma if is_new_release and not site_chosen else None,
        "clip": privacy.clip if is_new_release else None,
        "batch_size": train.batch_size if is_sampled and not site_chosen else None,
        "sampling": _SAMPLING_TEXT if is_sampled else None,
        "says": " ".join(says),
    }


def plan_lines(plan: FederationPlan, file: Path) -> Lines:
    """Report where a plan is, and what to do with it."""
    yield TextLine(
        f"{file}: plan {plan.digest[:8]} for {', '.join(plan.sites)}; send it to every hospital, which signs it with "
        f"`wsi-fl federation approve {file.name} --kit KIT`"
    )
