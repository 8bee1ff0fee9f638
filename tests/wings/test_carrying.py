"""Letters that lie at their hospitals are carried by the network, and cost nothing more."""

import json
import shutil
import subprocess
import sys
import threading
from base64 import b64encode

import numpy as np
import pytest
from conftest import REAL, model, refused, same, write_features
from hospitals import one_installation  # noqa: F401
from test_oneshot import make_hospitals, rows_of
from test_receive import unlabelled
from test_release import HEADS, NOISE, rewritten, sums_at
from wires import Federation, Wire

from wsi_fl.federation.documents import NotAgreed
from wsi_fl.hospitals.dossier import page
from wsi_fl.hospitals.plans.approving import look, look_lines, sign
from wsi_fl.hospitals.plans.making import make_plan
from wsi_fl.hospitals.plans.rehearsing import rehearse
from wsi_fl.hospitals.work.taking_part import LAST, take_part
from wsi_fl.privacy.ledger_file import digest
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.sums import as_file
from wsi_fl.stages.training import carrying, launch
from wsi_fl.stages.training.release import release
from wsi_fl.stages.training.train import train
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_lines
from wsi_fl.types import NoCommonPlan, UsageError, WsiFlError

SENT = [*NOISE, "train.releases=true"]


class Hospitals:
    """Hospitals with a study and a store each, and the study of whoever makes their plans."""

    def __init__(self, root, receiver=False):
        self.root, self.federation, self.identities = root, Federation(), {}
        self.whole = make_hospitals(root / "whole")
        for k in range(3):
            file = self.whole.root / f"sites/S{k}.toml"
            file.write_text(file.read_text().replace("real = false", REAL))
        if receiver:
            unlabelled(self.whole, "S3")
            file = self.whole.root / "sites/S3.toml"
            file.write_text(file.read_text().replace("real = false", "real = true"))
        for name in self.whole.site_names():
            self.join(name)

    def join(self, name):
        """Give a hospital a study of its own."""
        others = [one for one in self.whole.site_names() if one != name]
        shutil.copytree(self.whole.root, self.root / name, ignore=shutil.ignore_patterns(*others, "plan"))
        self.identities[name] = self.federation.identity(name)

    def study(self, name):
        return Study(self.root / name)

    def release(self, *names):
        for name in names:
            release(self.study(name), site=name, overrides=NOISE)

    def plan(self, *settings, method="oneshot"):
        overrides = [*SENT, *settings]
        return make_plan(self.whole, method=method, overrides=overrides, out=self.whole.root / "plan")

    def sign(self, plan):
        for name, identity in self.identities.items():
            study = self.study(name)
            sign(study, look(study, plan, name), identity)

    def run(self, *names, **given):
        """What each hospital that takes part returned or raised, each in a thread of its own."""
        ends, found = {}, {}

        def be(name):
            try:
                found[name] = take_part(self.study(name), self.identities[name], Wire(name, ends), **given)
            except Exception as error:
                found[name] = error

        threads = [threading.Thread(target=be, args=(name,), daemon=True) for name in names]
        for one in threads:
            one.start()
        for one in threads:
            one.join(120)
        return found

    def charges(self, name):
        return [
            line["mechanism"] for line in read_lines(self.study(name).ledger(name)) if "mechanism" in line
        ]

    def head(self, name, summary):
        return model(self.study(name).root / summary["run"], name, "proxy")

    def require_heads_of_files(self, found, letters, at=()):
        """Each hospital's files are those of their sites, and `train` makes the same heads of them, for nothing."""
        known = {one: sums_at(self.study(one).release(one)).digest[:8] for one in letters}
        assert all(isinstance(summary, dict) and summary["letters"] == known for summary in found.values()), (
            found
        )
        for name in at or found:
            summary = found[name]
            study = self.study(name)
            for one in letters:
                assert study.release(one).read_bytes() == self.study(one).release(one).read_bytes()
            before = study.ledger(name).read_bytes() if study.ledger(name).exists() else b""
            by_files = train(study, method="oneshot", backend="local", overrides=SENT)
            assert same(self.head(name, summary), self.head(name, by_files))
            assert before == (study.ledger(name).read_bytes() if study.ledger(name).exists() else b"")


