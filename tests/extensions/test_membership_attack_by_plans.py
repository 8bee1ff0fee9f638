"""Plans within a standing approval disclose nothing of named patients: not by n, refusals, headers or summaries.

Two hospitals differ only in which of ten named patients train there; in their place are patients of names that
the attacker does not know. The attacker's view of any plan is the same of both, to the last digit. So any guess
about the ten is right about one hospital as often as it is wrong about the other.
"""

import csv
import json
import random
import tomllib
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import numpy as np
import pytest
import tomli_w
from conftest import REAL, make_study, write_features
from federation_fixtures import Federation
from hospitals import one_installation  # noqa: F401

from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.plans.preapproval import write_preapproval
from wsi_fl.hospitals.plans.preapproval_check import admit_plan, make_preapproval
from wsi_fl.hospitals.plans.signed_plan import FederationPlan
from wsi_fl.hospitals.trust.certificates import key_fingerprint
from wsi_fl.models import weights
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import SiteData
from wsi_fl.stages.training.build_sites import build_site
from wsi_fl.stages.training.site_preflight import build_preflight
from wsi_fl.stages.training.summary import build_row
from wsi_fl.types import UsageError, WsiFlError

SITES = ("S0", "S1")
NAMED = [f"TCGA-{k:02d}" for k in range(10)]
OTHERS = [f"P{k}" for k in range(30)]
RARE = ("c", "d", "hiv")
PIPELINE = """
[model]
private = "mean_head"
proxy = "mean_head"
[train]
data = "features"
example = "slide"
rounds = 4
batch_size = 6
lr = 0.01
local_baseline = false
[target]
column = "g"
classes = ["a", "b"]
ignore = ["c"]
per = "slide"
[privacy]
sigma = 6.0
"""


def hospital(root, trains):
    """A study in which the given named patients train; each has a rare value or none in its table."""
    study = make_study(root, n_sites=0, text=PIPELINE)
    for site in SITES:
        (study.root / "sites" / f"{site}.toml").write_text(f'name = "{site}"\n{REAL}\nclinical = "table.csv"\n')
    rng = np.random.default_rng(0)
    who = [name if name in trains else f"unknown-{k}" for k, name in enumerate(NAMED)] + OTHERS
    patients = np.repeat(who, 3)
    split = np.where(np.arange(len(patients)) >= 3 * 34, "test", "train")
    labels = np.arange(len(patients)) % 2
    write_features(study, "S0", rng.normal(size=(len(patients), 4)), labels, patients, split, patients)
    with (study.root / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["patient", "g"])
        # a value of a named patient that nobody agreed on: of those that train one of each kind
        rows.writerows([name, RARE[k % 3] if name in trains and k < 3 else "ab"[k % 2]] for k, name in enumerate(who))
    return study


@pytest.fixture(scope="module")
def identities():
    from opacus.validators import ModuleValidator  # noqa: F401 it takes longer than all plans

    federation = Federation()
    return {name: federation.identity(name) for name in SITES}


def plan_of(study, identities, *overrides, method="proxyfl"):
    keys = {name: key_fingerprint(one.certificate) for name, one in identities.items()}
    return make_plan(study, method=method, overrides=overrides, out=study.root / "plan.json", keys=keys)


def forged(plan, **sections):
    """A plan with changed settings and an unchanged text: the settings alone decide the outcome."""
    settings = tomllib.loads(plan.document["settings"])
    for name, keys in sections.items():
        settings[name] = {**settings.get(name, {}), **keys}
    text = plan.document["settings"]
    return FederationPlan(plan.text.replace(json.dumps(text, ensure_ascii=False), json.dumps(tomli_w.dumps(settings))))


def ground_seed(name, least=1e-3):
    """A seed with a tiny holdout draw of a name, by the public formula of a simulated site; and that draw."""
    for seed in range(100_000):
        lot = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:6], "big") / 2**48
        if lot < least:
            return seed, lot
    raise AssertionError


FETCHING = [
    {"model": {"weights": "hub"}},
    {"model": {"weights": "/etc/passwd"}},
    {"model": {"proxy": "timm:resnet10t", "weights": "/srv/weights.pth"}},
    {"model": {"proxy": "timm:hf-hub:me/net"}},
    {"model": {"private": "timm:local-dir:/tmp/net"}},
    {"model": {"projection": "/etc/hostname"}},
    {"features": {"encoder": "hf-hub:me/net"}},
    {"mosaic": {"weights": "/etc/hostname"}},
]
"""Weights of the hub, an architecture of a hub or of a folder, an encoder of a hub, a file of this machine."""


