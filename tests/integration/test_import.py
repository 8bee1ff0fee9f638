"""Tests of importing features written by TRIDENT, CLAM, STAMP and LazySlide."""

import csv
import json
import pickle
import shutil
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import refused
from PIL import Image
from training_runs import trained

from wsi_fl.stages.evaluation.export_model import export_model
from wsi_fl.stages.evaluation.predict import predict
from wsi_fl.stages.prepare.import_export import ImportFacts, export_features, import_features
from wsi_fl.stores.bag_store import Bag, BagMeta, BagStore, write_bags
from wsi_fl.study.folder import Study
from wsi_fl.types import BagTable, GridSpec, NoCommonPlan

CLASSES = ("KIRC", "KIRP")
PIPELINE = """
[subtypes]
kidney = ["KIRC", "KIRP"]
[model]
private = "deepset"
proxy = "deepset"
[train]
data = "mosaics"
rounds = 2
batch_size = 4
[evaluate]
bootstrap = 0
"""
D = 5
OPEN = "privacy.enabled=false"
RESNET = {"encoder": "resnet50", "patch_px": 256, "mpp": 0.5}


@pytest.fixture
def study(tmp_path):
    root = tmp_path / "study"
    (root / "pipelines").mkdir(parents=True)
    (root / "sites").mkdir()
    (root / "pipelines" / "kidney.toml").write_text(PIPELINE)
    found = Study(root)
    for k in range(2):
        (root / "sites" / f"S{k}.toml").write_text(f'name = "S{k}"\nreal = false\n')
        write_site(found, f"S{k}", k)
    return found


def write_site(study, site, seed, n=9):
    rng, k = np.random.default_rng(seed), np.arange(n)

    def bag(m):
        x, xy = rng.normal(size=(m, D)).astype(np.float32), rng.integers(0, 200_000, (m, 2))
        return Bag(x, xy, rng.integers(0, 3, m), rng.random(m).astype(np.float32))

    table = BagTable(
        (k % 2).astype(np.int64),
        np.full(n, "kidney"),
        np.array([f"{site}.slide-{i}" for i in k]),
        np.array([f"p{i // 2}" for i in k]),
        np.where(k < 6, "train", "test"),
    )
    spec, types = GridSpec(256, 0.5, 224), {"kidney": CLASSES}
    meta = BagMeta(site, CLASSES, "uni sha256:0123", spec, "import", tumor_types=types)
    study.mosaic_path(site).parent.mkdir(parents=True, exist_ok=True)
    bags = [bag(m) for m in rng.integers(1, 6, n)]
    write_bags(study.mosaic_path(site), meta, table, bags, rng.uniform(0.2, 0.3, n))


def contents(path):
    with h5py.File(path) as file:
        said = {k: v for k, v in file.attrs.items() if k != "tool_version"}
        return said, {name: file[name][:] for name in file}


def brought(study, form, folder, table=None, **said):
    """Import features and return the row of the site; the default table labels four slides."""
    table, facts = table or labels(study.root / "labels.csv"), ImportFacts(**said)
    found = import_features(study, site="S0", form=form, source=folder, labels=table, facts=facts)
    return found["sites"][0]


def reasons_of(row):
    return {one["slide"]: one["reason"] for one in row["failed"]}


@pytest.mark.parametrize("form", ["clam", "trident", "stamp"])
def test_exported_features_are_imported_bit_for_bit(study, form, tmp_path):
    before, columns_before = contents(study.mosaic_path("S0"))
    export_features(study, site="S0", form=form, out=tmp_path / form)
    study.mosaic_path("S0").unlink()
    row = brought(study, form, tmp_path / form, tmp_path / form / "S0.csv")
    assert row["bags"] == 9 and row["failed"] == [] == row["notes"] and row["train"] == 6
    said, columns = contents(study.mosaic_path("S0"))
    assert said == before and columns.keys() == columns_before.keys()
    for name, values in columns.items():
        assert values.dtype == columns_before[name].dtype and np.array_equal(values, columns_before[name])


