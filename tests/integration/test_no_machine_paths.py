"""Tests that shared files name no path, host or user of the machine."""

import re
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_study
from test_oneshot import HEADS, make_hospitals
from training_runs import trained

import wsi_fl
from wsi_fl.models import create_model
from wsi_fl.models.export_formats import DownsamplingModel, write_onnx, write_torchscript
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.export_model import export_model
from wsi_fl.types import Bags, Images, Vectors

HERE = [str(Path(of.__file__).parents[1]) for of in (wsi_fl, torch, np)]
_SOURCE = re.compile(rb"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]+\.pyc?\b")


def contents(path):
    """Return the contents of a file, by member for an archive."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield f"{path.name}/{name}", name.encode() + b"\n" + archive.read(name)
    else:
        yield path.name, path.read_bytes()


def assert_says_no_place(folder, *more):
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert files
    words = [*HERE, str(folder), str(Path.home() / ".local"), ".partial", *map(str, more)]
    if len(host := socket.gethostname()) > 6:  # shorter ones are found in any bytes
        words.append(host)
    for path in files:
        for name, data in contents(path):
            assert not [word for word in words if word.encode() in data], name
            assert not _SOURCE.search(data), name


def build_models():
    """Return a model of every kind by name, with its shape."""
    shapes = {
        "gn_cnn_small": Images(3, 16),
        "lenet5": Images(1, 16),
        "mlp_head": Vectors(8),
        "deepset_attention": Bags(8),
    }
    found = {name: (create_model(name, n_classes=2, shape=shape, seed=0), shape) for name, shape in shapes.items()}
    network = create_model("lenet5", n_classes=2, shape=Images(3, 16), seed=0)
    found["reduced"] = DownsamplingModel(network, 16), Images(3, 32)
    found["shared"] = SharedHead(2, 8).solve_released_head(), Vectors(8)
    return {name: (model.eval().requires_grad_(False), shape) for name, (model, shape) in found.items()}


@pytest.mark.parametrize("write", [write_torchscript, pytest.param(write_onnx, marks=pytest.mark.end_to_end)])
def test_a_model_file_holds_no_trace_of_where_it_was_made(tmp_path, write):
    if write is write_onnx:
        pytest.importorskip("onnxruntime", reason="needs the extra `export`")
        pytest.importorskip("onnxscript")
    for name, (model, shape) in build_models().items():
        if name != "deepset_attention":
            assert write(tmp_path / name, model, shape) < 1e-5  # it is read back, and says the same
        elif write is write_onnx:
            write_onnx(tmp_path / name, model, shape, {"input": "features"})
    assert_says_no_place(tmp_path)


@pytest.mark.end_to_end
def test_an_exported_model_and_its_card_hold_no_trace_of_where_they_were_made(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    run = trained(study, "proxyfl", "train.rounds=1")["run"]
    evaluate(study, run)
    for form in ("wsinfer", "monai-bundle", "onnx"):
        if form == "onnx":
            pytest.importorskip("onnxruntime", reason="needs the extra `export`")
        document = export_model(study, run, model_name="proxy", form=form, out=tmp_path / form)
        assert document["files"]
        assert_says_no_place(tmp_path / form, study.root)
    assert RunFolder(study.find_run(run)).name in (tmp_path / form / "MODEL_CARD.md").read_text()


def test_a_class_statistics_file_holds_no_trace_of_where_it_was_made(tmp_path):
    study = make_hospitals(tmp_path / "study")
    release_statistics(study, site="S0", overrides=[*HEADS, "privacy.sigma=2.0"])
    assert_says_no_place(study.root / "statistics", study.root)