def attacks(plan, n, rng):
    """Settings that an attacker tries, each at most one step from those of the standing approval."""
    seeds = {name: ground_seed(name) for name in NAMED}
    ways = [
        lambda: {"train": {"seed": rng.randrange(2**31)}},
        lambda: {"train": dict(zip(("seed", "val_fraction"), seeds[rng.choice(NAMED)], strict=True))},
        lambda: {"train": {"val_fraction": rng.random()}},
        lambda: {"train": {"folds": (k := rng.randrange(2, 60)), "fold": rng.randrange(1, k + 1)}},
        lambda: {"target": {"ignore": rng.sample([*RARE, "e"], rng.randrange(4))}},
        lambda: {"target": {"classes": ["a", rng.choice(RARE)]}},
        lambda: {"target": {"column": rng.choice(["patient", "age", "g "])}},
        lambda: {"target": {"per": "patient"}},
        lambda: {"privacy": {"max_rows": rng.randrange(1, 9)}},
        lambda: {"privacy": {"unit": "row"}},
        lambda: {"privacy": {"clip": rng.uniform(0.1, 2)}},
        lambda: {"privacy": {"sigma": rng.uniform(0.5, 5.9)}},
        lambda: {"privacy": {"enabled": False}},
        lambda: {"privacy": {"target_epsilon": rng.uniform(0.1, 9)}},
        lambda: {"audit": {"canaries": rng.randrange(1, 40)}},
        lambda: {"topology": {"graph": rng.choice(["ring", "star", "x.json"])}},
        lambda: {"comm": {"timeout_s": rng.uniform(1, 99)}},
        lambda: {"model": {"proxy": rng.choice(["abmil", "deepset"])}},
        lambda: {"train": {"batch_size": rng.randrange(1, 41)}},
        lambda: {"train": {"rounds": rng.randrange(5, 900)}},
        lambda: {"train": {"left_out": "S0"}},
        lambda: {"train": {"max_patches": 3}},
        *[lambda sections=sections: sections for sections in FETCHING],
    ]
    made = (forged(plan, **ways[k % len(ways)]()) for k in range(2 * n))
    return [one for one in made if one.text != plan.text][:n]


def replies(study, pipeline, method="proxyfl"):
    """Everything a hospital discloses before ε: its preflight reply and its row of a summary."""
    with RunContext.create(study, pipeline, method, RunFolder(study.runs_path / "attacked")) as party:
        site = build_site(party, 0)
        return build_preflight(site, party), build_row(site)


def try_plan(study, me, plan):
    """What others see of a plan at a hospital with a standing approval: the refusal or the replies."""
    try:
        admit_plan(study, me, plan)
    except WsiFlError as error:
        return type(error).__name__, str(error)
    return "admitted", *replies(study, plan.pipeline(), plan.method)


def two_worlds(folder, rng):
    """Two hospitals, and the named patients that train in each: every patient trains in exactly one."""
    bits = dict(zip(NAMED, rng.sample([True, False] * 5, 10), strict=True))
    return [hospital(folder / str(k), {name for name in NAMED if bits[name] == bool(k)}) for k in (0, 1)], bits


def guess_from(seen, name):
    """A rule by which an attacker guesses from everything visible whether a patient trains."""
    return sha256(f"{name} {seen}".encode()).digest()[0] < 128


