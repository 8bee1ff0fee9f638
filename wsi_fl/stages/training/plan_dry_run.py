"""Dry run of a plan at one hospital: all sites are copies of it, nothing leaves, and its ledger is not written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

from wsi_fl.plugins import load_entries
from wsi_fl.report.formatting import format_duration, format_size
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import Lines, TextLine, Watcher
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import dump_toml
from wsi_fl.system.files import file_lock, write_text
from wsi_fl.system.machine import peak_bytes
from wsi_fl.types import UsageError, WsiFlError

_PIPELINE_NAME, _FOLDER_PREFIX = "dry-run", ".dry-run-"
_PRIVATE_FOLDERS = {"federation", "generated", "ledgers", "pipelines", "statistics", "runs", "sites", "stores"}
"""Folders of a study that a dry run has for itself."""
_LEDGER_FILES = {"ledger.head.json", "statistics.safetensors"}
"""Files beside a store that belong to the hospital's ledger."""
_PATH_KEYS = ("slides", "annotations", "labels", "clinical", "split", "manifest")


@dataclass(frozen=True)
class PlannedRun:
    """A run that a plan proposes to a hospital.

    Attributes:
        site: the hospital.
        digest: SHA-256 of the plan.
        settings: its pipeline, as TOML.
        roles: role of each site, as in site files.
        cost: cost of the real run for the hospital, for `--json`.
        cost_text: the same for people.
    """

    site: str
    digest: str
    method: str
    settings: str
    roles: Mapping[str, str]
    cost: Mapping[str, object]
    cost_text: str


class PlanDryRun(TypedDict):
    """The resources of a dry run, and the cost of the real run.

    Attributes:
        seconds_per_round: of this site alone.
        all_bytes: sent by all sites.
        peak_bytes: memory of this process, which holds all sites.
        not_finite: models with a NaN or an infinite number, as "site/role".
        kept: folder of the run; None where it was deleted.
    """

    site: str
    plan: str
    rounds: int
    seconds_per_round: float
    sent_bytes: int
    all_bytes: int
    peak_bytes: int
    not_finite: list[str]
    cost: Mapping[str, object]
    cost_text: str
    kept: str | None


def read_plan(study: Study, file: Path, site: str | None) -> PlannedRun:
    """Return what a plan proposes to a site, by default the plan's only site with a store here.

    It is read by an installed entry point of `wsi_fl.plans`. UsageError without one, or when the plan could not be
    signed here, or there is nothing to try.
    """
    readers: dict[str, Callable[[Study, Path, str | None], PlannedRun]] = load_entries("wsi_fl.plans")
    if not readers:
        raise UsageError("--plan: no installed package reads plans; install wsi-fl with its extension `hospitals`")
    return next(iter(readers.values()))(study, file, site)


def dry_run_plan(
    study: Study,
    planned: PlannedRun,
    *,
    overrides: Sequence[str] = (),
    keep: Path | None = None,
    watcher: Watcher | None = None,
) -> PlanDryRun:
    """Run a plan in this process with copies of the hospital's own rows for all sites, with its noise.

    Args:
        overrides: fewer `train.rounds` than the plan's, for an estimate of time and memory.
        keep: a new folder for the run, its private models included; by default it is deleted.

    Raises:
        UsageError: when `keep` exists, or other settings than the rounds are to be changed.
        WsiFlError: when it was interrupted.
    """
    if keep is not None and keep.exists():
        raise UsageError(f"{keep}: it is there already; give a new folder")
    if foreign := [override for override in overrides if not override.strip().startswith("train.rounds=")]:
        raise UsageError(f"--set {foreign[0]}: a plan has its settings; only train.rounds may be lower in a dry run")
    with _imitate_study(study, planned) as imitation:
        try:
            summary = train(
                imitation,
                method=planned.method,
                pipeline_name=_PIPELINE_NAME,
                overrides=overrides,
                backend="local",
                watcher=watcher,
            )
        except KeyboardInterrupt:
            raise WsiFlError("interrupted; nothing is left of the dry run") from None
        run = RunFolder(imitation.find_run(summary["run"]))
        folder = run.site_folder(planned.site)
        rounds, transfers = folder.read_metrics(), folder.list_transfers()
        if keep is not None:
            shutil.copytree(run.path, keep)
        return {
            "site": planned.site,
            "plan": planned.digest,
            "rounds": len(rounds),
            "seconds_per_round": sum(line["seconds"] for line in rounds) / max(1, len(rounds)),
            "sent_bytes": sum(line["bytes"] for line in [*rounds, *transfers]),
            "all_bytes": summary["communication"]["bytes"],
            "peak_bytes": peak_bytes(),
            "not_finite": list_nonfinite_models(run),
            "cost": planned.cost,
            "cost_text": planned.cost_text,
            "kept": None if keep is None else str(keep),
        }


