"""Standing approvals: plans within one run without a further signature; no other plan does, and none after its end."""

import json
import shutil
import tomllib
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import partial

import pytest
from conftest import REAL, larger_study, refused
from federation_fixtures import Wire, at_once
from hospitals import INSECURE, Bed, one_installation  # noqa: F401
from test_federation_plan import changed

from wsi_fl.hospitals.plans import installed_code, preapproval
from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.plans.preapproval import (
    load_preapproval,
    preapproval_entries,
    preapproval_path,
    revoke_preapproval,
    write_preapproval,
)
from wsi_fl.hospitals.plans.preapproval_check import (
    _explain_rejection,
    _explain_text_rejection,
    add_codes,
    admit_plan,
    make_preapproval,
)
from wsi_fl.hospitals.plans.review import review_plan, sign_plan
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, approval_path, approval_time, load_approved_plan
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.trust.certificates import key_fingerprint
from wsi_fl.hospitals.trust.root_ca import RootCA
from wsi_fl.hospitals.work.client import take_part
from wsi_fl.hospitals.work.start import _admit_shared_plan
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.guarantee import PrivacyTerms, collect_mechanisms
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.stages.site.site_ledger import open_ledger
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_lines
from wsi_fl.types import NoCommonPlan, UsageError, WsiFlError

SITES = ("S0", "S1")
PATIENTS = ("privacy.unit='patient'", "train.batch_size=3", "privacy.sigma=5", "train.rounds=2")
TODAY = datetime.now(UTC).date()


@pytest.fixture(scope="module")
def identities(federation):
    return {name: federation.identity(name) for name in SITES}


@pytest.fixture(scope="module")
def template(tmp_path_factory, identities):
    """The study of S0, and its plan."""
    study = larger_study(tmp_path_factory.mktemp("template") / "S0", n_sites=2, site_extra=REAL)
    made(study, identities)
    return study.root


@pytest.fixture
def study(template, tmp_path):
    return Study(shutil.copytree(template, tmp_path / "S0"))


@pytest.fixture
def me(identities):
    return identities["S0"]


@pytest.fixture
def plan(study):
    return FederationPlan.load(study.root / "plan.json")


def made(study, identities, *overrides, method="proxyfl", out="plan.json", **keys):
    known = {name: key_fingerprint(one.certificate) for name, one in identities.items()} | keys
    given = [*PATIENTS, *overrides]
    return make_plan(study, method=method, overrides=given, out=study.root / out, keys=known)


def log_of(study):
    return preapproval_path(study).with_suffix(".log")


def sign_standing_approval(study, identities, plan, site="S0", **given):
    limits = {"epsilon": 3.0, "until": (TODAY + timedelta(30)).isoformat(), "runs": 3} | given
    frame = make_preapproval(study, plan, site, **limits)
    write_preapproval(study, frame, identities[site])
    return frame


def test_a_standing_approval_has_every_statement_of_a_plan_and_contains_its_own_plan(study, identities, plan):
    frame = sign_standing_approval(study, identities, plan)
    allows = frame["allows"]
    said = {"method": "proxyfl", "unit": "patient", "delta": 1e-5, "guarantee": "guaranteed"}
    assert {key: allows[key] for key in said} == {key: [value] for key, value in said.items()}
    assert allows["classes"] == [["healthy", "tumor"]]
    assert [one.split()[0] for one in allows["partners"]] == list(SITES)
    assert "proxy model" in allows["leaves"] and not any("without diff" in one for one in allows["leaves"])
    looked = review_plan(study, plan, "S0", frame)
    assert load_preapproval(study, identities["S0"]) == frame

    def why(frame=frame, looked=looked, today=TODAY, n=0):
        return _explain_text_rejection(frame, plan, today, n) or _explain_rejection(frame, looked)

    def only(**given):
        return {"frame": {**frame, "allows": {**allows, **given}}}

    def learned(**given):
        return {"looked": replace(looked, learned={**looked.learned, **given})}

    def costs(**given):
        return {"looked": replace(looked, cost=replace(looked.cost, **given))}

    for what, given in (
        ("last day was", {"today": date.fromisoformat(frame["until"]) + timedelta(1)}),
        ("method", only(method=["fedavg"])),
        ("partners", only(partners=allows["partners"][:1])),
        ("leaves", only(leaves=[])),
        ("encoder", learned(encoder="another")),
        ("classes", learned(classes=["a", "b"])),
        ("unit", only(unit=["row"])),
        ("guarantee", only(guarantee=[])),
        ("delta", only(delta=[1e-6])),
        ("code", only(code=["0" * 64])),
        ("pipeline", only(pipeline=["another"])),
        ("not on this machine", {"looked": replace(looked, cost=None)}),
        ("for 3 runs", {"n": 3}),
        ("3 runs", costs(framed_runs=3)),
        ("ε = 3.01 of 3", costs(framed=3.01)),
    ):
        assert what in why(**given), what
    assert why() == why(**costs(framed_runs=2, framed=3.0)) == ""


