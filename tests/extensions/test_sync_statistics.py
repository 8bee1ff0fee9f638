"""Released class statistics are synced over the network, at no further charge."""

import json
import shutil
from base64 import b64encode
from functools import cache

import numpy as np
import pytest
import torch
from conftest import REAL, model, refused, same, write_features
from federation_fixtures import Wire, at_once
from hospitals import one_installation  # noqa: F401
from test_inference_only_sites import unlabelled
from test_oneshot import make_hospitals, rows_of
from test_released_statistics import HEADS, NOISE, rewritten, sums_at

from wsi_fl.federation.documents import ProtocolError
from wsi_fl.hospitals.dossier import departure, dossier_page
from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.plans.planned_run import read_planned_run
from wsi_fl.hospitals.plans.review import review_lines, review_plan, sign_plan
from wsi_fl.hospitals.work.client import LAST, take_part
from wsi_fl.oneshot import sync_statistics
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.oneshot.released_statistics import encode_file
from wsi_fl.privacy.ledger_file import digest_values, user_head_path
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_lines
from wsi_fl.types import NoCommonPlan, UsageError, WsiFlError

SENT = [*NOISE, "train.from_released=true"]


class Hospitals:
    """Hospitals with a study and a store each, and the study of the coordinator."""

    def __init__(self, root, identity, receiver=False):
        self.root, self.identity, self.identities = root, identity, {}
        self.whole = make_hospitals(root / "whole")
        if receiver:
            unlabelled(self.whole, "S3")
        for file in (self.whole.root / "sites").glob("*.toml"):
            real = "real = true" if file.stem == "S3" else REAL
            file.write_text(file.read_text().replace("real = false", real))
        for name in self.whole.site_names():
            self.join(name)

    def join(self, name):
        """Give a hospital its study."""
        others = [one for one in self.whole.site_names() if one != name]
        shutil.copytree(self.whole.root, self.root / name, ignore=shutil.ignore_patterns(*others, "plan"))
        self.identities[name] = self.identity(name)

    def study(self, name):
        return Study(self.root / name)

    def release(self, *names):
        for name in names:
            release_statistics(self.study(name), site=name, overrides=NOISE)

    def plan(self, *settings, method="oneshot"):
        overrides = [*SENT, *settings]
        return make_plan(self.whole, method=method, overrides=overrides, out=self.whole.root / "plan")

    def sign(self, plan):
        for name, identity in self.identities.items():
            study = self.study(name)
            sign_plan(study, review_plan(study, plan, name), identity)

    def run(self, *names, **given):
        """The result or exception of each participating hospital, each in its own thread."""
        ends = {}

        def be(name):
            return take_part(self.study(name), self.identities[name], Wire(name, ends), **given)

        return at_once(be, names)

    def charges(self, name):
        lines = read_lines(self.study(name).ledger_path(name))
        return [line["mechanism"] for line in lines if "mechanism" in line]

    def head(self, name, summary):
        return model(self.study(name).root / summary["run"], name, "shared")

    def require_heads_of_files(self, found, letters, at=()):
        """Check that each hospital has the files of the sites, and that `train` fits the same heads at no charge."""
        known = {one: sums_at(self.study(one).release_path(one)).digest[:8] for one in letters}
        for summary in found.values():
            assert isinstance(summary, dict) and summary["statistics"] == known, found
        for name in at or found:
            study = self.study(name)
            for one in letters:
                assert study.release_path(one).read_bytes() == self.study(one).release_path(one).read_bytes()
            before = study.ledger_path(name).read_bytes() if study.ledger_path(name).exists() else b""
            by_files = train(study, method="oneshot", backend="local", overrides=SENT)
            assert same(self.head(name, found[name]), self.head(name, by_files))
            assert before == (study.ledger_path(name).read_bytes() if study.ledger_path(name).exists() else b"")


@pytest.fixture(scope="module")
def identity(federation):
    return cache(federation.identity)


