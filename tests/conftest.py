"""Small studies and helpers shared by all tests."""

import atexit
import gc
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

import h5py
import hypothesis
import numpy as np
import pytest

from wsi_fl.federation.documents import decode_document, encode_document
from wsi_fl.privacy.privacy_plan import plan_of_round
from wsi_fl.stores.fields import StoreMeta, write_seal
from wsi_fl.stores.patch_shards import ShardMeta, write_columns, write_shard
from wsi_fl.stores.patch_store import PIXEL_DATASETS
from wsi_fl.study.folder import Study
from wsi_fl.types import CLASSES, GridSpec, PatchTable, UsageError, WsiFlError

SHARED = Path(__file__).parents[1].parent / "shared"

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="wsi-fl-state-")  # heads of ledgers, gone with the tests
_MADE = tempfile.mkdtemp(prefix="wsi-fl-stores-")
for _folder in (os.environ["XDG_STATE_HOME"], _MADE):
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=40)
hypothesis.settings.load_profile("untimed")
os.fsync = lambda descriptor: None
"""Tests kill processes, which loses nothing that was written; they never cut the power."""
signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell's background jobs ignore it, and the commands that tests interrupt would inherit that."""

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
"""A grammar that jsonschema, and so MONAI, imports where it is installed: ten seconds for nothing that a test needs."""


SECONDS = {"slow": 3600, "end_to_end": 60, "": 3}
"""Of a quiet processor, children's with it, that a test may take by its marker, or without one."""


