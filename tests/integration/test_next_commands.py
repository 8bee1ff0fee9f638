"""Tests of the commands that commands propose next: they can be given, and keep the pipeline and settings of before."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import make_study
from test_error_advice import parse_stated_command

from wsi_fl.stages.runtime.hints import next_command, partition_hint, pipeline_method
from wsi_fl.study.folder import Study, find_shipped_folder
from wsi_fl.synthesis.stages.generator_training import build_check_hint
from wsi_fl.synthesis.stages.generator_types import load_kind

OTHER = Path("other.npz")
"""Images that no shipped pipeline names."""
SHIPPED = sorted(path.stem for path in find_shipped_folder("pipelines").glob("*.toml"))


def study_of(root: Path, *names: str, text: str | None = None) -> Study:
    """Return a study with these shipped pipelines, or with pipelines of this text."""
    (root / "pipelines").mkdir()
    (root / "sites").mkdir()
    for name in names:
        shipped = find_shipped_folder("pipelines") / f"{name}.toml"
        (root / "pipelines" / f"{name}.toml").write_text(shipped.read_text() if text is None else text)
    return Study(root)


def test_a_proposed_command_keeps_what_was_given_for_a_shell():
    given = ["features.encoder=uni v2", "privacy.enabled=true", " train.data = patches"]
    command = next_command("train --method joint", "my runs/a.toml", given, ["train.data=mosaics"])
    words = ["wsi-fl", "train", "--method", "joint", "--pipeline", "my runs/a.toml"]
    settings = [*given[:2], "train.data=mosaics"]
    assert shlex.split(command) == [*words, *(word for setting in settings for word in ("--set", setting))]
    assert next_command("features --all") == "wsi-fl features --all"


@pytest.mark.parametrize("name", SHIPPED)
def test_partition_proposes_the_commands_of_the_only_pipeline(tmp_path, name):
    hint = partition_hint(study_of(tmp_path, name), OTHER).text.removeprefix("stores ready; next: ")
    for command in hint.split(" && "):
        parse_stated_command(command)
        assert "partition" not in command and (f"--pipeline {name}" in command or "--pipeline" not in command)


def test_partition_names_method_and_pipeline(tmp_path):
    study = study_of(tmp_path, "mpcpa_small")
    assert partition_hint(study, OTHER).text == (
        "stores ready; next: wsi-fl train --method mpcpa --pipeline mpcpa_small --baselines"
    )
    (tmp_path / "pipelines" / "mpcpa_small.toml").rename(tmp_path / "pipelines" / "of_mine.toml")
    assert "--method mpcpa --pipeline of_mine --baselines" in partition_hint(study, OTHER).text
    assert pipeline_method(study, None) == "mpcpa"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (Path("data/mnist_70k.npz"), "next: wsi-fl train --method proxyfl --pipeline mnist"),
        (Path("/usr/share/datasets/fashion-mnist"), "next: wsi-fl train --method proxyfl --pipeline fashion_mnist"),
        (OTHER, "--pipeline NAME (fashion_mnist, mnist, mnist_heterogeneous, …)"),
    ],
)
def test_partition_proposes_the_pipeline_of_its_images(tmp_path, source, expected):
    study = study_of(tmp_path, "camelyon17", "fashion_mnist", "mnist", "mnist_heterogeneous")
    assert partition_hint(study, source).text.endswith(expected)


@pytest.mark.parametrize(
    ("names", "words"), [((), "--pipeline NAME"), (("a",), "--method proxyfl"), (("a", "b"), "--pipeline NAME (a, b")]
)
def test_partition_proposes_the_default_method_without_a_single_described_pipeline(tmp_path, names, words):
    hint = partition_hint(study_of(tmp_path, *names, text="[train]\nrounds = 3\n"), OTHER).text
    assert hint.startswith("stores ready; next: wsi-fl train --method proxyfl") and words in hint


def test_the_partition_command_ends_with_it(tmp_path, wsi_fl):
    study = study_of(tmp_path, "mnist")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8), y=np.arange(20) % 2)
    done = wsi_fl("partition", "x.npz", "--sites", 2, cwd=study.root)
    last = "next: wsi-fl train --method proxyfl --pipeline mnist"
    assert done.returncode == 0 and done.stderr.splitlines()[-1].endswith(last)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [("gan", [], "--set lpips.weights=FILE"), ("gan", ["lpips.weights=vgg.safetensors"], ""), ("ddpm", [], "")],
)
def test_a_trained_generator_is_checked_with_its_pipeline_settings_and_weights(tmp_path, kind, settings, words):
    pipeline = make_study(tmp_path / "study", 1).load_pipeline("small", settings)
    hint = build_check_hint(pipeline, load_kind(kind), "S0", "small", settings)
    command, _, note = hint.partition(" (")
    expected = next_command(f"synthesize check --generator {kind} --site S0", "small", settings)
    assert command == expected and words in note and bool(note) == bool(words)
