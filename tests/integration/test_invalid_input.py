"""Tests that invalid input is refused in one line, before it takes time or memory."""

import json
import re
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import pair, write_features

from wsi_fl.slides.patching.annotations import read_annotations
from wsi_fl.stages.site.privacy_account import plan_round, require_budget
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.checks import check_run
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.fields import write_seal
from wsi_fl.stores.images import read_data_set
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.pipeline import Pipeline, pipeline_model
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import WsiFlError

study = pair
PYTHON = re.compile(
    r"unexpected|Error\b|Traceback|object has no|codec|subscriptable|indices must be|could not convert|NoneType|allocat"
)
"""Words of Python, which no message to people holds."""


def require_refusal(action, *words: str, error=WsiFlError) -> None:
    """Require a refusal with these words and without a Python message."""
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600 and not PYTHON.search(message), message
    for word in words:
        assert word in message, message


def _numbers(schema, definitions, key=""):
    """Return (key, field) of every number in a schema."""
    for name, field in schema.get("properties", {}).items():
        yield from _numbers_of(field, definitions, f"{key}.{name}".removeprefix("."))


def _numbers_of(field, definitions, key):
    if "$ref" in field:
        yield from _numbers(definitions[field["$ref"].rsplit("/", 1)[1]], definitions, key)
    for each in field.get("anyOf", ()):
        yield from _numbers_of(each, definitions, key)
    if field.get("type") == "array":
        yield from _numbers_of(field["items"], definitions, key)
    if field.get("type") in ("integer", "number") and "enum" not in field:
        yield key, field


@pytest.mark.parametrize("model", [pipeline_model(), SiteFile])
def test_every_number_has_bounds(model):
    schema = model.model_json_schema()
    found = list(_numbers(schema, schema.get("$defs", {})))
    assert len(found) >= (3 if model is SiteFile else 60)
    for key, field in found:
        assert {"minimum", "exclusiveMinimum"} & set(field), key
        assert {"maximum", "exclusiveMaximum"} & set(field), key


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.seed=18446744073709551616", ("train.seed", "9223372036854775807")),
        (f"train.seed={'9' * 5000}", ("train.seed", "digits")),
        ("privacy.sigma=1e-300", ("privacy.sigma", "at least 0.001")),
        ("tile.size_px=32\nfoo=3", ("tile.size_px", "U+000A")),
        ('sites=["../x"]', ("sites", "letters")),
        ('sites=["S0", "S0"]', ("listed twice: S0",)),
        ('model.private="a\\u0000b"', ("model.private", "U+0000")),
        ('target.classes=["a\\u001b[2J", "b"]', ("target.classes", "U+001B")),
        ("model.private=a\udce4", ("U+DCE4",)),
        (f"train.rounds={'[' * 5000}", ("train.rounds", "nested too deeply")),
        ("train.rounds", ("section.key=value",)),
        ("=5", ("section.key=value",)),
        ("train.roundes=5", ("small.toml with --set", "did you mean 'rounds'")),
        ("train.rounds.x=5", ("rounds is not a section",)),
        ("tile.qc=[['pen']]", ("tile.qc", "'pen', 'black' or 'blur'")),
        ("train.rounds=", ("train.rounds", "integer")),
        ("rounds=5", ("unknown key 'rounds'",)),
        ("predict.modle=mean", ("did you mean 'model'?",)),
    ],
)
def test_a_mistake_in_an_override_is_refused_by_its_key(study, override, words):
    require_refusal(lambda: study.load_pipeline("small", [override]), *words)


def test_a_batch_larger_than_the_hospital_or_a_delta_above_one_in_n_is_refused():
    def plan(delta=1e-5, target=None, **train):
        pipeline = Pipeline(train=train).replace_keys(privacy={"target_epsilon": target})
        return plan_round(SiteFile(name="A", max_epsilon=9.0, delta=delta), pipeline, 50)

    require_refusal(lambda: plan(batch_size=100), "train.batch_size = 100", "50 training rows")
    require_refusal(lambda: plan(delta=0.5), "set delta below")
    require_refusal(lambda: plan(delta=0.5, target=3.0), "set delta below 0.02")
    assert plan() is not None and plan(target=3.0) is not None


