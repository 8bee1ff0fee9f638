"""Tests that written files are readable by their owner only."""

import os
import stat

import numpy as np
import pytest
from conftest import SMALL, patches_of


@pytest.fixture
def open_umask():
    """Set the usual umask, by which new files are readable by all users."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def seen_by_others(path):
    return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def test_nothing_the_commands_write_can_be_read_by_others(tmp_path, wsi_fl, open_umask):
    root = tmp_path / "study"
    for folder in ("pipelines", "sites", "stores", "runs", "ledgers"):  # made by hand, and open
        (root / folder).mkdir(parents=True)
    (root / "pipelines" / "small.toml").write_text(SMALL)
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    np.savez(root / "images.npz", x=patches_of(rng, y, 16, 0), y=y)
    made_by_hand = set(root.rglob("*"))

    settings = ("--set", "train.rounds=1", "--set", "audit.canaries=4", "--set", "privacy.insecure_seed=1")
    for command in (
        ("partition", "images.npz", "--sites", "2"),
        ("pack", "stores/S1/patches.h5", "packed.h5"),
        ("train", "--backend", "local", *settings),
        ("evaluate", "1"),
        ("audit", "1"),
        ("report", "1"),
    ):
        done = wsi_fl(*command, cwd=root)
        assert done.returncode == 0, done.stderr
    written = [path for path in root.rglob("*") if path not in made_by_hand]
    names = {path.name for path in written}
    stored = {"packed.h5", "patches.h5", "train.h5", "S1.jsonl", "canaries.json", "metrics.jsonl"}
    assert names >= stored | {"private.safetensors", "predictions.csv", "audit.json", "index.html"}
    assert not [path for path in written if seen_by_others(path)]
