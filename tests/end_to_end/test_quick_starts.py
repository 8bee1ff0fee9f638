"""The commands of the features tutorial run as written."""

import re
import shlex
from pathlib import Path

import h5py
import numpy as np

DOCS = Path(__file__).parents[2] / "docs"


def trident(folder, table, first, n, rng):
    """Features of slides in TRIDENT's layout, and their labels."""
    folder.mkdir(parents=True)
    lines = ["slide,label,patient"]
    for k in range(first, first + n):
        label = k % 2
        with h5py.File(folder / f"s{k}.h5", "w") as file:
            file["features"] = (rng.normal(size=(5, 40)) + label).astype(np.float32)
            file["features"].attrs["encoder"] = "somebody's"
            file["coords"] = rng.integers(0, 100, (5, 2)) * 512
            file["coords"].attrs.update(patch_size=256, patch_size_level0=512, target_magnification=20, overlap=0)
        lines.append(f"s{k},{('not', 'recurrent')[label]},p{k}")
    table.write_text("\n".join(lines) + "\n")


def test_a_study_of_simulated_images_trains_in_seconds(tmp_path, wsi_fl, monkeypatch):
    page = (DOCS / "how-to" / "prepare-data.md").read_text(encoding="utf-8").split("## Archives")[0]
    (code,) = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    for command in re.findall(r"^    (wsi-fl .+)$", page, re.MULTILINE):
        place = tmp_path if " init " in command else tmp_path / "tiny"
        ran = wsi_fl(*shlex.split(command.removesuffix(" && cd tiny"))[1:], cwd=place)
        assert not ran.returncode, (command, ran.stderr)
    assert "2 rounds, ε = " in ran.stderr


def test_features_become_a_score_and_a_gain(tmp_path, wsi_fl):
    rng = np.random.default_rng(0)
    trident(tmp_path / "features_uni_v1", tmp_path / "labels.csv", 0, 24, rng)
    trident(tmp_path / "b" / "features_uni_v1", tmp_path / "labels_b.csv", 100, 24, rng)
    trident(tmp_path / "public" / "features_uni_v1", tmp_path / "nobody_reads.csv", 200, 24, rng)
    page = (DOCS / "tutorials" / "features.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    (wsi-fl .+)$", page, re.MULTILINE)
    (subtypes,) = re.findall(r"^    (\[subtypes\]\n)    (any = .+)$", page, re.MULTILINE)
    assert len(commands) == 11
    place, said = tmp_path, ""
    for command in commands:
        fewer = command.replace("--folds 5", "--folds 2").replace("1-5", "1-2")
        words = shlex.split(fewer.replace(" && cd ", " "))
        if words[1] == "train":
            words += ["--backend", "local", *(["--set", "train.rounds=4"] if "regular" in words else [])]
        folder = words.pop() if words[1] == "init" else "."
        ran = wsi_fl(*words[1:], cwd=tmp_path if words[1] == "init" else place)
        assert not ran.returncode, (command, ran.stderr)
        if words[1] == "init":
            place = tmp_path / folder
            with (place / "pipelines" / "features.toml").open("a") as file:
                file.write("\n" + "".join(subtypes))
        said += ran.stderr
    assert "Regular without DP" in said and "One-shot" in said and "of somebody's, from 120 patches" in said
    assert re.search(r"AUROC +│ +\d\.\d\d \(\d\.\d\d–\d\.\d\d\)", said)
    assert list(tmp_path.glob("*/comparisons/*/index.html"))