def test_a_standing_approval_beyond_the_site_file_or_the_plan_is_refused(study, identities, plan):
    for given, words in (
        *[({"epsilon": much}, "S0.toml: max_epsilon = 50") for much in (51.0, 0.0, float("nan"))],
        ({"until": "soon"}, "--until 2027-03-31"),
        ({"partners": ["S7"]}, "no site S7"),
        ({"methods": ["regular"]}, "regular shares nothing"),
    ):
        refused(partial(sign_standing_approval, study, identities, plan, **given), words)
    two = sign_standing_approval(study, identities, plan, methods=["proxyfl", "fedavg"], partners=["S1"])
    assert two["allows"]["method"] == ["proxyfl", "fedavg"] and "central model" in two["allows"]["leaves"]
    assert len(two["allows"]["partners"]) == 2  # its own too


def test_a_plan_within_a_standing_approval_is_approved_and_any_other_is_refused_in_one_line(
    study, identities, me, plan, capsys
):
    admit_plan(study, me, plan)  # without a frame nothing changes
    assert not approval_path(study, "S0").exists() and not log_of(study).exists()
    frame = sign_standing_approval(study, identities, plan)
    admit_plan(study, me, plan)
    approval = json.loads(approval_path(study, "S0").read_text())
    assert approval["preapproval"] == frame["id"] and len(approval["preapproval_sha256"]) == 64
    assert load_approved_plan(study, me).digest == plan.digest and approval_time(study, "S0").endswith(frame["id"])
    assert (study.root / "federation" / "plans" / f"{plan.digest}.json").read_text() == plan.text
    assert f"plan {plan.digest[:8]} was approved by the standing approval" in capsys.readouterr().err
    before = approval_time(study, "S0")
    admit_plan(study, me, plan)
    assert approval_time(study, "S0") == before
    others = [
        (made(study, identities, method="fedavg"), "method"),
        (made(study, identities, "privacy.sigma=1.5"), "privacy.sigma: 1.5, where the standing approval has 5"),
        (made(study, identities, S1="0" * 64), "partners"),
        # the first site of a star gets each site's statistics, the others their mean
        (made(study, identities, 'sites=["S1", "S0"]'), "order: S1, S0, where the standing approval has S0, S1"),
    ]
    for other, why in others:
        words = f"plan {other.digest[:8]} exceeds the standing approval of S0: {why}"
        refused(partial(admit_plan, study, me, other), words, "or more" if "sigma" in why else "")
    edited = FederationPlan(plan.text.replace('"rounds": 2', '"rounds": 1', 1))
    refused(lambda: admit_plan(study, me, edited), "S0 cannot approve", "preapproval.log says why")
    assert "changed by hand" in log_of(study).read_text()
    assert load_approved_plan(study, me).digest == plan.digest and log_of(study).read_text().count("refused") == 5


def test_a_standing_approval_that_was_changed_or_signed_by_others_does_not_count(study, identities, plan):
    frame = sign_standing_approval(study, identities, plan)
    path = preapproval_path(study)
    path.write_text(path.read_text().replace('"runs": 3', '"runs": 4'))
    words = "federation/preapproval.json cannot be used", "not signed"
    refused(lambda: admit_plan(study, identities["S0"], plan), *words)
    write_preapproval(study, frame, identities["S1"])
    refused(lambda: admit_plan(study, identities["S0"], plan), "not a standing approval of S0")
    earlier = {key: value for key, value in frame.items() if key != "settings"} | {"format": "wsi-fl frame 1"}
    write_preapproval(study, earlier, identities["S0"])  # it fixed too little
    refused(lambda: admit_plan(study, identities["S0"], plan), "that this version of wsi-fl reads; sign another")