@pytest.fixture
def hospitals(tmp_path, identity):
    return Hospitals(tmp_path, identity)


@pytest.fixture
def all_released(hospitals):
    hospitals.release("S0", "S1", "S2")
    return hospitals


def text_at(hospitals, name, plan):
    """The text that people read before they sign."""
    lines = review_lines(review_plan(hospitals.study(name), plan, name))
    return "\n".join(line.text for line in lines if hasattr(line, "text"))


def test_released_class_statistics_are_synced_and_nothing_more_is_spent(all_released):
    hospitals = all_released
    plan = hospitals.plan()
    cost, said = review_plan(hospitals.study("S0"), plan, "S0").cost, text_at(hospitals, "S0", plan)
    assert cost.epsilon == 0 and cost.letter == cost.lifetime_epsilon > 0
    assert "sends the class statistics that it released" in said and "nothing more is spent" in said
    assert "class statistics released before" in said and "no ε is spent" in said
    file = hospitals.study("S0").root / "tried.json"
    file.write_text(plan.text)
    refused(lambda: read_planned_run(hospitals.study("S0"), file, "S0"), "nothing to try")
    file.unlink()
    hospitals.sign(plan)
    found = hospitals.run("S0", "S1", "S2", plan=plan.digest)
    hospitals.require_heads_of_files(found, ["S0", "S1", "S2"], at=["S1"])
    for name in found:
        assert len(hospitals.charges(name)) == 1
        row = next(row for row in found[name]["sites"] if row["site"] == name)
        assert row["epsilon"] == row["lifetime_epsilon"] == pytest.approx(cost.letter)
        _, once, again = read_lines(hospitals.study(name).ledger_path(name))
        assert once["sending"] and again["sending"] and again["again"] and again["agreement"] == plan.digest
    study = hospitals.study("S0")
    (account,) = dossier_page.list_accounts(
        study, "S0", dossier_page.LedgerFile(study.ledger_path("S0")).entries, 1e-5, None
    )
    assert departure._describe_release(study, "S0", account)["to"] == ["S1", "S2"]


@pytest.mark.slow
def test_a_fourth_hospital_takes_part_by_a_new_plan_and_is_the_only_one_charged(all_released):
    hospitals = all_released
    plan = hospitals.plan()
    hospitals.sign(plan)
    found = hospitals.run("S0", "S1", "S2", plan=plan.digest)
    hospitals.require_heads_of_files(found, ["S0", "S1", "S2"])
    whole = hospitals.whole
    file = (whole.root / "sites/S0.toml").read_text()
    (whole.root / "sites/S3.toml").write_text(file.replace("S0", "S3"))
    x, labels = rows_of(60, 8, 0.5)
    write_features(whole, "S3", x, labels, [f"p{k}" for k in range(60)], ["train"] * 40 + ["test"] * 20)
    hospitals.join("S3")
    hospitals.release("S3")
    before = {name: hospitals.charges(name) for name in ("S0", "S1", "S2")}
    later = hospitals.plan()
    hospitals.sign(later)
    found = hospitals.run("S0", "S1", "S2", "S3", plan=later.digest)
    hospitals.require_heads_of_files(found, ["S0", "S1", "S2", "S3"])
    assert {name: hospitals.charges(name) for name in before} == before
    heads = [hospitals.head(name, found[name]) for name in found]
    assert all(int(head["n_sites"]) == 4 and np.array_equal(head["sums"], heads[0]["sums"]) for head in heads)


def test_a_hospital_is_told_to_release_before_it_signs_and_before_it_begins(hospitals):
    hospitals.release("S0", "S1")
    plan, advice = hospitals.plan(), ("S2 has released no statistics", "`wsi-fl statistics --site S2` with the plan's")
    refused(lambda: review_plan(hospitals.study("S2"), plan, "S2"), *advice)
    hospitals.release("S2")
    hospitals.sign(plan)
    hospitals.study("S2").release_path("S2").unlink()
    (why,) = hospitals.run("S2").values()
    assert isinstance(why, NoCommonPlan) and all(word in str(why) for word in advice)
    hospitals.release("S2")  # the same bytes again
    assert len(hospitals.charges("S2")) == 1