def _processor_seconds() -> float:
    spent = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in spent)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests by their folder and run the longest first."""
    markers = {"nightly": "slow", "end_to_end": "end_to_end", "extensions": "extension"}
    for item in items:
        if marker := markers.get(item.path.parent.name):
            item.add_marker(marker)
    folders = [*markers, "integration"]
    items.sort(key=lambda item: (*folders, item.path.parent.name).index(item.path.parent.name))


def pytest_collection_finish():
    """Freeze modules and tests for the garbage collector: scanning them takes a seventh of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test above three times its time limit; the factor allows for busy machines."""
    before = _processor_seconds()
    result = yield
    limit = next(SECONDS[name] for name in SECONDS if not name or item.get_closest_marker(name))
    spent = _processor_seconds() - before
    assert spent <= 3 * limit, f"it took {spent:.1f} s of processor, more than {limit} s: make it smaller or mark it"
    return result


def planned(n, batch_size, epochs=1, **terms):
    """Return a privacy plan of these sizes with default values for the rest."""
    given = {"sigma": 1.0, "clip": 1.0, "delta": 1e-6, **terms}
    return plan_of_round(n=n, batch_size=batch_size, epochs=epochs, **given)


def nightly(*cases):
    """Mark cases of a parametrised test as slow: they run in `make test-nightly` only, beside one unmarked case."""
    as_tuples = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*one, marks=pytest.mark.slow) for one in as_tuples]


def refused(action, *words: str, error=UsageError) -> None:
    """Check that the action fails with this error in one line with these words."""
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def patches_of(rng, labels, size_px, tint):
    """Return patches with a texture for the label and a tint for the site."""
    pixels = rng.integers(90, 160, (len(labels), size_px, size_px, 3)).astype(np.int64)
    stripes = (np.arange(size_px) // 2 % 2 * 60)[None, :, None, None]
    pixels += np.where(np.asarray(labels)[:, None, None, None] == 1, stripes, 0) + np.asarray(tint)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def write_store(study: Study, site: str, *, n_per_slide=12, n_patients=4, size_px=16, mpp=1.0, seed=0):
    """Write a store of `n_patients` slides, with the last patient for testing."""
    made = _made_store(site, n_per_slide, n_patients, size_px, mpp, seed)
    shutil.copytree(made, study.store_path(site).parent, copy_function=_put, dirs_exist_ok=True)


def _put(source: str, target: str) -> None:
    """Put a copy in the place of a file, as writers do."""
    shutil.copyfile(source, f"{target}.new")
    Path(f"{target}.new").replace(target)


@cache
def _made_store(site: str, n_per_slide: int, n_patients: int, size_px: int, mpp: float, seed: int) -> Path:
    """Return the folder of such a store, written once."""
    rng = np.random.default_rng(seed)
    spec = GridSpec(size_px, mpp, size_px)
    folder = Path(tempfile.mkdtemp(dir=_MADE)) / "store"
    shards = []
    for patient in range(n_patients):
        split = "test" if patient == n_patients - 1 else "train"
        label = np.arange(n_per_slide) % 2
        name = f"{site}_slide_{patient}"
        n = len(label)
        table = PatchTable(
            np.stack([np.arange(n) * size_px, np.zeros(n, np.int64)], 1).astype(np.int64),
            label.astype(np.int64),
            label.astype(np.float32),
            np.full(n, name),
            np.full(n, f"{site}_patient_{patient}"),
            np.full(n, split),
        )
        shard = folder / "slides" / f"{name}.h5"
        meta = ShardMeta(name, f"{site}_patient_{patient}", split, spec, "")
        write_shard(shard, meta, table, [patches_of(rng, label, size_px, rng.integers(-20, 20, 3))])
        shards.append(shard)
    write_columns(folder / "patches.h5", StoreMeta(site, CLASSES, spec), shards)
    return folder


@contextmanager
def edited(path: Path):
    """Open a patch store or a shard for changes that look like the original writing."""
    with h5py.File(path, "r+") as file:
        yield file
        write_seal(file, PIXEL_DATASETS)


SMALL = """
[tile]
size_px = 16
mpp = 1.0
[model]
private = "cnn1"
proxy = "mlp"
[train]
rounds = 2
batch_size = 18
lr = 0.005
augment = "none"
local_baseline = false
[privacy]
[evaluate]
bootstrap = 50
"""


def published(folder: Path, name: str, seed: int = 0) -> Path:
    """Write weights of a timm model with its classifier; all its statistics differ from their initial values."""
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    model = timm.create_model(name)
    with torch.no_grad():
        for key, one in model.state_dict().items():
            if one.is_floating_point() and one.numel() and one.min() == one.max():
                one.uniform_(0.5, 1.5)
            if key.endswith("running_mean"):
                one.uniform_(-0.3, 0.3)
    path = folder / f"{name}.safetensors"
    save_file({key: one.contiguous() for key, one in model.state_dict().items()}, path)
    return path


def write_features(study: Study, site: str, x, labels, patients, splits, *slides, golden=(), size_px=8) -> None:
    """Write a store of the features float32[n, d] of patches without a patch store.

    Args:
        slides: the slide of each patch; all are of one where this is left out.
        golden: vectors of the golden patches.
    """
    from wsi_fl.stores.bag_store import BagMeta

    n = len(labels)
    path = study.features_path(site)
    table = PatchTable(
        np.stack([np.arange(n), np.zeros(n, np.int64)], 1).astype(np.int64),
        np.asarray(labels, np.int64),
        np.asarray(labels, np.float32),
        np.asarray(slides[0] if slides else ["slide"] * n),
        np.asarray(patients),
        np.asarray(splits),
    )
    study.store_path(site).unlink(missing_ok=True)
    meta = BagMeta(site, CLASSES, "tiny sha256:0", GridSpec(size_px, 0.5, size_px), "features", golden=golden)
    write_patches_as_bags(path, meta, table, np.asarray(x, np.float32))


def write_patches_as_bags(path: Path, meta, patches: PatchTable, x) -> None:
    """A store of the features float32[n, d] of patches, as `features` writes it."""
    from wsi_fl.stores.bag_store import Bag, group_bags, write_bags

    bags, _ = group_bags(patches)
    parts = [patches.slide == name for name in bags.slide]
    write_bags(path, meta, bags, [Bag(x[rows], patches.xy_l0[rows]) for rows in parts], patches=patches)


LARGER = re.sub(
    "rounds = .*",
    "rounds = 3",
    re.sub("batch_size = .*", "batch_size = 8", SMALL.replace("local_baseline = false\n", "")),
)
"""Rounds enough for a site to be lost in one and come back in another, with the settings of users otherwise."""


REAL = "real = true\nmax_epsilon = 50.0\ndelta = 1e-5"
"""What a site file of a real hospital says, with more budget than tests spend."""


@pytest.fixture
def lone_exchange(monkeypatch):
    """Let a real site exchange with nobody, which `train` refuses: tests of its ledger need no partner."""
    monkeypatch.setattr("wsi_fl.stages.training.checks._require_partner", lambda context: None)


def make_study(root: Path, n_sites=3, extra="", site_extra="real = false", *, text=SMALL, **store) -> Study:
    (root / "pipelines").mkdir(parents=True)
    (root / "sites").mkdir()
    (root / "pipelines" / "small.toml").write_text(text + extra)
    study = Study(root)
    for k in range(n_sites):
        (root / "sites" / f"S{k}.toml").write_text(
            f'name = "S{k}"\nslides = "none/*.tif"\nlabels = "none.csv"\n{site_extra}\n'
        )
        write_store(study, f"S{k}", seed=k, **store)
    return study


def metrics(path: Path, site: str) -> list[dict[str, Any]]:
    """Return the lines of a site's metrics.jsonl in a run."""
    return [json.loads(line) for line in (path / "sites" / site / "metrics.jsonl").read_text().splitlines()]


