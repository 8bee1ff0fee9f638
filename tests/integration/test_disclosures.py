"""Tests that plans, dossiers and pages derive the disclosures of a method from its row in one table."""

import re
from pathlib import Path

import pytest
from conftest import REAL, make_study, refused
from file_changes import edit, site_file

from wsi_fl.federation.methods import COMMON_WITH_DP, METHODS, Disclosure, Method, step_private
from wsi_fl.federation.topology import TOPOLOGIES
from wsi_fl.hospitals.dossier.dossier_page import _describe_risks
from wsi_fl.hospitals.plans.build_plan import make_plan, parse_plan_document
from wsi_fl.hospitals.plans.disclosures import PLAN_TEXTS
from wsi_fl.report import formatting
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import train

PACKAGE = Path(__file__).parents[2] / "wsi_fl"


def method_of(name, does, *shares):
    return Method(name, does, COMMON_WITH_DP, step_private, disclosures=shares)


GOSSIP = method_of("Gossip", "models are whispered on", Disclosure("model", "random"))
TWO = ("sites=['S0', 'S1']", "train.rounds=2", "model.private=mlp")


@pytest.fixture
def gossip(monkeypatch):
    monkeypatch.setitem(METHODS.builtin, "gossip", GOSSIP)


@pytest.fixture
def real_study(tmp_path):
    """A study of two real hospitals."""
    return make_study(tmp_path / "study", n_sites=2, site_extra=REAL)


def test_a_new_method_is_a_row_and_nothing_else(gossip, pair):
    cost = dry_run(pair, method="gossip", overrides=TWO, backend="local")
    summary = train(pair, method="gossip", overrides=TWO, backend="local")
    assert [row["epsilon"] for row in cost["sites"]] == [row["epsilon"] for row in summary["sites"]]
    assert summary["communication"]["messages"] == 2 * 2  # each site sends one model in each round
    released = "".join(pair.ledger_path(site).read_text() for site in ("S0", "S1"))
    assert released.count('"released": "model ') == 4
    assert formatting.method_does("gossip") == GOSSIP.summary
    assert "trained together with Gossip" in write_report(pair, summary["run"]).read_text()


def test_the_plan_and_the_dossier_list_the_shares_of_a_new_method(gossip, real_study, tmp_path):
    assert PLAN_TEXTS["to"].keys() >= TOPOLOGIES.keys()  # a plan has words for every graph
    said = parse_plan_document(make_plan(real_study, method="gossip", overrides=TWO, out=tmp_path / "plan.json"))
    model, *documents = said["leaves"]
    assert said["does"] == "Gossip: models are whispered on."
    assert (model["what"], model["times"]) == ("central model (mlp)", 2)
    assert model["to"] == "the next site in an order drawn again in each round"
    assert model["protected_by"].startswith("differential privacy per row, guaranteed")
    assert not any(row["large"] for row in documents)
    facts = _describe_risks(said, real_study.load_site("S0"), None, None, audited=False, for_others=False)[
        "assessment"
    ][0]["facts"]
    assert any(model["what"] in fact and model["protected_by"] in fact for fact in facts)
    bare = (*TWO, "privacy.enabled=false")
    refused(
        lambda: make_plan(real_study, method="gossip", overrides=bare, out=tmp_path / "bare.json"),
        'sites/S0.toml: a model without differential privacy may not leave this site; add allow = ["model"]',
    )


def test_a_share_without_privacy_needs_its_name_in_every_site_file(monkeypatch, real_study, tmp_path):
    bare = method_of("Bare", "models go round", Disclosure("model", "ring", protection="leave"))
    monkeypatch.setitem(METHODS.builtin, "bare", bare)

    def plan(*overrides):
        return make_plan(real_study, method="bare", overrides=(*TWO, *overrides), out=tmp_path / "plan.json")

    refused(plan, "bare lets models leave without differential privacy", "privacy.enabled=false")
    refused(lambda: plan("privacy.enabled=false"), "sites/S0.toml", 'add allow = ["model"] there')
    for name in ("S0", "S1"):
        edit(site_file(real_study, name), more='allow = ["model"]\n')
    row = parse_plan_document(plan("privacy.enabled=false"))["leaves"][0]
    assert row["protected_by"] == 'no differential privacy; the site allows it by name (allow = ["model"])'


def table():
    """Render the table of releases by method in docs/explanation/privacy.md."""
    things = {"sums": "class statistics", "buffer": "synthetic samples", "generator": "its generator"}
    when = {"rounds": "every round", "once": "once"}
    when |= {"before": "once, before the first round", "after": "once, after the last round"}
    for name, row in METHODS.items():
        if row.learns_from == "everybody":
            yield f'| `{name}` | all training data | | once | `allow = ["patches"]` alone |'
        elif not row.disclosures:
            yield f"| `{name}` | nothing | | | |"
        for share in row.disclosures:
            thing = things.get(share.kind, "its proxy" if share.role == "proxy" else "its model")
            allow = f'`allow = ["{share.content}"]`'
            guard = f"{allow} alone" if share.protection == "leave" else f"ε, or {allow} without noise"
            yield f"| `{name}` | {thing} | {share.route} | {when[share.timing]} | {guard} |"


def test_the_page_on_privacy_has_the_table_of_shares():
    page = (PACKAGE.parent / "docs" / "explanation" / "privacy.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in table() if line not in page] == []


@pytest.mark.parametrize("name", ["fedavg", "avgpush", "cwt", "fml", "proxyfl"])
def test_no_other_file_refers_to_a_method_by_name(name):
    """Demos and benchmarks choose a method; all other code reads its row."""
    known = re.compile(rf"""["']{name}["']""")
    files = [path for path in PACKAGE.rglob("*.py") if known.search(path.read_text("utf-8"))]
    places = ("demo/run", "evidence/bench", "federation/methods", "hospitals/demo", "synthesis/stages/baselines")
    assert {path.relative_to(PACKAGE).as_posix() for path in files} <= {f"{place}.py" for place in places}
