"""A plan tried at one hospital alone before it is signed: nothing leaves, and no ledger of the hospital is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from wsi_fl.hospitals.plans.approving import Cost, cost_words, look
from wsi_fl.hospitals.plans.signed import Plan
from wsi_fl.report.words import duration, size
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.work.console import Line, Lines, Watcher
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import dump_toml
from wsi_fl.system.files import alone, write_text
from wsi_fl.system.machine import peak_bytes
from wsi_fl.types import UsageError, WsiFlError

_PIPELINE, _PLACE = "rehearsal", ".rehearsal-"
_NOT_SHOWN = {"federation", "generated", "ledgers", "pipelines", "statistics", "runs", "sites", "stores"}
"""Folders of a study that a rehearsal has for itself."""
_OF_THE_ACCOUNT = {"ledger.head.json", "statistics.safetensors"}
"""Files beside a store that belong to the hospital's ledger."""
_PATHS = ("slides", "annotations", "labels", "clinical", "split", "manifest")


class _Rehearsed(TypedDict):
    """What a run took, and would cost for real."""

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


def rehearse(
    study: Study,
    plan: Plan,
    site: str,
    *,
    rounds: int | None = None,
    keep: Path | None = None,
    watcher: Watcher | None = None,
) -> _Rehearsed:
    """Do a plan with the hospital's own rows in the place of everybody's, in this process, with its noise.

    Args:
        site: of the hospital; the other sites of the plan are imitated by copies of it.
        rounds: fewer than the plan's, for an idea of minutes and memory.
        keep: a new folder for the run, its private models too; by default it is deleted.

    Raises:
        UsageError: when the plan could not be signed here, the store is not here, or `keep` is there already.
        WsiFlError: when it was interrupted.
    """
    if keep is not None and keep.exists():
        raise UsageError(f"{keep}: it is there already; give a new folder")
    looked = look(study, plan, site)
    cost, roles = looked.cost, {one["name"]: one["role"] for one in looked.document["sites"]}
    if roles[site] == "receiver":
        raise UsageError(f"{site} receives, and sends nothing that could be rehearsed")
    if cost is not None and cost.letter is not None:
        raise UsageError(f"{site} sends the letter that it released, so there is nothing to rehearse")
    if cost is None:
        raise UsageError(f"the store of {site} is not on this machine; rehearse where it is")
    from wsi_fl.stages.training.train import train  # and with it PyTorch

    with _imitated(study, plan, site, roles) as stage:
        try:
            summary = train(
                stage,
                method=plan.method,
                pipeline_name=_PIPELINE,
                overrides=[] if rounds is None else [f"train.rounds={rounds}"],
                backend="local",
                watcher=watcher,
            )
        except KeyboardInterrupt:
            raise WsiFlError("interrupted; nothing is left of the rehearsal") from None
        run = RunFolder(stage.run(str(summary["run"])))
        lines, extra = run.site(site).metrics(), run.site(site).transfers()
        if keep is not None:
            shutil.copytree(run.path, keep)
        return {
            "site": site,
            "plan": plan.digest,
            "rounds": len(lines),
            "seconds_per_round": sum(one["seconds"] for one in lines) / max(1, len(lines)),
            "sent_bytes": sum(one["bytes"] for one in [*lines, *extra]),
            "all_bytes": summary["communication"]["bytes"],
            "peak_bytes": peak_bytes(),
            "not_finite": _not_finite(run),
            "cost": asdict(cost),
            "kept": None if keep is None else str(keep),
        }


@contextmanager
def _imitated(study: Study, plan: Plan, site: str, roles: Mapping[str, str]) -> Iterator[Study]:
    """A study inside the hospital's, for as long as it is used: its sites are simulated, and have a ledger there.

    What one that was killed has left, private models among it, goes first.
    """
    for left in study.root.glob(f"{_PLACE}*"):
        with suppress(WsiFlError), alone(left / ".lock", "another rehearsal is at work there"):
            shutil.rmtree(left)
    with TemporaryDirectory(dir=study.root, prefix=_PLACE) as place, alone(Path(place) / ".lock"):
        stage = Study(Path(place), rehearses=site)
        for entry in study.root.iterdir():
            if entry.name not in _NOT_SHOWN and not entry.name.startswith("."):
                (stage.root / entry.name).symlink_to(entry.resolve())
        write_text(stage.root / "pipelines" / f"{_PIPELINE}.toml", str(plan.document["settings"]))
        for name, role in roles.items():
            file = _simulated(study, site, name).model_copy(update={"role": role})
            write_text(stage.root / "sites" / f"{name}.toml", dump_toml(file))
            folder = stage.store(name).parent
            folder.mkdir(parents=True)
            for entry in study.store(site).parent.iterdir():
                if entry.name not in _OF_THE_ACCOUNT and not entry.name.startswith("."):
                    (folder / entry.name).symlink_to(entry.resolve())
        yield stage


def _simulated(study: Study, site: str, name: str) -> SiteFile:
    """The hospital's own site file under another name: with its budget, and without its ledger."""

    def there(said: str | list[str] | None) -> str | list[str] | None:
        if isinstance(said, list):
            return [str(study.resolve(one)) for one in said]
        return said and str(study.resolve(said))

    own = study.site(site)
    paths = {key: there(getattr(own, key)) for key in _PATHS}
    return own.model_copy(update={"name": name, "real": False, "allow": [], "ledger": None, **paths})


def _not_finite(run: RunFolder) -> list[str]:
    """The models of a run with a number that is none, or is infinite, as "site/role"."""
    return [
        f"{file.parent.name}/{file.stem}"
        for file in sorted(run.path.glob("sites/*/*.safetensors"))
        if not all(one.isfinite().all() for one in run.site(file.parent.name).load_model(file.stem).values())
    ]


def rehearsed_lines(document: _Rehearsed) -> Lines:
    """Say what the real run would take and cost."""
    wrong = ", ".join(document["not_finite"])
    yield Line(
        f"  {document['rounds']} rounds, {duration(document['seconds_per_round'])} each at {document['site']} alone; "
        f"at most {size(document['peak_bytes'])} of memory for all sites in one process"
    )
    sent, by_all = size(document["sent_bytes"]), size(document["all_bytes"])
    yield Line(f"  {document['site']} would send {sent}, all {by_all}")
    yield Line(
        f"  not finite: {wrong}; do not sign this" if wrong else "  all models are finite",
        "red" if wrong else "",
    )
    yield Line(f"  the real run: {cost_words(Cost(**document['cost']))}")
    where = f"the run lies in {document['kept']}" if document["kept"] else "the run was deleted"
    yield Line(f"nothing left {document['site']} and its ledger is as it was; {where}")
