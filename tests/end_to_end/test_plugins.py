"""The package of one file in `docs/reference/python-api.md` adds a command, a method, an encoder and a reader."""

import importlib
import json
import re
import sys
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import make_study, refused
from safetensors.torch import save_file
from torch.nn import functional

from wsi_fl import plugins
from wsi_fl.federation.methods import METHODS
from wsi_fl.hospitals.plans.installed_code import code_digest, package_versions
from wsi_fl.models.encoder import Encoder, build_preset_model
from wsi_fl.models.presets import PRESETS
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.types import WsiFlError

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")
PAGE = PAGE.partition("(plugins)=")[2]
TOML, PYTHON = (re.search(rf"```{kind}\n(.+?)```", PAGE, re.DOTALL)[1] for kind in ("toml", "python"))
PROJECT = tomllib.loads(TOML)["project"]


def installed(folder, name="neighbourly", groups=PROJECT["entry-points"], text=PYTHON):
    """Write the page's package and its metadata, as an installer leaves them."""
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


@contextmanager
def found_in(folder):
    """Let this process and those that it starts find the packages in a folder; yield what makes it look again."""

    def look_again():
        importlib.invalidate_caches()
        for known in (plugins._find_points, plugins._load_point):
            known.cache_clear()

    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        look_again()
        yield look_again
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)
    look_again()


@pytest.fixture
def install_packages(tmp_path):
    """Install packages into a folder on Python's path, and forget them afterwards."""
    folder = tmp_path / "site-packages"
    with found_in(folder) as look_again:
        yield lambda **given: (installed(folder, **given), look_again())


def test_the_command_of_a_plugin_is_available_and_its_method_trains(install_packages, tmp_path, wsi_fl):
    install_packages()
    study = make_study(tmp_path / "study", n_sites=2)
    assert "greet" in wsi_fl("--help", cwd=study.root).stdout
    assert wsi_fl("greet", "Zoë", cwd=study.root).stdout == "hello Zoë\n"
    ran = wsi_fl("train", "--method", "neighbourly", "--backend", "local", "--json", cwd=study.root)
    summary = json.loads(ran.stdout)
    assert [row["site"] for row in summary["sites"]] == ["S0", "S1"]
    assert summary["communication"]["messages"] == 2 * 2
    assert METHODS[summary["method"]].summary == "fedavg by another name"


def test_the_encoder_of_a_plugin_embeds_patches_and_its_reader_reads_a_slide(install_packages, tmp_path):
    install_packages()
    (tmp_path / "a.grey").write_bytes(b"GREY")
    with Slide(tmp_path / "a.grey") as slide:
        assert (slide.vendor, slide.size_l0, slide.mpp) == ("grey", (64, 48), 0.5)
        patch = slide.read((0, 0), 32, 0.5)
    encoder = Encoder("means")
    assert encoder.label.startswith("means at 16 px sha256:") and encoder.label.endswith("neighbourly 1.2")
    np.testing.assert_allclose(encoder(patch[None]), np.full((1, 12), 90 / 255), rtol=1e-6)
    assert list(PRESETS)[-1] == "means"


METTLE = Path(__file__).parents[2] / "docs" / "examples" / "wsi-fl-mettle"
HEAD = {"P": (16, 24, 8), "Q": (16, 24, 8), "mix.0.weight": (256, 24), "mix.0.bias": (256,), "mix.2.bias": (16,)}
HEAD |= {"mix.2.weight": (16, 256), "shift.0.weight": (256, 24), "shift.0.bias": (256,), "shift.2.bias": (24,)}
HEAD |= {"shift.2.weight": (24, 256)}


def test_the_example_package_adds_mettle_whose_head_refines_the_class_token(install_packages, tmp_path, monkeypatch):
    project = tomllib.loads((METTLE / "pyproject.toml").read_text())["project"]
    text = (METTLE / "wsi_fl_mettle.py").read_text("utf-8")
    install_packages(name="wsi_fl_mettle", groups=project["entry-points"], text=text)
    mettle, module = PRESETS["mettle"], sys.modules["wsi_fl_mettle"]
    with torch.device("meta"):
        whole = module._Mettle(build_preset_model(mettle))
    assert sum(parameter.numel() for parameter in whole.parameters()) == mettle.n_parameters
    arguments = {**mettle.arguments, "embed_dim": 24, "depth": 1, "num_heads": 2, "img_size": 28}
    monkeypatch.setattr(module, "mettle", replace(mettle, arguments=arguments))
    generator = torch.Generator().manual_seed(1)
    plain = timm.create_model(mettle.architecture, num_classes=0, **arguments).eval()
    head = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in HEAD.items()}
    state = {f"backbone.{name}": tensor for name, tensor in plain.state_dict().items()}
    save_file(state | {f"head.{name}": tensor for name, tensor in head.items()}, tmp_path / "w.safetensors")
    images = torch.randn(2, 3, 28, 28, generator=generator)
    with torch.inference_mode():
        features = mettle.build(tmp_path / "w.safetensors").eval()(images)
        tokens = plain.forward_features(images)
    for token, patches, row in zip(tokens[:, 0], tokens[:, 5:], features, strict=True):

        def network(name, token=token):
            hidden = functional.gelu(head[f"{name}.0.weight"] @ token + head[f"{name}.0.bias"])
            return head[f"{name}.2.weight"] @ hidden + head[f"{name}.2.bias"]

        atoms = torch.stack([q @ (p.T @ token) for p, q in zip(head["P"], head["Q"], strict=True)])
        expected = token + network("mix") @ atoms + network("shift")
        torch.testing.assert_close(row, torch.cat([expected, patches.mean(0)]), atol=1e-4, rtol=1e-4)


def test_a_plan_names_the_version_of_a_plugin(install_packages):
    before = code_digest("proxyfl")
    install_packages()
    assert package_versions()["neighbourly"] == "1.2"
    assert code_digest("proxyfl") != before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text": "import nothing_of_that_name"}, ("No module named", "cannot be imported", "update or")),
        ({"text": "method = 3"}, ("is no Method",)),
        ({"groups": {"wsi_fl.methods": {"fedavg": "neighbourly:method"}}}, ("which wsi-fl has itself",)),
    ],
)
def test_a_broken_plugin_is_named(install_packages, given, words):
    install_packages(**given)
    refused(lambda: [METHODS[name] for name in METHODS], "neighbourly 1.2", *words, error=WsiFlError)


def test_two_plugins_of_the_same_name_are_refused(install_packages):
    install_packages()
    install_packages(name="another")
    words = ("another 1.2", "neighbourly 1.2", "uninstall one")
    refused(lambda: METHODS["neighbourly"], *words, error=WsiFlError)