@pytest.fixture
def hospitals(tmp_path):
    return Hospitals(tmp_path)


def words(lines):
    return "\n".join(line.text for line in lines if hasattr(line, "text"))


def test_letters_that_lie_there_are_carried_and_nothing_more_is_spent(hospitals):
    hospitals.release("S0", "S1", "S2")
    plan = hospitals.plan()
    looked = look(hospitals.study("S0"), plan, "S0")
    assert looked.cost.epsilon == 0 and looked.cost.letter == looked.cost.lifetime_epsilon > 0
    said = words(look_lines(looked))
    assert "sends the letter that it released" in said and "nothing more is spent" in said
    assert "letter that was released before" in said and "no ε is spent" in said
    refused(lambda: rehearse(hospitals.study("S0"), plan, "S0"), "nothing to rehearse")
    hospitals.sign(plan)
    found = hospitals.run("S0", "S1", "S2", plan=plan.digest)
    hospitals.require_heads_of_files(found, ["S0", "S1", "S2"], at=["S1"])
    for name in found:
        assert len(hospitals.charges(name)) == 1
        row = next(row for row in found[name]["sites"] if row["site"] == name)
        assert row["epsilon"] == row["lifetime_epsilon"] == pytest.approx(looked.cost.letter)
        _, once, again = read_lines(hospitals.study(name).ledger(name))
        assert once["sending"] and again["sending"] and again["again"] and again["agreement"] == plan.digest
    (account,) = page._accounts(hospitals.study("S0"), "S0", _entries(hospitals, "S0"), 1e-5, None)
    assert page._released(hospitals.study("S0"), "S0", account)["to"] == ["S1", "S2"]


@pytest.mark.slow
def test_a_fourth_hospital_joins_by_a_new_plan_and_pays_alone(hospitals):
    hospitals.release("S0", "S1", "S2")
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


def _entries(hospitals, name):
    return page.LedgerFile(hospitals.study(name).ledger(name)).entries


def test_a_hospital_is_told_to_release_before_it_signs_and_before_it_begins(hospitals):
    hospitals.release("S0", "S1")
    plan, advice = hospitals.plan(), ("S2 has released no letter yet", "`wsi-fl release --site S2`")
    refused(lambda: look(hospitals.study("S2"), plan, "S2"), *advice)
    hospitals.release("S2")
    hospitals.sign(plan)
    hospitals.study("S2").release("S2").unlink()
    (why,) = hospitals.run("S2").values()
    assert isinstance(why, NoCommonPlan) and all(word in str(why) for word in advice)
    hospitals.release("S2")  # the same bytes again
    assert len(hospitals.charges("S2")) == 1


def test_only_what_the_ledger_knows_as_final_may_leave(hospitals):
    hospitals.release("S0", "S1", "S2")
    plan, study = hospitals.plan(), hospitals.study("S2")
    hospitals.sign(plan)
    file = study.release("S2")
    good = file.read_bytes()

    def no_go(*said, error=WsiFlError):
        (found,) = hospitals.run("S2").values()
        assert isinstance(found, error) and all(word in str(found) for word in said), found
        refused(lambda: look(study, plan, "S2"), *said, error=error)
        assert len(read_lines(study.ledger("S2"))) == 2  # nothing was sent
        file.write_bytes(good)

    sums = sums_at(file)
    rewritten(file, {"sums": 1.5 * _torch(sums.vector)})
    no_go("releases/S2.safetensors", "edited since")
    other = sums.vector.copy()
    other[0] += 1
    rewritten(file, {"sums": _torch(other)}, digest=digest(other))
    no_go("lacks the release of releases/S2.safetensors", error=UsageError)
    file.write_bytes(hospitals.study("S1").release("S1").read_bytes())
    no_go("these are the sums of site S1")
    lines = study.ledger("S2").read_text().splitlines(keepends=True)
    assert json.loads(lines[1])["sending"]
    study.ledger("S2").write_text(lines[0])  # as where the machine stopped before
    for head in (study.store("S2").parent / "ledger.head.json", _head("S2")):
        head.unlink()
    refused(
        lambda: look(study, plan, "S2"), "does not say that it may leave", "wsi-fl release", error=WsiFlError
    )
    hospitals.release("S2")
    assert look(study, plan, "S2").cost.letter


