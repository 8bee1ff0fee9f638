"""Experience replay: training sources, transfers, refusals, and bit-exact resumption after a kill."""

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from shutil import copytree

import numpy as np
import pytest
import torch
from conftest import make_study, metrics, model, nightly, refused, same, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

from wsi_fl.data.batches import build_tensor
from wsi_fl.data.cohort import Cohort
from wsi_fl.data.privacy_units import TrainingSet, row_units
from wsi_fl.federation import loop
from wsi_fl.federation.comm import LocalComm
from wsi_fl.federation.exchange import pass_buffers
from wsi_fl.federation.message import BYTES, Outgoing, body_length, pack_message, unpack_message
from wsi_fl.federation.methods import METHODS
from wsi_fl.federation.site_state import BufferShape, reissue_buffer, release_buffer
from wsi_fl.federation.topology import list_receivers, list_senders
from wsi_fl.models import create_model
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger import PrivacyLedger, PrivacyTerms
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import open_store, pixels_digest, store_digest
from wsi_fl.stages.training.build_sites import build_site
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.study.folder import Study
from wsi_fl.synthesis.copying_evidence import CRITERIA
from wsi_fl.synthesis.folder import GeneratorFolder
from wsi_fl.synthesis.stages import buffers
from wsi_fl.synthesis.stylegan2 import GanShape, Generator
from wsi_fl.system.files import read_lines, write_sealed
from wsi_fl.types import Images, WsiFlError

VARIANTS = ("replay", "no_buffer", "buffer_only", "synthetic_only", "central")
EXTRA = "[replay]\nbuffer = 10\n"
SITES = ["S0", "S1", "S2"]
N_TRAIN, N_BUFFER = 36, 10
SMALL = BufferShape(4, 2, 3, 2)


def plant(study, site, *, seed=0, passed=True):
    """An untrained generator, as if it had been trained on the site's store and checked."""
    torch.manual_seed(seed)
    shape = GanShape(16, 3, 2, z_dim=8, w_dim=8, mapping_layers=1, channel_base=64, channel_max=8)
    folder = GeneratorFolder(study.generator_path(site))
    digest = folder.save_generator("before", Generator(shape))
    store = open_store(study, site)
    known = {"sha256": store_digest(store), **pixels_digest(store), "classes": list(store.meta.classes)}
    document = {"site": site, "settings": {"shape": asdict(shape), "privacy": None}, "store": known}
    phases = {"before": {"sha256": digest, "iterations": 1}}
    folder.write_document(document | {"phases": phases, "finished": True})
    check = {"criteria": CRITERIA, "generator": {"sha256": digest}, "passed": passed, "truncation": 1.0}
    write_sealed(folder.check_path, check | {"reasons": [] if passed else ["a planted reason"]})


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    study = make_study(tmp_path_factory.mktemp("replay") / "study", n_sites=3, extra=EXTRA)
    pipeline = study.root / "pipelines" / "small.toml"
    pipeline.write_text(pipeline.read_text().replace("[privacy]\n", "[privacy]\nenabled = false\n"))
    for k, site in enumerate(SITES):
        plant(study, site, seed=k)
    return study


@pytest.fixture
def study(planted, tmp_path):
    """A copy of the study that tests may change."""
    return Study(copytree(planted.root, tmp_path / "study"))


def run(study, variant="replay", *overrides):
    chosen = [f"replay.variant={variant}", "train.rounds=2", *overrides]
    return study.root / train(study, method="replay", overrides=chosen, backend="local")["run"]


def predecessor(site, round_, n=3, seed=0):
    (matrix,) = METHODS["replay"].build_graph(seed)(n, round_ - 1, 0.0)
    return list_senders(matrix, site)[0]