def draw_features(names, d=D, dtype=np.float32):
    """Return features of four patches per slide and their places in units of one patch."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(4, d)).astype(dtype) for name in names}, np.arange(8).reshape(4, 2)


def of_trident(folder, names="abcd", shape=lambda x: x, d=D, **attrs):
    """Write as TRIDENT's `save_h5` does: chunks of one row, and attributes of the patching."""
    place = folder / "20x_256px_0px_overlap" / "features_uni_v1"
    place.mkdir(parents=True)
    said = {"patch_size": 256, "patch_size_level0": 512, "level0_magnification": 40}
    said |= {"target_magnification": 20, "overlap": 0, "name": "", "savetodir": "/x"} | attrs
    made, places = draw_features(names, d)
    for name, x in made.items():
        with h5py.File(place / f"{name}.h5", "w") as file:
            rest = shape(x).shape[1:]
            file.create_dataset("features", data=shape(x), chunks=(1, *rest), maxshape=(None, *rest))
            file["features"].attrs.update({"name": name, "savetodir": "/x", "encoder": "uni_v1"})
            file["coords"] = places * 512
            file["coords"].attrs.update(said)
    return place, made


def of_stamp(folder, names="abcd", d=D, **attrs):
    place = folder / "uni-0a1b2c3d"
    (place / "deeper").mkdir(parents=True)
    said = {"stamp_version": "2.3.0", "extractor": "uni", "unit": "um", "tile_size_um": 256.0}
    said |= {"tile_size_px": 224, "code_hash": "0a1b2c3d", "feat_type": "tile"} | attrs
    made, places = draw_features(names, d, np.float16)
    for name, x in made.items():
        with h5py.File(place / "deeper" / f"{name}.h5", "w") as file:
            file["coords"], file["feats"] = (places * 256).astype(np.float32), x
            file.attrs.update({key: value for key, value in said.items() if value is not None})
    return place, made


def of_clam(folder, names="abcd"):
    for kind in ("h5_files", "pt_files"):
        (folder / kind).mkdir(parents=True)
    made, places = draw_features(names)
    for name, x in made.items():
        torch.save(torch.from_numpy(x), folder / "pt_files" / f"{name}.pt")
        with h5py.File(folder / "h5_files" / f"{name}.h5", "w") as file:
            file["features"], file["coords"] = x, (places * 512).astype(np.int32)
    return folder, made


def of_lazyslide(folder, **spec):
    """Write the result of wsidata's `features_anndata` as AnnData's `write_h5ad` does."""
    folder.mkdir(parents=True)
    said = {"height": 256, "width": 256, "stride_width": 256, "mpp": 0.5, "base_downsample": 2.0} | spec
    made, places = draw_features("abcd")
    for name, x in made.items():
        with h5py.File(folder / f"{name}.h5ad", "w") as file:
            file.create_dataset("X", data=x, compression="gzip")
            file["obsm/spatial"] = places * 512.0
            file["uns/slide_properties/mpp"] = 0.25
            for key, value in said.items():
                file[f"uns/tile_spec/{key}"] = value
    return folder, made


PLACES = [[0, 512], [1024, 1536], [2048, 2560], [3072, 3584]]


def labels(path, names="abcd", heading="slide_id,case_id,label", **more):
    lines = [",".join([heading, *more])]
    for k, name in enumerate(names):
        row = [name, f"patient {k}", CLASSES[k % 2], *(column[k] for column in more.values())]
        lines.append(",".join(map(str, row)))
    path.write_text("\n".join(lines) + "\n")
    return path


def replace_dataset(path, name, value=None):
    """Replace or delete a dataset."""
    with h5py.File(path, "a") as file:
        del file[name]
        if value is not None:
            file[name] = value


def store_of(study):
    return BagStore(study.mosaic_path("S0"))


