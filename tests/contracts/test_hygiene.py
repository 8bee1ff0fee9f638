"""Files that nobody should have written: one clear line says which, and nothing is taken."""

import io
import json
import zipfile

import h5py
import numpy as np
import pytest
from conftest import make_study, refused
from safetensors.torch import save_file

from wsi_fl import __main__ as program
from wsi_fl.runs.run import RunFolder
from wsi_fl.slides.choosing.annotations import read_annotations
from wsi_fl.stores.bag_shards import read_shard
from wsi_fl.stores.bags import Bag, BagMeta, BagStore, write_bags
from wsi_fl.stores.images import read_data_set
from wsi_fl.stores.patches import PatchStore
from wsi_fl.system.files import append_line, read_json, read_lines, read_lines_from
from wsi_fl.types import BagTable, GridSpec, WsiFlError

DEEP = 100_000
NESTED = "[" * DEEP + "]" * DEEP
MANY = 1 << 46
"""Rows of a column that no address space holds, and that takes next to nothing in its file."""


# nested too deeply


def test_a_deeply_nested_json_file_is_refused_by_its_name(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text(NESTED)
    refused(lambda: read_json(path), "deep.json", "nested too deeply", error=WsiFlError)


def test_a_deeply_nested_line_is_damaged_and_as_the_last_one_unfinished(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(f"{{}}\n{NESTED}\n{{}}\n")
    refused(lambda: read_lines(path), "lines.jsonl", "line 2 is damaged", error=WsiFlError)
    path.write_text(f"{{}}\n{NESTED}")
    assert read_lines_from(path, 0) == ([{}], 3)
    append_line(path, {"a": 3})
    assert read_lines(path) == [{}, {"a": 3}]


@pytest.mark.parametrize("text", [f"x = {NESTED}", "x = " + "{a = " * DEEP + "1" + "}" * DEEP])
@pytest.mark.parametrize("folder", ["pipelines", "sites"])
def test_a_deeply_nested_toml_file_is_refused_by_its_name(tmp_path, folder, text):
    study = make_study(tmp_path / "study", n_sites=1)
    (study.root / folder / "deep.toml").write_text(text)
    read = study.pipeline if folder == "pipelines" else study.site
    refused(lambda: read("deep"), f"{folder}/deep.toml", "nested too deeply")


def test_a_deeply_nested_override_is_refused_without_being_repeated(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    with pytest.raises(WsiFlError, match=r"--set target\.classes: .*nested too deeply") as caught:
        study.pipeline("small", [f"target.classes={NESTED}"])
    assert len(str(caught.value)) < 200


def test_a_checkpoint_with_a_deeply_nested_document_is_damaged(tmp_path):
    folder = RunFolder(tmp_path).site("S0")
    path = folder.checkpoint_path(1)
    path.parent.mkdir(parents=True)
    save_file({}, path, metadata={"document": NESTED})
    refused(
        lambda: folder.load_checkpoint(1),
        path.name,
        "damaged checkpoint",
        "nested too deeply",
        error=WsiFlError,
    )


def outline(geometry=None, group="tumor"):
    square = {"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 9]]]}
    properties = {"classification": {"name": group}}
    return {"type": "Feature", "geometry": geometry or square, "properties": properties}


def collections(depth):
    text = '{"type": "GeometryCollection", "geometries": [' * depth + "]}" * depth
    return '{"type": "Feature", "properties": {}, "geometry": ' + text + "}"


@pytest.mark.parametrize("text", [NESTED, '{"features": ' + NESTED + "}", collections(DEEP)])
def test_a_deeply_nested_annotation_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "deep.geojson"
    path.write_text(text)
    refused(lambda: read_annotations(path), "deep.geojson", "nested too deeply", error=WsiFlError)


def test_deeply_nested_xml_is_read_like_any_other(tmp_path):
    path = tmp_path / "deep.xml"
    path.write_text(f"<ASAP_Annotations>{'<a>' * DEEP}{'</a>' * DEEP}</ASAP_Annotations>")
    assert read_annotations(path).tumor.is_empty


# names of any length


def test_unknown_groups_are_shortened_and_counted(tmp_path):
    path = tmp_path / "groups.geojson"
    long = [outline(group=f"{k}" + "x" * 1_000_000) for k in range(8)]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [outline(), *long]}))
    with pytest.raises(WsiFlError, match=r"unknown annotation groups 0xx.*, and 3 more; known are") as caught:
        read_annotations(path)
    assert len(str(caught.value)) < 1000
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [outline(group="stroma")]}))
    refused(lambda: read_annotations(path), "unknown annotation groups stroma; known", error=WsiFlError)


