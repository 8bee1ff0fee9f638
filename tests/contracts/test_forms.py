"""The evidence of a hospital: every figure is its own, what is not known is not claimed, and the folder is signed."""

import json
import shutil

import pytest
from conftest import refused
from test_dossier import RUN, own_state, signed, words_of
from typer.testing import CliRunner

from wsi_fl.cli.main import app
from wsi_fl.hospitals.dossier import evidence as writing
from wsi_fl.hospitals.dossier.evidence import make_evidence, verify_evidence
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.system.files import write_json

__all__ = ["own_state", "signed"]


@pytest.fixture(scope="module")
def made(signed, tmp_path_factory):
    """(document, folder) of a hospital with releases and an audit; no tool is asked."""
    study, kit, *_ = signed
    out = tmp_path_factory.mktemp("evidence") / "evidence"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "find_spec", lambda _: None)
        return make_evidence(study, Kit.open(kit), out), out


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made[1], tmp_path / "copy")


def root_of(signed):
    return Kit.open(signed[1]).identity().root


def answers(document, title):
    (sheet,) = [one for one in document["sheets"] if one["title"].startswith(title)]
    return {row["asks"]: row for row in sheet["row"]}


def test_epsilon_of_the_page_is_the_ledgers(signed, made):
    document, out = made
    epsilon = f"{signed[3].epsilon():.4g}"
    assert answers(document, "Entry")["ε"]["says"] == f"{epsilon} spent on everything so far; budget 50"
    page = words_of((out / "index.html").read_text())
    assert f"has ε = {epsilon} of 50 at δ = 1e-05, per row (guaranteed)" in page
    assert json.loads((out / "evidence.json").read_text()) == document


def test_figures_of_audits_are_those_of_the_audit_and_nothing_else_is_claimed(
    signed, made, tmp_path, monkeypatch
):
    asked = answers(made[0], "Is a model")
    (membership,) = [row for key, row in asked.items() if "membership" in key]
    assert "AUROC of 0.51 " in membership["says"] and membership["shown"]
    for words in ("canaries", "inversion"):  # the audit has no upper end, and there is no such attack
        assert not next(row for key, row in asked.items() if words in key)["shown"]
    assert not answers(made[0], "European")["Article 68, data permit"]["shown"]
    study, kit, *_ = signed
    audit = study.runs / RUN / "audit" / "audit.json"
    monkeypatch.setattr(writing, "find_spec", lambda _: None)
    audit.rename(tmp_path / "audit.json")
    try:
        document = make_evidence(study, Kit.open(kit), tmp_path / "bare")
    finally:
        (tmp_path / "audit.json").rename(audit)
    assert not next(row for key, row in answers(document, "Is a model").items() if "membership" in key)[
        "shown"
    ]


def test_every_place_of_a_sheet_is_a_fact_and_tools_that_are_missing_are_named(made):
    rows = [row for sheet in made[0]["sheets"] for row in sheet["row"]]
    assert len(rows) == sum(len(one["row"]) for one in writing._SHEETS) > 45
    assert all("{" not in row["says"] and "= None" not in row["says"] for row in rows)
    assert all(row["says"] for row in rows), "what is not shown says why"
    assert "pip install pip-audit" in made[0]["vulnerabilities"]
    assert "python -m cyclonedx_py environment --of JSON -o sbom.json" in made[0]["sbom"]


def test_an_epsilon_that_is_nominal_is_not_called_a_guarantee(signed, tmp_path):
    study, kit, *_ = signed
    from wsi_fl.hospitals.dossier.page import make_dossier

    found = make_dossier(study, site=None, kit=kit, out=tmp_path / "d.html")
    assert "every attack" in writing._facts(found)["worth"]
    accounts = [account | {"guarantee": "nominal"} for account in found["accounts"]]
    told = writing._facts(found | {"accounts": accounts})
    assert (told["guarantee"], "every attack" in told["worth"]) == ("nominal", False)


def test_a_tool_that_fails_is_told_in_its_own_words(tmp_path):
    said = writing._tool("json.tool", "a-tool", [], tmp_path / "file.json")
    assert said.startswith("not made; a-tool failed: ") and "file.json" in said


def test_a_folder_as_it_was_signed_is_verified(signed, made):
    found = verify_evidence(made[1], root_of(signed))
    assert (found["site"], found["organization"]) == ("S0", "org")
    assert set(found["files"]) == {"index.html", "evidence.json", "dossier.html", "dossier.json"}


def edited(folder):
    file = folder / "index.html"
    file.write_text(file.read_text().replace("50", "51", 1))


def of_another_site(folder):
    said = json.loads((folder / "evidence.sig.json").read_text())
    (folder / "evidence.sig.json").write_text(json.dumps(said | {"site": "S1"}))


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (edited, "index.html is not as S0 signed it"),
        (lambda folder: (folder / "more.txt").write_text("x"), "more.txt is not as"),
        (lambda folder: write_json(folder / "a" / "evidence.sig.json", {}), "a/evidence.sig.json is not as"),
        (lambda folder: (folder / "dossier.html").unlink(), "dossier.html is not as"),
        (of_another_site, "was not signed by it"),
        (lambda folder: (folder / "evidence.sig.json").write_text("{}"), "it is incomplete"),
    ],
)
def test_a_folder_that_was_touched_is_refused(signed, copy, harm, word):
    harm(copy)
    refused(lambda: verify_evidence(copy, root_of(signed)), word)


def test_a_folder_of_another_federation_is_refused(copy):
    from test_plan import Root

    refused(lambda: verify_evidence(copy, Root().root), "does not belong to this federation")


def test_the_command_writes_and_verifies(signed, made, tmp_path, monkeypatch):
    study, kit, *_ = signed
    monkeypatch.setattr(writing, "find_spec", lambda _: None)
    out = tmp_path / "evidence"
    given = ["federation", "evidence", "--kit", str(kit), "--study", str(study.root), "--out", str(out)]
    done = CliRunner().invoke(app, given)
    assert (done.exit_code, done.stdout) == (0, f"{out / 'index.html'}\n"), done.output
    done = CliRunner().invoke(app, [*given[:4], "--verify", str(out)])
    assert done.exit_code == 0 and "is as S0 (org) signed it" in done.stdout
    refused(lambda: make_evidence(study, Kit.open(kit), out), "it holds something already")