def test_a_withdrawn_or_expired_standing_approval_approves_nothing_and_voids_approvals(
    study, identities, me, plan, monkeypatch
):
    frame = sign_standing_approval(study, identities, plan)
    admit_plan(study, me, plan)
    with monkeypatch.context() as patch:
        patch.setattr(preapproval, "has_expired", lambda *_: True)
        refused(lambda: load_approved_plan(study, me), f"allowed this plan until {frame['until']}")
    assert load_approved_plan(study, me)
    revoke_preapproval(study, me)
    refused(lambda: load_approved_plan(study, me), "withdrew the standing approval")
    refused(lambda: revoke_preapproval(study, me), "has signed no standing approval")
    gone = study.root / "federation" / f"preapproval-{frame['id']}-withdrawn.json"
    preapproval_path(study).write_text(gone.read_text())  # as it comes back from a backup
    assert load_preapproval(study, me) is None
    refused(lambda: load_approved_plan(study, me), "withdrew the standing approval")
    sign_standing_approval(study, identities, plan)  # another frame brings no old approval back
    refused(lambda: load_approved_plan(study, me), "withdrew the standing approval")
    sign_plan(study, review_plan(study, plan, "S0"), me)  # a person's own approval needs none
    revoke_preapproval(study, me)
    assert load_approved_plan(study, me)


def test_refusals_that_depend_on_a_single_patient_are_not_disclosed(study, identities, me, plan, monkeypatch):
    sign_standing_approval(study, identities, plan)
    looked = review_plan(study, plan, "S0", load_preapproval(study, me))
    group = {"rows": 700, "epsilon": 99.0, "delta": 1e-5}
    above = replace(looked, cost=replace(looked.cost, group=group, lifetime_group=group))
    dear = replace(looked, cost=replace(looked.cost, framed=3.01))
    strange = replace(looked, learned={**looked.learned, "classes": ["a", "b"]})
    gone = replace(looked, cost=None)

    def fails(error):
        def raised(*_):
            raise error

        return raised

    reasons = [lambda *_, one=one: one for one in (dear, strange, gone)]
    for why in (*reasons, fails(UsageError("slide S_7")), fails(WsiFlError("S_7")), fails(KeyError("S_7"))):
        monkeypatch.setattr("wsi_fl.hospitals.plans.preapproval_check.review_plan", why)
        with pytest.raises(UsageError) as told:
            admit_plan(study, me, plan)
        log = "its own federation/preapproval.log says why"
        words = f"site S0 cannot approve plan {plan.digest[:8]} by its standing approval; {log}"
        assert (type(told.value), str(told.value)) == (UsageError, words)
    log = log_of(study).read_text()
    assert "ε = 3.01 of 3" in log and "classes" in log and log.count("S_7") == 3
    # a refusal would tell how many rows the patient with the most has: by plans of more noise as exactly as one likes
    monkeypatch.setattr("wsi_fl.hospitals.plans.preapproval_check.review_plan", lambda *_: above)
    admit_plan(study, me, plan)
    assert "above your max_epsilon" in log_of(study).read_text()
    refused(
        lambda: sign_standing_approval(study, identities, plan),
        "above your max_epsilon",
        "no standing approval is for such plans",
    )


def spend(study, me, run, rounds):
    """Charge the ledger like a run of the approved plan."""
    site, named = study.load_site(me.name), {"approved": approval_time(study, me.name)}
    terms = PrivacyTerms(1e-5, site.max_epsilon, True, (), "guaranteed", "patient")
    ledger = open_ledger(study, site, run, terms, named=named)
    for _ in range(rounds):
        ledger.record_transmission(ledger.record(None, Mechanism(5.0, 1.0, 1.0, 1), "kept 0"), "0")