def test_only_statistics_that_are_final_on_the_ledger_may_leave_the_site(all_released):
    hospitals = all_released
    plan, study = hospitals.plan(), hospitals.study("S2")
    hospitals.sign(plan)
    file = study.release_path("S2")
    good = file.read_bytes()

    def no_go(*said, error=WsiFlError):
        (found,) = hospitals.run("S2").values()
        assert isinstance(found, error) and all(word in str(found) for word in said), found
        refused(lambda: review_plan(study, plan, "S2"), *said, error=error)
        assert len(read_lines(study.ledger_path("S2"))) == 2  # nothing was sent
        file.write_bytes(good)

    sums = sums_at(file)
    rewritten(file, {"sums": torch.from_numpy(1.5 * np.float32(sums.vector))})
    no_go("statistics/S2.safetensors", "edited since")
    other = sums.vector.copy()
    other[0] += 1
    rewritten(file, {"sums": torch.from_numpy(np.float32(other))}, digest=digest_values(other))
    no_go("lacks the release of statistics/S2.safetensors", error=UsageError)
    file.write_bytes(hospitals.study("S1").release_path("S1").read_bytes())
    no_go("these are the statistics of site S1")
    lines = study.ledger_path("S2").read_text().splitlines(keepends=True)
    assert json.loads(lines[1])["sending"]
    study.ledger_path("S2").write_text(lines[0])  # as where the machine stopped before
    for head in (study.store_path("S2").parent / "ledger.head.json", user_head_path("S2")):
        head.unlink()
    words = "not final in the ledger", "wsi-fl statistics"
    refused(lambda: review_plan(study, plan, "S2"), *words, error=WsiFlError)
    hospitals.release("S2")
    assert review_plan(study, plan, "S2").cost.letter


def test_class_statistics_without_noise_are_sent_only_while_the_site_allows_them(hospitals):
    for one in hospitals.root.glob("*/sites/*.toml"):
        one.write_text(one.read_text() + '\nallow = ["model"]\n')
    for name in hospitals.identities:
        release_statistics(hospitals.study(name), site=name, overrides=[*HEADS, "privacy.enabled=false"])
    assert review_plan(hospitals.study("S1"), hospitals.plan(), "S1").cost is not None
    for root in (hospitals.whole.root, hospitals.root / "S1"):
        for one in root.glob("sites/*.toml"):
            one.write_text(one.read_text().replace('allow = ["model"]', ""))
    plan, words = hospitals.plan(), ("S1.toml", "without differential privacy")
    refused(lambda: review_plan(hospitals.study("S1"), plan, "S1"), *words)


def test_an_inference_only_site_gets_all_class_statistics_and_sends_none(tmp_path, identity):
    hospitals = Hospitals(tmp_path, identity, receiver=True)
    hospitals.release("S0", "S1", "S2")
    plan = hospitals.plan()
    assert review_plan(hospitals.study("S3"), plan, "S3").cost.epsilon is None
    assert "statistics released before" not in text_at(hospitals, "S3", plan)
    hospitals.sign(plan)
    found = hospitals.run("S0", "S1", "S2", "S3", plan=plan.digest)
    hospitals.require_heads_of_files(found, ["S0", "S1", "S2"], at=["S3"])
    assert found["S3"]["inference_sites"] == ["S3"] and not hospitals.study("S3").ledger_path("S3").exists()
    assert not any(hospitals.study(name).release_path("S3").exists() for name in found)
    heads = [hospitals.head(name, found[name])["sums"] for name in ("S0", "S3")]
    assert np.array_equal(*heads)