@pytest.mark.parametrize("n", [2, 3, 7])
def test_every_round_is_one_cycle_through_all_sites_and_buffers_are_sent_with_models(n):
    orders, method = set(), METHODS["replay"]
    for round_ in range(12):
        (models,), (buffers,) = (share.build_graph(3)(n, round_, 0.0) for share in method.disclosures)
        assert np.array_equal(models, buffers)
        assert np.array_equal(models, method.build_graph(3)(n, round_, 0.0)[0])  # on another rank
        walked = [0]
        while (after := list_receivers(models, walked[-1])) != [0]:
            walked += after
        assert sorted(walked) == list(range(n))
        orders.add(tuple(walked))
    assert len(orders) == 1 if n == 2 else len(orders) > 1


def images(rng, n, size_px=16):
    pixels = rng.integers(0, 256, (n, size_px, size_px, 3)).astype(np.uint8)
    name = np.full(n, "x")
    return Cohort.from_columns(lambda rows: pixels[rows], rng.integers(0, 2, n), name, name)


def test_the_loss_of_a_batch_is_half_of_equation_4():
    rng = np.random.default_rng(0)
    own, buffer = images(rng, 11), images(rng, 5)
    lesson = TrainingSet(own, row_units(11), buffer)
    net = create_model("cnn1", n_classes=2, shape=Images(3, 16), seed=0)

    def loss(examples, rows):
        logits = net(build_tensor(examples.read(rows)))
        return functional.cross_entropy(logits, torch.from_numpy(examples.label[rows]))

    batches = lesson.epoch_batches(4, 2, sampler=CipherStream.from_seed(0))
    assert [len(rows) for rows in batches] == [8, 8, 6] * 2
    replayed = [row - 11 for rows in batches for row in rows if row >= 11]
    turns = [sorted(replayed[start : start + 5]) for start in range(0, 20, 5)]
    assert turns == [[0, 1, 2, 3, 4]] * 4, "replayed rows take turns, across epochs too"
    for rows in batches:
        mine, theirs = rows[rows < 11], rows[rows >= 11] - 11
        assert len(mine) == len(theirs)
        torch.testing.assert_close(2 * loss(lesson.join_examples(), rows), loss(own, mine) + loss(buffer, theirs))


@pytest.fixture(scope="module", params=VARIANTS)
def variant_run(request, planted, tmp_path_factory):
    """A variant, its study and run, and by round and site the origins of its rows: {"real S0": 36, "buffer S1": 36}."""
    variant, drawn, order = request.param, loop.load_batches, []
    study = Study(copytree(planted.root, tmp_path_factory.mktemp("variant") / "study"))

    def spy(examples, rows, **settings):
        chosen = list(rows)
        order.append([examples.read(one) for one in chosen])
        return drawn(examples, iter(chosen), **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "load_batches", spy)
        path = run(study, variant)
    origin = {}
    for site in SITES:
        store = open_store(study, site)
        rows = np.flatnonzero(store.table.split == "train")
        origin |= {pixels.tobytes(): f"real {site}" for pixels in store.read(rows)}
        if variant != "no_buffer":
            values, _ = RunFolder(path).site_folder(site).read_buffer()
            samples = BufferShape(N_BUFFER, 16, 3, 2).unpack_samples(values)
            origin |= {pixels.tobytes(): f"buffer {site}" for pixels in samples.read(np.arange(len(samples)))}
    seen = [Counter(origin[x.tobytes()] for batch in batches for x in batch) for batches in order]
    return variant, study, path, seen


def test_each_variant_learns_from_the_sources_of_its_paper(variant_run):
    variant, _, path, seen = variant_run
    if variant == "central":  # a round to collect, then all buffers alike
        assert seen == [{f"buffer {site}": N_BUFFER for site in SITES}] * 3
        assert metrics(path, "S0")[0]["loss"] == {}
        return
    for round_ in (1, 2):
        for site in range(3):
            found = seen[3 * (round_ - 1) + site]
            before = f"buffer S{predecessor(site, 1)}"  # what came with round 1 is learned from in round 2
            if variant == "synthetic_only":
                expected = {f"buffer S{site}": N_BUFFER} | ({before: N_BUFFER} if round_ == 2 else {})
            else:
                has_buffer = round_ == 2 and variant != "no_buffer"
                expected = {f"real S{site}": N_TRAIN} | ({before: N_TRAIN} if has_buffer else {})
            assert found == expected, (round_, site)