def test_a_site_that_spent_more_than_its_standing_approval_sends_nothing_more(study, identities, me, plan):
    """Two runs overlap: each was within the standing approval when its plan came, and both together are not."""
    sign_standing_approval(study, identities, plan, epsilon=2.0, runs=2)
    admit_plan(study, me, plan)
    spend(study, me, "a" * 32, 2)
    assert load_approved_plan(study, me)
    spend(study, me, "b" * 32, 2)
    assert load_approved_plan(study, me)
    spend(study, me, "a" * 32, 3)
    refused(lambda: load_approved_plan(study, me), "S0 spent ε = 2.", "of the 2 of its standing approval")
    sign_standing_approval(study, identities, plan, epsilon=9.0, runs=2)
    admit_plan(study, me, plan)
    for run in "cde":
        assert load_approved_plan(study, me)
        spend(study, me, run * 32, 1)
    refused(lambda: load_approved_plan(study, me), "began 3 runs under a standing approval for 2")


def test_an_approval_that_is_replaced_as_a_run_begins_ends_the_run(study, identities, me, plan, monkeypatch):
    """Ledger lines would name another approval than that of the running plan."""
    sign_plan(study, review_plan(study, plan, "S0"), me)  # by a person
    sign_standing_approval(study, identities, plan)
    other, seen = made(study, identities, "train.lr=0.5", out="other.json"), []

    def meanwhile(*given):
        if not seen:
            seen.append(admit_plan(study, me, other))
        return load_approved_plan(*given)

    monkeypatch.setattr("wsi_fl.hospitals.work.client.load_approved_plan", meanwhile)
    part = partial(take_part, study, me, Wire("S0", {}), plan=other.digest)
    refused(part, "approved another plan just now", error=NoCommonPlan)


def test_a_patch_release_that_the_standing_approval_lists_voids_no_approval(study, identities, me, plan, monkeypatch):
    frame = sign_standing_approval(study, identities, plan)
    admit_plan(study, me, plan)
    monkeypatch.setattr(installed_code, "code_digest", lambda _: "1" * 64)
    refused(lambda: review_plan(study, plan, "S0", frame), "install the plan's version")
    write_preapproval(study, add_codes(frame), me)
    listed = load_preapproval(study, me)
    assert listed["id"] == frame["id"] and listed["allows"]["code"][-1] == "1" * 64
    assert _explain_rejection(listed, review_plan(study, plan, "S0", listed)) == ""
    assert _explain_text_rejection(listed, plan, TODAY, 1) == ""
    refused(lambda: review_plan(study, plan, "S0"), "install the plan's version")  # a person approves one code
    part = partial(take_part, study, me, Wire("S0", {}), plan=plan.digest)
    monkeypatch.setattr("wsi_fl.hospitals.work.client._open_comm", lambda *_, **__: 1 / 0)
    with monkeypatch.context() as patch:  # a list of code says nothing of what its guarantee rests on
        patch.setattr(installed_code, "code_digest", lambda _: frame["allows"]["code"][0])
        patch.setattr(installed_code, "package_versions", lambda: {"torch": "0"})
        refused(part, "the plan is for ", "install the plan's version", error=NoCommonPlan)
    with pytest.raises(ZeroDivisionError):  # that far: the code is no reason to refuse
        part()


def test_a_plan_in_the_shared_folder_is_taken_only_within_a_standing_approval(tmp_path, study, identities, me, plan):
    share = tmp_path / "share"
    share.mkdir()
    (share / "plan.json").write_text(plan.text)
    _admit_shared_plan(study, me, str(share))
    assert not approval_path(study, "S0").exists()
    sign_standing_approval(study, identities, plan)
    _admit_shared_plan(study, me, str(share))
    assert load_approved_plan(study, me).digest == plan.digest
    other = made(study, identities, method="fedavg")
    (share / "plan.json").write_text(other.text)
    refused(lambda: _admit_shared_plan(study, me, str(share)), "exceeds the standing approval of S0: method")
    SharedFolder(str(share)).write(b"{}", "plan.json")
    refused(lambda: _admit_shared_plan(study, me, str(share)), "plan.json of the shared folder: this is no plan")


ODD = [
    ("fedavg", "train.rounds=1"),
    ("proxyfl", "privacy.unit='row'"),
    ("proxyfl", "privacy.sigma=1"),
    ("proxyfl", "privacy.enabled=false"),
]