def test_a_budget_above_any_private_epsilon_is_refused_unless_models_may_leave_without():
    site = SiteFile(name="A", max_epsilon=500.0, delta=1e-5)
    require_refusal(lambda: require_budget(site), "max_epsilon = 500", "max_epsilon = 100 or less")
    require_budget(site.model_copy(update={"max_epsilon": 100.0}))
    require_budget(site.model_copy(update={"allow": ["model"]}))


@pytest.mark.parametrize(
    ("override", "words"), [("train.batch_size=1000", "more than its 36 rows"), ("privacy.delta=0.5", "not below 1/36")]
)
def test_simulated_sites_get_warnings_of_batch_size_and_delta(study, capsys, override, words):
    with RunContext.create(study, study.load_pipeline("small", [override]), "proxyfl") as party:
        check_run(party, "local")
    said = " ".join(capsys.readouterr().err.split())
    assert said.count(words) == 2 and "site S0" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("privacy", "--n", "10", "--batch-size", "100", "--sigma", "1"), ("--batch-size 100", "10 rows")),
        (("train", "--method", "fedsgd"), ("unknown method 'fedsgd'", "proxyfl")),
        (("train", "--seeds", "1000000000000000"), ("--seeds", "1000")),
        (("train", "--dry-run", "--seeds", "3"), ("single new run", "--seeds")),
        (("train", "--dry-run", "--resume", "1"), ("single new run", "--resume")),
        (("train", "--dry-run", "--leave-site-out"), ("single new run", "train.left_out=NAME")),
        (("train", "--folds", "1000000000"), ("train.folds", "1000")),
        (("partition", ".", "--sites", "1000000000"), ("--sites", "10000")),
        (("partition", ".", "--sites", "2", "--seed", str(2**64)), ("--seed",)),
        (("partition", ".", "--prefix", "T", "--sites", "2", "--size-px", "100000"), ("--size-px", "4096")),
        (("synthesize", "sample", "--site", "S0", "--n-per-class", "1", "--seed", str(2**64)), ("--seed",)),
        (("synthesize", "sample", "--site", "S0", "--n-per-class", str(10**12)), ("--n-per-class",)),
        (("privacy", "--n", "100", "--sigma", "1e-300"), ("--sigma",)),
        (("privacy", "--n", str(10**30), "--sigma", "1"), ("--n",)),
        (("privacy", "--n", "100", "--sigma", "1", "--epochs", "1e300"), ("--epochs",)),
        (("privacy", "--n", "100", "--sigma", "nan"), ("--sigma",)),
        (("privacy", "--n", "100", "--sigma", "1", "--delta", "2"), ("--delta",)),
        (("privacy", "--n", "100", "--sigma", "1", "--delta", "0"), ("--delta 0: ", "such as 1e-5")),
        (("privacy", "--n", "100", "--sigma", "1", "--delta", "1e-320"), ("--delta ", "such as 1e-5")),
        (("privacy", "--n", "100", "--target-epsilon", "0"), ("--target-epsilon",)),
        (("privacy", "--n", "100", "--sigma", "1", "--batch-size", "100", "--rounds", "0.5"), ("less than one step",)),
        (("privacy", "--n", "9", "--target-epsilon", "1", "--batch-size", "9", "--rounds", "0"), ("one step",)),
    ],
)
def test_numbers_of_the_command_line_have_bounds_and_methods_are_known(study, wsi_fl, arguments, words):
    done = wsi_fl(*arguments, cwd=study.root)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("wsi-fl: error: ") and not PYTHON.search(last[15:]), last
    assert all(word in last for word in words), last


SQUARE = [[0, 0], [400, 0], [400, 400], [0, 400]]
XML = (
    '<?xml version="1.0" encoding="{}"?>\n<ASAP_Annotations><Annotations><Annotation PartOfGroup="tumor"><Coordinates>'
    + "".join(f'<Coordinate Order="{k}" X="{x}" Y="{y}"/>' for k, (x, y) in enumerate(SQUARE))
    + "</Coordinates></Annotation></Annotations></ASAP_Annotations>"
)


def geojson(coordinates, kind="Polygon"):
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": coordinates}}


