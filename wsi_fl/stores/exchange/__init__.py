"""Import and export of features in other tools' layouts: one table of readers and writers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wsi_fl.stores.bags import BagStore
from wsi_fl.stores.exchange.anndata import find_anndata, read_anndata
from wsi_fl.stores.exchange.clam import find_clam, read_clam, write_clam
from wsi_fl.stores.exchange.foreign import Foreign, mpp_of_each
from wsi_fl.stores.exchange.stamp import find_stamp, read_stamp, write_stamp
from wsi_fl.stores.exchange.trident import find_trident, read_trident, write_trident
from wsi_fl.system.files import write_text


@dataclass(frozen=True)
class Layout:
    """How a tool lays out features.

    Attributes:
        find: folder → the file of every slide.
        read: a file → the features in it, or a WsiFlError of one line.
        write: a store and a folder → the files of its slides; None where nobody needs that.
    """

    find: Callable[[Path], dict[str, Path]]
    read: Callable[[Path], Foreign]
    write: Callable[[BagStore, Path], list[Path]] | None = None


LAYOUTS = {
    "clam": Layout(find_clam, read_clam, write_clam),
    "trident": Layout(find_trident, read_trident, write_trident),
    "stamp": Layout(find_stamp, read_stamp, write_stamp),
    "anndata": Layout(find_anndata, read_anndata),
}


def write_labels(store: BagStore, path: Path) -> None:
    """Write the table of a store's slides: case_id, slide_id and label as CLAM reads them, and what else is known."""
    lines = io.StringIO(newline="")
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(("case_id", "slide_id", "label", "tumor_type", "split", "mpp"))
    columns = store.table
    for k, mpp_l0 in enumerate(mpp_of_each(store).tolist()):
        label = store.meta.classes[int(columns.label[k])]
        table.writerow(
            (
                columns.patient[k],
                columns.slide[k],
                label,
                columns.tumor_type[k],
                columns.split[k],
                repr(mpp_l0),
            )
        )
    write_text(path, lines.getvalue())