def test_an_absent_site_counts_by_statistics_that_all_have_and_gets_the_same_heads_later(all_released):
    hospitals = all_released
    plan = hospitals.plan("train.min_sites=2")
    hospitals.sign(plan)
    theirs = hospitals.study("S2").release_path("S2")
    shutil.copy(theirs, hospitals.study("S0").release_path("S2"))
    found = hospitals.run("S0", "S1", without=["S2"], plan=plan.digest)
    for name in ("S0", "S1"):
        assert list(found[name]["statistics"]) == ["S0", "S1"]  # S1 has no letter of S2, who alone may send it
    assert not hospitals.study("S1").release_path("S2").exists()
    back = hospitals.run("S0", "S1", "S2", resume=LAST, plan=plan.digest)
    for one in back.values():
        assert one["run"] == found["S0"]["run"] and list(one["statistics"]) == ["S0", "S1"], one
    assert np.array_equal(*(hospitals.head(name, back[name])["sums"] for name in ("S0", "S2")))
    assert hospitals.study("S1").release_path("S2").read_bytes() == theirs.read_bytes()
    hospitals.sign(plan)  # once more, which costs nothing
    again = hospitals.run("S0", "S1", without=["S2"], plan=plan.digest)
    assert [list(one["statistics"]) for one in again.values()] == [["S0", "S1", "S2"]] * 2
    assert all(len(hospitals.charges(name)) == 1 for name in ("S0", "S1", "S2"))


def test_a_plan_that_computes_statistics_again_warns_where_some_were_released(hospitals):
    further = "which cost ε again"
    plan = hospitals.plan("train.from_released=false", "privacy.sigma=5.0")
    assert further not in text_at(hospitals, "S0", plan)
    hospitals.release("S0")
    assert further in text_at(hospitals, "S0", plan)
    hospitals.release("S1", "S2")
    assert further not in text_at(hospitals, "S0", hospitals.plan())
    for file in hospitals.whole.root.glob("sites/*.toml"):
        file.write_text(file.read_text() + 'allow = ["shared"]\n')
    refused(lambda: hospitals.plan("privacy.noise=shared"), "noise = 'own'")


def test_statistics_of_peers_are_kept_only_if_their_file_would_be_accepted(hospitals):
    hospitals.release("S0", "S1")
    study, sums = hospitals.study("S0"), sums_at(hospitals.study("S1").release_path("S1"))
    party = RunContext.create(study, study.load_pipeline(study.pipeline_name(None), SENT), "oneshot")

    def keep(content, name="S1"):
        sync_statistics._keep_statistics(party, "S0", name, content)

    refused(lambda: keep("nothing!"), "no statistics", error=ProtocolError)
    refused(lambda: keep(b64encode(b"x" * 99).decode()), "damaged release", error=WsiFlError)
    good = b64encode(encode_file(sums)).decode()
    refused(lambda: keep(good, "S2"), "these are the statistics of site S1", error=WsiFlError)
    other = hospitals.study("S1").release_path("S1")
    rewritten(other, encoder="evil\nlines sha256:0")
    refused(lambda: keep(b64encode(other.read_bytes()).decode()), "encoder = evil?lines", error=UsageError)
    assert [file.name for file in study.release_path("S0").parent.iterdir()] == ["S0.safetensors"]
    keep(good)
    assert study.release_path("S1").stat().st_mode & 0o077 == 0


def test_common_statistics_are_those_that_all_sites_have_or_began_with():
    here = {"own": "a" * 64, "held": {"S0": "a" * 64, "S2": "c" * 64}, "began": None}
    there = {"own": "", "held": {"S2": "c" * 64}, "began": ["S0"]}
    names = ["S0", "S1", "S2", "S3"]
    assert sync_statistics._find_common({"S0": here, "S1": there | {"began": None}}, names) == ["S0", "S2"]
    assert sync_statistics._find_common({"S0": here, "S1": there}, names) == ["S0"]
    assert sync_statistics._find_common({"S0": here, "S1": there | {"held": {}, "began": None}}, names) == ["S0"]
    odd = there | {"held": {"S2": "d" * 64}, "began": None}
    assert sync_statistics._find_common({"S0": here, "S1": odd}, names) == ["S0"]
