"""The release of stains: once, through the ledger, whatever crashes; and training in other sites' stains."""

import shutil

import numpy as np
import pytest
import torch
from conftest import make_study, refused
from PIL import Image

from wsi_fl.federation.preflight import compare
from wsi_fl.learning.examples import Examples, batches, in_stains, joined, subset
from wsi_fl.privacy.accounting import Mechanism, epsilon, plan
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.slides.stains.reinhard import restained, stain_of, tissue_moments
from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.prepare import stain as stage
from wsi_fl.stages.prepare.stain import stain
from wsi_fl.stages.site.data import open_store
from wsi_fl.stages.site.kinds import open_data
from wsi_fl.stages.site.stains import read_stain, stains_of
from wsi_fl.stages.training.plan import dry_run
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_json, read_lines, write_json
from wsi_fl.types import WsiFlError

ONCE = Mechanism(8.0, 1.5, 1.0, 1)
EXCHANGE = ["stain.exchange=true", "train.rounds=2", "model.private=mlp"]


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study", n_sites=3)


def lines_of(study, site="S0"):
    return read_lines(study.ledger(site))


def test_a_stain_is_released_once_and_costs_what_its_ledger_says(study):
    (row,) = stain(study, site="S0")["sites"]
    assert row["spent"] and row["n"] == 36 and row["unit"] == "row" and row["file"] == "stains/S0.json"
    assert row["epsilon"] == pytest.approx(epsilon([ONCE], 1e-5))
    released, sent = lines_of(study)
    assert released["run"] == "stain" and released["mechanism"]["sigma"] == 8 and sent["sending"]
    document = read_json(study.stain("S0"))
    assert released["released"] == f"stain {document['digest']}" and released["guarantee"] == "guaranteed"
    again = stain(study, site="S0", overrides=["stain.sigma=2.0"])["sites"][0]
    assert not again["spent"] and len(lines_of(study)) == 2 and again["digest"] == row["digest"]
    more = stain(study, site="S0", again=True)["sites"][0]
    assert more["spent"] and more["digest"] != row["digest"]
    assert more["epsilon"] == pytest.approx(epsilon([ONCE, ONCE], 1e-5))
    with Image.open(study.store("S0").parent / "stain.png") as picture:
        assert picture.size[1] > 600


def test_with_little_noise_it_is_the_mean_of_the_training_patches(study):
    stain(study, site="S1", overrides=["stain.sigma=1e-3", "stain.clip=100.0"])
    with open_store(study, "S1") as store:
        moments = tissue_moments(store.read(np.flatnonzero(store.table.split == "train"))).mean(0)
    released = read_stain(read_json(study.stain("S1")), "")
    np.testing.assert_allclose(released.moments, moments, atol=0.02)
    document = read_json(study.stain("S1"))
    assert document["mean"] == list(released.stain.mean) and document["space"] == "CIELAB (D65)"
    assert released.stain == stain_of(released.moments.astype(np.float64))


def test_dyes_are_released_and_exchanged_like_colours(study):
    dyes = ["stain.method=macenko"]
    rows = stain(study, site=None, overrides=dyes)["sites"]
    assert {row["space"] for row in rows} == {"optical density"} and len(rows[0]["moments"]) == 8
    assert all(len(rows[0][key]) == n for key, n in (("haematoxylin", 3), ("eosin", 3), ("strength", 2)))
    assert rows[0]["epsilon"] == pytest.approx(epsilon([ONCE], 1e-5))
    assert read_stain(read_json(study.stain("S0")), "S0").method == "macenko"
    summary = train(study, method="proxyfl", overrides=[*EXCHANGE, *dyes], backend="local")
    assert {site["guarantee"] for site in summary["sites"]} == {"guaranteed"}
    refused(lambda: stain(study, site="S0"), "S0", "by macenko", "--again", "reinhard")
    stain(study, site="S0", again=True)
    refused(
        lambda: train(study, method="proxyfl", overrides=[*EXCHANGE, *dyes], backend="local"),
        "stains/S0.json", "by reinhard", "stain.method is macenko",
    )  # fmt: skip


