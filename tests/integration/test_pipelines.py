"""Tests of the shipped pipelines: studies of ProxyFL's section 4, their settings and first lines."""

import shlex

import numpy as np
import pytest
from conftest import nightly
from PIL import Image

from wsi_fl.cli.main import app
from wsi_fl.study.folder import Study, find_shipped_folder


@pytest.fixture
def study(tmp_path):
    for name in ("pipelines", "sites"):
        (tmp_path / "study" / name).mkdir(parents=True)
    return Study(tmp_path / "study")


def first_line(name):
    """Return the options of `partition DATA` and of `train` in the first command of the pipeline."""
    line = (find_shipped_folder("pipelines") / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    divide, train = (shlex.split(command) for command in line.removeprefix("# ").split("&&"))
    assert (divide[:2], train[:2]) == (["wsi-fl", "partition"], ["wsi-fl", "train"])
    return [dict(zip(words[::2], words[1::2], strict=True)) for words in (divide[3:], train[2:])]


def write_images(path, n, side, channels, n_classes):
    """Write synthetic images whose brightness depends on the class: an npz, or a folder for a path without suffix."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % n_classes
    shape = (n, side, side, channels) if channels > 1 else (n, side, side)
    shade = (y * 200 // n_classes).reshape(n, *[1] * (len(shape) - 1))
    x = (rng.integers(0, 56, shape) + shade).astype(np.uint8)
    if path.suffix:
        np.savez(path, x_train=x, y_train=y, x_test=x[: n // 4], y_test=y[: n // 4])
        return path
    for k in range(n):
        folder = path / f"class_{y[k]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.concatenate([x[k], x[k][:, : side // 4]], axis=1)).save(folder / f"{k}.png")
    return path


def flat(options):
    return [word for pair in options.items() for word in pair]


@pytest.mark.parametrize(
    ("name", "images", "smaller"),
    [
        ("fashion_mnist", ("data.npz", 300, 28, 1, 10), {"--per-site": "30"}),
        *nightly(("cifar10", ("data.npz", 120, 32, 3, 10), {"--per-site": "30"})),
        ("kvasir", ("folder", 24, 40, 3, 8), {"--size-px": "32"}),
    ],
)
def test_the_first_line_of_a_pipeline_runs_the_study_at_a_smaller_scale(study, monkeypatch, name, images, smaller):
    data = write_images(study.root / images[0], *images[1:])
    divided, trained = first_line(name)
    monkeypatch.chdir(study.root)
    app(["partition", str(data), *flat(divided | smaller | {"--sites": "2"})], standalone_mode=False)
    small = ["--set", "train.rounds=1", "--set", "train.batch_size=10"]
    if name == "kvasir":  # what its comment recommends for two cores
        small += ["--set", "model.private=gn_cnn", "--set", "model.proxy=gn_cnn_small"]
    app(["train", "--backend", "local", *flat(trained), *small], standalone_mode=False)
    (run,) = (folder for folder in study.runs_path.glob("*") if folder.is_dir())
    assert run.name.endswith(f"proxyfl-{name}")
    assert len(list(run.glob("sites/*/private.safetensors"))) == 2


@pytest.mark.parametrize(
    ("overrides", "unit"),
    [
        ((), "row"),
        (("train.data=features",), "row"),
        (("train.data=mosaics",), "patient"),
        (("train.data=features", "train.example=slide"), "patient"),
        (("train.data=features", "train.example=patient", "privacy.sigma=1"), "patient"),
        (("train.data=mosaics", "target.column=grade", "target.range=[0,1]"), "patient"),
        (("train.data=mosaics", "privacy.unit=row"), "row"),
    ],
)
def test_pipelines_for_slides_or_patients_protect_patients(study, overrides, unit):
    (study.root / "pipelines/mine.toml").write_text("[train]\nrounds = 1\n", encoding="utf-8")
    assert study.load_pipeline("mine", overrides).privacy.unit == unit
