"""The secret of a real hospital's held-out draw, so that no seed, fraction or fold of a plan chooses the patients.

It is beside the hospital's ledger, `ledgers/<site>.lots`: studies that share a ledger are on the same patients, and
draw alike. It is made once, of the operating system's entropy, and never leaves the site. After its loss other patients
are drawn, and a run that began with it is refused, so a backup must hold it. A simulated site has none: its draw
follows from `train.seed`.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from wsi_fl.data.validation import PUBLIC_DRAW, HoldoutDraw
from wsi_fl.study.folder import Study
from wsi_fl.system.files import atomic_path, file_lock, require_regular_file
from wsi_fl.types import WsiFlError

_SECRET_BYTES = 32


def secret_path(study: Study, site: str) -> Path:
    """Return the path of a real hospital's secret, which may not exist."""
    ledger = study.ledger_path(site)
    return ledger.with_name(f"{ledger.name.removesuffix('.jsonl')}.lots")


def load_holdout_draw(study: Study, site: str) -> HoldoutDraw:
    """Return the draw of a site's folds and validation patients; a real site's secret is made if missing.

    WsiFlError where the file is damaged, as another secret would hold out other patients.
    """
    if not study.load_site(site).real:
        return PUBLIC_DRAW
    path = secret_path(study, site)
    if not path.exists():
        with file_lock(path.with_name(f".{path.name}.lock")):  # ranks of one job may all be first
            if not path.exists():
                with atomic_path(path) as temporary:
                    temporary.touch(mode=0o600)
                    temporary.write_text(f"{secrets.token_hex(_SECRET_BYTES)}\n", encoding="ascii")
    text = require_regular_file(path).read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch(f"[0-9a-f]{{{2 * _SECRET_BYTES}}}", text):
        raise WsiFlError(f"{study.relative_path(path)}: damaged; put its backup back: it draws the held-out patients")
    return HoldoutDraw(bytes.fromhex(text))
