"""Dry run of a plan at one hospital before it is signed: nothing leaves, and the hospital's ledger is not written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from wsi_fl.hospitals.plans.review import PlanCost, describe_cost, review_plan
from wsi_fl.hospitals.plans.signed_plan import FederationPlan
from wsi_fl.report.formatting import format_duration, format_size
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import Lines, TextLine, Watcher
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import dump_toml
from wsi_fl.system.files import file_lock, write_text
from wsi_fl.system.machine import peak_bytes
from wsi_fl.types import UsageError, WsiFlError

_PIPELINE_NAME, _FOLDER_PREFIX = "rehearsal", ".rehearsal-"
_PRIVATE_FOLDERS = {"federation", "generated", "ledgers", "pipelines", "statistics", "runs", "sites", "stores"}
"""Folders of a study that a dry run has for itself."""
_LEDGER_FILES = {"ledger.head.json", "statistics.safetensors"}
"""Files beside a store that belong to the hospital's ledger."""
_PATH_KEYS = ("slides", "annotations", "labels", "clinical", "split", "manifest")


class _DryRunResult(TypedDict):
    """The resources of a dry run, and the cost of the real run."""

    site: str
    plan: str
    rounds: int
    seconds_per_round: float  # of this site alone
    sent_bytes: int
    all_bytes: int  # of all sites
    peak_bytes: int  # of this process, which holds all sites
    not_finite: list[str]  # models, as "site/role"
    cost: dict[str, Any]  # as `approve` shows it
    kept: str | None


def dry_run_plan(
    study: Study,
    plan: FederationPlan,
    site: str,
    *,
    rounds: int | None = None,
    keep: Path | None = None,
    watcher: Watcher | None = None,
) -> _DryRunResult:
    """Run a plan in this process with copies of the hospital's own rows for all sites, with its noise.

    Args:
        site: of the hospital; the other sites of the plan are copies of it.
        rounds: fewer than the plan's, for an estimate of time and memory.
        keep: a new folder for the run, its private models included; by default it is deleted.

    Raises:
        UsageError: when the plan could not be signed here, the store is not here, or `keep` exists.
        WsiFlError: when it was interrupted.
    """
    if keep is not None and keep.exists():
        raise UsageError(f"{keep}: it is there already; give a new folder")
    review = review_plan(study, plan, site)
    cost, roles = review.cost, {row["name"]: row["role"] for row in review.document["sites"]}
    if roles[site] == "receiver":
        raise UsageError(f"{site} receives, and sends nothing that could be rehearsed")
    if cost is not None and cost.letter is not None:
        raise UsageError(f"{site} sends the class statistics that it released, so there is nothing to rehearse")
    if cost is None:
        raise UsageError(f"the store of {site} is not on this machine; rehearse where it is")
    from wsi_fl.stages.training.train import train  # and with it PyTorch

    with _imitate_study(study, plan, site, roles) as stage:
        try:
            summary = train(
                stage,
                method=plan.method,
                pipeline_name=_PIPELINE_NAME,
                overrides=[] if rounds is None else [f"train.rounds={rounds}"],
                backend="local",
                watcher=watcher,
            )
        except KeyboardInterrupt:
            raise WsiFlError("interrupted; nothing is left of the rehearsal") from None
        run = RunFolder(stage.find_run(str(summary["run"])))
        lines, extra = run.site_folder(site).read_metrics(), run.site_folder(site).list_transfers()
        if keep is not None:
            shutil.copytree(run.path, keep)
        return {
            "site": site,
            "plan": plan.digest,
            "rounds": len(lines),
            "seconds_per_round": sum(line["seconds"] for line in lines) / max(1, len(lines)),
            "sent_bytes": sum(line["bytes"] for line in [*lines, *extra]),
            "all_bytes": summary["communication"]["bytes"],
            "peak_bytes": peak_bytes(),
            "not_finite": _list_non_finite(run),
            "cost": asdict(cost),
            "kept": None if keep is None else str(keep),
        }


@contextmanager
def _imitate_study(study: Study, plan: FederationPlan, site: str, roles: Mapping[str, str]) -> Iterator[Study]:
    """Yield a temporary study inside the hospital's: its sites are simulated, and have a ledger there.

    Leftovers of a killed dry run, private models included, are deleted first.
    """
    for leftover in study.root.glob(f"{_FOLDER_PREFIX}*"):
        with suppress(WsiFlError), file_lock(leftover / ".lock", "another rehearsal is at work there"):
            shutil.rmtree(leftover)
    with TemporaryDirectory(dir=study.root, prefix=_FOLDER_PREFIX) as place, file_lock(Path(place) / ".lock"):
        stage = Study(Path(place), stand_in=site)
        for entry in study.root.iterdir():
            if entry.name not in _PRIVATE_FOLDERS and not entry.name.startswith("."):
                (stage.root / entry.name).symlink_to(entry.resolve())
        write_text(stage.root / "pipelines" / f"{_PIPELINE_NAME}.toml", str(plan.document["settings"]))
        for name, role in roles.items():
            file = _simulate_site(study, site, name).model_copy(update={"role": role})
            write_text(stage.root / "sites" / f"{name}.toml", dump_toml(file))
            folder = stage.store_path(name).parent
            folder.mkdir(parents=True)
            for entry in study.store_path(site).parent.iterdir():
                if entry.name not in _LEDGER_FILES and not entry.name.startswith("."):
                    (folder / entry.name).symlink_to(entry.resolve())
        yield stage


def _simulate_site(study: Study, site: str, name: str) -> SiteFile:
    """Return the hospital's own site file under another name: with its budget, and without its ledger."""

    def resolve_paths(value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list):
            return [str(study.resolve(path)) for path in value]
        return value and str(study.resolve(value))

    local_file = study.load_site(site)
    paths = {key: resolve_paths(getattr(local_file, key)) for key in _PATH_KEYS}
    return local_file.model_copy(update={"name": name, "real": False, "allow": [], "ledger": None, **paths})


def _list_non_finite(run: RunFolder) -> list[str]:
    """Return the models of a run with a NaN or an infinite number, as "site/role"."""
    return [
        f"{file.parent.name}/{file.stem}"
        for file in sorted(run.path.glob("sites/*/*.safetensors"))
        if not all(
            tensor.isfinite().all() for tensor in run.site_folder(file.parent.name).load_model(file.stem).values()
        )
    ]


def dry_run_lines(document: _DryRunResult) -> Lines:
    """Report resources and cost of the real run."""
    wrong = ", ".join(document["not_finite"])
    yield TextLine(
        f"  {document['rounds']} rounds, {format_duration(document['seconds_per_round'])} each at {document['site']} "
        f"alone; at most {format_size(document['peak_bytes'])} of memory for all sites in one process"
    )
    sent, by_all = format_size(document["sent_bytes"]), format_size(document["all_bytes"])
    yield TextLine(f"  {document['site']} would send {sent}, all {by_all}")
    yield TextLine(
        f"  not finite: {wrong}; do not sign this" if wrong else "  all models are finite", "red" if wrong else ""
    )
    yield TextLine(f"  the real run: {describe_cost(PlanCost(**document['cost']))}")
    location = f"the run lies in {document['kept']}" if document["kept"] else "the run was deleted"
    yield TextLine(f"nothing left {document['site']} and its ledger is as it was; {location}")