@contextmanager
def _imitate_study(study: Study, planned: PlannedRun) -> Iterator[Study]:
    """Yield a temporary study inside the hospital's: its sites are simulated, and have a ledger there.

    Leftovers of a killed dry run, private models included, are deleted first.
    """
    for leftover in study.root.glob(f"{_FOLDER_PREFIX}*"):
        with suppress(WsiFlError), file_lock(leftover / ".lock", "another dry run is at work there"):
            shutil.rmtree(leftover)
    own_file, store_folder = study.load_site(planned.site), study.store_path(planned.site).parent
    with TemporaryDirectory(dir=study.root, prefix=_FOLDER_PREFIX) as place, file_lock(Path(place) / ".lock"):
        imitation = Study(Path(place), stand_in=planned.site)
        _link_entries(study.root, imitation.root, _PRIVATE_FOLDERS)
        write_text(imitation.root / "pipelines" / f"{_PIPELINE_NAME}.toml", planned.settings)
        for name, role in planned.roles.items():
            file = _simulate_site(study, own_file, name).model_copy(update={"role": role})
            write_text(imitation.site_path(name), dump_toml(file))
            _link_entries(store_folder, imitation.store_path(name).parent, _LEDGER_FILES)
        yield imitation


def _link_entries(source: Path, target: Path, omitted: set[str]) -> None:
    """Link all visible entries of a folder into another, but the omitted ones."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.name not in omitted and not entry.name.startswith("."):
            (target / entry.name).symlink_to(entry.resolve())


def _simulate_site(study: Study, own_file: SiteFile, name: str) -> SiteFile:
    """Return the hospital's own site file under another name: with its budget, and without its ledger."""

    def resolve_paths(value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list):
            return [str(study.resolve(path)) for path in value]
        return value and str(study.resolve(value))

    paths = {key: resolve_paths(getattr(own_file, key)) for key in _PATH_KEYS}
    return own_file.model_copy(update={"name": name, "real": False, "allow": [], "ledger": None, **paths})


def list_nonfinite_models(run: RunFolder) -> list[str]:
    """Return the models of a run with a NaN or an infinite number, as "site/role"."""
    return [
        f"{file.parent.name}/{file.stem}"
        for file in sorted(run.path.glob("sites/*/*.safetensors"))
        if not all(
            tensor.isfinite().all() for tensor in run.site_folder(file.parent.name).load_model(file.stem).values()
        )
    ]


def plan_dry_run_lines(document: PlanDryRun) -> Lines:
    """Yield the resources of a dry run, and the cost of the real run, for people."""
    wrong, site = ", ".join(document["not_finite"]), document["site"]
    yield TextLine(
        f"  {document['rounds']} rounds, {format_duration(document['seconds_per_round'])} each at {site} alone; "
        f"at most {format_size(document['peak_bytes'])} of memory for all sites in one process"
    )
    yield TextLine(
        f"  {site} would send {format_size(document['sent_bytes'])}, all {format_size(document['all_bytes'])}"
    )
    yield TextLine(
        f"  not finite: {wrong}; do not sign this" if wrong else "  all models are finite", "red" if wrong else ""
    )
    yield TextLine(f"  the real run: {document['cost_text']}")
    location = f"the run lies in {document['kept']}" if document["kept"] else "the run was deleted"
    yield TextLine(f"nothing left {site} and its ledger is as it was; {location}")
