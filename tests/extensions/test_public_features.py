"""Projections from public features alone: any importable format, without labels, and without weights of the encoder."""

import shutil

import h5py
import numpy as np
import pytest
from conftest import refused, write_store
from file_changes import edit, make_real, site_file
from PIL import Image
from test_import_tools import of_atlaspatch, of_eva, of_slide2vec, of_slideflow

from wsi_fl.evidence.bench import _read_projection
from wsi_fl.models.golden import GOLDEN_SLIDE
from wsi_fl.oneshot.build_projection import build_projection
from wsi_fl.oneshot.projection import read_projection
from wsi_fl.oneshot.public_features import MAX_PATCHES, read_public_features
from wsi_fl.stages.prepare.import_export import ImportFacts, import_features
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.site import encoders
from wsi_fl.stages.site.public_sources import index_private_slides, sample_indices
from wsi_fl.stores.bag_store import Bag, BagMeta, BagStore, write_bags
from wsi_fl.stores.foreign_formats import LAYOUTS
from wsi_fl.stores.foreign_writers import write_clam
from wsi_fl.study.folder import Study
from wsi_fl.types import BagTable, GridSpec, WsiFlError

N_SLIDES, D = 6, 48
CLAM_SAYS_NOTHING = ImportFacts(encoder="uni-like")


def bags_of(seed=0, n=N_SLIDES, d=D):
    rng = np.random.default_rng(seed)
    mixture = rng.normal(size=(40, d))
    x = rng.normal(size=(n, 10, 40)) @ mixture
    return [Bag(part.astype(np.float32), rng.integers(0, 9000, (10, 2))) for part in x]


def write_public_store(path, bags, encoder="uni-like", name="public", patient=""):
    n = len(bags)
    slides = np.array([f"{name}{k}" for k in range(n)])
    table = BagTable(np.arange(n) % 2, np.full(n, ""), slides, np.full(n, patient), np.full(n, "train"))
    meta = BagMeta("elsewhere", ("a", "b"), encoder, GridSpec(256, 0.5, 256), "import")
    write_bags(path, meta, table, bags, np.full(n, 0.25))


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study with a real hospital A, which imported TRIDENT's features; no encoder can be loaded."""

    def refuse_weights(*_, **__):
        raise AssertionError("no patch is encoded, so no weights are needed")

    monkeypatch.setattr(encoders, "load_encoder", refuse_weights)
    init_study(tmp_path / "study", names=["A"], pipeline="features")
    made = Study(tmp_path / "study")
    folder = write_layout(tmp_path / "own", "trident", bags_of(5), name="own")
    lines = [f"own{k},p{k},{('healthy', 'tumor')[k % 2]}\n" for k in range(N_SLIDES)]
    (tmp_path / "labels.csv").write_text("slide,patient,label\n" + "".join(lines))
    import_features(made, site="A", form="trident", source=folder, labels=tmp_path / "labels.csv")
    make_real(made, "A")
    return made


def write_layout(folder, form, bags, **store):
    """Write features in the layout of a tool, or as our store or a table; return what a user names."""
    folder.mkdir(parents=True)
    write_public_store(folder / "store.h5", bags, **store)
    if form == "store":
        return folder / "store.h5"
    rows = np.concatenate([bag.features for bag in bags])
    if form == "npz":
        np.savez(folder / "t.npz", x=rows)
    elif form == "csv":
        np.savetxt(folder / "t.csv", rows, delimiter=",", header=",".join(f"f{k}" for k in range(D)), comments="")
    elif form == "anndata":
        for k, bag in enumerate(bags):
            with h5py.File(folder / f"public{k}.h5ad", "w") as file:
                file["X"] = bag.features
    else:
        with BagStore(folder / "store.h5") as opened:
            write_clam(opened, folder, tensors=True) if form == "clam" else LAYOUTS[form].write(opened, folder)
    (folder / "store.h5").unlink()
    if form == "clam":
        shutil.rmtree(folder / "h5_files")  # the tensors alone say no encoder
    return folder / f"t.{form}" if form in {"npz", "csv"} else folder


READ_ALONE = {"atlaspatch": of_atlaspatch, "eva": of_eva, "slide2vec": of_slide2vec, "slideflow": of_slideflow}
"""Writers of tools' layouts that wsi-fl reads and does not write."""
FORMS = ["store", "npz", "csv", *(form for form in LAYOUTS if form not in READ_ALONE)]


def project(study, source, form, out="p.safetensors", **options):
    sources = source if isinstance(source, list) else [source]
    tool = form if form in LAYOUTS else None
    needs_name = form in {"npz", "csv", "clam", "anndata"}
    options = {"facts": CLAM_SAYS_NOTHING if needs_name else None, "n_dimensions": 8} | options
    return build_projection(study, sources, out=study.root / out, form=tool, **options)


