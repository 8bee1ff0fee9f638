"""What a site releases once and keeps as a file, which people may copy: its sums.

The order: ledger line, a copy of what was released beside the store, a second line that it may leave, then the file.
After a crash before the copy nothing has left, and the next release takes the place of the lost one; after it the same
numbers are written again. So no crash makes a site release two noisy versions. Nor do two studies on one ledger:
numbers whose place was taken by another study's do not leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from wsi_fl.privacy.guarantee import Round
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Guarantee, Release, Values, digest
from wsi_fl.stages.site.account import terms_of
from wsi_fl.stages.site.ledgers import claimed, open_ledger
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.types import WsiFlError

T = TypeVar("T")


@dataclass(frozen=True)
class Once(Generic[T]):
    """Where something that is released once lies, and how it is read and written.

    Attributes:
        copy: beside the store, written before anything may leave.
        file: what may be taken to other sites.
        schema: of the numbers.
        read: refuses a damaged file.
        vector: the very numbers that the ledger has the digest of.
    """

    study: Study
    copy: Path
    file: Path
    schema: str
    read: Callable[[Path], T]
    write: Callable[[Path, T], None]
    vector: Callable[[T], Values]


def release_once(
    once: Once[T],
    ledger: PrivacyLedger,
    make: Callable[[], tuple[Release, T]],
    agrees: Callable[[T], None],
    *,
    again: bool = False,
) -> tuple[T, bool]:
    """Release something unless it was released before; return it, and whether that spent anything.

    Args:
        make: puts a new release on the ledger; one that was never sent is taken back by it.
        agrees: refuses what was released before where it is not what is asked for now.
        again: release anew, which costs as much once more.

    Raises:
        WsiFlError: when a file is damaged, or its numbers are not on the ledger.
    """
    kept = None if again else _kept(ledger, once.copy, once.file)
    if kept is None:
        release, content = make()
        once.write(once.copy, content)
        ledger.sending(release.round, release.digest)
    else:
        content = once.read(kept)
        vector = once.vector(content)
        round_ = check_own(ledger, digest(vector), once.study.relative(kept))
        agrees(content)
        if not round_.final:
            ledger.reissue(round_.number, vector, schema=once.schema)
    once.write(once.file, content)
    return content, kept is None


def _kept(ledger: PrivacyLedger, *files: Path) -> Path | None:
    """Return the file whose numbers the ledger knows, else the first that is there, to be refused; None for none."""
    there = [file for file in files if file.exists()]
    released = {known for round_ in ledger.rounds() for known in round_.releases.values()}
    known = [file for file in there if claimed(file) in released]
    return next(iter([*known, *there]), None)


def once_ledger(
    study: Study, site: SiteFile, pipeline: Pipeline, run: str, guarantee: Guarantee = "guaranteed"
) -> PrivacyLedger:
    """Return the site's account of what it releases once, whose noise never comes from a fixed seed.

    Args:
        run: what ledgers call the release: "oneshot".
        guarantee: what the next one is worth.
    """
    plain = pipeline.privacy.model_copy(update={"insecure_seed": None})
    terms = terms_of(site, pipeline.model_copy(update={"privacy": plain}), guarantee)
    allowed = terms if site.real else replace(terms, allow=(*terms.allow, run))
    return open_ledger(study, site, run, allowed)


def check_own(ledger: PrivacyLedger, known: str, label: str) -> Round:
    """Return the round of the ledger in which this site released what has this digest: its ε rests on that noise.

    Raises:
        WsiFlError: when it released none such, or has put another measurement in the place of this one before it left.
    """
    for round_ in ledger.rounds():
        if known in round_.releases.values():
            return round_
    # a real hospital's account has refused before, whatever is asked
    raise WsiFlError(
        f"{label}: its numbers are not in {ledger.path.parent.name}/{ledger.path.name}, or others have taken their "
        "place there; restore both from the same backup, or measure anew with --again, which costs as much as a release"
    )