@pytest.mark.parametrize(
    "text",
    [
        f"<{'r' * 1_000_000}/>",
        json.dumps({"features": [outline({"type": "x" * 1_000_000})]}),
        json.dumps({"features": [outline({"type": "Polygon", "coordinates": [[["x" * 1_000_000, 1]] * 4]})]}),
    ],
)
def test_what_is_wrong_with_an_annotation_is_said_in_a_line_that_can_be_read(tmp_path, text):
    path = tmp_path / "long.xml"
    path.write_text(text)
    with pytest.raises(WsiFlError, match=r"long\.xml: not ASAP XML or QuPath GeoJSON") as caught:
        read_annotations(path)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


# more than there is memory for


def claimed(path, name, shape=(MANY,)):
    """Makes a column of a store say that it has so many rows."""
    with h5py.File(path, "r+") as file:
        kind = file[name].dtype
        del file[name]
        file.create_dataset(name, shape, kind, chunks=True)


@pytest.mark.parametrize("column", ["label", "slide", "xy_l0", "tumor_fraction"])
def test_a_store_that_claims_more_rows_than_fit_is_refused_by_its_name(tmp_path, column):
    path = make_study(tmp_path / "study", n_sites=1).store("S0")
    claimed(path, column, (MANY, 2) if column == "xy_l0" else (MANY,))
    refused(lambda: PatchStore(path), "patches.h5", "more than fits into memory", error=WsiFlError)


def test_a_shard_that_claims_more_streams_than_fit_is_refused_by_its_slide(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    with h5py.File(study.store("S0").parent / "slides" / "S0_slide_1.h5", "r+") as file:
        file.attrs["content"] = "native"
        file["bytes"] = np.zeros(9, np.uint8)
        file.create_dataset("start", (MANY,), np.uint64, chunks=True)
    with PatchStore(study.store("S0")) as store:
        words = "patches.h5", "shard of slide S0_slide_1", "more than fits into memory"
        refused(lambda: store.read(np.arange(12, 14)), *words, error=WsiFlError)


def test_features_that_claim_more_than_fits_are_refused_by_their_name(tmp_path):
    path, one = tmp_path / "features.h5", np.array(["a"])
    meta = BagMeta("S0", ("healthy", "tumor"), "e", GridSpec(16, 1.0, 16))
    bag = Bag(np.zeros((2, 3), np.float32), np.zeros((2, 2), np.int64))
    write_bags(path, meta, BagTable(np.zeros(1, np.int64), one, one, one, np.array(["train"])), [bag])
    claimed(path, "start")
    refused(lambda: BagStore(path), "features.h5", "more than fits into memory", error=WsiFlError)


def test_a_mosaic_that_claims_more_than_fits_is_refused_by_its_name(tmp_path):
    path = tmp_path / "mosaic.h5"
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "wsi-fl bag", "version": 1, "size_px": 16, "mpp": 1.0, "stride_px": 16})
        file.create_dataset("features", (MANY, 1000), np.float32, chunks=True)
    refused(lambda: read_shard(path), "mosaic.h5", "more than fits into memory", error=WsiFlError)


def test_image_data_that_claim_more_than_fits_are_refused_by_their_name(tmp_path):
    with h5py.File(tmp_path / "claims.h5", "w") as file:
        file.create_dataset("x", (MANY, 8, 8), np.uint8, chunks=True)
        file["y"] = np.zeros(3, np.int64)
    header = {"descr": "|u1", "fortran_order": False, "shape": (1 << 50,)}
    with zipfile.ZipFile(tmp_path / "claims.npz", "w") as file:
        out = io.BytesIO()
        np.lib.format.write_array_header_1_0(out, header)
        file.writestr("x.npy", out.getvalue())
    for name in ("claims.h5", "claims.npz"):
        refused(lambda name=name: read_data_set(tmp_path / name), name, "more than fits into memory")


def test_too_little_memory_is_said_in_one_line(monkeypatch, capsys):
    def hungry(**_):
        raise MemoryError("Unable to allocate 2.00 TiB")

    monkeypatch.setattr(program, "app", hungry)
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "not enough memory" in line and "2.00 TiB" in line and "unexpected" not in line