@pytest.mark.parametrize("form", FORMS)
def test_features_in_every_format_give_one_projection_without_labels_or_weights(study, tmp_path, form):
    bags = bags_of()
    document = project(study, write_layout(tmp_path / form, form, bags), form)
    reference = project(study, write_layout(tmp_path / "reference", "store", bags), "store", out="r.safetensors")
    (source,) = document["sources"]
    assert document["encoder"] == "uni-like" and source["rows"] == 60 and not document["excluded"]
    ours, theirs = (read_projection(study.root / name, name) for name in ("p.safetensors", "r.safetensors"))
    np.testing.assert_allclose(np.abs(ours.components), np.abs(theirs.components), atol=1e-4)
    assert ours.origin.encoder == "uni-like" and theirs.digest == reference["digest"]


@pytest.mark.parametrize("form", READ_ALONE)
def test_features_of_tools_are_read_but_for_those_of_golden_patches(tmp_path, form):
    folder, features = READ_ALONE[form](tmp_path / form, names=("a", "b", GOLDEN_SLIDE))
    public = read_public_features(folder, form, ImportFacts(encoder="uni-like" if form == "eva" else None))
    expected = np.concatenate([features[name] for name in ("a", "b")])
    np.testing.assert_array_equal(np.sort(public.features, axis=0), np.sort(expected.astype(np.float32), axis=0))


def test_an_encoder_that_no_file_names_is_asked_for(study, tmp_path):
    for form in ("npz", "clam", "anndata"):
        source = write_layout(tmp_path / form, form, bags_of())
        refused(lambda source=source, form=form: project(study, source, form, facts=None), "add --encoder NAME")
    source = write_layout(tmp_path / "trident", "trident", bags_of())
    other = ImportFacts(encoder="resnet50")
    refused(lambda: project(study, source, "trident", facts=other), "--encoder resnet50", "says uni-like")
    assert not list(study.root.glob("*.safetensors"))


def test_features_of_another_encoder_than_the_studys_are_refused(study, tmp_path):
    source = write_layout(tmp_path / "trident", "trident", bags_of(), encoder="virchow2-like")
    words = "features of virchow2-like", "those of site A are of uni-like"
    refused(lambda: project(study, source, "trident"), *words)
    study.mosaic_path("A").unlink()
    named = ["features.encoder=uni"]
    refused(lambda: project(study, source, "trident", overrides=named), "those of the pipeline are of uni;")
    assert project(study, source, "trident")["encoder"] == "virchow2-like"  # nobody has named one


