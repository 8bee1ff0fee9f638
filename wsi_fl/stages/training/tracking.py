"""The metrics of a finished run as files of trackers: `runs/RUN/tracking/`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from wsi_fl.report.trackers import TRACKERS, curves_of, missing
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.work.aside import reason_of
from wsi_fl.stages.work.console import Watcher
from wsi_fl.types import UsageError


def require_trackers(trackers: Sequence[str]) -> None:
    """Refuse to begin where a tracker is asked for that is not installed.

    Raises:
        UsageError: which says how to install it.
    """
    if absent := missing(trackers):
        raise UsageError(
            f"report.trackers: {absent[0]} is not installed; pip install 'wsi-fl[{absent[0]}]', or leave it out"
        )


def track(run: RunFolder, trackers: Sequence[str], watcher: Watcher) -> None:
    """Write the metrics of all sites whose part of the run lies here, anew each time.

    What goes wrong with a tracker is said and ends nothing: the metrics are in metrics.jsonl.
    """
    sites = sorted(path.parent.name for path in run.path.glob("sites/*/metrics.jsonl"))
    curves = {site: curves_of(run.site(site).metrics()) for site in sites}
    for name in trackers:
        folder = run.path / "tracking" / name
        shutil.rmtree(folder, ignore_errors=True)
        try:
            TRACKERS[name][1](folder, run.name, curves)
        except Exception as error:  # of a library that is not ours
            watcher.say(f"  {run.name}: no files for {name}: {reason_of(error)}")
