"""The study that gets malformed input: the tortured one, with what other tools and other people give beside it."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import h5py
import numpy as np

from attacks.running import run
from attacks.studies import EVERYTHING, copied, explained, prepared


@functools.cache
def given(folder: Path) -> Path:
    """Return the study with everything in it, and what others give; it is made once per folder."""
    root = folder / "given"
    if root.exists():
        return root
    study = copied(prepared(folder, EVERYTHING), folder / "given.partial")
    for form in ("clam", "trident", "stamp"):
        _do(("export", "--site", "C1", "--format", form, "--out", f"foreign/{form}"), study)
    _do(("statistics", "--all", "--set", "train.data=features", "--set", "privacy.sigma=2"), study)
    _do(("federation", "provision", "fed", "--name", "fl", "--folder", "line", "--sites", "C1,C2"), study)
    _clinical(study)
    _generic(study)
    _data_sets(study)
    study.rename(root)
    return root


def _do(command: tuple[str, ...], study: Path) -> None:
    ended = run(command, study, limit_s=600)
    if ended.code:
        raise RuntimeError(f"{' '.join(command)} failed undisturbed: {explained(ended)}")


def _clinical(study: Path) -> None:
    """A table of survival for both sites."""
    (study / "tables").mkdir()
    rows = ["patient,months,dead,grade"]
    for k, path in enumerate(sorted((study / "archive").rglob("*.tif"))):
        rows.append(f"{path.stem[:11]},{k + 1}.5,{k % 2},{'high' if k % 3 else 'low'}")
    (study / "tables" / "all.csv").write_text("\n".join(dict.fromkeys(rows)) + "\n")
    for site in ("C1", "C2"):
        file = study / "sites" / f"{site}.toml"
        file.write_text(file.read_text() + 'clinical = "tables/all.csv"\n')


def _generic(study: Path) -> None:
    """A site with a table of slides, and outlines as GeoJSON."""
    folder = study / "generic"
    folder.mkdir()
    rows = ["slide,patient,site,label,annotation,mpp"]
    for k, path in enumerate(sorted((study / "archive").rglob("*.tif"))[:3]):
        shutil.copy(path, folder / path.name)
        rows.append(f"{path.name},p{k},G,{'tumor' if k else 'normal'},{'' if not k else f'{k}.geojson'},")
        ring = [[100, 100], [500, 100], [500, 500], [100, 500], [100, 100]]
        outline = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}}
        outline["properties"] = {"classification": {"name": "Tumor"}}
        (folder / f"{k}.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [outline]}))
    (folder / "slides.csv").write_text("\n".join(rows) + "\n")
    (study / "sites" / "G.toml").write_text(
        'name = "G"\nreal = false\nslides = "generic/*.tif"\nannotations = "generic"\nlayout = "generic"\n'
        'labels = "generic/slides.csv"\n'
    )


def _data_sets(study: Path) -> None:
    """What `partition` takes."""
    from PIL import Image

    rng, folder = np.random.default_rng(0), study / "data"
    x, y = rng.integers(0, 256, (24, 8, 8, 3), np.uint8), np.arange(24) % 2
    for k in range(6):
        (folder / "images" / f"{k % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[k]).save(folder / "images" / f"{k % 2}" / f"{k}.png")
    np.savez(folder / "set.npz", x=x, y=y)
    with h5py.File(folder / "set.h5", "w") as file:
        file["x"], file["y"] = x, y
