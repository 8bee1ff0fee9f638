"""The secret by which a real hospital draws who is held out, so that no seed, fraction or fold of a plan chooses whom.

It lies beside the hospital's ledger, `ledgers/<site>.lots`: studies that share a ledger are on the same patients, and
draw alike. It is made once, of the operating system's entropy, and never leaves. Whoever loses it draws others from
then on, and a run that began with it is refused; it is part of `federation backup`. A simulated site has none: what it
holds out follows from `train.seed`.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from wsi_fl.learning.validation import OPEN_LOTS, Lots
from wsi_fl.study.folder import Study
from wsi_fl.system.files import alone, atomic, ordinary
from wsi_fl.types import WsiFlError

_BYTES = 32


def lots_path(study: Study, site: str) -> Path:
    """Return where a real hospital's secret is, or would be."""
    ledger = study.ledger(site)
    return ledger.with_name(f"{ledger.name.removesuffix('.jsonl')}.lots")


def lots_of(study: Study, site: str) -> Lots:
    """Return what draws a site's folds and validation patients; the secret of a real one is made where there is none.

    WsiFlError where the file is damaged, for another secret would hold out other patients.
    """
    if not study.site(site).real:
        return OPEN_LOTS
    path = lots_path(study, site)
    if not path.exists():
        with alone(path.with_name(f".{path.name}.lock")):  # ranks of one job may all be first
            if not path.exists():
                _make_secret(path)
    text = ordinary(path).read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch(f"[0-9a-f]{{{2 * _BYTES}}}", text):
        raise WsiFlError(f"{study.relative(path)}: damaged; put its backup back: it draws who is held out")
    return Lots(bytes.fromhex(text))


def _make_secret(path: Path) -> None:
    with atomic(path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_text(f"{secrets.token_hex(_BYTES)}\n", encoding="ascii")
