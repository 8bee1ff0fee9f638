"""The ledger of a site: opened only where it has all past spending of the study, and is not older than its anchors."""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from wsi_fl.privacy.guarantee import LedgerRound, PrivacyTerms, collect_rounds
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import user_head_path
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.site.run_context import find_method
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.tensors import load_document
from wsi_fl.types import UsageError, WsiFlError


def open_ledger(
    study: Study,
    site: SiteFile,
    run: str,
    terms: PrivacyTerms,
    includes: Collection[str] = (),
    named: Mapping[str, str] = MappingProxyType({}),
) -> PrivacyLedger:
    """Open a site's ledger, which for a real hospital must have all past spending of this study.

    Args:
        includes: other entries whose cost is part of the run's.
        named: fields of each of its lines; see `PrivacyLedger`.

    Raises:
        UsageError: when the ledger is missing, or lacks rounds of a run or a release in the study.
        WsiFlError: when the file is damaged, changed or older than its anchor files.
    """
    path = study.ledger_path(site.name)
    head_path = _store_head_path(study, site.name)
    load_ledger = partial(
        PrivacyLedger, path, site=site.name, run=run, terms=terms, includes=includes, references=named
    )
    if not site.real:
        if head_path.exists():
            raise WsiFlError(
                f"sites/{site.name}.toml says real = false, but {study.relative_path(head_path)} belongs to a real "
                "hospital's ledger; say real = true, or simulate under another name"
            )
        return load_ledger()
    rounds = _list_paid_rounds(study, site.name)  # read before the ledger, as the next line: they may grow
    sums = (study.local_release_path(site.name), study.release_path(site.name))
    released = _read_claims(study, [file for file in sums if file.exists()])
    if not path.exists() and (rounds or released):
        raise UsageError(
            f"{study.relative_path(path)} is missing, though site {site.name} has released before; restore it: it is "
            "the site's budget"
        )
    ledger = load_ledger(heads=_list_heads(study, site.name))
    for folder, identity, last in rounds:
        if max((entry.round for entry in ledger.entries_of_run(identity)), default=0) < last:
            raise UsageError(
                f"{study.relative_path(path)}: lacks rounds of {folder}, which reached round {last}; put the newest "
                "backup of the ledger back: it is the site's budget (or take the folder away, if that run is another "
                "hospital's)"
            )
    known_digests = {entry.released.split()[-1] for entry in ledger.entries if entry.released}
    for file, digest in released:
        if digest not in known_digests:
            raise UsageError(
                f"{study.relative_path(path)}: lacks the release of {file}; restore both from the same backup: the "
                "ledger is the site's budget"
            )
    return ledger


def _store_head_path(study: Study, site: str) -> Path:
    return study.store_path(site).parent / "ledger.head.json"


def _list_heads(study: Study, site: str) -> list[Path]:
    """Return the anchor files of a real site's ledger: beside its store, and of this user."""
    return [_store_head_path(study, site), user_head_path(site)]


def _list_paid_rounds(study: Study, site: str) -> list[tuple[str, str, int]]:
    """Return (folder, run's id, last round that cost ε) of each run of this study in which the site spent."""
    paid_runs = []
    for metrics in sorted(study.runs_path.glob(f"*/sites/{glob.escape(site)}/metrics.jsonl")):
        run = RunFolder(metrics.parents[2])
        paid = [
            line["round"] for line in run.site_folder(site).read_metrics() if line["takes_part"] and line["epsilon"]
        ]
        if paid and not (run.site_folder(site).read_statistics_digests() and _uses_statistics(run)):
            paid_runs.append((study.relative_path(run.path), run.identity, max(paid)))
    return paid_runs


def _uses_statistics(run: RunFolder) -> bool:
    """Return whether a run computed its heads from released statistics, not only its initial weights."""
    pipeline = load_run_pipeline(run.path / "config.toml")
    return find_method(str(run.manifest["method"]), pipeline).uses_files


def _read_claims(study: Study, files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return (label, digest in the header) of intact copies of released statistics; WsiFlError if all are damaged."""
    claims, errors = [], []
    for file in files:
        try:
            document = load_document(file, "release")
            claims.append((study.relative_path(file), str(document.get("digest"))))
        except WsiFlError as error:
            errors.append(error)
    if errors and not claims:
        raise WsiFlError(f"{errors[0]}; copy the file from its site again, or put its backup back")
    return claims


def require_release(ledger: PrivacyLedger, run: str, digest: str, label: str) -> LedgerRound:
    """Return the round of a run in which this site made the release with a digest; WsiFlError for none."""
    for round_ in collect_rounds(ledger.entries_of_run(run)):
        if digest in round_.releases.values():
            return round_
    raise WsiFlError(
        f"{label}: {ledger.path.parent.name}/{ledger.path.name} lacks its release, or has a newer one; "
        "restore both from the same backup, or measure anew with --again, which costs as much as a release"
    )