def test_a_folder_of_trident_is_imported(study, tmp_path):
    one_bag = lambda x: x[None] if x[0, 0] > 0 else x  # noqa: E731
    folder, made = of_trident(tmp_path / "job", shape=one_bag)
    table = labels(tmp_path / "labels.csv", names=("a.svs", "b.svs", "c.svs", "d.svs"))
    brought(study, "trident", tmp_path / "job", table)
    with store_of(study) as store:
        assert store.meta.encoder == "uni_v1" and store.meta.spec == GridSpec(256, 0.5, 256)
        assert np.array_equal(store.mpp_l0, [0.25] * 4)
        for k, name in enumerate("abcd"):
            assert np.array_equal(store.read_bag(k).features, made[name])
            assert store.read_bag(k).xy_l0.tolist() == PLACES
            assert store.read_bag(k).cluster is None
        train, test = (set(store.table.patient[store.table.split == split]) for split in ("train", "test"))
        assert train and test and not train & test
    brought(study, "trident", folder, table, mpp=0.46)  # measured, not nominal
    with store_of(study) as store:
        assert store.meta.spec.mpp == 0.46
        assert np.allclose(store.mpp_l0, 0.23)  # 512 level-0 pixels are the side of a patch of 256
    for said, word in (({"mpp": 1.0}, "0.5"), ({"encoder": "x"}, "uni_v1"), ({"patch_px": 224}, "256")):
        refused(lambda said=said: brought(study, "trident", folder, table, **said), word, "a.h5")


def make_two_tool_study(study, tmp_path, **stamp):
    """Make a hospital with TRIDENT's features of UNI and one with STAMP's."""
    trident, _ = of_trident(tmp_path / "trident", "abcdefgh", d=1024)
    stamps, _ = of_stamp(tmp_path / "stamp", "abcdefgh", d=1024, extractor="mahmood-uni-77ffbca1", **stamp)
    split = ["train"] * 6 + ["test"] * 2
    table = labels(tmp_path / "labels.csv", "abcdefgh", mpp=[0.25] * 8, split=split)
    for site, form, folder in (("S0", "trident", trident), ("S1", "stamp", stamps)):
        import_features(study, site=site, form=form, source=folder, labels=table)


def test_two_hospitals_with_one_encoder_train_together_whichever_tools_they_had(study, tmp_path):
    make_two_tool_study(study, tmp_path, tile_size_um=128.0, tile_size_px=256)
    for site, written in (("S0", "uni_v1"), ("S1", "mahmood-uni-77ffbca1")):
        with BagStore(study.mosaic_path(site)) as store:
            assert store.meta.encoder == f"uni; written as {written}"
    assert trained(study, "fedavg", OPEN)["run"]


def test_features_of_another_field_of_view_are_refused_unless_allowed(study, tmp_path):
    make_two_tool_study(study, tmp_path)
    words = ("256 µm (224 px at 1.14 µm/px)", "128 µm (256 px at 0.5 µm/px)", "train.any_patch_size")
    refused(lambda: trained(study, "fedavg", OPEN), *words, error=NoCommonPlan)
    assert trained(study, "fedavg", OPEN, "train.any_patch_size=true")["run"]


def test_a_given_encoder_name_is_recorded_and_refused_for_features_that_contradict_it(study, tmp_path):
    folder, _ = of_trident(tmp_path / "job")
    refused(lambda: brought(study, "trident", folder, new_name="UNI"), "1024", "has 5")
    brought(study, "trident", folder, new_name="ours")
    with store_of(study) as store:
        assert store.meta.encoder == "ours; written as uni_v1; so called on import"
    refused(
        lambda: brought(study, "trident", folder, encoder="ours"),
        "uni_v1",
        "leave --encoder out, or say --encoder-name ours",
    )