@pytest.mark.slow
def test_of_twenty_plans_only_the_half_within_the_standing_approval_run(tmp_path, identities):
    """Two hospitals have standing approvals that were made of the same plan."""
    studies = {name: larger_study(tmp_path / name, n_sites=2, site_extra=REAL) for name in SITES}
    like, ran, refused_ = made(studies["S0"], identities), [], []
    for name in SITES:
        sign_standing_approval(studies[name], identities, like, name, runs=12, epsilon=3.0)

    def take_part_in(plan):
        ends, given = {}, {"plan": plan.digest, "received_plan": plan}
        return lambda name: take_part(studies[name], identities[name], Wire(name, ends), **given)

    for k in range(10):
        for inside in (True, False):
            method, more = ("proxyfl", "privacy.sigma=5") if inside else ODD[k % 4]
            given = ("train.rounds=1", f"train.lr={(k + 1) / 1000}", more)
            try:
                plan = made(studies["S0"], identities, *given, method=method, out=f"{k}-{inside}.json")
            except Exception as error:  # a plan that no site file allows is not even made
                refused_.append(str(error))
                continue
            came = at_once(take_part_in(plan), SITES)
            (ran if all(isinstance(one, dict) for one in came.values()) else refused_).append(plan.digest)
            assert inside == (plan.digest in ran), came
    assert len(ran) == 10 and len(refused_) == 10
    for name, study in studies.items():
        entries = LedgerFile(study.ledger_path(name)).entries
        assert {entry.agreement for entry in entries if entry.mechanism} == set(ran)
        frame = load_preapproval(study, identities[name])
        assert preapproval_entries(entries, name, frame["id"]) == entries
        spent = epsilon(collect_mechanisms(entries), 1e-5)
        assert 2.5 < spent <= 3.0 < 10 * epsilon(collect_mechanisms(entries)[:1], 1e-5)  # composed, not added