@pytest.mark.parametrize("place", ["write copy", "sending", "write file"])
def test_no_crash_makes_a_site_release_two_noisy_versions(study, monkeypatch, place):
    writes = []

    def crash_at(number):
        def write(path, document):
            writes.append(path)
            if len(writes) == number:
                raise KeyboardInterrupt
            write_json(path, document)

        return write

    if place == "sending":
        monkeypatch.setattr(PrivacyLedger, "sending", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    else:
        monkeypatch.setattr(stage, "write_json", crash_at(1 if place == "write copy" else 2))
    with pytest.raises(KeyboardInterrupt):
        stain(study, site="S0")
    monkeypatch.undo()
    assert not study.stain("S0").exists()
    (row,) = stain(study, site="S0")["sites"]
    assert row["spent"] == (place == "write copy")  # then nothing had left, and the new one takes its place
    assert row["epsilon"] == pytest.approx(epsilon([ONCE], 1e-5))
    assert row["digest"] in lines_of(study)[-2]["released"] and lines_of(study)[-1]["sending"]
    assert stain(study, site="S0")["sites"][0]["digest"] == row["digest"]


def test_a_lost_file_comes_back_and_lost_numbers_cost_again(study):
    (row,) = stain(study, site="S0")["sites"]
    study.stain("S0").unlink()
    assert stain(study, site="S0")["sites"][0]["digest"] == row["digest"]
    study.stain("S0").unlink()
    (study.store("S0").parent / "stain.json").unlink()
    (other,) = stain(study, site="S0")["sites"]
    assert other["spent"] and other["epsilon"] == pytest.approx(epsilon([ONCE, ONCE], 1e-5))


def test_a_stain_that_did_not_leave_through_the_ledger_is_refused(study):
    stain(study, site=None)
    study.ledger("S0").unlink()
    refused(lambda: stain(study, site="S0"), "not in ledgers/S0.jsonl", error=WsiFlError)
    run = {"method": "proxyfl", "overrides": EXCHANGE, "backend": "local"}
    refused(lambda: train(study, **run), "not in ledgers/S0.jsonl", error=WsiFlError)
    document = read_json(study.stain("S1"))
    write_json(study.stain("S1"), document | {"moments": [0.0] * 6})
    refused(lambda: train(study, **run), "stains/S1.json: not a released stain", error=WsiFlError)


def test_real_hospitals_need_no_permission_but_a_budget(tmp_path):
    study = make_study(
        tmp_path / "study", n_sites=1, site_extra="real = true\nmax_epsilon = 1.0\ndelta = 1e-5"
    )
    (row,) = stain(study, site="S0")["sites"]
    assert row["epsilon"] < 1
    refused(
        lambda: stain(study, site="S0", again=True, overrides=["stain.sigma=1.0"]),
        "above its 1",
        error=WsiFlError,
    )
    assert stain(study, site="S0")["sites"][0]["digest"] == row["digest"]


def test_training_counts_the_stain_and_keeps_the_budget(study):
    stain(study, site=None)
    summary = train(study, method="proxyfl", overrides=EXCHANGE, backend="local")
    mechanism = plan(36, 8, 2, 1.4, 0.7)
    for row in summary["sites"]:
        assert row["epsilon"] == pytest.approx(epsilon([ONCE, mechanism], 1e-5))
        assert row["guarantee"] == "guaranteed"
    without = train(study, method="proxyfl", overrides=EXCHANGE[1:], backend="local")
    assert without["sites"][0]["epsilon"] == pytest.approx(epsilon([mechanism], 1e-5))
    assert evaluate(study, summary["run"])["merged"]["accuracy"]["mean"] is not None
    costs = dry_run(study, method="proxyfl", overrides=EXCHANGE, backend="local")["sites"]
    assert costs[0]["epsilon"] == pytest.approx(epsilon([ONCE, mechanism], 1e-5))


def test_max_epsilon_binds_stain_and_training_together(tmp_path):
    mechanism = plan(36, 8, 1, 1.4, 0.7)
    both = epsilon([ONCE, mechanism], 1e-5)
    extra = f"real = false\nmax_epsilon = {both + 1e-6}"
    study = make_study(tmp_path / "study", n_sites=2, site_extra=extra)
    stain(study, site=None)
    summary = train(study, method="proxyfl", overrides=EXCHANGE, backend="local")
    assert [row["rounds"] for row in summary["sites"]] == [1, 1]
    assert all(row["epsilon"] <= both + 1e-6 for row in summary["sites"])


def test_target_epsilon_leaves_room_for_the_stain(study):
    stain(study, site=None)
    summary = train(
        study, method="proxyfl", overrides=[*EXCHANGE, "privacy.target_epsilon=4.0"], backend="local"
    )
    assert all(3.5 < row["epsilon"] <= 4 for row in summary["sites"])


def test_a_missing_stain_says_what_to_run_where(study):
    stain(study, site="S0")
    refused(
        lambda: train(study, method="proxyfl", overrides=EXCHANGE, backend="local"),
        "stains/S1.json: no stain of site S1 yet; run `wsi-fl stain --site S1` where its store is",
        error=WsiFlError,
    )
    refused(
        lambda: train(study, method="regular", overrides=[*EXCHANGE, "train.data=mosaics"], backend="local"),
        "stain.exchange is for patches",
    )


def test_sites_with_other_stains_do_not_begin():
    same = {"site": "S0", "stains": {"S0": "a"}}
    refused(
        lambda: compare([same, same | {"site": "S1"}, {"site": "S2", "stains": {"S0": "b"}}]),
        "S2 brings",
        "as the stains in use",
    )


def colour(rows):
    """Patches of one colour each."""
    return np.full((len(rows), 4, 4, 3), 120, np.uint8) + rows[:, None, None, None].astype(np.uint8)


def examples(n=30):
    unknown = np.full(n, "")
    return Examples(colour, np.arange(n) % 2, unknown, unknown)


def test_every_example_is_shown_in_any_stain_with_equal_chance_and_evaluated_in_its_own():
    shown = in_stains(examples(), [lambda rows, pixels: pixels * 0, lambda rows, pixels: pixels * 0 + 1])
    rows = [np.arange(30)] * 100
    cpu = torch.device("cpu")
    drawn = [
        x for x, _ in batches(shown, iter(rows), augment=None, device=cpu, stains=CipherStream.seeded(3))
    ]
    values = ((torch.stack(drawn)[..., 0, 0, 0] + 1) * 127.5).round().int()
    for k in range(30):
        counts = [int((values[:, k] == one).sum()) for one in (0, 1, 120 + k)]
        assert sum(counts) == 100 and min(counts) > 15
    plain = torch.cat([x for x, _ in batches(shown, iter(rows[:1]), augment=None, device=cpu)])
    assert ((plain[:, 0, 0, 0] + 1) * 127.5).round().int().tolist() == (120 + np.arange(30)).tolist()


def test_stains_survive_subsets_and_pools():
    first = in_stains(examples(4), [lambda rows, pixels: pixels * 0 + rows[:, None, None, None].astype("u1")])
    second = in_stains(examples(3), [lambda rows, pixels: pixels * 0 + 9])
    both = joined([subset(first, np.array([3, 1])), second])
    found = both.show(np.array([0, 1, 2, 1, 4]), np.array([1, 1, 1, 0, 0]))
    assert found[:, 0, 0, 0].tolist() == [3, 1, 9, 121, 122] and both.n_stains == 2
    assert joined([first, examples(2)]).show is None


def test_training_patches_are_moved_between_released_stains(study):
    stain(study, site=None)
    pipeline = study.pipeline("small", EXCHANGE)
    stains = stains_of(study, pipeline)
    with open_data(study, "S0", pipeline) as data:
        plain = data.examples("train")
        found = in_stains(plain, data.restains(stains))
        rows = np.arange(6)
        pixels = plain.read(rows)
        expected = restained(pixels, stains["S0"].stain, stains["S2"].stain)
        assert np.array_equal(found.show(rows, np.full(6, 2)), expected)
        assert np.array_equal(found.show(rows, np.zeros(6, int)), pixels)


def test_ranks_share_the_sites(study, wsi_fl, as_ranks):
    document, nothing = as_ranks(2, lambda: stain(study, site=None))
    assert not nothing  # said once
    rows = document["sites"]
    assert [row["site"] for row in rows] == ["S0", "S1", "S2"] and all(row["spent"] for row in rows)
    assert all((study.store(row["site"]).parent / "stain.png").exists() for row in rows)
    told = wsi_fl("stain", "--all", cwd=study.root)
    assert told.returncode == 0 and told.stderr.count("nothing spent") == 3


def test_copies_of_other_hospitals_stains_are_enough(study, tmp_path):
    stain(study, site=None)
    alone = Study(shutil.copytree(study.root, tmp_path / "alone"))
    for name in ("S1", "S2"):
        alone.ledger(name).unlink()
        shutil.rmtree(alone.store(name).parent)
    assert not stain(alone, site="S0")["sites"][0]["spent"]
    assert set(stains_of(alone, alone.pipeline("small"))) == {"S0", "S1", "S2"}