def _head(name):
    from wsi_fl.stages.site.account import head_of_user

    return head_of_user(name)


def _torch(vector):
    import torch

    return torch.from_numpy(np.asarray(vector, np.float32))


def test_a_letter_without_noise_is_sent_only_by_who_allows_it_still(hospitals):
    for one in hospitals.root.glob("*/sites/*.toml"):
        one.write_text(one.read_text() + '\nallow = ["model"]\n')
    for name in hospitals.identities:
        release(hospitals.study(name), site=name, overrides=[*HEADS, "privacy.enabled=false"])
    assert look(hospitals.study("S1"), hospitals.plan(), "S1").cost is not None
    for root in (hospitals.whole.root, hospitals.root / "S1"):
        for one in root.glob("sites/*.toml"):
            one.write_text(one.read_text().replace('allow = ["model"]', ""))
    refused(
        lambda: look(hospitals.study("S1"), hospitals.plan(), "S1"), "S1.toml", "without differential privacy"
    )


def test_a_receiver_gets_all_letters_and_sends_none(tmp_path):
    hospitals = Hospitals(tmp_path, receiver=True)
    hospitals.release("S0", "S1", "S2")
    plan = hospitals.plan()
    assert look(hospitals.study("S3"), plan, "S3").cost.epsilon is None
    assert "letter that was" not in words(look_lines(look(hospitals.study("S3"), plan, "S3")))
    hospitals.sign(plan)
    found = hospitals.run("S0", "S1", "S2", "S3", plan=plan.digest)
    hospitals.require_heads_of_files(found, ["S0", "S1", "S2"], at=["S3"])
    assert found["S3"]["receivers"] == ["S3"] and not hospitals.study("S3").ledger("S3").exists()
    assert not any(hospitals.study(name).release("S3").exists() for name in found)
    heads = [hospitals.head(name, found[name])["sums"] for name in ("S0", "S3")]
    assert np.array_equal(*heads)


def test_who_is_away_counts_by_a_letter_that_all_have_and_who_comes_later_gets_the_same_heads(hospitals):
    hospitals.release("S0", "S1", "S2")
    plan = hospitals.plan("train.at_least=2")
    hospitals.sign(plan)
    theirs = hospitals.study("S2").release("S2")
    shutil.copy(theirs, hospitals.study("S0").release("S2"))
    found = hospitals.run("S0", "S1", without=["S2"], plan=plan.digest)
    for name in ("S0", "S1"):
        assert list(found[name]["letters"]) == ["S0", "S1"]  # S1 has no letter of S2, who alone may send it
    assert not hospitals.study("S1").release("S2").exists()
    back = hospitals.run("S0", "S1", "S2", resume=LAST, plan=plan.digest)
    for name in back:
        assert back[name]["run"] == found["S0"]["run"] and list(back[name]["letters"]) == ["S0", "S1"], back[
            name
        ]
    assert np.array_equal(*(hospitals.head(name, back[name])["sums"] for name in ("S0", "S2")))
    assert hospitals.study("S1").release("S2").read_bytes() == theirs.read_bytes()
    hospitals.sign(plan)  # once more, which costs nothing
    again = hospitals.run("S0", "S1", without=["S2"], plan=plan.digest)
    assert [list(one["letters"]) for one in again.values()] == [["S0", "S1", "S2"]] * 2
    assert all(len(hospitals.charges(name)) == 1 for name in ("S0", "S1", "S2"))


