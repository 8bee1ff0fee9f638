"""The public API imports names on first use, and the examples of `docs/reference/python-api.md` run as written."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import make_study
from safetensors.torch import save_file
from torch.nn import functional

import wsi_fl
from wsi_fl import api
from wsi_fl.demo.simulated_slides.tiff_writer import write_pyramid

PAGE = Path(wsi_fl.__file__).parents[1] / "docs" / "reference" / "python-api.md"
EXAMPLES = PAGE.read_text(encoding="utf-8").partition("(plugins)=")[0]
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.+?)(?=^## |\Z)", EXAMPLES, re.MULTILINE | re.DOTALL))


def rows(seed, n=200, d=8):
    """Return features float32[n, d] of two separate classes, and their classes."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, n)
    return (rng.normal(size=(n, d)) + 2 * label[:, None]).astype(np.float32), label


def build_names(section):
    """Return the names that a section of the page presumes; files lie in the current folder."""
    rng = np.random.default_rng(0)
    if section == "A slide":
        picture = np.full((512, 512, 3), 240, np.uint8)
        picture[100:400, 100:400] = rng.integers([150, 60, 120], [220, 140, 190], (300, 300, 3))
        write_pyramid(Path("a.tif"), picture, 0.5)
        save_file(timm.create_model("test_efficientnet", num_classes=0).state_dict(), "weights.safetensors")
    if section == "A store":
        make_study(Path(), n_sites=1)
    if section == "Bags of features":
        bags = [rng.normal(size=(m, 8)).astype(np.float32) for m in (3, 5, 2, 7)]
        return {"bags": bags, "labels": [0, 1, 0, 1]}
    if section == "Federated training in memory":
        both = {name: rows(seed, 60) for seed, name in enumerate("ABC")}
        return {letter: {name: one[k] for name, one in both.items()} for k, letter in enumerate("xy")}
    if section == "One-shot class statistics":
        sites = [tuple(map(torch.from_numpy, rows(seed, d=32))) for seed in range(3)]
        return {"sites": sites, "public": rows(9, d=32)[0]}
    return dict(zip("xy", map(torch.from_numpy, rows(0)), strict=True))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_example_of_the_page_runs(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"torch": torch, "cross_entropy": functional.cross_entropy, **build_names(section)}
    test = doctest.DocTestParser().get_doctest(SECTIONS[section], known, section, str(PAGE), 0)
    assert test.examples
    said = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


def test_a_public_name_is_imported_on_first_use():
    code = "import sys, wsi_fl; dir(wsi_fl); import wsi_fl.api; wsi_fl.GridSpec; print('numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_the_page_documents_every_public_name():
    documented = re.findall(r"^\.\. auto\w+:: wsi_fl\.(?:\w+\.)+(\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(api.__all__) <= set(documented)


@pytest.mark.parametrize("name", api.__all__)
def test_every_public_name_resolves_and_an_unknown_name_does_not(name):
    assert name in dir(wsi_fl) and getattr(wsi_fl, name) is getattr(api, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}s'"):
        getattr(wsi_fl, f"{name}s")


def test_features_may_be_any_numpy_array():
    x, label = rows(0, n=20)
    sites = {name: api.Cohort.from_arrays(x.astype(np.float64), label) for name in ("A", "B")}
    learned = api.federate(sites, "fedavg", private=lambda: torch.nn.Linear(8, 2), rounds=1, sigma=None)
    assert all(np.isfinite(site.rounds[0]["loss"]["private"]) for site in learned.values())
