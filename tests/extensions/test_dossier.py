"""The dossier of a hospital as page and JSON with no name of a slide or patient, and its answers to forms."""

import json
import re
import shutil
from contextlib import contextmanager
from functools import partial
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from conftest import REAL, larger_study, refused
from hospitals import one_installation  # noqa: F401
from test_federation_plan import hospital, made
from test_report import Document

from wsi_fl.hospitals.dossier import dossier_page as page_module
from wsi_fl.hospitals.dossier.answers import answer_sheets
from wsi_fl.hospitals.dossier.departure import write_departure
from wsi_fl.hospitals.dossier.dossier_page import _largest_patient_rows, _render_page, make_dossier
from wsi_fl.hospitals.plans.build_plan import parse_plan_document
from wsi_fl.hospitals.plans.review import review_plan, sign_plan
from wsi_fl.hospitals.plans.signed_plan import approval_path, load_approved_plan, plan_path
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.privacy.accounting import group_epsilon
from wsi_fl.privacy.guarantee import PrivacyTerms
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.privacy_plan import plan_of_round
from wsi_fl.report.cross_site_section import render_coordinator
from wsi_fl.stages.site.site_ledger import open_ledger
from wsi_fl.study.folder import Study
from wsi_fl.system.files import append_line, write_json, write_sealed
from wsi_fl.types import WsiFlError

RUN = "00001-proxyfl-small"
ROUND = plan_of_round(n=36, batch_size=8, epochs=1, sigma=1.4, clip=0.7, delta=1e-5)


def spend(study, plan, rounds=2):
    """Put releases under a plan on the ledger of S0, and an audit next to them."""
    terms = PrivacyTerms(1e-5, max_epsilon=50.0, lifetime=True, guarantee="guaranteed", allow=("scores",))
    given = {"site": "S0", "run": f"{RUN} {'a' * 32}", "references": {"agreement": plan.digest}}
    ledger = PrivacyLedger(study.ledger_path("S0"), terms=terms, **given)
    for number in range(1, rounds + 1):
        ledger.release(number, np.zeros(4, np.float32), schema="x", mechanism=ROUND, content="model")
    counts = np.arange(8, dtype=np.uint8)  # of test patients, whom no ε covers
    ledger.release(rounds + 1, counts, schema="x", mechanism=None, content="scores")
    folder = study.runs_path / RUN
    write_sealed(folder / "manifest.json", {"id": "a" * 32, "config_sha256": ""})
    cost = {"seconds": 0.5, "epsilon": 1.0, "takes_part": True, "messages": 1, "communication_seconds": 0.1}
    for number in range(1, rounds + 1):
        line = {"round": number, "bytes": 1000 + number, **cost}
        append_line(folder / "sites" / "S0" / "metrics.jsonl", line)
    own = {"auroc": 0.51, "interval": [0.45, 0.57]}
    model = {"model": "proxy", "membership": {"own": own}, "canaries": {"epsilon_lower": 0.2}}
    sites = [{"site": site, "models": [model]} for site in ("S0", "S1")]
    write_json(folder / "audit" / "audit.json", {"run": f"runs/{RUN}", "sites": sites})
    return ledger


@pytest.fixture(scope="module")
def signed(tmp_path_factory, federation):
    """(study of S0, its startup kit, the signed plan, its ledger), with releases and an audit."""
    folder = tmp_path_factory.mktemp("dossier")
    plan = made(larger_study(folder / "coordinator", n_sites=3, site_extra=REAL), folder)
    kit, study = federation.kit(folder / "kit", "S0", federation="trial"), hospital(folder, "S0")
    sign_plan(study, review_plan(study, plan, "S0"), Kit.open(kit).load_identity())
    return study, kit, plan, spend(study, plan)


@pytest.fixture(scope="module")
def dossier(signed, tmp_path_factory):
    study, kit, *_ = signed
    out = tmp_path_factory.mktemp("out") / "dossier.html"
    return make_dossier(study, site=None, kit=kit, out=out), out