def model(path: Path, site: str, role: str = "private"):
    """Return the tensors, by name, of a site's model of a role in a run."""
    from safetensors.torch import load_file

    return load_file(path / "sites" / site / f"{role}.safetensors")


def slow_intervals(scored_rows, cluster, exact=lambda *_: None, *, repeats, seed=0):
    """Compute intervals over patients by definition: each resample is concatenated and scored as data.

    Args:
        scored_rows: rows int64[m] → scores by name.
        exact: the name of a score and the value that all draws have → its interval.
    """
    names, rng = np.unique(cluster), np.random.default_rng(seed)
    members = [np.flatnonzero(cluster == name) for name in names]
    if len(names) < 2:
        return dict.fromkeys(scored_rows(members[0]))
    drawn = [
        scored_rows(np.concatenate([members[k] for k in rng.integers(len(names), size=len(names))]))
        for _ in range(repeats)
    ]
    known = {name: [one[name] for one in drawn if one[name] is not None] for name in drawn[0]}

    from scipy.stats import norm, t

    n = len(names)
    tail = norm.cdf(t(n - 1).ppf(0.025) * np.sqrt(n / (n - 1)))  # of n patients, which vary more than draws of them

    def ends(name, values):
        low, high = np.quantile(values, [tail, 1 - tail]).tolist()
        return exact(name, low) if low == high else [low, high]

    return {name: ends(name, values) if len(values) > repeats / 2 else None for name, values in known.items()}


def same(a, b) -> bool:
    """Return whether two models of named tensors are equal bit for bit."""
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class Told:
    """A communicator with scripted documents of the other site."""

    sites, running, n_sites = (1,), (0, 1), 2

    def __init__(self, *answers):
        self.answers = list(answers)

    def gather(self, documents, kind, *, patient=False):
        answer = self.answers.pop(0)
        return [answer() if callable(answer) else answer, *documents]


@contextmanager
def interrupted_after(n: int):
    """Interrupt a run as by Ctrl-C before a site logs its n-th round."""
    from wsi_fl.federation import loop

    real, calls = loop._log_round, []

    def cut(*args, **kwargs):
        calls.append(1)
        if len(calls) == n:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "_log_round", cut)
        yield