def test_every_transfer_is_counted_and_on_the_ledger(variant_run):
    variant, study, path, _ = variant_run
    models = variant in ("replay", "no_buffer", "synthetic_only")
    shape = BufferShape(N_BUFFER, 16, 3, 2)
    size = 4 * sum(value.numel() for value in model(path, "S0").values())
    for site in SITES:
        for line in metrics(path, site):
            buffers = {"no_buffer": 0, "central": 2 * (line["round"] == 1)}.get(variant, 1)
            assert line["messages"] == models + buffers
            expected = models * size + buffers * shape.n_bytes
            assert expected <= line["bytes"] <= expected + 128 * line["messages"]
            assert line["epsilon"] is None
        account = read_lines(study.ledger_path(site))
        let_go = [entry["released"] for entry in account if entry.get("released")]
        buffers = [one for one in let_go if one.startswith("buffer")]
        assert sum(one.startswith("model") for one in let_go) == 2 * models
        assert len(buffers) == {"no_buffer": 0, "central": 1}.get(variant, 2)
        assert len(set(buffers)) == (variant != "no_buffer")  # drawn once, the same bytes in every round
        assert all(entry["mechanism"] is None for entry in account if "mechanism" in entry)


def test_a_buffer_is_balanced_drawn_from_the_local_generator_and_depends_on_the_seed(study):
    one, two = (run(study, "replay", "train.rounds=1", f"train.seed={seed}") for seed in (0, 1))
    found = [RunFolder(path).site_folder("S1").read_buffer() for path in (one, two)]
    for values, provenance in found:
        assert np.bincount(BufferShape(N_BUFFER, 16, 3, 2).unpack_samples(values).label).tolist() == [5, 5]
        assert provenance["sha256"] == GeneratorFolder(study.generator_path("S1")).compute_digest("before")
        assert (provenance["check"], provenance["differential_privacy"]) == ("passed", False)
    assert not np.array_equal(found[0][0], found[1][0])
    assert not np.array_equal(found[0][0], RunFolder(one).site_folder("S0").read_buffer()[0])


def test_a_hospital_releases_only_what_its_site_file_allows(study):
    file = study.root / "sites" / "S1.toml"
    text = file.read_text().replace("real = false", "real = true")

    def allowed(variant, *allow):
        file.write_text(text + f"allow = {json.dumps([*allow, 'patches'])}\n")
        return run(study, variant, "train.rounds=1")

    for variant, allow, missing in (
        ("replay", ["model"], "buffer"),
        ("replay", ["buffer"], "model"),
        ("buffer_only", ["model"], "buffer"),
        ("synthetic_only", [], "model"),
        ("no_buffer", ["buffer"], "model"),
        ("central", ["model"], "buffer"),
    ):
        refused(partial(allowed, variant, *allow), "sites/S1.toml", f"a {missing} without", "add allow = [")
    assert not study.ledger_path("S1").exists()
    allowed("buffer_only", "buffer")
    allowed("no_buffer", "model")


def test_a_generator_must_exist_be_checked_and_belong_to_the_store(study):
    check = study.generator_path("S1") / "check.json"
    check.unlink()
    refused(lambda: run(study), "site S1: no buffer is released", "was not run", "unchecked", error=WsiFlError)
    unchecked = run(study, "replay", "replay.unchecked=true", "train.rounds=1")
    assert RunFolder(unchecked).site_folder("S1").read_buffer()[1]["check"] == "not run"
    assert "`synthesize check` was not run" in (unchecked / "sites" / "S1" / "log.txt").read_text()
    plant(study, "S1", passed=False)
    refused(lambda: run(study), "was not passed: a planted reason", error=WsiFlError)
    write_store(study, "S1", n_per_slide=14)
    refused(lambda: run(study), "generators/S1", "another store of site S1")
    for file in study.generator_path("S1").iterdir():
        file.unlink()
    refused(lambda: run(study), "no generator yet", "synthesize train --site S1", error=WsiFlError)
    run(study, "no_buffer", "train.rounds=1")  # needs none