def test_the_facts_equal_those_of_the_plan_the_ledger_and_the_audits(signed, dossier):
    _, _, plan, ledger = signed
    found, out = dossier
    assert json.loads(out.with_suffix(".json").read_text()) == found
    assert (found["site"], found["signed"], set(found["missing"])) == ("S0", ["S0"], {"S1", "S2"})
    assert found["plan_sha256"] == plan.digest and found["plan"] == parse_plan_document(plan)
    assert found["spent"] == pytest.approx(ledger.epsilon(lifetime=True))
    (account,) = found["accounts"]
    assert (account["plan"], account["guarantee"], account["unit"]) == (plan.digest, "guaranteed", "row")
    assert account["epsilon"] == pytest.approx(ledger.epsilon())
    assert [one["sha256"] for one in account["releases"]] == [one.split()[1] for one in ledger.list_releases()]
    assert [one["bytes"] for one in account["releases"]] == [1001, 1002, None]
    (audited,) = found["audits"]
    assert (audited["model"], audited["epsilon_lower"], audited["epsilon_upper"]) == ("proxy", 0.2, None)
    assert any("root CA's key" in one for one in found["not_protected"])
    assert all(part["gaps"] for part in found["assessment"]) and len(found["assessment"]) == 5


def test_the_page_is_self_contained_and_names_no_slide_or_patient(signed, dossier):
    html = dossier[1].read_text()
    document = Document(html)
    for _, attributes in document.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert attributes.get(name, "#").startswith("#"), attributes
    assert not {"script", "link", "iframe", "object", "base", "img"} & {tag for tag, _ in document.tags}
    assert not re.search(r"url\(\s*['\"]?(?!#)|@import|https?://", html)
    for file in (dossier[1], dossier[1].with_suffix(".json")):
        assert not re.search(r"S\d_(slide|patient)|none/\*\.tif|\.h5", file.read_text())
        assert str(signed[0].root) not in file.read_text()


def make(study, kit, tmp_path, **given):
    """Return the facts of a dossier and its page as readable text."""
    out = tmp_path / "d.html"
    found = make_dossier(study, **{"site": None, "kit": kit, "out": out, **given})
    return found, words_of(out.read_text())


@contextmanager
def hide_file(path):
    """Move a file away within the context."""
    away = path.rename(path.with_name("away"))
    yield
    away.rename(path)


def test_missing_facts_are_stated_and_names_cannot_break_the_page(signed, dossier, tmp_path):
    bare = {"accounts": [], "audits": [], "spent": None, "missing": None, "signed": []}
    html = _render_page(dossier[0] | bare | {"not_protected": ["<script>alert(1)</script>"]})
    assert "Nothing has left this site" in html and "No run of this study was audited" in html
    assert "known with --kit" in html and "<script>" not in html
    (tmp_path / "empty" / "sites").mkdir(parents=True)
    for study, site, words in (
        (signed[0], None, "of which hospital"),
        (signed[0], "S9", "S9 is not in this"),
        (Study(tmp_path / "empty"), "S0", "no plan lies here"),
    ):
        refused(partial(make, study, None, tmp_path, site=site), words)


def test_the_command_prints_the_json(signed, tmp_path, wsi_fl):
    study, kit, *_ = signed
    out = tmp_path / "page.html"
    done = wsi_fl("federation", "dossier", "--kit", kit, "--out", out, "--json", cwd=study.root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(out.with_suffix(".json").read_text())


def words_of(html):
    """Return the readable text of a page in one line."""
    text = re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)
    return " ".join(unescape(text).split())