def annotation(folder: Path, content) -> Path:
    path = folder / "a.xml"
    data = content if isinstance(content, bytes | str) else json.dumps(content)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


ENCODED = [
    XML.format("UTF-16").encode("utf-16"),
    b"\xfe\xff" + XML.format("UTF-16").encode("utf-16-be"),
    XML.format("UTF-8").encode("utf-8-sig"),
    json.dumps(geojson([SQUARE])).encode("utf-16"),
    json.dumps(geojson([SQUARE])).encode("utf-8-sig"),
    json.dumps(geojson([[[*point, 7.0] for point in SQUARE]])).encode(),
]


def test_annotations_are_read_in_every_encoding_that_tools_write(tmp_path):
    for data in ENCODED:
        assert read_annotations(annotation(tmp_path, data)).tumor.area == 400 * 400


MALFORMED = [
    (geojson([[["400", "0"], [1, 2], [3, 4]]]), ("a coordinate is a text, not a number",)),
    (geojson([[[10**400, 0], [1, 2], [3, 4]]]), ("not a finite number",)),
    (geojson([[[1], [1, 2], [3, 4]]]), ("a point is a list, not a list of two numbers",)),
    (geojson([5]), ("a ring is a number",)),
    (geojson([SQUARE], ["Polygon"]), ("unknown geometry",)),
    ("null", ("it is null",)),
    ({"type": "Feature"}, ("a feature has no 'geometry'",)),
    ({"type": "Feature", "geometry": {}, "properties": [1]}, ("properties is a list",)),
    ('{"a": ' * 100_000, ("nested too deeply",)),
    (f'{{"type": {"9" * 5000}}}', ("thousands of digits",)),
    (b"\xff\xff{}", ("UTF-8",)),
    ("", ("malformed",)),
    (XML.format("klingon"), ("encoding",)),
    (XML.format("UTF-8").replace('X="400"', 'X="wide"'), ("X = 'wide', which is no number",)),
    (XML.format("UTF-8").replace('X="400"', ""), ("a Coordinate has no X",)),
    (XML.format("UTF-8").replace('X="400"', 'X="1e999"'), ("not a finite number",)),
    ("<html/>", ("its root element is html",)),
]


def test_a_malformed_annotation_is_refused_without_a_python_message(tmp_path):
    for content, words in MALFORMED:
        require_refusal(lambda content=content: read_annotations(annotation(tmp_path, content)), "a.xml", *words)


def test_an_archive_that_claims_more_than_there_is_takes_no_memory(tmp_path):
    npz, h5 = tmp_path / "x.npz", tmp_path / "x.h5"
    np.savez(npz, y=np.zeros(4, np.int64))
    header = {"descr": "|u1", "fortran_order": False, "shape": (10**12, 1000, 1000, 3)}
    with zipfile.ZipFile(npz, "a") as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, header)
        member.write(b"\0" * 64)
    with h5py.File(h5, "w") as file:
        file.create_dataset("x", (10**7, 100, 100, 100), "u1", chunks=(1, 100, 100, 100))
        file["y"] = np.zeros(4, np.int64)
    for path in (npz, h5):
        require_refusal(lambda path=path: read_data_set(path), path.name, "GB", "memory")


@pytest.mark.parametrize("kind", ["patches", "features"])
@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("label", lambda old: old + 2, "of 2 classes"),
        ("label", lambda old: old - 1, "label -1"),
        ("patient", lambda old: np.full_like(old, b"p"), "patient p is in two splits (train and test)"),
        ("split", lambda old: np.full_like(old, b"x"), "unknown split 'x'"),
    ],
)
def test_a_store_that_no_model_may_be_trained_on_is_refused(study, kind, column, change, words):
    """The store is intact and sealed, as another tool might write it."""
    path, opened = study.store_path("S0"), PatchStore
    if kind == "features":
        write_features(study, "S0", np.eye(4), [0, 1, 0, 1], list("abcd"), ["train", "train", "test", "test"])
        path, opened, column = study.features_path("S0"), BagStore, f"patch_{column}"
    with h5py.File(path, "r+") as file:
        file[column][...] = change(file[column][:])
        write_seal(file, opened.rows)
    require_refusal(lambda: opened(path), words)
