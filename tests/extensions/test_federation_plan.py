"""The plan that hospitals sign: its text follows from its settings, and a site takes part in no other plan."""

import io
import json
import shutil
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import REAL, refused, write_features, write_store
from conftest import larger_study as make_study
from federation_fixtures import Federation, Wire, at_once
from hospitals import one_installation  # noqa: F401

import wsi_fl
from wsi_fl import __version__
from wsi_fl.hospitals.plans import installed_code, review
from wsi_fl.hospitals.plans.build_plan import make_plan, parse_plan_document
from wsi_fl.hospitals.plans.installed_code import code_digest
from wsi_fl.hospitals.plans.planned_run import read_planned_run
from wsi_fl.hospitals.plans.review import describe_cost, review_lines, review_plan, sign_plan
from wsi_fl.hospitals.plans.signed_plan import (
    FederationPlan,
    approval_path,
    collect_approvals,
    describe_changes,
    plan_path,
    record_approval,
)
from wsi_fl.hospitals.trust import certificates
from wsi_fl.hospitals.trust.certificates import key_fingerprint
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.work import client
from wsi_fl.hospitals.work.client import take_part
from wsi_fl.models import create_model
from wsi_fl.oneshot.projection import ProjectionOrigin, ProjectionSource, fit_projection, write_projection
from wsi_fl.plugins import load_entries
from wsi_fl.privacy.accounting import epsilon, group_epsilon
from wsi_fl.privacy.privacy_plan import plan_of_round
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import print_lines
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.resume import RunRequest, describe_run
from wsi_fl.stages.training.run_cost import dry_run, plan_lines
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_lines
from wsi_fl.types import Images, WsiFlError

SITES = ("S0", "S1", "S2")