def test_epsilon_per_row_is_shown_with_the_guarantee_of_a_patient(signed, dossier):
    found, page = dossier[0], words_of(dossier[1].read_text())
    worth = group_epsilon([ROUND] * 2, 1e-5, 12)
    assert worth == pytest.approx(60.9, abs=0.1)
    assert found["group"] == found["accounts"][0]["group"] == {"rows": 12, "epsilon": worth, "delta": 1e-5}
    assert "so far, per row 3.23" in page and "60.9 12 rows together" in page
    assert "all 12 rows of the patient with the most rows ε = 60.9" in page
    assert "With this plan on top, as it was signed 3.78 for the patient with the most rows 76.7" in page
    (said,) = [one for one in found["not_protected"] if "many records" in one]
    assert "all 12 rows of the patient with the most rows together have ε = 76.7" in said
    assert said in found["assessment"][2]["facts"]


def test_unknown_patient_guarantees_and_missing_audit_bounds_are_not_reported(signed, dossier, tmp_path):
    study, kit, *_ = signed
    with hide_file(study.root / "federation" / "cost-S0.json"):
        found, page = make(study, kit, tmp_path)
    assert (found["group"], found["cost"]) == (None, None)
    assert any("how much less is not known here" in one for one in found["not_protected"])
    assert "not known: it was signed without the store" in page
    assert any("their bounds are above" in one for one in dossier[0]["assessment"][3]["facts"])
    with hide_file(study.runs_path / RUN / "audit" / "audit.json"):
        facts = " ".join(make(study, kit, tmp_path)[0]["assessment"][3]["facts"])
    assert "bounds" not in facts and "No model of the site was audited" in facts


def with_a_plan(tmp_path, said):
    """A study with a plan that nobody has signed."""
    study = larger_study(tmp_path / "study", n_sites=3, site_extra=said)
    plan = made(study, tmp_path)
    plan_path(study).parent.mkdir()
    plan_path(study).write_text(plan.text)
    return study, plan


def test_the_assessment_names_exact_counts_and_the_drawing_cuts_no_text(tmp_path):
    study, _ = with_a_plan(tmp_path, f'{REAL}\nallow = ["scores"]')
    found, _ = make(study, None, tmp_path, site="S0")
    (said,) = [one for one in found["assessment"][0]["facts"] if "computed of records" in one]
    assert not any("class-means" in one for one in found["assessment"][0]["facts"])
    for row in found["plan"]["leaves"]:
        assert (row["what"] in said) == (not row["what"].startswith(("documents", "tallies"))), row["what"]
    drawing = words_of((tmp_path / "d.html").read_text().split("<svg")[1].split("</svg>")[0])
    assert "a site's last release once more, to be scored" in drawing
    assert "counts of test examples by score and class" in drawing and "private model" in drawing


def test_the_dossier_warns_of_a_ledger_that_approve_refuses(tmp_path):
    study, plan = with_a_plan(tmp_path, REAL)
    terms = PrivacyTerms(1e-5, max_epsilon=50.0, lifetime=True, guarantee="guaranteed")
    ledger = open_ledger(study, study.load_site("S0"), f"{RUN} {'a' * 32}", terms)
    for number in (1, 2, 3):
        ledger.record(number, ROUND)
    assert make(study, None, tmp_path, site="S0")[0]["warning"] == ""
    lines = study.ledger_path("S0").read_text().splitlines(keepends=True)
    study.ledger_path("S0").write_text("".join(lines[:1]))
    refused(lambda: review_plan(study, plan, "S0"), "ledgers/S0.jsonl", error=WsiFlError)
    found, page = make(study, None, tmp_path, site="S0")
    assert found["warning"].startswith("ledgers/S0.jsonl") and str(study.root) not in found["warning"]
    assert f"This ledger is invalid: {found['warning']}" in page


@pytest.mark.parametrize("unit", ["row", "patient"])
def test_the_coordinators_page_names_the_privacy_unit_of_epsilon(unit):
    row = {"site": "S0", "epsilon": 1.0, "rounds": 1, "guarantee": "guaranteed", "unit": unit}
    summary = {"run": f"runs/{RUN}", "method": "proxyfl", "seconds": 1.0, "lost": [], "losses": [], "sites": [row]}
    summary["communication"] = {"messages": 1, "bytes": 1, "seconds": 1.0}
    page = words_of(render_coordinator(summary, None))
    for known, words in (("row", "one training row"), ("patient", "all training rows of one patient")):
        assert (f"The privacy unit is {words}" in page) == (known == unit)


