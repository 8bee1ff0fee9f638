"""The page of the ledger's format is enough for another implementation, which agrees with wsi-fl on every ledger."""

import ast
import importlib.util
import json
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wsi_fl.__main__ import main
from wsi_fl.cli.main import app
from wsi_fl.stages.site.ledger_report import summarize_ledger
from wsi_fl.types import WsiFlError

ROOT = Path(__file__).parents[2]
VECTORS, VERIFIER = ROOT / "tests" / "fixtures" / "ledger-v1", ROOT / "docs" / "examples" / "verify_ledger.py"
EXPECTED = json.loads((VECTORS / "expected.json").read_text())


@pytest.fixture(scope="module")
def verifier():
    spec = importlib.util.spec_from_file_location("verify_ledger", VERIFIER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files_of(name):
    head = VECTORS / f"{name}.head.json"
    return VECTORS / f"{name}.jsonl", [head] if head.exists() else []


@pytest.mark.parametrize("name", [name for name, row in EXPECTED.items() if "tampering" not in row])
def test_both_verifiers_find_the_spending_of_a_ledger(name, verifier):
    path, heads = files_of(name)
    own, (epsilon, delta) = summarize_ledger(path, heads), verifier.spend(verifier.read(path, heads))
    assert own["delta"] == delta == EXPECTED[name]["delta"]
    truth = EXPECTED[name]["epsilon"]
    assert [own["epsilon"], epsilon] == [None, None] if truth is None else [pytest.approx(truth, rel=1e-6)] * 2


@pytest.mark.parametrize("name", [name for name, row in EXPECTED.items() if "tampering" in row])
def test_both_verifiers_refuse_a_ledger_that_was_tampered_with(name, verifier):
    path, heads = files_of(name)
    with pytest.raises(WsiFlError):
        summarize_ledger(path, heads)
    with pytest.raises(ValueError, match=r"a line breaks|not the ledger"):
        verifier.read(path, heads)


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line[:-1] + b', "sending": true}',
        lambda line: line[:-1] + b', "relayed": "' + b"0" * 64 + b'"}',
        lambda line: line[:-1] + b', "run": "twice"}',
    ],
    ids=["a departure that costs", "a mixture that costs", "a key twice"],
)
def test_both_verifiers_refuse_lines_by_which_spending_could_be_hidden(tmp_path, verifier, change):
    first = (VECTORS / "01-three-rounds.jsonl").read_bytes().split(b"\n")[0]
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(first + b"\n")
    assert summarize_ledger(path)["epsilon"] == pytest.approx(verifier.spend(verifier.read(path))[0])
    path.write_bytes(change(first) + b"\n")
    with pytest.raises(WsiFlError):
        summarize_ledger(path)
    with pytest.raises(ValueError, match="a line breaks"):
        verifier.read(path)


def test_there_are_twenty_ledgers_half_of_them_tampered_with():
    assert sorted(path.stem for path in VECTORS.glob("*.jsonl")) == sorted(EXPECTED)
    assert [sum(key in row for row in EXPECTED.values()) for key in ("epsilon", "tampering")] == [10, 10]


def test_the_verifier_has_some_fifty_lines_and_nothing_of_wsi_fl():
    text = VERIFIER.read_text()
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert sum(node.end_lineno - node.lineno + 1 for node in functions) <= 55
    assert "wsi_fl" not in text


def test_the_commands_show_and_verify_a_ledger(capsys, monkeypatch):
    path, tampered = VECTORS / "02-two-jobs.jsonl", VECTORS / "11-changed-number.jsonl"
    said = CliRunner().invoke(app, ["ledger", "show", str(path), "--json"])
    document = json.loads(said.stdout)
    assert [(run["run"], run["rounds"]) for run in document["runs"]] == [("job-a", 2), ("job-b", 2)]
    assert (document["lines"], document["unit"], document["guarantee"]) == (8, "site", "guaranteed")
    assert document["sha256"] == sha256(path.read_bytes()).hexdigest()
    for command, file, code in (("verify", path, 0), ("verify", tampered, 1), ("show", VECTORS / "none.jsonl", 2)):
        monkeypatch.setattr("sys.argv", ["wsi-fl", "ledger", command, str(file)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        lines = [line for line in capsys.readouterr().err.splitlines() if line]
        assert ("each fits those before it" in lines[0]) if code == 0 else (len(lines) == 1 and str(file) in lines[0])
