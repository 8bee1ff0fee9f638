"""What was renamed before 1.0: whoever gives an old name is told the new one, in one line."""

from __future__ import annotations

RENAMED = {
    "wsi-fl release": "wsi-fl statistics",
    "wsi-fl directions": "wsi-fl projection",
    "wsi-fl federation frame": "wsi-fl federation preapprove",
    "wsi-fl federation board": "wsi-fl federation status",
    "wsi-fl federation evidence": "wsi-fl federation dossier",
    "wsi-fl federation rehearse": "wsi-fl train --dry-run --plan FILE",
    "wsi-fl federation withdraw": "wsi-fl federation preapprove --revoke",
    "wsi-fl projection --directions": "--dimensions",
    "wsi-fl bench --directions": "--projection",
    "wsi-fl clinical --least": "--min-patients",
    "wsi-fl import --as": "--encoder-name",
    "model.directions": "model.projection",
    "predict.with": "predict.model",
    "predict.model = 'alone'": "predict.model = 'local'",
    "predict.model = 'stack'": "predict.model = 'ensemble'",
    "train.alone": "train.local_baseline",
    "train.at_least": "train.min_sites",
    "train.releases": "train.from_released",
    "train.start": "train.init_from",
    "train.until": "train.deadline",
}
"""Old name → new one, of commands, options, keys and values."""


def new_name(old: str) -> str:
    """Return in words what an old name was renamed to; "" where it is none."""
    return f"{old} was renamed: use {RENAMED[old]}" if old in RENAMED else ""