def test_pictures_are_not_encoded_by_another_encoder_than_the_studys(study, tmp_path):
    pixels = np.random.default_rng(0).integers((150, 60, 120), (230, 140, 200), (256, 256, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(picture := tmp_path / "public.png")
    overrides = ["tile.size_px=64", "tile.mpp=0.5"]
    words = "features.encoder: densenet121, but site A has features of uni-like"
    refused(lambda: project(study, picture, "", mpp=0.5, overrides=overrides), words)


def test_sources_of_two_encoders_or_widths_are_refused(study, tmp_path):
    one, other = (write_layout(tmp_path / f"{e}-like", "trident", bags_of(), encoder=f"{e}-like") for e in ("uni", "x"))
    refused(lambda: project(study, [one, other], "trident"), "uni-like: features of uni-like", "x-like are of x-like")
    shutil.copy(next(other.rglob("*.h5")), next(one.rglob("*.h5")).with_name("z.h5"))
    refused(lambda: project(study, one, "trident"), "slides differ", "uni-like", "x-like")


def test_damaged_files_of_a_folder_are_skipped_by_name(study, tmp_path):
    source = write_layout(tmp_path / "trident", "trident", bags_of())
    file = next(source.rglob("*.h5"))
    with h5py.File(file, "a") as opened:
        opened["features"][0, 0] = np.nan
    document = project(study, source, "trident")
    assert document["excluded"] == [f"{file.name}: features are not finite"] and document["sources"][0]["rows"] == 50
    shutil.rmtree(source)
    (source / "features_uni").mkdir(parents=True)
    shutil.copy(tmp_path / "labels.csv", source / "features_uni" / "a.h5")
    refused(lambda: project(study, source, "trident"), "none of its files can be read", error=WsiFlError)


def test_every_slide_of_a_large_folder_gives_equally_many_patches(study, tmp_path):
    bags = [Bag(np.repeat(bag.features, 20, 0), np.zeros((200, 2), np.int64)) for bag in bags_of()]
    document = project(study, write_layout(tmp_path / "trident", "trident", bags), "trident")
    assert document["sources"][0]["rows"] == MAX_PATCHES // N_SLIDES * N_SLIDES


def own_folder(study, tmp_path):
    return tmp_path / "own", "trident"


def renamed_files(study, tmp_path):
    for file in [*(tmp_path / "own").rglob("*.h5")]:
        file.rename(file.with_name(f"public-{file.name}"))
    return tmp_path / "own", "trident"


def other_features_of_its_slides(study, tmp_path):
    return write_layout(tmp_path / "again", "stamp", bags_of(7), name="own"), "stamp"


def with_a_suffix_of_slides(study, tmp_path):
    folder = write_layout(tmp_path / "again", "stamp", bags_of(7), name="own")
    for file in [*folder.rglob("*.h5")]:
        file.rename(file.with_name(f"{file.stem.upper()}.SVS.h5"))
    return folder, "stamp"


def of_slides_without_features(study, tmp_path):
    study.mosaic_path("A").unlink()
    (tmp_path / "slides").mkdir()
    for k in range(N_SLIDES):
        (tmp_path / "slides" / f"own{k}.ome.tif").write_bytes(b"slide")
    edit(site_file(study, "A"), 'name = "A"', f'name = "A"\nslides = "{tmp_path}/slides/*"')
    return tmp_path / "own", "trident"


def of_tiled_slides(study, tmp_path):
    study.mosaic_path("A").unlink()
    write_store(study, "A")
    return write_layout(tmp_path / "again", "trident", bags_of(7, n=4), name="A_slide_"), "trident"


def other_features_of_its_slides_in_a_store(study, tmp_path):
    return write_layout(tmp_path / "again", "store", bags_of(7), name="own"), "store"


def its_exported_store(study, tmp_path):
    return write_layout(tmp_path / "copy", "store", bags_of(5)), "store"


def vectors_of_patients(study, tmp_path):
    (tmp_path / "patients").mkdir()
    for k, bag in enumerate(bags_of(9, n=20)):
        with h5py.File(tmp_path / "patients" / f"x{k}.h5", "w") as file:
            file["feats"] = bag.features[0]
            file.attrs.update(feat_type="patient", encoder="uni-like")
    return tmp_path / "patients", "stamp"


def vectors_of_patients_by_slide2vec(study, tmp_path):
    folder, _ = of_slide2vec(
        tmp_path / "run", [f"x{k}" for k in range(20)], d=D, encoder="uni-like", artifact_type="patient_embeddings"
    )
    shutil.rmtree(folder / "tiles")
    (folder / "tile_embeddings").rename(folder / "patient_embeddings")
    return folder, "slide2vec"


def patients_of_slide2vec_by_folder(study, tmp_path):
    folder, _ = of_slide2vec(tmp_path / "run", [f"x{k}" for k in range(20)], d=D, encoder="uni-like", artifact_type="")
    (folder / "tile_embeddings").rename(folder / "patient_embeddings")
    return folder / "patient_embeddings", "slide2vec"


def table_of_patients(study, tmp_path):
    x = np.concatenate([bag.features for bag in bags_of()])
    np.savez(tmp_path / "t.npz", x=x, patient=np.array(["", "Meier"] * 30))
    return tmp_path / "t.npz", "npz"


def own_rows():
    return np.concatenate([bag.features for bag in bags_of(5)])


def table_of_its_rows(study, tmp_path):
    np.savez(tmp_path / "t.npz", x=own_rows().astype(np.float16))
    return tmp_path / "t.npz", "npz"


def table_with_a_few_of_its_rows(study, tmp_path):
    rows = np.concatenate([own_rows()[:2], *(bag.features for bag in bags_of(8))])
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header=",".join(f"f{k}" for k in range(D)), comments="")
    return tmp_path / "t.csv", "csv"


def table_of_named_slides(study, tmp_path):
    x = np.concatenate([bag.features for bag in bags_of()])
    np.savez(tmp_path / "t.npz", x=x, Slide_ID=np.repeat([f"own{k}" for k in range(N_SLIDES)], 10))
    return tmp_path / "t.npz", "npz"


def its_slides_in_one_file(study, tmp_path):
    x = own_rows()
    return write_layout(tmp_path / "merged", "trident", [Bag(x, np.zeros((len(x), 2), np.int64))]), "trident"


def without_a_patch_of_each_slide(study, tmp_path, form="trident"):
    bags = [Bag(bag.features[:9], bag.xy_l0[:9]) for bag in bags_of(5)]
    return write_layout(tmp_path / "less", form, bags), form


def its_store_without_a_patch_of_each_slide(study, tmp_path):
    return without_a_patch_of_each_slide(study, tmp_path, "store")


PRIVATE = [
    own_folder,
    renamed_files,
    other_features_of_its_slides,
    other_features_of_its_slides_in_a_store,
    with_a_suffix_of_slides,
    of_slides_without_features,
    of_tiled_slides,
    its_exported_store,
    vectors_of_patients,
    vectors_of_patients_by_slide2vec,
    patients_of_slide2vec_by_folder,
    table_of_patients,
    table_of_its_rows,
    table_with_a_few_of_its_rows,
    table_of_named_slides,
    its_slides_in_one_file,
    without_a_patch_of_each_slide,
    its_store_without_a_patch_of_each_slide,
]


@pytest.mark.parametrize("private", PRIVATE)
def test_features_of_a_hospitals_patients_are_public_only_when_declared(study, tmp_path, private):
    source, form = private(study, tmp_path)
    refused(lambda: project(study, source, form), "give public reference slides, or --public if it is public")
    assert not (study.root / "p.safetensors").exists()
    assert project(study, source, form, public=True)["dimensions"] == 8


def test_rows_of_one_number_in_both_are_no_sign_of_a_patient(study, tmp_path):
    blank = np.zeros((1, D), np.float32)
    bags = [Bag(np.r_[bag.features, blank], np.zeros((11, 2), np.int64)) for bag in bags_of(5)]
    study.mosaic_path("A").chmod(0o600)
    write_public_store(study.mosaic_path("A"), bags)
    x = np.concatenate([blank, *(bag.features for bag in bags_of())])
    np.savez(tmp_path / "t.npz", x=x)
    assert project(study, tmp_path / "t.npz", "npz")["dimensions"] == 8
    np.savez(tmp_path / "t.npz", x=np.concatenate([x, bags[0].features[:1]]))
    refused(lambda: project(study, tmp_path / "t.npz", "npz"), "1 of its rows are features of real site A")


def test_of_a_large_store_a_sample_of_every_slide_is_compared(study, tmp_path, monkeypatch):
    monkeypatch.setattr("wsi_fl.stages.site.public_sources._MAX_ROWS", 3 * N_SLIDES)
    rows = index_private_slides(study)
    assert sum(isinstance(key, bytes) for key in rows) == 3 * N_SLIDES
    source, form = without_a_patch_of_each_slide(study, tmp_path)
    refused(lambda: project(study, source, form), "of its rows are features of real site A")


def test_a_store_is_not_left_unchecked_for_a_damaged_patch_outside_the_sample(study, tmp_path):
    bags = [Bag(np.repeat(bag.features, 20, 0), np.zeros((200, 2), np.int64)) for bag in bags_of(5)]
    source, sample = write_layout(tmp_path / "copy", "store", bags), sample_indices(200, MAX_PATCHES // N_SLIDES)
    with h5py.File(source, "r+") as file:
        file["features"][np.setdiff1d(np.arange(200), sample)[0]] = 0
    refused(lambda: project(study, source, "store"), "copy/store.h5", "damaged")


def damaged_features(study, tmp_path):
    path = study.mosaic_path("A")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return "stores/A/mosaic.h5"


def damaged_patches(study, tmp_path):
    study.store_path("A").write_bytes(b"no store")
    return "stores/A/patches.h5"


def damaged_site_file(study, tmp_path):
    site_file(study, "A").write_text("name =")
    return "sites/A.toml"


@pytest.mark.parametrize("damage", [damaged_features, damaged_patches, damaged_site_file])
@pytest.mark.parametrize("form", ["store", "trident"])
def test_an_unreadable_file_of_a_real_site_does_not_switch_the_check_off(study, tmp_path, damage, form):
    name = damage(study, tmp_path)
    source = write_layout(tmp_path / "other", form, bags_of())
    refused(lambda: project(study, source, form), name)
    assert not (study.root / "p.safetensors").exists()
    assert project(study, source, form, public=True, facts=CLAM_SAYS_NOTHING)["dimensions"] == 8


def test_features_of_another_tool_without_its_name_are_refused_with_the_option(study, tmp_path):
    source = write_layout(tmp_path / "trident", "trident", bags_of())
    folder = source / "features_uni-like"
    for named in (folder, folder / "public0.h5"):
        refused(lambda named=named: project(study, named, "store"), "another tool name it, --format", error=WsiFlError)
    refused(lambda: project(study, source, "trident-like", facts=None), "no slide, picture", error=WsiFlError)
    refused(lambda: build_projection(study, [source], out=tmp_path / "p", form="tridnet"), "--format 'tridnet': use")


def test_a_benchmark_takes_public_features_without_labels(tmp_path):
    bags = bags_of()
    for form in ("store", "npz", "csv", "trident"):
        found = _read_projection(write_layout(tmp_path / form, form, [*bags, *bags_of(1)]))
        assert found.components.shape[0] == D and not isinstance(found, int)