def test_a_leaving_hospital_gets_a_list_of_what_stays_with_others(signed, tmp_path):
    (study, _, plan, ledger), kit = signed, Kit.open(signed[1])
    study = Study(shutil.copytree(study.root, tmp_path / "study"))
    approval = approval_path(study, "S0")
    first = write_departure(study, kit, out=tmp_path / "leaving.json")
    assert approval.exists() and any(str(approval) in said for said in first["says"])
    again = partial(write_departure, study, kit, out=tmp_path / "leaving.json", delete_approval=True)
    with kit.lock_kit():
        refused(again, "end it first", error=WsiFlError)
    assert approval.exists()
    found = again()
    assert json.loads((tmp_path / "leaving.json").read_text()) == json.loads(json.dumps(found))
    assert not approval.exists()
    refused(lambda: load_approved_plan(study, kit.load_identity()), "has approved no plan")
    (run,) = found["runs"]
    assert run["plan"] == plan.digest and run["epsilon"] == pytest.approx(ledger.epsilon())
    assert run["releases"] == []  # noted, and never sent
    assert found["says"][0] == f"{RUN}: nothing has left"
    for words in ("no plan is signed here", "keep", "revoke S0"):
        assert any(words in said for said in found["says"])


def test_sent_models_are_listed_as_staying_with_the_other_sites_of_the_run(signed, tmp_path):
    study, kit, _, ledger = signed
    study = Study(shutil.copytree(study.root, tmp_path / "study"))
    copy = PrivacyLedger(study.ledger_path("S0"), site="S0", run=ledger.run, terms=ledger.terms)
    copy.record_transmission(3, ledger.list_releases()[-1].split()[1])
    (study.runs_path / RUN / "config.toml").write_text('sites = ["S0", "S1", "S2"]\n')
    manifest = {"id": "a" * 32, "config_sha256": "", "method": "proxyfl"}
    write_sealed(study.runs_path / RUN / "manifest.json", manifest)
    found = write_departure(study, Kit.open(kit), out=tmp_path / "leaving.json")
    (run,) = found["runs"]
    assert (run["method"], run["to"], len(run["releases"])) == ("proxyfl", ["S1", "S2"], 1)
    held = f"1 releases of S0 (scores; rounds 3 to 3; ε = {ledger.epsilon():.2f} per row)"
    assert found["says"][0].startswith(f"{RUN}: S1, S2 may hold {held}")


def answers(document, title):
    (sheet,) = [one for one in document["answers"] if one["title"].startswith(title)]
    return {row["asks"]: row for row in sheet["row"]}


def test_answers_to_forms_repeat_the_ledger_and_the_audits_and_claim_nothing_else(signed, dossier, tmp_path):
    study, kit, _, ledger = signed
    found, page = dossier[0], words_of(dossier[1].read_text())
    epsilon = f"{ledger.epsilon():.4g}"
    assert answers(found, "Entry")["ε"]["says"] == f"{epsilon} spent on everything so far; budget 50"
    assert f"has ε = {epsilon} of 50 at δ = 1e-05, per row (guaranteed)" in page
    asked = answers(found, "Is a model")
    (membership,) = [key for key in asked if "membership" in key]
    assert "AUROC of 0.51 " in asked[membership]["says"] and asked[membership]["complete"]
    for words in ("canaries", "inversion"):  # the audit has no upper end, and there is no such attack
        assert not next(row for key, row in asked.items() if words in key)["complete"]
    assert not answers(found, "European")["Article 68, data permit"]["complete"]
    rows = [row for sheet in found["answers"] for row in sheet["row"]]
    assert len(rows) == 50
    assert all(row["says"] and "{" not in row["says"] and "= None" not in row["says"] for row in rows)
    with hide_file(study.runs_path / RUN / "audit" / "audit.json"):
        assert not answers(make(study, kit, tmp_path)[0], "Is a model")[membership]["complete"]