def test_a_folder_of_stamp_is_imported_with_and_without_the_resolution(study, tmp_path):
    folder, made = of_stamp(tmp_path / "stamp")
    table = labels(tmp_path / "labels.csv", mpp=[0.25, 0.5, 0.25, 0.25])
    brought(study, "stamp", folder, table)
    with store_of(study) as store:
        assert store.meta.encoder == "uni" and store.meta.spec.size_px == 224
        assert store.meta.spec.mpp == pytest.approx(256 / 224)
        assert store.read_bag(0).features.dtype == np.float32 and np.array_equal(store.read_bag(0).features, made["a"])
        assert [store.read_bag(k).xy_l0[1].tolist() for k in (0, 1)] == [[2048, 3072], [1024, 1536]]
    row = brought(study, "stamp", folder)
    assert len(row["notes"]) == 4 and "mpp_override" in row["notes"][0]["note"]
    with store_of(study) as store:
        assert not store.read_bag(0).has_places and store.mpp_l0 is None
    shutil.rmtree(folder)
    old, _ = of_stamp(tmp_path / "stamp", tile_size_um=None, tile_size=256.0, tile_size_px=None)
    refused(lambda: brought(study, "stamp", old, table), "patch size", "--patch-px")
    brought(study, "stamp", old, table, patch_px=224, mpp=256 / 224)


def test_a_folder_of_clam_needs_options_that_its_files_lack(study, tmp_path):
    folder, made = of_clam(tmp_path / "clam")
    lacks = "do not say their encoder, patch size, resolution; add --encoder, --patch-px, --mpp"
    refused(lambda: brought(study, "clam", folder), lacks)
    refused(lambda: brought(study, "clam", folder, new_name="resnet50", mpp=0.5), "patch size; add --patch-px")
    row = brought(study, "clam", folder, **RESNET)
    assert row["notes"] == [] and row["encoder"] == "resnet50"
    with store_of(study) as store:
        assert np.array_equal(store.read_bag(2).features, made["c"]) and store.read_bag(2).has_places
    (folder / "h5_files" / "b.h5").unlink()
    row = brought(study, "clam", folder, **RESNET)
    assert [note["slide"] for note in row["notes"]] == ["b"] and "no coordinates" in row["notes"][0]["note"]
    with store_of(study) as store:
        assert np.array_equal(store.read_bag(1).features, made["b"]) and not store.read_bag(1).has_places


def test_tiles_of_lazyslide_are_imported_from_anndata(study, tmp_path):
    folder, made = of_lazyslide(tmp_path / "h5ad", stride_width=224)
    refused(lambda: brought(study, "anndata", folder), "encoder", "--encoder")
    brought(study, "anndata", folder, encoder="uni2")
    with store_of(study) as store:
        assert store.meta.encoder == "uni2" and store.meta.spec == GridSpec(256, 0.5, 224)
        assert np.array_equal(store.mpp_l0, [0.25] * 4)
        assert np.array_equal(store.read_bag(1).features, made["b"])
        assert store.read_bag(1).xy_l0.tolist() == PLACES
    replace_dataset(folder / "c.h5ad", "obsm", h5py.ExternalLink(str(folder / "a.h5ad"), "obsm"))
    replace_dataset(folder / "d.h5ad", "X")
    with h5py.File(folder / "d.h5ad", "a") as file:
        file["X/data"] = np.ones(4, np.float32)  # sparse
    row = brought(study, "anndata", folder, encoder="uni2")
    reasons = reasons_of(row)
    assert "link" in reasons["c"] and "'X' is no dataset" in reasons["d"] and row["bags"] == 2
    refused(lambda: brought(study, "anndata", tmp_path / "study"), "write_h5ad")
    refused(lambda: export_features(study, site="S0", form="anndata"), "clam, trident, stamp")


@pytest.mark.parametrize("said", [{}, {"patch_px": 512, "mpp": 0.5}], ids=["beside places", "alone"])
def test_a_slide_vector_is_a_bag_of_one_found_in_a_folder_of_its_own(study, tmp_path, said):
    """TRIDENT's slide encoders write a vector, beside the places of its patches or alone."""
    folder, made = of_trident(tmp_path / "job", shape=lambda x: x[0])
    folder = folder.rename(folder.parent / "slide_features_titan")
    for name in made:
        with h5py.File(folder / f"{name}.h5", "a") as file:
            del file["features"].attrs["encoder"]
            if said:
                del file["coords"]
        (folder / f"{name}.h5").rename(folder / f"{name}.H5")
    row = brought(study, "trident", tmp_path / "job", **said)
    assert row["encoder"] == "titan" and "whole slide" in row["notes"][0]["note"]
    with store_of(study) as store:
        assert np.array_equal(store.read_bag(2).features, made["c"][:1]) and not store.read_bag(2).has_places


