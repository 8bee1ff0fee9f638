"""What ε per row is worth to the patient with the most rows, from what a hospital saw before: no store is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsi_fl.privacy.groups import group_epsilon
from wsi_fl.privacy.guarantee import applied, epsilon_of, units_of
from wsi_fl.privacy.ledger_file import Entry
from wsi_fl.stages.site.account import Group
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_json


def most_rows(study: Study, site: str, cost: Mapping[str, Any] | None) -> int | None:
    """Return the most rows that a patient of a site had, as it signed or in a run; None where nobody looked.

    Args:
        cost: what the hospital saw of the plan's cost as it signed.
    """
    runs = [path for path in study.runs.glob("*/sites/*/ledger.json") if path.parent.name == site]
    seen = [(cost or {}).get("group"), *(read_json(path).get("group") for path in runs)]
    return max((int(one["rows"]) for one in seen if one), default=None)


def group_of(entries: Sequence[Entry], delta: float, rows: int | None) -> Group | None:
    """Return what ε per row of lines of a ledger is worth to a patient with so many rows.

    None where ε is not per row or says nothing, or the number of rows is not known.
    """
    if rows is None or units_of(entries) != {"row"} or epsilon_of(entries, delta) is None:
        return None
    return {"rows": rows, "epsilon": group_epsilon(applied(entries), delta, rows), "delta": delta}