def test_an_epsilon_that_is_nominal_is_not_called_a_guarantee(dossier):
    assert "every attack" in str(answer_sheets(dossier[0]))
    accounts = [account | {"guarantee": "nominal"} for account in dossier[0]["accounts"]]
    sheets = answer_sheets(dossier[0] | {"accounts": accounts})
    assert answers({"answers": sheets}, "Entry")["Guarantee"]["says"] == "nominal" and "every attack" not in str(sheets)


def keys_and_values(document):
    """Every (key, value) of a document, at any depth."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield key, value
        if isinstance(value, dict | list):
            yield from keys_and_values(value)


def test_a_dossier_for_others_holds_nothing_of_single_patients_unreleased_models_or_paths(
    signed, tmp_path, monkeypatch
):
    study, kit, *_ = signed
    file, home = study.runs_path / RUN / "audit" / "audit.json", tmp_path / "home"
    document, before = json.loads(file.read_text()), file.read_text()
    stayed = {"model": "private", "membership": {"own": {"auroc": 0.987, "interval": [0.98, 0.99]}}, "canaries": None}
    for row in document["sites"]:
        row["models"].append(stayed)
    file.write_text(json.dumps(document))
    shared = Path(shutil.copytree(kit, tmp_path / "kit")) / "federation.json"
    shared.write_text(json.dumps(json.loads(shared.read_text()) | {"folder": str(home / "share")}))
    try:
        own, _ = make(study, kit, tmp_path)
        found, page = make(study, shared.parent, tmp_path, for_others=True)
        loaded = page_module._load_ledger
        damaged = f"{home}/ledger.jsonl: another than {home}/x knows"
        monkeypatch.setattr(page_module, "_load_ledger", lambda *given: (loaded(*given)[0], damaged))
        warned, warned_page = make(study, shared.parent, tmp_path, for_others=True)
    finally:
        file.write_text(before)
    assert own["group"]["rows"] == 12 and [one["auroc"] for one in own["audits"]] == [0.51, 0.987]
    told = [value for key, value in keys_and_values(found) if key in ("group", "lifetime_group", "rows", "cost")]
    assert told and set(map(str, told)) == {"None"}
    assert [(one["model"], one["auroc"]) for one in found["audits"]] == [("proxy", 0.51)]
    for text in (page, json.dumps(found), warned_page, json.dumps(warned)):
        for word in ("0.987", "12 rows", "76.7", str(home), str(study.root), str(tmp_path), "/share"):
            assert word not in text, word


def account_of(study, run, document):
    path = study.runs_path / run / "sites" / "S0" / "ledger.json"
    path.parent.mkdir(parents=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))


def test_the_largest_patient_counts_over_all_runs_and_signatures(tmp_path):
    study, money = Study(tmp_path), {"epsilon": 1, "delta": 1e-5, "guarantee": "guaranteed", "unit": "row"}
    assert _largest_patient_rows(study, "S0", None) is None
    account_of(study, "00001-proxyfl-small", money | {"group": {"rows": 7}})
    account_of(study, "00002-proxyfl-small", money | {"group": None})
    (study.runs_path / "notes.txt").touch()
    assert _largest_patient_rows(study, "S0", None) == 7
    assert _largest_patient_rows(study, "S0", {"group": {"rows": 9}}) == 9
    assert _largest_patient_rows(study, "S1", {"group": None}) is None


@pytest.mark.parametrize("document", ["[]", '{"epsilon": 1', "{}", '{"epsilon": 1, "delta": 1}', "\0\0"])
def test_a_damaged_account_of_a_run_is_refused_by_name(tmp_path, document):
    study = Study(tmp_path)
    account_of(study, "00003-fml-small", document)
    words = "00003-fml-small/sites/S0/ledger.json", "--resume"
    refused(lambda: _largest_patient_rows(study, "S0", None), *words, error=WsiFlError)
