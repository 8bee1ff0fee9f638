"""The plan that hospitals sign: its words follow from its settings, and nobody takes part in another."""

import io
import json
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from conftest import REAL, refused, write_features, write_store
from conftest import larger_study as make_study
from hospitals import one_installation  # noqa: F401
from wires import Wire

from wsi_fl import __version__
from wsi_fl.hospitals.plans import approving
from wsi_fl.hospitals.plans import signed as signed_plans
from wsi_fl.hospitals.plans.approving import cost_words, look, look_lines, sign
from wsi_fl.hospitals.plans.making import document_of, make_plan
from wsi_fl.hospitals.plans.signed import Plan, approval_path, approvals, approve, code_digest, plan_path
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust.certificates import approved, fingerprint, new_key, new_request, new_root
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.work.taking_part import take_part
from wsi_fl.models import build
from wsi_fl.models.directions import Origin, Source, public_directions, write_directions
from wsi_fl.privacy.accounting import epsilon, group_epsilon
from wsi_fl.privacy.plan import plan_of_round
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training.going_on import Asked, describe_run
from wsi_fl.stages.training.plan import dry_run, plan_lines
from wsi_fl.stages.work.console import render
from wsi_fl.study.folder import Study
from wsi_fl.types import Images, WsiFlError

SITES = ("S0", "S1", "S2")


class Root:
    """A federation's root, and kits of it."""

    def __init__(self):
        self.key = new_key()
        self.root = new_root(self.key, "a federation")

    def kit(self, folder, name, **given):
        key = new_key()
        certificate = approved(new_request(key, name, "org"), self.key, self.root, role="hospital", **given)
        (folder / "startup").mkdir(parents=True)
        (folder / "federation.json").write_text(json.dumps({"name": name, "role": "hospital"}))
        for file, text in (("client.key", key), ("client.crt", certificate), ("rootCA.pem", self.root)):
            (folder / "startup" / file).write_text(text)
        return folder


@pytest.fixture(scope="module")
def root():
    return Root()