def test_unsuitable_settings_and_privacy_are_refused_in_one_line(study):
    for override, words in (
        ("privacy.enabled=true", "without differential privacy"),
        ("topology.graph=star", "orders sites anew"),
        ("topology.self_weight=0.5", "orders sites anew"),
        ('sites=["S1"]', "two sites or more"),
        ("train.data=features", "train.data = 'patches'"),
    ):
        refused(partial(run, study, "replay", override), words)


@pytest.mark.parametrize("buffer", [14_300, 700_000, 10_000_000])
def test_a_buffer_too_large_for_memory_is_refused_before_any_image_is_drawn(study, buffer, monkeypatch):
    monkeypatch.setattr(buffers, "free_bytes", lambda: 10**6)
    monkeypatch.setattr(buffers, "_draw_buffer", lambda *_: pytest.fail("it was drawn"))
    begun = partial(run, study, "replay", f"replay.buffer={buffer}")
    refused(begun, f"replay.buffer = {buffer}: ", "0.001 GB are free; at most ")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 3]), st.integers(1, 999))
def test_a_buffer_survives_packing_and_unpacking(n, size, channels, classes):
    rng = np.random.default_rng(n)
    pixels = rng.integers(0, 256, (n, size, size, channels)).astype(np.uint8)
    label = rng.integers(0, classes, n)
    shape = BufferShape(n, size, channels, classes)
    values = shape.pack_samples(pixels, label)
    assert (values.dtype, len(values)) == (np.uint8, shape.n_bytes)
    assert shape.find_problem(values) == ""
    found = shape.unpack_samples(values)
    assert np.array_equal(found.label, label) and np.array_equal(found.read(np.arange(n)), pixels)


def small_buffer(label=(0, 1, 0, 1)):
    return SMALL.pack_samples(np.zeros((4, 2, 2, 3), np.uint8), np.array(label))


def test_malformed_bytes_are_refused_as_a_buffer():
    assert "label 2, and there are 2 classes" in SMALL.find_problem(small_buffer((0, 1, 0, 2)))
    assert "agreed on" in SMALL.find_problem(small_buffer()[:-1])
    assert SMALL.find_problem(np.full(SMALL.n_bytes, 255, np.uint8))
    assert SMALL.schema != BufferShape(4, 2, 3, 3).schema


def test_images_of_bytes_are_neither_cast_nor_scaled(tmp_path):
    terms = PrivacyTerms(1e-5, allow=("buffer", "model"))
    ledger = PrivacyLedger(tmp_path / "a.jsonl", site="a", run="r", terms=terms)
    release = ledger.release(1, small_buffer(), schema=SMALL.schema, mechanism=None, content="buffer")
    assert release.vector.dtype == np.uint8
    header, values = pack_message(Outgoing(0, 1, 1.0, release), 1, 5)
    assert values.tobytes() == small_buffer().tobytes()
    assert unpack_message(header, values, 0, 1, 1, len(values), kind=BYTES).refused == ""
    assert "another kind" in unpack_message(header, values, 0, 1, 1, len(values)).refused
    assert body_length(header, len(values)) == 0  # a receiver of numbers does not even take it in
    with pytest.raises(ValueError, match="cannot be scaled"):
        pack_message(Outgoing(0, 1, 0.5, release), 1, 5)


@pytest.mark.parametrize("what", ["label", "length", "schema"])
def test_a_broken_buffer_is_rejected_and_the_receiver_continues_without_it(study, what):
    """One site of a run sends a malformed buffer; the other two get valid ones."""
    party = RunContext.create(study, study.load_pipeline("small"), "replay")
    sites = [build_site(party, k) for k in range(3)]
    for site in sites:
        release_buffer(site, 1)
        site.received_buffers = {9: site.buffer.values}
    (matrix,) = METHODS["replay"].find_disclosure("buffer").build_graph(0)(3, 0, 0.0)
    releases = {site.index: reissue_buffer(site, 1) for site in sites}
    bad = np.array(sites[0].buffer.values)
    if what == "label":
        bad[0] = 200
    given = {"schema": "cd" * 32 if what == "schema" else sites[0].buffer.shape.schema, "content": "buffer"}
    releases[0] = sites[0].ledger.release(1, bad[:-1] if what == "length" else bad, mechanism=None, **given)
    pass_buffers(sites, LocalComm(3), matrix, releases, round_=1, hop=5)
    (victim,) = list_receivers(matrix, 0)
    for site in sites:
        (sender,) = list_senders(matrix, site.index)
        if site.index == victim:
            assert site.received_buffers == {} and site.rejected[0].startswith("buffer of site 0: ")
        else:
            assert site.rejected == [] and np.array_equal(site.received_buffers[sender], sites[sender].buffer.values)