@pytest.fixture(scope="module")
def kits(federation, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    return {name: federation.kit(folder / name, name) for name in SITES}


@pytest.fixture(scope="module")
def identities(kits):
    return {name: Kit.open(path).load_identity() for name, path in kits.items()}


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    """The study of the coordinator, which makes plans; no test changes it."""
    return make_study(tmp_path_factory.mktemp("made") / "coordinator", n_sites=3, site_extra=REAL)


@pytest.fixture(scope="module")
def plan(coordinator):
    """A ProxyFL plan; its file is `plan.json` next to the study."""
    return made(coordinator, coordinator.root.parent)


@pytest.fixture
def file(coordinator):
    return coordinator.root.parent / "plan.json"


def hospital(tmp_path, name, said=REAL):
    """A study with one hospital's site file and only its store."""
    study = make_study(tmp_path / name, n_sites=0)
    (study.root / "sites" / f"{name}.toml").write_text(
        f'name = "{name}"\nslides = "none/*.tif"\nlabels = "none.csv"\n{said}\n'
    )
    write_store(study, name, seed=SITES.index(name))
    return study


def made(study, tmp_path, method="proxyfl", *overrides):
    return make_plan(study, method=method, overrides=overrides, out=tmp_path / "plan.json")


def changed(plan, **given):
    """Return the plan with a changed text."""
    return FederationPlan(json.dumps(plan.document | given, indent=2, ensure_ascii=False) + "\n")


def test_a_plan_states_what_runs_and_the_bytes_of_each_transfer(coordinator, plan, tmp_path):
    said = parse_plan_document(plan)
    model = create_model("mlp", n_classes=2, shape=Images(3, 16), seed=5)
    n_bytes = 4 * sum(p.numel() for p in model.parameters())
    proxy = said["leaves"][0]
    assert proxy["what"] == "proxy model (mlp)" and (proxy["bytes"], proxy["times"]) == (n_bytes, 3)
    assert plan.most_bytes == 2 * n_bytes + 32_000_000
    assert plan.sites == list(SITES) == plan.pipeline().sites
    own = {"name": "S1", "real": True, "role": "member", "allow": []}
    assert said["sites"][1] == own | {"max_epsilon": 50.0, "delta": 1e-5, "key": None}
    assert said["learns"]["classes"] == ["healthy", "tumor"] and said["learns"]["size_px"] == 16
    assert (said["privacy"]["guarantee"], said["privacy"]["sigma"]) == ("guaranteed", 1.4)
    assert any("the private model" in one for one in said["stays"])
    assert str(coordinator.root.parent) not in plan.text
    again = made(coordinator, tmp_path).document  # the same but for its time
    assert list(again) == list(plan.document) and list(again)[:3] == ["format", "version", "created"]
    assert again | {"created": ""} == plan.document | {"created": ""}


def test_a_plan_without_privacy_states_it(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2, site_extra='real = true\nallow = ["model"]')
    document = parse_plan_document(made(study, tmp_path, "fedavg", "privacy.enabled=false"))
    assert "no differential privacy" in document["privacy"]["says"]
    assert document["leaves"][0]["what"] == "central model (cnn1)"
    assert document["leaves"][0]["to"].startswith("the first site")
    assert 'allow = ["model"]' in document["leaves"][0]["protected_by"]
    assert not any("private model" in one for one in document["stays"])


def test_a_plan_of_features_made_without_a_store_states_what_must_agree(tmp_path):
    study = make_study(tmp_path / "study", n_sites=3, site_extra=REAL)
    said = parse_plan_document(made(study, tmp_path, "proxyfl", *HEADS))
    assert said["learns"]["n_features"] is None and said["leaves"][0]["bytes"] is None
    assert "must agree" in said["learns"]["says"] and said["most_bytes"] > 500_000_000
    oneshot = parse_plan_document(made(study, tmp_path, "oneshot", HEADS[0], "privacy.noise='own'"))
    assert oneshot["rounds"] == 1 and oneshot["leaves"][0]["what"].startswith("class statistics")
    assert oneshot["leaves"][0]["often"] == "once"


def test_the_attempts_of_secure_aggregation_are_in_the_plan_and_in_its_cost(tmp_path, capsys):
    said = f'{REAL}\nallow = ["scores", "shared"]'
    study = with_features(make_study(tmp_path / "c", n_sites=4, site_extra=said), 8)
    own = with_features(hospital(tmp_path / "h", "S0", said), 8)
    settings = ("train.data='features'", "privacy.noise='shared'", "privacy.target_epsilon=1")
    plan = made(study, tmp_path, "oneshot", *settings)
    assert "at most 1 may collude." in parse_plan_document(plan)["privacy"]["says"]
    lossy = parse_plan_document(made(study, tmp_path / "lossy", "oneshot", *settings, "privacy.dropouts=1"))
    assert "at most 1 may collude and 1 go away while it is made." in lossy["privacy"]["says"]
    sums = parse_plan_document(plan)["leaves"][0]
    assert sums["times"] == 3 and "at most 3 times under one approval" in sums["often"]
    looked = review_plan(own, plan, "S0")
    print_lines(review_lines(looked))
    assert "scores without DP; shared noise" in capsys.readouterr().err
    cost = looked.cost
    assert cost.epsilon == pytest.approx(1, rel=1e-3) and 1.5 < cost.most_epsilon < 3
    assert f"3 times in all at ε = {cost.most_epsilon:.2f}" in describe_cost(cost)
    often = changed(plan, leaves=[sums | {"times": 99}, *parse_plan_document(plan)["leaves"][1:]])
    refused(lambda: review_plan(own, often, "S0"), "(leaves)", "changed by hand")


def test_a_hospital_with_only_its_store_signs_and_gets_the_other_site_files(plan, file, tmp_path, kits, wsi_fl):
    study = hospital(tmp_path, "S1")
    given = ("federation", "approve", file, "--kit", kits["S1"], "--yes", "--yes-per-row", "--json")
    done = wsi_fl(*given, cwd=study.root)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["approval"] == "federation/approval-S1.json" and document["rounds"] == 3
    assert document["epsilon"] == document["lifetime_epsilon"] == pytest.approx(3.78, abs=0.01)
    for words in ("what leaves your hospital", "proxy model (mlp) →", "777.6 kB each", "36 rows at your"):
        assert words in done.stderr
    assert [study.load_site(name).max_epsilon for name in SITES] == [50.0] * 3
    assert study.load_site("S2").slides is None and study.load_site("S1").slides == "none/*.tif"
    found = collect_approvals(study, plan, Kit.open(kits["S1"]).load_identity().root)
    assert found.signed == ("S1",) and set(found.missing) == {"S0", "S2"}
    assert "has not arrived" in found.missing["S0"]


def test_the_command_writes_a_plan_and_names_the_next_step(coordinator, tmp_path, wsi_fl):
    out = tmp_path / "agreed.json"
    given = ("federation", "plan", "--method", "proxyfl", "--set", "train.rounds=2", "--out", out)
    done = wsi_fl(*given, "--json", cwd=coordinator.root)
    assert done.returncode == 0, done.stderr
    plan = FederationPlan.load(out)
    assert json.loads(done.stdout)["sha256"] == plan.digest and plan.pipeline().train.rounds == 2
    assert "wsi-fl federation approve agreed.json" in wsi_fl(*given, cwd=coordinator.root).stderr


def test_a_second_signature_shows_the_changes_of_the_plan(coordinator, identities, tmp_path):
    study = Study(shutil.copytree(coordinator.root, tmp_path / "study"))
    first = made(study, tmp_path, "proxyfl", "train.rounds=1")
    record_approval(study, first, identities["S0"])
    assert not any("lies here" in note for note in review_plan(study, first, "S0").notes)
    second = made(study, tmp_path, "proxyfl", "train.rounds=2")
    told = f"compared with plan {first.digest[:8]}, which lies here: train.rounds 1 → 2"
    assert told in review_plan(study, second, "S0").notes
    fewer = changed(second, sites=second.document["sites"][:2])
    assert describe_changes(first, fewer) == ["without S2", "train.rounds 1 → 2"]
    assert describe_changes(fewer, second) == ["with S2"]


def test_files_of_an_earlier_plan_are_kept_next_to_those_of_the_new_one(coordinator, identities, tmp_path, capfd):
    study = Study(shutil.copytree(coordinator.root, tmp_path / "study"))
    folder = study.root / "federation"
    first = made(study, study.root, "proxyfl", "train.rounds=1")
    assert "is kept" not in capfd.readouterr().err
    for _ in range(2):  # for another run of the same plan
        record_approval(study, first, identities["S0"])
    assert sorted(one.name for one in folder.glob("*.json")) == ["approval-S0.json", "plan.json"]
    second = made(study, study.root, "proxyfl", "train.rounds=2")
    tag, said = first.digest[:8], capfd.readouterr().err
    assert f"plan-{tag}.json" in said and f"approval-S0-{tag}.json" in said
    assert FederationPlan.load(study.root / f"plan-{tag}.json") == first
    assert FederationPlan.load(study.root / "plan.json") == second
    record_approval(study, second, identities["S0"])
    assert FederationPlan.load(folder / f"plan-{tag}.json") == first and FederationPlan.load(plan_path(study)) == second
    assert json.loads((folder / f"approval-S0-{tag}.json").read_text())["plan"] == first.digest
    assert collect_approvals(study, second, identities["S0"].root).signed == ("S0",)
    approval_path(study, "S0").write_text('{"plan": "../../x"}')  # not by us
    record_approval(study, second, identities["S0"])
    assert len(list(folder.glob("*.json"))) == 4


ALL_ROWS = "all 12 rows of the patient with the most rows together have ε = 76.7"


def test_a_hospital_must_accept_the_patient_guarantee_of_an_epsilon_per_row(
    plan, file, tmp_path, kits, wsi_fl, monkeypatch
):
    study, asked = hospital(tmp_path, "S0"), []
    assert "A patient with many rows is protected much less" in parse_plan_document(plan)["privacy"]["says"]
    cost = review_plan(study, plan, "S0").cost
    assert cost is not None and cost.group is not None and cost.group_over_budget == cost.lifetime_group
    step = plan_of_round(n=36, batch_size=8, epochs=1, sigma=1.4, clip=0.7, delta=1e-5)
    assert cost.group["epsilon"] == pytest.approx(group_epsilon([step] * 3, 1e-5, 12))
    assert cost.group["rows"] == 12 and cost.epsilon == pytest.approx(epsilon([step] * 3, 1e-5))

    def approve(*more):
        return wsi_fl("federation", "approve", file, "--kit", kits["S0"], *more, cwd=study.root)

    refused_ = approve("--yes")
    assert refused_.returncode == 1 and not plan_path(study).exists()
    assert f"nothing was signed, for {ALL_ROWS}" in refused_.stderr and "--yes-per-row" in refused_.stderr
    for more, instead in (((), "--yes-per-row and --yes"), (("--yes-per-row",), "give --yes")):
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
    assert "76.7" not in (study.root / "federation" / "approval-S0.json").read_text()


def test_the_cost_of_a_plan_follows_the_batch_size_of_the_hospitals_own_file(plan, tmp_path):
    study = hospital(tmp_path, "S0")
    with (study.root / "sites" / "S0.toml").open("a") as own:
        own.write("batch_size = 12\n")
    cost = review_plan(study, plan, "S0").cost
    step = plan_of_round(n=36, batch_size=12, epochs=1, sigma=1.4, clip=0.7, delta=1e-5)
    assert cost is not None and cost.epsilon == pytest.approx(epsilon([step] * 3, 1e-5))


@pytest.mark.slow
def test_one_confirmation_is_enough_per_patient_or_within_the_budget(tmp_path, kits, wsi_fl):
    for unit, said in (("patient", REAL), ("row", REAL.replace("50.0", "120.0"))):
        coordinator = make_study(tmp_path / unit / "coordinator", n_sites=3, site_extra=said)
        given = (f"privacy.unit='{unit}'", "privacy.target_epsilon=3.78")
        plan = made(coordinator, tmp_path, "proxyfl", *given)
        study = hospital(tmp_path / unit, "S0", said)
        cost = review_plan(study, plan, "S0").cost
        assert cost is not None and cost.group_over_budget is None and (cost.group is None) == (unit == "patient")
        given = ("federation", "approve", tmp_path / "plan.json", "--kit", kits["S0"], "--yes")
        assert wsi_fl(*given, cwd=study.root).returncode == 0
        assert ("A patient with many rows" in parse_plan_document(plan)["privacy"]["says"]) == (unit == "row")


def test_a_dry_run_reports_the_patient_guarantee_of_an_epsilon_per_row(tmp_path, capsys):
    study = make_study(tmp_path / "study", n_sites=2, site_extra="real = false\nmax_epsilon = 50.0")
    document = dry_run(study, method="proxyfl", backend="local")
    group = document["sites"][0]["group"]
    assert group["rows"] == 12 and group["epsilon"] == pytest.approx(76.7, abs=0.1)
    print_lines(plan_lines(document))
    assert f"{ALL_ROWS}, which is above its max_epsilon = 50" in capsys.readouterr().err
    per_patient = ["privacy.unit='patient'", "train.batch_size=3"]
    document = dry_run(study, method="proxyfl", backend="local", overrides=per_patient)
    assert document["sites"][0]["group"] is None


def test_a_plan_is_tried_by_the_hospital_with_its_store_before_it_signs(plan, file, tmp_path):
    study = hospital(tmp_path, "S0")
    planned, cost = read_planned_run(study, file, None), review_plan(study, plan, "S0").cost
    assert (planned.site, planned.digest, planned.method) == ("S0", plan.digest, "proxyfl")
    assert planned.settings == plan.document["settings"] and planned.roles == dict.fromkeys(SITES, "member")
    assert planned.cost["epsilon"] == cost.epsilon and planned.cost_text == describe_cost(cost)
    assert next(iter(load_entries("wsi_fl.plans").values())) is read_planned_run
    refused(lambda: read_planned_run(study, file, "S7"), "S7 is not in this plan")
    shutil.rmtree(study.store_path("S0").parent)
    refused(lambda: read_planned_run(study, file, None), "which site is yours? give --site")
    refused(lambda: read_planned_run(study, file, "S0"), "try the plan where it is")


def test_a_plan_that_a_site_file_does_not_permit_is_refused(plan, tmp_path):
    study = hospital(tmp_path, "S0")
    file, said = study.root / "sites" / "S0.toml", (study.root / "sites" / "S0.toml").read_text()
    for old, new, words in (
        ("50.0", "3.0", "max_epsilon = 50.0 of S0, and sites/S0.toml says 3.0"),
        ("delta", 'allow = ["model"]\ndelta', "says allow = []"),
        ("real = true", "real = false", "says real = true"),
    ):
        file.write_text(said.replace(old, new))
        refused(lambda: review_plan(study, plan, "S0"), words)
    refused(lambda: review_plan(study, plan, "S7"), "S7 is not in this plan")
    file.unlink()
    refused(lambda: review_plan(study, plan, "S0"), "sites/S0.toml is missing", "max_epsilon")


def test_a_budget_below_one_round_is_refused_and_one_below_all_rounds_is_reported(tmp_path):
    looked = {}
    for limit in ("0.5", "3.0"):
        said = REAL.replace("50.0", limit)
        plan = made(make_study(tmp_path / f"c{limit}", n_sites=3, site_extra=said), tmp_path)
        looked[limit] = partial(review_plan, hospital(tmp_path / limit, "S0", said), plan, "S0")
    refused(looked["0.5"], "max_epsilon = 0.5", "not enough")
    some = looked["3.0"]()
    assert some.cost is not None and 0 < some.cost.rounds < 3
    assert f"enough for {some.cost.rounds} of 3 rounds" in some.notes[0]


def test_a_plan_text_that_does_not_follow_from_the_settings_is_refused(plan, tmp_path):
    study, said = hospital(tmp_path, "S0"), plan.document
    assert review_plan(study, plan, "S0").cost
    first, *others = said["sites"]
    for given, *words in (
        ({"rounds": 2}, "(rounds)", "changed by hand"),
        ({"leaves": []}, "(leaves)", "changed by hand"),
        ({"more": "trust me"}, "more than its keys", "changed by hand"),
        ({"settings": said["settings"].replace("rounds = 3", "rounds = 9")}, "(rounds)", "changed by hand"),
        ({"code": "0" * 64}, "00000000", "install the plan's version"),
        ({"sites": []}, "S0 is not in this plan"),
        ({"learns": None}, "damaged", "learns"),
        ({"sites": [first, *(one | {"name": f"../{one['name']}"} for one in others)]}, "name", "letters"),
        ({"learns": said["learns"] | {"says": "fine\x1b[8m"}}, "hides something", "do not sign it"),
        ({"pipeline": "a\x1b[2K"}, "hides something", "do not sign it"),
    ):
        refused(partial(review_plan, study, changed(plan, **given), "S0"), *words)
    twice = FederationPlan(plan.text.replace('"rounds": 3', '"rounds": 1, "rounds": 3', 1))
    refused(lambda: review_plan(study, twice, "S0"), "changed by hand")
    parse_plan_document(changed(plan, created="2026-07-01T09:30:00+02:00"))
    without = FederationPlan(json.dumps({key: value for key, value in said.items() if key != "created"}))
    wrong = ("2026-07-01T09:30:00", "20260701T093000+0000", "sign at once", 5)
    for one in (without, *(changed(plan, created=created) for created in wrong)):
        refused(partial(parse_plan_document, one), "damaged", "created")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the installed package, without compiled files."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(Path(wsi_fl.__file__).parent, tmp_path_factory.mktemp("p") / "wsi_fl", ignore=ignored)


@pytest.fixture(scope="module")
def codes(package):
    return {method: code_digest(method, package) for method in ("proxyfl", "oneshot", "mpcpa")}


@pytest.mark.parametrize(
    ("file", "affected"),
    [
        ("privacy/ledger.py", {"proxyfl", "oneshot", "mpcpa"}),
        ("hospitals/dossier/dossier.html.j2", {"proxyfl", "oneshot", "mpcpa"}),
        ("federation/methods.py", {"proxyfl", "oneshot", "mpcpa"}),
        ("oneshot/class_statistics.py", {"proxyfl", "oneshot", "mpcpa"}),  # which plans of all methods may read
        ("synthesis/lpips_vgg16.safetensors", {"mpcpa"}),
        ("viewer/page/viewer.js", set()),
        ("evidence/verdict.py", set()),
        ("shipped/pipelines/x.toml", set()),
        ("privacy/__pycache__/x.pyc", set()),
        (".x.swp", set()),
    ],
)
def test_a_changed_file_changes_the_code_of_the_methods_that_use_its_package(package, codes, file, affected):
    good = (package / file).read_bytes() if (package / file).exists() else b"??"
    (package / file).parent.mkdir(parents=True, exist_ok=True)
    (package / file).write_bytes(good[:-2] + bytes([good[-2] ^ 1]) + good[-1:])
    assert {method for method in codes if code_digest(method, package) != codes[method]} == affected
    (package / file).write_bytes(good)


def test_the_code_of_a_strangers_method_covers_its_package(tmp_path, monkeypatch):
    (tmp_path / "stranger").mkdir()
    for name in ("__init__.py", "parts.py"):
        (tmp_path / "stranger" / name).write_text("")
    (tmp_path / "alone.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for method, file in (("stranger", "stranger/parts.py"), ("alone", "alone.py")):
        point = EntryPoint(method, f"{method}:METHOD", "wsi_fl.methods")
        monkeypatch.setattr(installed_code, "entry_points", EntryPoints([point]).select)
        before = code_digest(method), code_digest("proxyfl")
        (tmp_path / file).write_text("x = 1")
        assert code_digest(method) != before[0] and code_digest("proxyfl") == before[1]


@pytest.mark.parametrize("file", ["viewer/page/viewer.js", "hospitals/faults.py"])
def test_an_approval_is_void_for_other_code_alone(signed, identities, package, monkeypatch, file):
    """Also an approval of an older version, whose digest was of all files: it is for another wsi-fl."""
    good = (package / file).read_text()
    (package / file).write_text(f"{good}\n")
    monkeypatch.setattr(installed_code, "code_digest", partial(code_digest, package=package))
    monkeypatch.setattr(client, "_open_comm", lambda *_, **__: 1 / 0)
    if file.startswith("viewer"):
        with pytest.raises(ZeroDivisionError):  # that far: the code is no reason to refuse
            part(signed, identities)()
    else:
        words = f"S0 has {__version__} (", "install the plan's version, or agree on a new plan"
        refused(part(signed, identities), "the plan is for wsi-fl", *words)
    (package / file).write_text(good)


@pytest.mark.parametrize("name", ["torch", "cryptography"])
def test_another_version_of_a_privacy_dependency_changes_the_digest(plan, tmp_path, monkeypatch, name):
    study, before = hospital(tmp_path, "S0"), code_digest("proxyfl")
    installed = installed_code.version
    monkeypatch.setattr(installed_code, "version", lambda one: "1.2.3" if one == name else installed(one))
    assert code_digest("proxyfl") != before
    refused(lambda: review_plan(study, plan, "S0"), f"the plan is for {name} ", "S0 has 1.2.3", "install")
    monkeypatch.setattr(installed_code, "version", lambda one: installed(one).partition("+")[0] + "+own")
    assert code_digest("proxyfl") == before


HEADS = ("train.data='features'", "model.proxy='linear_head'", "model.private='linear_head'")


def with_features(study, d):
    """The study, with features of 40 patches at S0."""
    x, patients = np.random.default_rng(0).normal(size=(40, d)), [f"p{k}" for k in range(40)]
    write_features(study, "S0", x, np.arange(40) % 2, patients, ["train"] * 30 + ["test"] * 10)
    return study


def test_the_projection_of_class_statistics_is_in_the_plan_and_hospitals_need_the_same_file(tmp_path):
    def write(study, seed):
        origin = ProjectionOrigin(
            encoder="tiny sha256:0", sources=[ProjectionSource(name="a.svs", rows=50, sha256="0" * 64)]
        )
        found = fit_projection(np.random.default_rng(seed).normal(size=(50, 5)).astype("f4"), origin, 3)
        write_projection(study.root / "d.safetensors", found)
        return found.digest

    coordinator = with_features(make_study(tmp_path / "c", n_sites=3, site_extra=REAL), 5)
    digest = write(coordinator, 0)
    plan = made(coordinator, tmp_path, "oneshot", "train.data='features'", "model.projection='d.safetensors'")
    said = parse_plan_document(plan)
    assert said["learns"]["projection"] == digest and said["leaves"][0]["bytes"] == 4 * 2 * (3 + 2)
    own = with_features(hospital(tmp_path, "S0"), 5)
    refused(lambda: review_plan(own, plan, "S0"), "d.safetensors", "copy it here", error=WsiFlError)
    write(own, 1)
    refused(lambda: review_plan(own, plan, "S0"), "directions with the SHA-256", digest)
    write(own, 0)
    assert review_plan(own, plan, "S0").cost


def test_a_local_store_of_another_encoder_or_other_classes_is_refused(tmp_path, monkeypatch):
    coordinator = with_features(make_study(tmp_path / "c", n_sites=3, site_extra=REAL), 5)
    plan = made(coordinator, tmp_path, "proxyfl", *HEADS)
    assert parse_plan_document(plan)["learns"]["encoder"] == "tiny sha256:0"
    other = with_features(hospital(tmp_path / "other", "S0"), 6)
    refused(lambda: review_plan(other, plan, "S0"), "features per patch 5, but S0 has 6")
    same, real = with_features(hospital(tmp_path / "same", "S0"), 5), review.describe_store
    assert review_plan(same, plan, "S0").cost
    other_values = ("encoder", "huge sha256:1", "--set features.encoder=huge"), ("classes", ["a", "b"], "another plan")
    for key, value, advice in other_values:
        found = {key: value}
        monkeypatch.setattr(review, "describe_store", lambda *given, found=found: real(*given) | found)
        refused(lambda: review_plan(same, plan, "S0"), key, advice)


def test_existing_files_of_other_sites_stay_and_differences_are_reported(plan, tmp_path, identities):
    study = hospital(tmp_path, "S0")
    own = 'name = "S1"\nreal = true\nmax_epsilon = 1.0\ndelta = 1e-5\n'
    (study.root / "sites" / "S1.toml").write_text(own)
    looked = review_plan(study, plan, "S0")
    assert "sites/S1.toml says another max_epsilon" in looked.notes[1]
    sign_plan(study, looked, identities["S0"])
    assert (study.root / "sites" / "S1.toml").read_text() == own
    refused(lambda: sign_plan(study, looked, identities["S1"]), "this kit belongs to S1")


def test_a_plan_pins_and_shows_the_keys_of_all_sites(coordinator, tmp_path, identities, capfd):
    keys = {name: key_fingerprint(identities[name].certificate) for name in SITES}
    pinned = make_plan(coordinator, method="proxyfl", out=tmp_path / "pinned.json", keys=keys)
    study = hospital(tmp_path, "S0")
    looked = review_plan(study, pinned, "S0")
    assert not any("pins no keys" in note for note in looked.notes)
    print_lines(review_lines(looked))
    shown = capfd.readouterr().err
    for name, key in keys.items():
        assert f"{name}: {key}\n" in shown and len(bytes.fromhex(key.replace(":", ""))) == 32
    sign_plan(study, looked, identities["S0"])
    assert collect_approvals(study, pinned, identities["S0"].root).signed == ("S0",)
    false = {**keys, "S0": keys["S1"]}
    other = make_plan(coordinator, method="proxyfl", out=tmp_path / "other.json", keys=false)
    refused(
        lambda: sign_plan(study, review_plan(study, other, "S0"), identities["S0"]), "another key of S0", "telephone"
    )


def test_approvals_of_another_plan_site_or_federation_do_not_count(plan, tmp_path, identities):
    study, root = hospital(tmp_path, "S0"), identities["S0"].root
    path = sign_plan(study, review_plan(study, plan, "S0"), identities["S0"])
    text = path.read_text()
    (path.parent / "approval-S1.json").write_text(text)
    found = collect_approvals(study, plan, root)
    assert found.signed == ("S0",) and "another plan" in found.missing["S1"]
    later = changed(plan, created="later")
    assert "another plan" in collect_approvals(study, later, root).missing["S0"]
    assert "does not belong to this federation" in collect_approvals(study, plan, Federation().root).missing["S0"]
    for damaged in ("[]", "{}", "no JSON", text.replace('"signature": "', '"signature": "00')):
        path.write_text(damaged)
        assert collect_approvals(study, plan, root).signed == ()


@pytest.fixture(scope="module")
def all_signed(plan, identities, tmp_path_factory):
    """A folder with the study of each hospital, which has signed the plan."""
    folder = tmp_path_factory.mktemp("signed")
    for name in SITES:
        study = hospital(folder, name)
        sign_plan(study, review_plan(study, plan, name), identities[name])
    return folder


@pytest.fixture
def signed(all_signed, tmp_path):
    shutil.copytree(all_signed, tmp_path / "all")
    return {name: Study(tmp_path / "all" / name) for name in SITES}


def part(signed, identities, **given):
    return lambda: take_part(signed["S0"], identities["S0"], Wire("S0", {}), **given)


def test_every_release_on_a_ledger_names_its_plan(plan, signed, identities):
    ends = {}

    def be(name):
        return take_part(signed[name], identities[name], Wire(name, ends), plan=plan.digest)

    summaries = at_once(be, SITES)
    assert [row["site"] for row in summaries["S0"]["sites"]] == list(SITES)
    for name, study in signed.items():
        lines = [line for line in read_lines(study.ledger_path(name)) if line.get("released")]
        assert [line.get("agreement") for line in lines] == [plan.digest] * 3
    words = ("for one run, and has it: 00001-", "--resume last", "approve the plan again")
    refused(part(signed, identities), "S0 approved plan", *words)
    promised = review_plan(signed["S0"], plan, "S0")
    row = summaries["S0"]["sites"][0]
    assert promised.cost is not None and promised.cost.epsilon == pytest.approx(row["epsilon"])
    assert promised.cost.lifetime_epsilon > row["epsilon"]  # once more, on top of what was spent


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("no approval", ("S0 has approved no plan", "federation approve")),
        ("an altered plan file", ("signed another plan than",)),
        ("an approval of another site", ("S0 has signed another plan",)),
        ("a site file that was changed", ("says allow = [] of S0", "made with your site file")),
        ("an expired certificate", ("S0 cannot be used: the certificate of S0 holds from",)),
    ],
)
def test_taking_part_is_refused_with(harm, words, signed, identities, monkeypatch):
    here, there = (approval_path(signed[name], name) for name in ("S0", "S1"))
    file, plan = signed["S0"].root / "sites" / "S0.toml", plan_path(signed["S0"])
    if harm == "no approval":
        here.unlink()
    elif harm == "an altered plan file":
        data = bytearray(plan.read_bytes())
        data[data.index(b"rounds") + 9] ^= 1
        plan.write_bytes(data)
    elif harm == "an approval of another site":
        here.write_text(there.read_text())
    elif harm == "a site file that was changed":
        file.write_text(file.read_text() + '\nallow = ["model"]\n')
    else:
        later = SimpleNamespace(now=lambda zone=None: datetime.now(UTC) + timedelta(days=800))
        monkeypatch.setattr(certificates, "datetime", later)
    refused(part(signed, identities), *words)


def test_another_plan_or_a_run_of_other_sites_or_settings_is_refused(plan, signed, identities, tmp_path):
    refused(part(signed, identities, plan="1" * 64), "this job is plan 11111111", "nothing was begun")
    study, evil = signed["S0"], tmp_path / "evil"
    RunFolder(evil).path.mkdir()
    (evil / "config.toml").write_text("")
    for asked in (str(evil), "../evil", "runs/../../evil", "nothing", ""):
        refused(part(signed, identities, resume=asked), "is not in this hospital's runs/")
    weak = study.load_pipeline("small", ["privacy.sigma=0.1"])
    party = RunContext.create(study, weak, plan.method, RunFolder(study.runs_path / "00007-proxyfl-small"))
    party.run.path.mkdir(parents=True)
    describe_run(party, RunRequest("small", agreement=plan.digest), "ab" * 16, party.run)
    again = part(signed, identities, resume="00007-proxyfl-small")
    refused(again, "has other settings", "nothing was begun")