@pytest.fixture(scope="module")
def kits(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    return {name: root.kit(folder / name, name) for name in SITES}


@pytest.fixture(scope="module")
def identities(kits):
    return {name: Kit.open(path).identity() for name, path in kits.items()}


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    """Whoever makes plans; no test changes this study."""
    return make_study(tmp_path_factory.mktemp("made") / "coordinator", n_sites=3, site_extra=REAL)


@pytest.fixture(scope="module")
def plan(coordinator):
    """A plan of ProxyFL; its file is `plan.json` beside the study."""
    return made(coordinator, coordinator.root.parent)


@pytest.fixture
def file(coordinator):
    return coordinator.root.parent / "plan.json"


def hospital(tmp_path, name, said=REAL):
    """A study with one hospital's site file and store alone."""
    study = make_study(tmp_path / name, n_sites=0)
    (study.root / "sites" / f"{name}.toml").write_text(
        f'name = "{name}"\nslides = "none/*.tif"\nlabels = "none.csv"\n{said}\n'
    )
    write_store(study, name, seed=SITES.index(name))
    return study


def made(study, tmp_path, method="proxyfl", *overrides):
    return make_plan(study, method=method, overrides=overrides, out=tmp_path / "plan.json")


def changed(plan, **given):
    """The plan with other words."""
    return Plan(json.dumps(plan.document | given, indent=2, ensure_ascii=False) + "\n")


def test_a_plan_says_what_runs_and_the_bytes_of_what_travels(coordinator, plan, tmp_path):
    said = document_of(plan)
    model = build("mlp", n_classes=2, shape=Images(3, 16), seed=5)
    n_bytes = 4 * sum(p.numel() for p in model.parameters())
    proxy = said["leaves"][0]
    assert proxy["what"] == "proxy model (mlp)"
    assert (proxy["bytes"], proxy["times"]) == (n_bytes, 3)
    assert plan.most_bytes == 2 * n_bytes + 32_000_000
    assert plan.sites == list(SITES) == plan.pipeline().sites
    assert said["sites"][1] == {
        "name": "S1",
        "real": True,
        "role": "member",
        "allow": [],
        "max_epsilon": 50.0,
        "delta": 1e-5,
        "key": None,
    }
    assert said["learns"]["classes"] == ["healthy", "tumor"] and said["learns"]["size_px"] == 16
    assert (said["privacy"]["guarantee"], said["privacy"]["sigma"]) == ("guaranteed", 1.4)
    assert any("the private model" in one for one in said["stays"])
    assert str(coordinator.root.parent) not in plan.text
    again = made(coordinator, tmp_path).document  # the same but for its time
    assert list(again) == list(plan.document) and list(again)[:3] == ["format", "version", "created"]
    assert again | {"created": ""} == plan.document | {"created": ""}


def test_a_plan_without_privacy_says_so(tmp_path):
    said = 'real = true\nallow = ["model"]'
    study = make_study(tmp_path / "study", n_sites=2, site_extra=said)
    plan = made(study, tmp_path, "fedavg", "privacy.enabled=false")
    document = document_of(plan)
    assert "no differential privacy" in document["privacy"]["says"]
    assert document["leaves"][0]["what"] == "central model (cnn1)"
    assert document["leaves"][0]["to"].startswith("the first site")
    assert 'allow = ["model"]' in document["leaves"][0]["protected_by"]
    assert not any("private model" in one for one in document["stays"])


def test_without_a_store_a_plan_of_features_says_what_must_agree(tmp_path):
    study = make_study(tmp_path / "study", n_sites=3, site_extra=REAL)
    heads = ("train.data='features'", "model.proxy='linear_head'", "model.private='linear_head'")
    said = document_of(made(study, tmp_path, "proxyfl", *heads))
    assert said["learns"]["n_features"] is None and said["leaves"][0]["bytes"] is None
    assert "must agree" in said["learns"]["says"]
    assert said["most_bytes"] > 500_000_000
    oneshot = document_of(made(study, tmp_path, "oneshot", heads[0], "privacy.noise='own'"))
    assert oneshot["rounds"] == 1 and oneshot["leaves"][0]["what"].startswith("sums of features")
    assert oneshot["leaves"][0]["often"] == "once"


def test_how_often_a_sum_may_be_tried_stands_in_the_plan_and_is_priced(tmp_path):
    said = f'{REAL}\nallow = ["shared"]'
    study, own = make_study(tmp_path / "c", n_sites=4, site_extra=said), hospital(tmp_path / "h", "S0", said)
    x, labels = np.random.default_rng(0).normal(size=(40, 8)), np.arange(40) % 2
    for where in (study, own):
        write_features(where, "S0", x, labels, [f"p{k}" for k in range(40)], ["train"] * 30 + ["test"] * 10)
    settings = ("train.data='features'", "privacy.noise='shared'", "privacy.target_epsilon=1")
    plan = made(study, tmp_path, "oneshot", *settings)
    assert "at most 1 may collude." in document_of(plan)["privacy"]["says"]
    lossy = document_of(made(study, tmp_path / "lossy", "oneshot", *settings, "privacy.dropouts=1"))
    assert "at most 1 may collude and 1 go away while it is made." in lossy["privacy"]["says"]
    sums = document_of(plan)["leaves"][0]
    assert sums["times"] == 3 and "at most 3 times under one approval" in sums["often"]
    cost = look(own, plan, "S0").cost
    assert cost.epsilon == pytest.approx(1, rel=1e-3) and 1.5 < cost.most_epsilon < 3
    assert f"3 times in all at ε = {cost.most_epsilon:.2f}" in cost_words(cost)
    often = changed(plan, leaves=[sums | {"times": 99}, *document_of(plan)["leaves"][1:]])
    refused(lambda: look(own, often, "S0"), "(leaves)", "changed by hand")


def test_the_longest_letter_is_bounded_by_the_package_of_all_generators(tmp_path):
    said = 'real = true\nallow = ["model", "generator"]'
    study = make_study(tmp_path / "study", n_sites=5, site_extra=said)
    small = ("ddpm.resolution=8", "ddpm.channels=[8, 8]")
    plan = made(study, tmp_path, "mpcpa", "privacy.enabled=false", *small)
    own, package, classifier = [row for row in document_of(plan)["leaves"] if row["large"]]
    assert package["bytes"] == 4 * own["bytes"] > classifier["bytes"] > 0
    assert plan.most_bytes == 2 * package["bytes"] + 32_000_000


def test_a_hospital_with_its_own_store_alone_signs_and_gets_the_others_files(
    plan, file, tmp_path, kits, root, wsi_fl
):
    study = hospital(tmp_path, "S1")
    given = ("federation", "approve", file, "--kit", kits["S1"], "--yes", "--yes-per-row", "--json")
    done = wsi_fl(*given, cwd=study.root)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["approval"] == "federation/approval-S1.json" and document["rounds"] == 3
    assert document["epsilon"] == document["lifetime_epsilon"] == pytest.approx(3.78, abs=0.01)
    for words in ("what leaves your hospital", "proxy model (mlp) →", "777.6 kB each", "36 rows at your"):
        assert words in done.stderr
    assert [study.site(name).max_epsilon for name in SITES] == [50.0] * 3
    assert study.site("S2").slides is None and study.site("S1").slides == "none/*.tif"
    found = approvals(study, plan, root.root)
    assert found.signed == ("S1",) and set(found.missing) == {"S0", "S2"}
    assert "has not arrived" in found.missing["S0"]


def test_the_command_writes_a_plan_and_says_what_next(coordinator, tmp_path, wsi_fl):
    out = tmp_path / "agreed.json"
    given = ("federation", "plan", "--method", "proxyfl", "--set", "train.rounds=2", "--out", out)
    done = wsi_fl(*given, "--json", cwd=coordinator.root)
    assert done.returncode == 0, done.stderr
    plan = Plan.load(out)
    assert json.loads(done.stdout)["sha256"] == plan.digest and plan.pipeline().train.rounds == 2
    assert "wsi-fl federation approve agreed.json" in wsi_fl(*given, cwd=coordinator.root).stderr


def test_what_was_about_another_plan_is_kept_beside_the_new_one(coordinator, identities, tmp_path, capfd):
    study = Study(shutil.copytree(coordinator.root, tmp_path / "study"))
    folder = study.root / "federation"
    first = made(study, study.root, "proxyfl", "train.rounds=1")
    assert "is kept" not in capfd.readouterr().err
    approve(study, first, identities["S0"])
    signed = approval_path(study, "S0").read_text()
    approve(study, first, identities["S0"])  # for another run of the same plan
    assert sorted(one.name for one in folder.glob("*.json")) == ["approval-S0.json", "plan.json"]
    second = made(study, study.root, "proxyfl", "train.rounds=2")
    tag, said = first.digest[:8], capfd.readouterr().err
    assert f"plan-{tag}.json" in said and f"approval-S0-{tag}.json" in said
    assert Plan.load(study.root / f"plan-{tag}.json") == first
    assert Plan.load(study.root / "plan.json") == second
    approve(study, second, identities["S0"])
    assert Plan.load(folder / f"plan-{tag}.json") == first and Plan.load(plan_path(study)) == second
    kept = json.loads((folder / f"approval-S0-{tag}.json").read_text())
    assert kept["plan"] == json.loads(signed)["plan"] == first.digest
    assert approvals(study, second, identities["S0"].root).signed == ("S0",)
    approval_path(study, "S0").write_text('{"plan": "../../x"}')  # not by us
    approve(study, second, identities["S0"])
    assert len(list(folder.glob("*.json"))) == 4


ALL_ROWS = "all 12 rows of the patient with the most rows together have ε = 84.6"


def test_a_hospital_reads_and_accepts_what_a_row_s_epsilon_is_worth_to_a_patient(
    plan, file, tmp_path, kits, wsi_fl, monkeypatch
):
    study, asked = hospital(tmp_path, "S0"), []
    assert "A patient with many rows is protected much less" in document_of(plan)["privacy"]["says"]
    cost = look(study, plan, "S0").cost
    assert cost is not None and cost.group is not None and cost.above == cost.lifetime_group
    step = plan_of_round(n=36, batch_size=8, epochs=1, sigma=1.4, clip=0.7, delta=1e-5)
    assert cost.group["epsilon"] == pytest.approx(group_epsilon([step] * 3, 1e-5, 12))
    assert cost.group["rows"] == 12 and cost.epsilon == pytest.approx(epsilon([step] * 3, 1e-5))

    def approve(*more):
        given = ("federation", "approve", file, "--kit", kits["S0"], *more)
        return wsi_fl(*given, cwd=study.root)

    refused_ = approve("--yes")
    assert refused_.returncode == 1 and not plan_path(study).exists()
    assert f"nothing was signed, for {ALL_ROWS}" in refused_.stderr and "--yes-per-row" in refused_.stderr
    for more, instead in (((), "--yes-per-row and --yes"), (("--yes-per-row",), "say --yes")):
        monkeypatch.setattr("sys.stdin", io.StringIO())
        unasked = approve(*more)
        assert unasked.returncode == 2 and not plan_path(study).exists()
        assert "nobody can be asked here" in unasked.stderr and instead in unasked.stderr
    answers = iter([False, True, False, True, True])
    monkeypatch.setattr("typer.confirm", lambda text, **_: asked.append(text) or next(answers))
    assert approve().returncode == 1 and len(asked) == 1
    assert ALL_ROWS in asked[0] and "above your max_epsilon = 50" in asked[0]
    assert approve().returncode == 1 and len(asked) == 3 and not plan_path(study).exists()
    assert [path.name for path in (study.root / "sites").iterdir()] == ["S0.toml"]
    done = approve("--json")
    assert done.returncode == 0 and json.loads(done.stdout)["group"] == cost.group and len(asked) == 5
    assert "84.6" not in (study.root / "federation" / "approval-S0.json").read_text()


@pytest.mark.slow
def test_per_patient_or_within_the_budget_one_yes_is_enough(tmp_path, kits, wsi_fl):
    for unit, said in (("patient", REAL), ("row", REAL.replace("50.0", "120.0"))):
        coordinator = make_study(tmp_path / unit / "coordinator", n_sites=3, site_extra=said)
        given = (f"privacy.unit='{unit}'", "privacy.target_epsilon=3.78")
        plan = made(coordinator, tmp_path, "proxyfl", *given)
        study = hospital(tmp_path / unit, "S0", said)
        cost = look(study, plan, "S0").cost
        assert cost is not None and cost.above is None and (cost.group is None) == (unit == "patient")
        given = ("federation", "approve", tmp_path / "plan.json", "--kit", kits["S0"], "--yes")
        assert wsi_fl(*given, cwd=study.root).returncode == 0
        assert ("A patient with many rows" in document_of(plan)["privacy"]["says"]) == (unit == "row")


def test_a_dry_run_says_what_a_row_s_epsilon_is_worth_to_a_patient(tmp_path, capsys):
    study = make_study(tmp_path / "study", n_sites=2, site_extra="real = false\nmax_epsilon = 50.0")
    document = dry_run(study, method="proxyfl", backend="local")
    group = document["sites"][0]["group"]
    assert group["rows"] == 12 and group["epsilon"] == pytest.approx(84.6, abs=0.1)
    render(plan_lines(document))
    assert f"{ALL_ROWS}, which is above its max_epsilon = 50" in capsys.readouterr().err
    per_patient = ["privacy.unit='patient'", "train.batch_size=3"]
    document = dry_run(study, method="proxyfl", backend="local", overrides=per_patient)
    assert document["sites"][0]["group"] is None


def test_what_is_allowed_is_named_as_it_is_protected(tmp_path, capsys):
    said = f'{REAL}\nallow = ["scores", "shared"]'
    study = make_study(tmp_path / "study", n_sites=3, site_extra=said)
    render(look_lines(look(study, made(study, tmp_path), "S0")))
    assert "scores without DP; shared noise" in capsys.readouterr().err


def test_what_a_site_file_does_not_permit_is_refused(plan, tmp_path):
    for said, word in (
        (REAL.replace("50.0", "3.0"), "max_epsilon = 50.0 of S0, and sites/S0.toml says 3.0"),
        (f'{REAL}\nallow = ["model"]', "says allow = []"),
        (REAL.replace("real = true", "real = false"), "says real = true"),
    ):
        study = hospital(tmp_path / str(len(word)), "S0", said)
        refused(lambda study=study: look(study, plan, "S0"), word)
    study = hospital(tmp_path / "another", "S0")
    refused(lambda: look(study, plan, "S7"), "S7 is not in this plan")
    (study.root / "sites" / "S0.toml").unlink()
    refused(lambda: look(study, plan, "S0"), "sites/S0.toml is missing", "max_epsilon")


def test_a_budget_too_small_for_one_round_is_refused_and_for_some_is_told(tmp_path):
    for limit, rounds in (("0.5", 0), ("3.0", 1)):
        said = REAL.replace("50.0", limit)
        coordinator = make_study(tmp_path / f"c{limit}", n_sites=3, site_extra=said)
        plan = made(coordinator, tmp_path)
        study = hospital(tmp_path / limit, "S0", said)
        if not rounds:
            refused(lambda study=study, plan=plan: look(study, plan, "S0"), "max_epsilon = 0.5", "not enough")
            continue
        looked = look(study, plan, "S0")
        assert looked.cost is not None and 0 < looked.cost.rounds < 3
        assert f"enough for {looked.cost.rounds} of 3 rounds" in looked.notes[0]


def test_words_that_do_not_follow_from_the_settings_are_refused(plan, tmp_path):
    study = hospital(tmp_path, "S0")
    assert look(study, plan, "S0").cost
    for given, word in (
        ({"rounds": 2}, "(rounds)"),
        ({"leaves": []}, "(leaves)"),
        ({"more": "trust me"}, "more than its keys"),
        ({"settings": plan.document["settings"].replace("rounds = 3", "rounds = 9")}, "(rounds)"),
    ):
        refused(lambda given=given: look(study, changed(plan, **given), "S0"), word, "changed by hand")
    twice = Plan(plan.text.replace('"rounds": 3', '"rounds": 1, "rounds": 3', 1))
    refused(lambda: look(study, twice, "S0"), "changed by hand")
    refused(lambda: look(study, changed(plan, code="0" * 64), "S0"), "00000000", "install the plan's version")
    refused(lambda: look(study, changed(plan, sites=[]), "S0"), "S0 is not in this plan")
    refused(lambda: look(study, changed(plan, learns=None), "S0"), "damaged", "learns")
    outside = [site | {"name": f"../{site['name']}"} for site in plan.document["sites"][1:]]
    sites = [plan.document["sites"][0], *outside]
    refused(lambda: look(study, changed(plan, sites=sites), "S0"), "name", "letters")
    learns = plan.document["learns"]
    for hidden in ({"learns": learns | {"says": "fine\x1b[8m"}}, {"pipeline": "a\x1b[2K"}):
        refused(
            lambda one=hidden: look(study, changed(plan, **one), "S0"), "hides something", "do not sign it"
        )


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of what is installed, without what Python compiled."""
    copy = tmp_path_factory.mktemp("package") / "wsi_fl"
    here = Path(signed_plans.__file__).parents[2]
    shutil.copytree(here, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.parametrize(
    "file",
    ["hospitals/dossier/dossier.html.j2", "synthesis/lpips_vgg16.safetensors", "privacy/ledger.py"],
)
def test_one_byte_of_what_runs_is_another_digest(package, file):
    before, data = code_digest(package), bytearray((package / file).read_bytes())
    assert before == code_digest()
    data[-2] ^= 1
    (package / file).write_bytes(data)
    assert code_digest(package) != before
    data[-2] ^= 1
    (package / file).write_bytes(data)
    for same in ("__pycache__/x.pyc", "shipped/pipelines/x.toml", ".x.swp"):
        (package / same).parent.mkdir(parents=True, exist_ok=True)
        (package / same).write_text("x")
    assert code_digest(package) == before


@pytest.mark.parametrize("name", ["torch", "cryptography"])
def test_another_version_of_what_the_guarantee_rests_on_is_another_digest(plan, tmp_path, monkeypatch, name):
    study, before = hospital(tmp_path, "S0"), code_digest()
    installed = signed_plans.version
    monkeypatch.setattr(signed_plans, "version", lambda one: "1.2.3" if one == name else installed(one))
    assert code_digest() != before
    refused(lambda: look(study, plan, "S0"), f"the plan is for {name} ", "S0 has 1.2.3", "install")
    monkeypatch.setattr(signed_plans, "version", lambda one: installed(one).partition("+")[0] + "+own")
    assert code_digest() == before


def with_features(study, d):
    """The study, with features of 40 patches at S0."""
    x, patients = np.random.default_rng(0).normal(size=(40, d)), [f"p{k}" for k in range(40)]
    write_features(study, "S0", x, np.arange(40) % 2, patients, ["train"] * 30 + ["test"] * 10)
    return study


def test_a_letter_s_directions_stand_in_the_plan_and_a_hospital_needs_the_same_file(tmp_path):
    def write(study, seed):
        origin = Origin(encoder="tiny sha256:0", sources=[Source(name="a.svs", rows=50, sha256="0" * 64)])
        found = public_directions(np.random.default_rng(seed).normal(size=(50, 5)).astype("f4"), origin, 3)
        write_directions(study.root / "d.safetensors", found)
        return found.digest

    coordinator = with_features(make_study(tmp_path / "c", n_sites=3, site_extra=REAL), 5)
    digest = write(coordinator, 0)
    plan = made(coordinator, tmp_path, "oneshot", "train.data='features'", "model.directions='d.safetensors'")
    said = document_of(plan)
    assert said["learns"]["directions"] == digest
    assert said["leaves"][0]["bytes"] == 4 * 2 * (3 + 2)
    own = with_features(hospital(tmp_path, "S0"), 5)
    refused(lambda: look(own, plan, "S0"), "d.safetensors", "copy it here", error=WsiFlError)
    write(own, 1)
    refused(lambda: look(own, plan, "S0"), "directions with the SHA-256", digest)
    write(own, 0)
    assert look(own, plan, "S0").cost


def test_another_encoder_or_other_classes_in_the_own_store_are_refused(tmp_path, monkeypatch):
    heads = ("train.data='features'", "model.proxy='linear_head'", "model.private='linear_head'")
    plan = made(
        with_features(make_study(tmp_path / "c", n_sites=3, site_extra=REAL), 5), tmp_path, "proxyfl", *heads
    )
    assert document_of(plan)["learns"]["encoder"] == "tiny sha256:0"
    assert look(with_features(hospital(tmp_path / "same", "S0"), 5), plan, "S0").cost
    other = with_features(hospital(tmp_path / "other", "S0"), 6)
    refused(lambda: look(other, plan, "S0"), "features per patch 5, but S0 has 6")
    same, real = hospital(tmp_path / "changed", "S0"), approving.of_store
    with_features(same, 5)
    for key, value in (("encoder", "huge sha256:1"), ("classes", ["a", "b"])):
        found = {key: value}
        monkeypatch.setattr(approving, "of_store", lambda *given, found=found: real(*given) | found)
        refused(lambda: look(same, plan, "S0"), key)


def test_existing_files_of_others_stay_and_a_difference_is_told(plan, tmp_path, identities):
    study = hospital(tmp_path, "S0")
    own = 'name = "S1"\nreal = true\nmax_epsilon = 1.0\ndelta = 1e-5\n'
    (study.root / "sites" / "S1.toml").write_text(own)
    looked = look(study, plan, "S0")
    assert "sites/S1.toml says another max_epsilon" in looked.notes[1]
    sign(study, looked, identities["S0"])
    assert (study.root / "sites" / "S1.toml").read_text() == own
    refused(lambda: sign(study, looked, identities["S1"]), "this kit belongs to S1")


def test_a_plan_pins_the_keys_that_speak_for_sites_and_shows_all_of_them(
    coordinator, tmp_path, identities, root, capfd
):
    keys = {name: fingerprint(identities[name].certificate) for name in SITES}
    pinned = make_plan(coordinator, method="proxyfl", out=tmp_path / "pinned.json", keys=keys)
    study = hospital(tmp_path, "S0")
    looked = look(study, pinned, "S0")
    assert not any("pins no keys" in note for note in looked.notes)
    render(look_lines(looked))
    shown = capfd.readouterr().err
    for name, key in keys.items():
        assert f"{name}: {key}\n" in shown and len(bytes.fromhex(key.replace(":", ""))) == 32
    sign(study, looked, identities["S0"])
    assert approvals(study, pinned, root.root).signed == ("S0",)
    false = {**keys, "S0": keys["S1"]}
    other = make_plan(coordinator, method="proxyfl", out=tmp_path / "other.json", keys=false)
    refused(lambda: sign(study, look(study, other, "S0"), identities["S0"]), "another key of S0", "telephone")


@pytest.mark.parametrize(
    "created",
    ["2026-07-01T09:30:00", "20260701T093000+0000", "sign at once", 5],
)
def test_a_plan_was_made_at_a_time(plan, created):
    for zone in ("+00:00", "+02:00"):
        document_of(changed(plan, created=f"2026-07-01T09:30:00{zone}"))
    refused(lambda: document_of(changed(plan, created=created)), "damaged", "created")
    without = {key: value for key, value in plan.document.items() if key != "created"}
    refused(lambda: document_of(Plan(json.dumps(without))), "damaged", "created")


def test_approvals_of_another_plan_site_or_federation_do_not_count(plan, tmp_path, identities, root):
    study = hospital(tmp_path, "S0")
    path = sign(study, look(study, plan, "S0"), identities["S0"])
    text = path.read_text()
    (path.parent / "approval-S1.json").write_text(text)
    found = approvals(study, plan, root.root)
    assert found.signed == ("S0",) and "another plan" in found.missing["S1"]
    later = changed(plan, created="later")
    assert "another plan" in approvals(study, later, root.root).missing["S0"]
    assert "does not belong to this federation" in approvals(study, plan, Root().root).missing["S0"]
    for damaged in ("[]", "{}", "no JSON", text.replace('"signature": "', '"signature": "00')):
        path.write_text(damaged)
        assert approvals(study, plan, root.root).signed == ()


# what a hospital's process refuses, and what its ledger says after it took part


@pytest.fixture(scope="module")
def all_signed(plan, identities, tmp_path_factory):
    """A folder with the study of each hospital, which has signed the plan."""
    folder = tmp_path_factory.mktemp("signed")
    for name in SITES:
        study = hospital(folder, name)
        sign(study, look(study, plan, name), identities[name])
    return folder


@pytest.fixture
def signed(all_signed, tmp_path):
    shutil.copytree(all_signed, tmp_path / "all")
    return {name: Study(tmp_path / "all" / name) for name in SITES}


def part(signed, identities, **given):
    return lambda: take_part(signed["S0"], identities["S0"], Wire("S0", {}), **given)


def test_whatever_a_ledger_released_names_the_plan(plan, signed, identities):
    ends, summaries = {}, {}

    def be(name):
        summaries[name] = take_part(signed[name], identities[name], Wire(name, ends), plan=plan.digest)

    threads = [threading.Thread(target=be, args=(name,), daemon=True) for name in SITES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [row["site"] for row in summaries["S0"]["sites"]] == list(SITES)
    for name, study in signed.items():
        lines = [json.loads(line) for line in study.ledger(name).read_text().splitlines()]
        named = [line.get("agreement") for line in lines if line.get("released")]
        assert named == [plan.digest] * 3
    words = ("for one run, and has it: 00001-", "--resume last", "approve the plan again")
    refused(part(signed, identities), "S0 approved plan", *words)
    promised = look(signed["S0"], plan, "S0")
    row = summaries["S0"]["sites"][0]
    assert promised.cost is not None and promised.cost.epsilon == pytest.approx(row["epsilon"])
    assert promised.cost.lifetime_epsilon > row["epsilon"]  # once more, on top of what was spent


def without_an_approval(signed, patch):
    (signed["S0"].root / "federation" / "approval-S0.json").unlink()


def an_altered_plan_file(signed, patch):
    path = plan_path(signed["S0"])
    data = bytearray(path.read_bytes())
    data[data.index(b"rounds") + 9] ^= 1
    path.write_bytes(data)


def an_approval_of_another_site(signed, patch):
    there = signed["S0"].root / "federation" / "approval-S0.json"
    there.write_text((signed["S1"].root / "federation" / "approval-S1.json").read_text())


def a_site_file_that_was_changed_after_signing(signed, patch):
    path = signed["S0"].root / "sites" / "S0.toml"
    path.write_text(path.read_text() + '\nallow = ["model"]\n')


def other_code(signed, patch):
    patch.setattr(signed_plans, "code_digest", lambda: "2" * 64)


def an_expired_certificate(signed, patch):
    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(UTC) + timedelta(days=800)

    patch.setattr(certificates, "datetime", Later)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (without_an_approval, ("S0 has approved no plan", "federation approve")),
        (an_altered_plan_file, ("signed another plan than",)),
        (an_approval_of_another_site, ("S0 has signed another plan",)),
        (a_site_file_that_was_changed_after_signing, ("says allow = [] of S0", "made with your site file")),
        (other_code, (f"has {__version__} (22222222)", "install the plan's version")),
        (an_expired_certificate, ("S0 cannot be used: the certificate of S0 holds from",)),
    ],
)
def test_nobody_takes_part_with(harm, words, signed, identities, monkeypatch):
    harm(signed, monkeypatch)
    refused(part(signed, identities), *words)


def test_another_plan_or_a_run_elsewhere_or_of_other_settings(plan, signed, identities, tmp_path):
    refused(part(signed, identities, plan="1" * 64), "this job is plan 11111111", "nothing was begun")
    study, evil = signed["S0"], tmp_path / "evil"
    RunFolder(evil).path.mkdir()
    (evil / "config.toml").write_text("")
    for asked in (str(evil), "../evil", "runs/../../evil", "nothing", ""):
        refused(part(signed, identities, resume=asked), "is not in this hospital's runs/")
    weak = study.pipeline("small", ["privacy.sigma=0.1"])
    party = RunContext.of(study, weak, plan.method, RunFolder(study.runs / "00007-proxyfl-small"))
    party.run.path.mkdir(parents=True)
    describe_run(party, Asked("small", agreement=plan.digest), "ab" * 16, party.run)
    again = part(signed, identities, resume="00007-proxyfl-small")
    refused(again, "has other settings", "nothing was begun")