def test_a_plan_that_makes_letters_anew_says_so_where_one_was_released(hospitals):
    further = "which costs ε again"
    plan = hospitals.plan("train.releases=false", "privacy.sigma=5.0")
    assert further not in words(look_lines(look(hospitals.study("S0"), plan, "S0")))
    hospitals.release("S0")
    assert further in words(look_lines(look(hospitals.study("S0"), plan, "S0")))
    hospitals.release("S1", "S2")
    assert further not in words(look_lines(look(hospitals.study("S0"), hospitals.plan(), "S0")))
    for file in hospitals.whole.root.glob("sites/*.toml"):
        file.write_text(file.read_text() + 'allow = ["shared"]\n')
    refused(lambda: hospitals.plan("privacy.noise=shared"), "noise = 'own'")


def test_what_peers_send_is_kept_only_if_people_could_have_carried_it(hospitals):
    hospitals.release("S0", "S1")
    study, sums = hospitals.study("S0"), sums_at(hospitals.study("S1").release("S1"))
    party = RunContext.of(study, study.pipeline(study.pipeline_name(None), SENT), "oneshot")

    def keep(content, name="S1"):
        carrying._keep(party, "S0", name, content)

    refused(lambda: keep("nothing!"), "no letter", error=NotAgreed)
    refused(lambda: keep(b64encode(b"x" * 99).decode()), "damaged release", error=WsiFlError)
    good = b64encode(as_file(sums)).decode()
    refused(lambda: keep(good, "S2"), "these are the sums of site S1", error=WsiFlError)
    other = hospitals.study("S1").release("S1")
    rewritten(other, encoder="evil\nlines sha256:0")
    refused(lambda: keep(b64encode(other.read_bytes()).decode()), "encoder = evil?lines", error=UsageError)
    assert [file.name for file in study.release("S0").parent.iterdir()] == ["S0.safetensors"]
    keep(good)
    assert study.release("S1").stat().st_mode & 0o077 == 0


def test_letters_that_all_have_or_that_fewer_sites_began_with():
    here = {"own": "a" * 64, "held": {"S0": "a" * 64, "S2": "c" * 64}, "began": None}
    there = {"own": "", "held": {"S2": "c" * 64}, "began": ["S0"]}
    names = ["S0", "S1", "S2", "S3"]
    assert carrying._common({"S0": here, "S1": there | {"began": None}}, names) == ["S0", "S2"]
    assert carrying._common({"S0": here, "S1": there}, names) == ["S0"]
    assert carrying._common({"S0": here, "S1": there | {"held": {}, "began": None}}, names) == ["S0"]
    odd = there | {"held": {"S2": "d" * 64}, "began": None}
    assert carrying._common({"S0": here, "S1": odd}, names) == ["S0"]


@pytest.mark.slow
def test_ranks_with_a_study_of_their_own_each_carry_letters_too(hospitals):
    hospitals.release("S0", "S1", "S2")
    command = [launch.find_mpiexec(), "--oversubscribe", "--bind-to", "none"]
    for k, name in enumerate(hospitals.identities):
        command += [":"] * (k > 0) + ["-n", "1", "--wdir", str(hospitals.root / name)]
        command += [sys.executable, "-m", "wsi_fl", "train", "--method", "oneshot", "--json"]
        command += [word for setting in SENT for word in ("--set", setting)]
    options = {"capture_output": True, "text": True, "timeout": 240, "env": launch.rank_environment(3)}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = hospitals.study("S0").runs.glob("0*")
    summary = json.loads((run / "summary.json").read_text())
    hospitals.require_heads_of_files(dict.fromkeys(hospitals.identities, summary), ["S0", "S1", "S2"])
    assert all(len(hospitals.charges(name)) == 1 for name in hospitals.identities)