@pytest.mark.parametrize("n", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_plans_in_a_standing_approval_reveal_nothing_of_ten_named_patients(tmp_path, identities, n, monkeypatch):
    rng, n_inside = random.Random(n), 2 if n == 40 else 12
    worlds, bits = two_worlds(tmp_path, rng)
    plan, me = plan_of(worlds[0], identities), identities["S0"]
    last = (datetime.now(UTC) + timedelta(9)).date().isoformat()
    for study in worlds:
        frame = make_preapproval(study, plan, "S0", epsilon=9.0, until=last, runs=n_inside)
        write_preapproval(study, frame, me)
    outside, inside = attacks(plan, n - n_inside - 1, rng), []
    for k in range(n_inside):
        varied = (f"train.rounds={1 + k % 4}", f"train.lr={rng.uniform(1e-4, 1)}", f"privacy.sigma={6 + k / 9}")
        inside.append(plan_of(worlds[0], identities, *varied))
    opened, fetched, real = [], [], SiteData.__init__
    monkeypatch.setattr(SiteData, "__init__", lambda self, *given: (opened.append(given[1]), real(self, *given))[1])
    for name in ("download_weights", "read_weights", "create_timm_model"):
        monkeypatch.setattr(weights, name, lambda *given, **_: fetched.append(given))
    refusals = [[try_plan(study, me, plan) for plan in outside] for study in worlds]
    assert all("exceeds the standing approval of S0" in text or "is damaged" in text for _, text in refusals[0])
    # by the plan's own text alone, before anything is opened: so the time of a refusal cannot depend on the store
    assert not opened and not fetched
    seen = [[*refusals[k], *(try_plan(study, me, plan) for plan in inside)] for k, study in enumerate(worlds)]
    assert {kind for kind, *_ in seen[0][len(outside) :]} == {"admitted"}
    assert {document["units"] for _, document, _ in seen[0][len(outside) :]} == {34}  # also those without an answer
    for k, study in enumerate(worlds):  # nothing was spent, and the frame has had its runs
        seen[k].append(try_plan(study, me, plan))
        assert not study.ledger_path("S0").exists() and f"for {n_inside} runs, and it had them" in seen[k][-1][1]
    assert seen[0] == seen[1] and len(seen[0]) == n
    right = sum(guess_from(seen[k], name) == (bits[name] == bool(k)) for k in (0, 1) for name in NAMED)
    assert right == len(NAMED)  # of twice as many guesses


STEERED = [
    {"train": {"folds": 3, "fold": 2}},
    {"train": {"folds": 50, "fold": 1}},
    {"target": {"ignore": []}},
    {"target": {"ignore": ["d", "hiv"]}},
    {"target": {"classes": ["b", "d"]}},
    {"target": {"per": "patient"}},
    {"privacy": {"unit": "row"}},
]


def test_plans_that_a_person_signs_disclose_no_more(tmp_path):
    """Of any settings that choose patients by name, or by a value of the table."""
    worlds, _ = two_worlds(tmp_path, random.Random(0))
    for name in NAMED[:4]:
        seed, lot = ground_seed(name)
        STEERED.append({"train": {"seed": seed, "val_fraction": lot + 1e-6}})
    usual = [study.load_pipeline("small") for study in worlds]
    for sections in STEERED:
        first, second = (replies(study, one.replace_keys(**sections)) for study, one in zip(worlds, usual, strict=True))
        assert first == second, sections


@pytest.mark.parametrize("answer", ["a", "c", "hiv", "NA"])
@pytest.mark.parametrize("privacy", [{"unit": "row"}, {"unit": "row", "max_rows": 2}, {"enabled": False}])
def test_n_counts_slides_without_a_patient_whatever_their_label(tmp_path, answer, privacy):
    """Where rows count, one slide without a patient is one of n, whether agreed on, ignored, rare or missing."""
    study = hospital(tmp_path / "study", NAMED)
    rng, slides = np.random.default_rng(0), np.array([f"slide-{k}" for k in range(20)])
    patients = np.array(["", *(f"P{k}" for k in range(1, 20))])
    write_features(study, "S0", rng.normal(size=(20, 4)), np.arange(20) % 2, patients, ["train"] * 20, slides)
    rows = [f"{name},{answer if k == 0 else 'ab'[k % 2]}" for k, name in enumerate(slides)]
    (study.root / "table.csv").write_text("\n".join(["slide,g", *rows]))
    (study.root / "sites" / "S0.toml").write_text(f'name = "S0"\n{REAL}\nclinical = "table.csv"\nallow = ["model"]\n')
    assert replies(study, study.load_pipeline("small").replace_keys(privacy=privacy))[0]["units"] == 20


def test_a_column_that_identifies_patients_or_slides_is_refused_as_a_target(tmp_path):
    """A plan's approval would disclose whether a name occurs as a class, and so whether that patient is there."""
    worlds, _ = two_worlds(tmp_path, random.Random(0))
    for study in worlds:
        text = (study.root / "table.csv").read_text()
        for column, own in (("patient", ""), ("case_id", ""), ("slide", ""), ("number", 'patient = "number"')):
            (study.root / "table.csv").write_text(text.replace("patient,g", f"{column},g"))
            given = f"\n[columns]\n{own}\n" if own else ""
            (study.root / "sites" / "S0.toml").write_text(f'name = "S0"\n{REAL}\nclinical = "table.csv"\n{given}')
            for name, spelt in zip(NAMED[:2], (column, column.upper()), strict=True):
                asked = {"column": spelt, "classes": [name, "other"], "ignore": []}
                with pytest.raises(UsageError, match="identifies slides or patients"):
                    replies(study, study.load_pipeline("small").replace_keys(target=asked))
