"""Curves of a run for trackers that people have: local files of TensorBoard and MLflow. Nothing is sent anywhere."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Curves = Mapping[str, list[tuple[int, dict[str, float]]]]
"""Site → (round, values by name) of every finished round."""


def curves_of(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Return the numbers of a site's metrics by round; nested names are joined by a slash.

    Example:
        >>> curves_of([{"round": 2, "loss": {"proxy": 0.5}, "with": "private", "epsilon": None, "takes_part": True}])
        [(2, {'loss/proxy': 0.5})]
    """
    return [
        (int(line["round"]), dict(_numbers({name: value for name, value in line.items() if name != "round"})))
        for line in lines
    ]


def _numbers(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{above}{name}", float(value)


def write_tensorboard(folder: Path, run: str, curves: Curves) -> None:
    """Write an event file for every site, `folder/<site>`."""
    del run
    from torch.utils.tensorboard import SummaryWriter

    for site, rounds in curves.items():
        with SummaryWriter(str(folder / site)) as writer:
            for number, values in rounds:
                for name, value in values.items():
                    writer.add_scalar(name, value, number)


def write_mlflow(folder: Path, run: str, curves: Curves) -> None:
    """Write an experiment of the run's name, with an MLflow run for every site, as files below a folder."""
    os.environ |= {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    folder.mkdir(parents=True, exist_ok=True)
    address = folder.resolve().as_uri()
    client = MlflowClient(tracking_uri=address, registry_uri=address)
    experiment = client.create_experiment(run)
    for site, rounds in curves.items():
        found = client.create_run(experiment, run_name=site).info.run_id
        for number, values in rounds:
            client.log_batch(
                found, metrics=[Metric(name, value, 0, number) for name, value in values.items()]
            )
        client.set_terminated(found)


TRACKERS: dict[str, tuple[str, Callable[[Path, str, Curves], None]]] = {
    "tensorboard": ("tensorboard", write_tensorboard),
    "mlflow": ("mlflow", write_mlflow),
}
"""Name of a tracker, which is that of the extra → (the module it needs, what writes its files)."""


def missing(trackers: Iterable[str]) -> list[str]:
    """Return those of the trackers whose extra is not installed."""
    return [name for name in trackers if find_spec(TRACKERS[name][0]) is None]