class PowerCut(BaseException):
    pass


@contextmanager
def cut(site, at, moment):
    """Interrupt a round of a site within the context: after the exchange, before or after its checkpoint."""
    name = "_log_round" if moment == "after the exchange" else "write_checkpoint"
    real = getattr(loop, name)

    def interrupt(where, *given, **more):
        is_due = (where.name, more.get("round_", given[0])) == (site, at)
        if not is_due or moment == "after it":
            real(where, *given, **more)
        if is_due:
            raise PowerCut

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(loop, name, interrupt)
        yield


@pytest.mark.parametrize(
    ("variant", "moment"),
    [
        ("replay", "after the exchange"),
        *nightly(*(("replay", moment) for moment in ("before the checkpoint", "after it"))),
        *nightly(*((variant, "after it") for variant in ("buffer_only", "central"))),
    ],
)
def test_a_killed_run_resumes_to_the_same_bytes(study, variant, moment):
    whole = run(study, variant, "train.rounds=3")
    with cut("S1", 2, moment):
        run(study, variant, "train.rounds=3")
    path = sorted(study.runs_path.glob("0*"))[-1]
    assert path != whole
    for site in SITES:  # a generator that is trained anew meanwhile changes nothing
        plant(study, site, seed=77)
    resume_run(study, path.name, backend="local")
    for site in SITES:
        assert same(model(path, site), model(whole, site))
        last = [one / "sites" / site / "state" / "round_00003.safetensors" for one in (path, whole)]
        states = list(map(load_file, last))
        assert same(*states)
        assert any(key.startswith("buffer/") for key in states[0]) == (variant != "no_buffer")
        lines, expected = metrics(path, site), metrics(whole, site)
        assert [line["round"] for line in lines] == [1, 2, 3]
        assert {line["bytes"] for line in lines} == {line["bytes"] for line in expected}


@pytest.mark.parametrize("variant", ["replay", *nightly("central")])
def test_a_dropped_out_site_returns_and_gets_buffers_again(study, variant):
    with cut("S2", 2, "before the checkpoint"):
        run(study, variant, "train.rounds=6")
    with cut("S2", 4, "before the checkpoint"):
        resume_run(study, "1", without=["S1"], backend="local")
    summary = resume_run(study, "1", backend="local")
    assert [row["site"] for row in summary["sites"]] == SITES
    path = study.root / summary["run"]
    last = metrics(path, "S1")[-1]
    assert (last["round"], last["takes_part"]) == (6, True) and last["loss"]["private"] is not None
    if variant != "central":
        assert {metrics(path, site)[-1]["messages"] for site in SITES} == {2}
    assert [row["rejected"] for row in summary["sites"]] == [0, 0, 0]


@pytest.mark.slow
def test_three_ranks_train_the_models_of_one_process(study, wsi_fl):
    local = run(study)
    done = wsi_fl("train", "--method", "replay", "--json", "--set", "train.rounds=2", cwd=study.root)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert "S1 releases" in done.stderr and "without differential privacy" in done.stderr
    path = study.root / summary["run"]
    assert path != local
    for site in SITES:
        assert same(model(path, site), model(local, site))
        sent = [[line["bytes"] for line in metrics(one, site)] for one in (path, local)]
        assert sent[0] == sent[1]
    assert summary["communication"]["messages"] == 12
    assert not [f for f in path.rglob("*") if f.is_file() and f.read_bytes()[:1] == b"\x80"]