@pytest.fixture(scope="module", autouse=True)
def _state_of_a_module(tmp_path_factory):
    """Give each test file a user state of its own for the studies that its tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _user_state(tmp_path_factory, monkeypatch):
    """Give each test a user state of its own: ledgers of real sites of the same name do not count."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """Return eight read-only simulated slides of two hospitals."""
    from wsi_fl.demo.simulated_slides import simulate_archive

    folder = tmp_path_factory.mktemp("phantom") / "archive"
    return simulate_archive(folder, n_sites=2, patients_per_site=2, size_px=1024)


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory):
    """Return random weights of a tiny architecture."""
    import timm
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("test_efficientnet", num_classes=7).state_dict(), path)
    return path


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study")


larger_study = partial(make_study, n_sites=4, text=LARGER)


@pytest.fixture
def larger(tmp_path):
    """Return a study for tests of several rounds; `study = larger` in a file gives it to all tests there."""
    return larger_study(tmp_path / "study")


@pytest.fixture
def larger_pair(tmp_path):
    """Return the larger study with two sites."""
    return larger_study(tmp_path / "study", n_sites=2)


@pytest.fixture
def pair(tmp_path):
    """Return a study of two sites, which takes half the time."""
    return make_study(tmp_path / "study", n_sites=2)


@pytest.fixture
def wsi_fl(monkeypatch):
    """Run the command line in a folder and in this process; return the result of a finished process."""
    from wsi_fl.__main__ import main

    def run(*arguments, cwd, env=None):
        said, told = io.StringIO(), io.StringIO()
        before = os.umask(0o077)
        with monkeypatch.context() as patch, redirect_stdout(said), redirect_stderr(told):
            os.umask(before)
            patch.chdir(cwd)
            patch.setattr(sys, "argv", ["wsi-fl", *map(str, arguments)])
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            try:
                main()
            except SystemExit as end:
                code = end.code
            finally:
                os.umask(before)
        return subprocess.CompletedProcess(arguments, code, said.getvalue(), told.getvalue())

    return run


@pytest.fixture
def as_ranks(monkeypatch):
    """Run a function in n threads that act as MPI ranks; return each rank's value or error."""

    def run(n, work):
        barrier, me, told = threading.Barrier(n, timeout=60), threading.local(), [()] * n

        class Comm:
            running = tuple(range(n))

            def __init__(self, *_):
                self.sites = (me.rank,)

            def gather(self, documents, kind):
                told[me.rank] = [encode_document(one, kind, me.rank) for one in documents]
                barrier.wait()
                found = [decode_document(text, kind, k) for k, texts in enumerate(told) for text in texts]
                barrier.wait()
                return found

            def abort(self, code=1):
                barrier.abort()

        def as_rank(k):
            me.rank = k
            try:
                return work()
            except (SystemExit, WsiFlError) as end:
                return end

        with monkeypatch.context() as patch, ThreadPoolExecutor(n) as threads:
            patch.setattr("wsi_fl.stages.runtime.rank_job.count_ranks", lambda: n)
            patch.setattr("wsi_fl.federation.comm.MpiComm", Comm)
            return list(threads.map(as_rank, range(n)))

    return run


def train_generator(study, *, site, overrides=(), **given):
    """Run `synthesize train` of the study's only pipeline."""
    from wsi_fl.synthesis.keys import Synthesis
    from wsi_fl.synthesis.stages.generator_training import train_generator
    from wsi_fl.synthesis.stages.generator_types import load_kind

    pipeline = study.load_pipeline(study.pipeline_name(None), overrides)
    return train_generator(study, pipeline, load_kind(pipeline.find_section(Synthesis).generator), site, **given)


def check(study, *, site, overrides=()):
    """Run `synthesize check` of the study's only pipeline."""
    from wsi_fl.synthesis.keys import Synthesis
    from wsi_fl.synthesis.stages.generator_check import check_generator
    from wsi_fl.synthesis.stages.generator_types import load_kind

    pipeline = study.load_pipeline(study.pipeline_name(None), overrides)
    return check_generator(study, pipeline, load_kind(pipeline.find_section(Synthesis).generator), site)


@pytest.fixture(scope="session")
def federation():
    """Return a root CA, which makes identities of sites."""
    from federation_fixtures import Federation

    return Federation()


@pytest.fixture(scope="session")
def identities(federation):
    """Return the identities of three sites."""
    from federation_fixtures import NAMES

    return {name: federation.identity(name) for name in NAMES}


@pytest.fixture(scope="session")
def monai_bundle():
    """MONAI's own commands, imported before a test that needs them."""
    return pytest.importorskip("monai.bundle")