class Harmful:
    def __reduce__(self):
        return (open, ("harm", "w"))


def test_every_broken_file_is_excluded_in_one_line_with_its_name(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = of_clam(tmp_path / "clam", "abcdefghi")
    h5, pt = folder / "h5_files", folder / "pt_files"
    for name in "abc":
        (h5 / f"{name}.h5").unlink()
    (pt / "a.pt").write_bytes((pt / "a.pt").read_bytes()[:300])
    torch.save({"x": Harmful()}, pt / "b.pt")
    (pt / "c.pt").write_bytes(pickle.dumps(Harmful()))
    with h5py.File(h5 / "d.h5", "a") as file:
        file["features"][1, 2] = np.nan
    replace_dataset(h5 / "e.h5", "features", np.zeros((0, D), np.float32))
    replace_dataset(h5 / "e.h5", "coords", np.zeros((0, 2), np.int32))
    replace_dataset(h5 / "f.h5", "coords", np.zeros((4, 3), np.int32))
    (h5 / "g.h5").write_bytes((h5 / "g.h5").read_bytes()[:500])
    replace_dataset(h5 / "h.h5", "features")
    row = brought(study, "clam", folder, labels(tmp_path / "labels.csv", "abcdefghi"), **RESNET)
    reasons = reasons_of(row)
    assert row["bags"] == 1 and row["slides"] == 9 and set(reasons) == set("abcdefgh")
    words = {"a": "damaged", "b": "run code", "c": "run code", "d": "not finite", "e": "empty"}
    words |= {"f": "coords are int32[4, 3]", "g": "not a readable HDF5", "h": "'features'"}
    for name, word in words.items():
        assert word in reasons[name] and name in reasons[name] and "\n" not in reasons[name], reasons[name]
    assert not (tmp_path / "harm").exists()


def test_labels_and_files_that_do_not_match_are_counted_and_named(study, tmp_path):
    folder, _ = of_trident(tmp_path / "job", "abcdefg")
    table = labels(tmp_path / "labels.csv", "abcdz", split=["train", "train", "test", "train", "train"])
    with table.open("a") as more:
        more.write("f.svs,patient 9,N/A,\ng,patient 9,Kirc,\n")
    row = brought(study, "trident", folder, table)
    reasons = reasons_of(row)
    assert row["bags"] == 4 and row["slides"] == 8 and (row["train"], row["test"]) == (3, 1)
    assert reasons["f"] == "has no label (labels.csv line 7)" and "did you mean KIRC?" in reasons["g"]
    assert "no features" in reasons["z"] and "line 6" in reasons["z"] and "no label" in reasons["e"]


def test_features_that_do_not_match_are_refused_by_name(study, tmp_path):
    folder, _ = of_trident(tmp_path / "job")
    before, bad = study.mosaic_path("S0").read_bytes(), tmp_path / "bad.csv"

    def refuses(*words, table=None, source=folder, form="trident"):
        refused(lambda: brought(study, form, source, table), *words)

    with h5py.File(folder / "c.h5", "a") as file:
        file["features"].attrs["encoder"] = "conch"
    refuses("uni_v1", "conch", "a", "c")
    replace_dataset(folder / "c.h5", "features", np.zeros((4, D + 1), np.float32))
    refuses("a has features of width 5", "c 6")
    for text, *words in (
        ("slide_id,case,label\na,p,KIRC", "no column patient or case_id", "slide_id, case, label"),
        ("slide,patient,label\na,p,KIRC\na,p,KIRC", "line 3", "a has a row already"),
        ("slide,patient,label\na,,KIRC", "line 2", "patient is empty"),
        ("slide,patient,label,split\na,p,KIRC,x", "unknown split 'x'"),
        ("slide,patient,label,split\na,p,KIRC,train\nb,p,KIRC,test", "p is in two splits"),
    ):
        bad.write_text(text + "\n")
        refuses(*words, table=bad)
    refuses("clam, trident, stamp, anndata", form="xyz")
    refuses("no such folder", source=tmp_path / "none")
    refuses("features_<encoder>", source=tmp_path / "study")
    refuses("no such file", table=tmp_path / "none.csv")
    of_trident(tmp_path / "job" / "other")
    refuses("several folders", source=tmp_path / "job")
    assert study.mosaic_path("S0").read_bytes() == before


def test_exported_features_load_in_clams_training(study, tmp_path):
    """CLAM's Generic_MIL_Dataset reads labels by slide_id, then pt_files/<slide_id>.pt, or h5_files with use_h5."""
    out = tmp_path / "clam"
    export_features(study, site="S0", form="clam", out=out, tensors=True)
    refused(lambda: export_features(study, site="S0", form="stamp", out=out, tensors=True), "--pt")
    with (out / "S0.csv").open() as handle, store_of(study) as store:
        for k, row in enumerate(csv.DictReader(handle)):
            features = torch.load(out / "pt_files" / f"{row['slide_id']}.pt", weights_only=True)
            with h5py.File(out / "h5_files" / f"{row['slide_id']}.h5") as file:
                assert torch.equal(features, torch.from_numpy(file["features"][:]))
                assert np.array_equal(file["coords"][:], store.read_bag(k).xy_l0)
                assert file["coords"].attrs["patch_size_level0"] == round(128 / store.mpp_l0[k])
                assert "patch_level" not in file["coords"].attrs  # CLAM would read patch_size pixels of that level
            assert features.dtype == torch.float32 and np.array_equal(features, store.read_bag(k).features)
            assert row["label"] in CLASSES and row["case_id"] == store.table.patient[k]


def test_exported_features_load_in_stamps_training(study, tmp_path):
    """STAMP takes names of files with .h5 from its slide table, and one label of each patient from its clini table."""
    document = export_features(study, site="S0", form="stamp", out=tmp_path / "stamp")
    tables = [pd.read_csv(document[name], dtype=str).dropna(subset="label") for name in ("table", "clini")]
    patients = tables[0].set_index("FILENAME", verify_integrity=True)["PATIENT"]
    assert all((Path(document["features"]) / name).is_file() for name in patients.index)
    with store_of(study) as store:
        assert patients.tolist() == store.table.patient.tolist()
        slides = pd.Series(np.array(CLASSES)[store.table.label]).groupby(store.table.patient.astype(str))
    truth = {patient: labels.iloc[0] for patient, labels in slides if labels.nunique() == 1}
    assert tables[1].set_index("PATIENT", verify_integrity=True)["label"].to_dict() == truth
    assert document["unlabelled"] == len(slides) - len(truth)


def test_patches_of_other_tools_are_shown_where_they_were_cut(study, tmp_path):
    """TRIDENT's grid begins at the tissue, and it rounds magnifications: 512 pixels of 0.2308 µm are 256 "at 20x"."""
    names = ["a", "b", "b.1", "b.2", *"cdef"]
    folder, _ = of_trident(tmp_path / "job", names)
    for path in folder.iterdir():
        with h5py.File(path, "a") as file:
            file["coords"][:] += 300
    split, mpp = ["train"] * 6 + ["test"] * 2, [0.2308] * 8
    for measured in ({}, {"mpp": mpp}):
        brought(study, "trident", folder, labels(tmp_path / "labels.csv", names, split=split, **measured))
        export_features(study, site="S0", form="trident", out=tmp_path / "out")
        with h5py.File(tmp_path / "out" / "features_uni_v1" / "a.h5") as file:
            assert file["coords"].attrs["patch_size_level0"] == 512
    Image.new("RGB", (4500, 5000)).save(tmp_path / "a.png")
    heads = ["train.example=patch", "model.private=linear_head", "model.proxy=linear_head", 'sites=["S0"]']
    run = trained(study, "regular", OPEN, "train.rounds=1", *heads)["run"]
    (row,) = predict(study, run, site="S0", slides=[tmp_path / "a.png"], mpp=0.2308)["slides"]
    lines = list(csv.DictReader((study.root / row["csv"]).open()))
    assert [[line["x_l0"], line["size_l0"]] for line in lines] == [[str(x + 300), "512"] for x, _ in PLACES]
    features = json.loads((study.root / row["geojson"]).read_text())["features"]
    tiles = [f["geometry"]["coordinates"][0] for f in features if f["properties"]["objectType"] == "tile"]
    assert [[tile[0], tile[2]] for tile in tiles] == [[[x + 300, y + 300], [x + 812, y + 812]] for x, y in PLACES]
    failed = predict(study, run, site="S0", slides=[Path(name) for name in ("b.1", "b.2", "b.3")])["failed"]
    assert [row["slide"] for row in failed] == ["b.1", "b.2", "b.3"]  # none is taken for b
    assert ["no such slide" in row["reason"] for row in failed] == [False, False, True]


def test_unsupported_uses_of_imported_features_are_refused_in_one_line(study, tmp_path):
    make_two_tool_study(study, tmp_path, tile_size_um=128.0, tile_size_px=256)
    heads = ["train.example=patient", "model.private=linear_head", "model.proxy=linear_head"]
    known, new = (tmp_path / f"{name}.h5" for name in ("a", "N1"))
    for path in (known, new):
        path.write_bytes(b"features")
    for method, receives in (("fedavg", False), ("oneshot", True)):
        run, out = trained(study, method, OPEN, *heads)["run"], tmp_path / method
        says = ("N1: not in the store", "features of uni; written as uni_v1 were imported", "--format onnx`")
        document = predict(study, run, site="S0", slides=[known, new], out=out)
        (row,), (failed,) = document["slides"], document["failed"]
        assert all(word in failed["reason"] for word in says)
        assert ('role = "receiver"' in failed["reason"]) == receives
        assert row["heatmap"] is None and row["class"] in CLASSES  # from the store
    said = ("uni; written as uni_v1", "which is no encoder of the study", "use --format onnx")
    refused(lambda: export_model(study, run, model_name="shared", form="wsinfer"), *said)


def test_the_import_command_prints_one_document(study, tmp_path, wsi_fl):
    of_trident(tmp_path / "job")
    table = labels(tmp_path / "labels.csv")
    words = ["import", "--site", "S0", "--format", "trident", "--from", tmp_path / "job", "--labels", table]
    done = wsi_fl(*words, "--json", cwd=study.root)
    assert done.returncode in (0, None) and json.loads(done.stdout)["sites"][0]["bags"] == 4
    told = wsi_fl(*words, cwd=study.root)
    last = "4 slides of 4 patients ready (stores/S0/mosaic.h5; uni_v1)"
    assert told.returncode in (0, None) and last in " ".join(told.stderr.split())
    setting = "--set train.data=mosaics"
    for data, role, given, step in (
        ("mosaics", "member", [], "; next: wsi-fl train --method proxyfl --pipeline kidney"),
        ("patches", "member", setting.split(), f"; next: wsi-fl train --method proxyfl --pipeline kidney {setting}"),
        ("patches", "receiver", [], ""),
    ):
        (study.root / "pipelines" / "kidney.toml").write_text(PIPELINE.replace("mosaics", data))
        (study.root / "sites" / "S0.toml").write_text(f'name = "S0"\nreal = false\nrole = "{role}"\n')
        done = wsi_fl(*words, "--pipeline", "kidney", *given, cwd=study.root)
        said = " ".join(done.stderr.split())
        assert said.endswith(f"uni_v1){step}"), said
    failed = wsi_fl(*words, "--mpp", "4", cwd=study.root)
    assert failed.returncode == 2 and failed.stderr.count("error") == 1