@pytest.mark.usefixtures("plan")
def test_the_commands_sign_show_and_withdraw_a_standing_approval(study, tmp_path, wsi_fl, federation, identities):
    kit = federation.kit(tmp_path / "kit", "S0", identities["S0"])
    given = ("federation", "preapprove", "--kit", kit, "--plan", study.root / "plan.json", "--epsilon", "2")
    assert "say --until DATE" in wsi_fl(*given, cwd=study.root).stderr
    done = wsi_fl(*given, "--until", "2099-01-31", "--yes", "--json", cwd=study.root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epsilon"] == 2 and "ε = 2 in all" in done.stderr
    done = wsi_fl("federation", "preapprove", "--kit", kit, "--add-code", "--yes", "--json", cwd=study.root)
    assert done.returncode == 0 and len(json.loads(done.stdout)["allows"]["code"]) == 1
    assert wsi_fl("federation", "preapprove", "--revoke", "--kit", kit, "--json", cwd=study.root).returncode == 0
    assert not preapproval_path(study).exists()


def preapprove_by_all(bed, plan, runs):
    for site in bed.sites:
        study, identity = bed.study(site), bed.kit(site).load_identity()
        limits = {"epsilon": None, "until": "2099-01-31", "runs": runs}
        write_preapproval(study, make_preapproval(study, plan, site, **limits), identity)


@pytest.mark.slow
def test_over_flare_a_job_brings_its_plan(tmp_path):
    pytest.importorskip("nvflare")
    bed = Bed(tmp_path)
    file = tmp_path / "plan.json"

    def planned(method, k):
        given = {
            "overrides": [*INSECURE, f"train.lr={(k + 1) / 1000}"],
            "keys": RootCA.open(bed.root / "kits").load_keys(),
        }
        return make_plan(bed.study("S0"), method=method, pipeline_name=bed.pipeline, out=file, **given)

    preapprove_by_all(bed, planned("proxyfl", 0), runs=5)
    with bed.running():
        plan = planned("proxyfl", 1)
        done = bed.submit("--plan", str(file))
        assert done.returncode == 0, done.stderr
        for site in bed.sites:
            lines = [line for line in read_lines(bed.study(site).ledger_path(site)) if line.get("released")]
            assert {line["agreement"] for line in lines} == {plan.digest}
        planned("fedavg", 2)
        done = bed.submit("--plan", str(file))
        assert done.returncode != 0 and "exceeds the standing approval of S" in done.stderr
        said = bed.command("preapprove", "--revoke", "--kit", bed.root / "kits" / "S1", "--study", bed.root / "S1")
        assert said.returncode == 0, said.stderr
        planned("proxyfl", 3)
        done = bed.submit("--plan", str(file))
        assert done.returncode != 0 and "S1 withdrew the standing approval" in done.stderr
        terminal = bed.processes["S0"]
        bed.stop("S1")
        terminal.terminate()
        assert f"plan {plan.digest[:8]} was approved by the standing approval" in terminal.stdout.read()


@pytest.mark.slow
def test_over_a_folder_the_plan_is_taken_from_it(tmp_path):
    share = tmp_path / "share"
    share.mkdir()
    bed = Bed(tmp_path, folder=str(share))
    keys = RootCA.open(bed.root / "kits").load_keys()
    given = {"method": "proxyfl", "pipeline_name": bed.pipeline, "out": share / "plan.json", "keys": keys}
    like = make_plan(bed.study("S0"), overrides=[*INSECURE, "train.lr=0.9"], **given)
    preapprove_by_all(bed, like, runs=1)

    def all_start():
        processes = [bed.start(site, wait=False) for site in bed.sites]
        return [(process.communicate(timeout=120)[0], process.returncode) for process in processes]

    for rate, status in ((0.01, 0), (0.02, 2)):  # the frame is for one run
        plan = make_plan(bed.study("S0"), overrides=[*INSECURE, f"train.lr={rate}"], **given)
        said = all_start()
        assert [one[1] for one in said] == [status] * len(bed.sites), said
        assert all(plan.digest[:8] in one[0] for one in said)
        assert status == 0 or all("the standing approval is for 1 runs, and it had them" in one[0] for one in said)
    bed.processes.clear()


DOTS = "a." * 20
ODD_SETTINGS = (
    f"{DOTS}b = 1\n",
    f"[{DOTS}b]\n",
    '"a".' * 20 + '"b" = 1\n',
    "'a'." * 20 + "b = 1\n",
    f'x = {{ s = """ " \' """, {DOTS}b = 1, t = "\'" }}\n',
    "x = " + "[" * 9000 + "\n",
)


@pytest.mark.parametrize("odd", ODD_SETTINGS)
def test_settings_in_a_form_that_plans_never_write_are_refused_unparsed(study, identities, me, plan, odd, monkeypatch):
    sign_standing_approval(study, identities, plan)
    sent, read, loads = changed(plan, settings=plan.document["settings"] + odd), [], tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: (read.append(text), loads(text))[1])
    refused(lambda: admit_plan(study, me, sent), f"plan {sent.digest[:8]} is damaged")
    refused(lambda: review_plan(study, sent, "S0"), "settings are not as plans write them")
    assert not any(odd in text and "[[" not in odd for text in read)


def test_dots_in_values_are_not_read_as_keys(study, identities, me):
    value = "a.b.c.d.e.f.g.h.i.j.k 'quoted' \\\"twice\\\""
    plan = made(study, identities, f'model.projection="{value}"', "train.lr=0.001")
    assert plan.pipeline().model.projection == value.replace("\\", "")


def test_a_plan_must_describe_its_data_with_exactly_the_known_keys(study, identities, me, plan):
    sign_standing_approval(study, identities, plan)
    for learns, odd in (
        ({"says": "All ethics boards have agreed to this plan."}, "learns.says"),
        ({"says": plan.document["learns"]["says"] + " It was audited."}, "learns.says"),
        ({"parameters": None}, "learns.parameters"),
    ):
        sent = changed(plan, learns=plan.document["learns"] | learns)
        refused(lambda sent=sent: review_plan(study, sent, "S0"), f"does not match its settings ({odd})")
        refused(lambda sent=sent: admit_plan(study, me, sent), "S0 cannot approve")
    assert review_plan(study, plan, "S0")


@pytest.mark.parametrize("count", ['{"plans": ""}', '{"plans": 3}', "{}", '{"plans": [3]}'])
def test_a_damaged_count_of_plans_is_refused(study, identities, me, plan, count):
    frame = sign_standing_approval(study, identities, plan)
    admit_plan(study, me, plan)
    path = study.root / "federation" / f"preapproval-{frame['id']}-admitted.json"
    path.write_text(count)
    other = made(study, identities, "train.rounds=1")
    refused(lambda: admit_plan(study, me, other), "admitted.json: damaged", error=WsiFlError)
