"""Tests that the documentation names existing commands, keys and links and has a current configuration reference."""

import json
import re
import shlex
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from conftest import make_study, refused
from typer.testing import CliRunner

from wsi_fl import __version__
from wsi_fl.__main__ import main
from wsi_fl.cli.main import app
from wsi_fl.hospitals.plans.build_plan import PlanDocument
from wsi_fl.models.cnn import IMAGE_BUILDERS
from wsi_fl.models.mil import BAG_BUILDERS, VECTOR_BUILDERS
from wsi_fl.models.presets import PRESETS
from wsi_fl.stages.prepare.check_stores import _CheckDocument, _SiteCheck
from wsi_fl.stages.prepare.init_study import _InitDocument
from wsi_fl.stages.prepare.slide_lists import BagsDocument, BagsRow
from wsi_fl.stages.site.ledger_report import LedgerSpending, RunSpending
from wsi_fl.stages.training.plan_dry_run import PlanDryRun
from wsi_fl.stages.training.run_cost import _RunCost, _SiteCost
from wsi_fl.stages.training.summary import Summary, SummaryRow
from wsi_fl.stages.training.train import SeriesSummary
from wsi_fl.study.folder import Study, find_shipped_folder
from wsi_fl.study.pipeline import pipeline_model
from wsi_fl.study.reference import find_keys, render_reference_page
from wsi_fl.study.renamed import RENAMED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "AGENTS", "SECURITY")]
PAGES += [page for page in sorted((ROOT / "docs").rglob("[!_]*.md")) if "_build" not in page.parts]
PAGES += sorted((ROOT / "studies").glob("*.md"))
FILES = ("csv", "onnx", "json", "jsonl", "toml", "py", "h5", "png", "tif", "html", "safetensors", "head")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("docs") / "study", n_sites=2)


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_configuration_reference_is_current():
    assert text_of("docs/reference/configuration.md") == render_reference_page(), "run `make docs`"


def test_every_key_has_a_description_and_a_type():
    rows = find_keys()
    assert len(rows) == len({row["key"] for row in rows}) > 100
    for row in rows:
        assert re.match(r"[A-Z].{10,}\.$", row["meaning"]), row
        assert row["type"], row


def test_config_explains_a_key_a_section_and_all():
    explained = CliRunner().invoke(app, ["config", "privacy.mode"]).stdout
    assert explained.startswith('privacy.mode: paper or strict; default: "strict"\n    Guarantee level of ε.')
    found = {prefix: [row["key"] for row in find_keys(prefix)] for prefix in ("topology", "site.real", "predict.model")}
    assert found == {
        "topology": ["topology.graph", "topology.self_weight", "topology.weights"],
        "site.real": ["site.real"],
        "predict.model": ["predict.model"],
    }
    every = json.loads(CliRunner().invoke(app, ["config", "--json"]).stdout)
    assert [row["key"] for row in every["keys"]] == [row["key"] for row in find_keys()]
    rounds = find_keys("train.rounds")[0]
    assert (rounds["type"], rounds["default"]) == ("integer ≥ 1, ≤ 1000000", 30)
    refused(lambda: find_keys("train.roundes"), "unknown key 'train.roundes'", "did you mean 'train.rounds'?")
    refused(lambda: find_keys("trian"), "did you mean 'train'?")


def test_machine_readable_files_name_existing_things():
    made = re.findall(r"\]\((\S+)\.html\)", text_of("docs/llms.txt"))
    assert len(made) >= 20
    for name in made:
        assert (ROOT / "docs" / f"{name}.md").is_file(), name
    assert f"version: {__version__}\n" in text_of("CITATION.cff")
    goals = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    for page_ in ("README.md", "CONTRIBUTING.md", "AGENTS.md"):
        said = re.findall(r"`make ([a-z-]+)`|^    make ([a-z-]+)", text_of(page_), re.MULTILINE)
        assert said and {max(pair) for pair in said} <= goals, page_


def test_links_and_named_keys_exist():
    known, sections, wrong = {row["key"] for row in find_keys()}, set(pipeline_model().model_fields), []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        wrong += [
            (path.name, link) for link in links if not link.startswith("http") and not (path.parent / link).exists()
        ]
        named = re.findall(r"(?:`|--set )([a-z]+)\.([a-z_0-9]+)", text)
        keys_named = [f"{section}.{key}" for section, key in named if section in sections and key not in FILES]
        wrong += [(path.name, key) for key in keys_named if key not in known]
    assert len(PAGES) > 40 and not wrong, wrong


def test_every_command_and_pipeline_is_described():
    program, described = typer.main.get_command(app), text_of("docs/reference/commands.md")
    commands = {name: program.get_command(None, name) for name in program.list_commands(None)}
    visible = [name for name, command in commands.items() if not command.hidden]
    between = [f"federation {name}" for name in commands["federation"].commands]
    assert {"synthesize", "view"} < set(visible)
    assert [name for name in (*visible, *between) if f"`wsi-fl {name}" not in described] == []
    assert [p.stem for p in find_shipped_folder("pipelines").glob("*.toml") if f"`{p.stem}`" not in described] == []


def test_the_pipelines_of_the_hospital_pages_guarantee_epsilon_per_patient(tmp_path):
    text = text_of("docs/tutorials/hospitals.md") + text_of("docs/how-to/operate-federation.md")
    named = {*re.findall(r"--pipeline (\w+)", text), "hospitals"}
    assert "camelyon17_hospitals" in named
    for name in named:
        pipeline = Study(tmp_path).load_pipeline(name)
        assert (pipeline.privacy.unit, pipeline.privacy.mode) == ("patient", "strict"), name
        assert pipeline.privacy.target_epsilon is not None, name  # 32 patients are more than many have


def test_the_readme_is_a_first_page():
    assert len(text_of("README.md").splitlines()) <= 110


def test_the_readme_counts_the_encoders_without_their_other_crops():
    encoders = [name for name in PRESETS if not name.endswith("cropped")]
    assert f"[{len(encoders)} pathology encoders]" in text_of("README.md")


def test_help_and_the_page_of_commands_have_the_same_groups():
    sections = re.split(r"^## ", text_of("docs/reference/commands.md"), flags=re.M)[1:-2]
    of_page = {part.split("\n", 1)[0]: {*re.findall(r"^\| `wsi-fl ([a-z-]+)", part, flags=re.M)} for part in sections}
    program = typer.main.get_command(app)
    groups = program.list_groups()
    assert groups["Start"][:2] == ["demo", "doctor"]
    assert of_page == {title: {*names} for title, names in groups.items()}
    shown = CliRunner().invoke(app, ["--help"]).stdout
    of_help = {part.split(":", 1)[0]: part for part in re.split(r"^(?=\S+.*:$)", shown, flags=re.M)}
    for title, names in groups.items():
        visible = [name for name in names if not program.get_command(None, name).hidden]
        assert re.findall(r"^  ([a-z-]+) ", of_help[title], flags=re.M) == visible


def list_commands(text):
    """Return the command lines of a page as words, from code blocks and from backticks."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^(?:    |\*/\d+ .*?)?((?:[^|`\n]*&& )?wsi-fl .+)$", text, re.MULTILINE)
    for line in (*blocks, *re.findall(r"`(wsi-fl [^`]+)`", text)):
        words = shlex.split(re.sub(r"\d?>>? \S+|[\[\]…](?=[^'\"]*$)", "", line), comments=True)
        for part in " ".join(map(shlex.quote, words)).split("'&&'"):
            command = shlex.split(part)
            if command[:1] == ["wsi-fl"] and not command[1].isupper() and command[1] not in OTHER_WORDS:
                yield command[1:]


UsageError = typer.BadParameter.__mro__[1]
"""Click's, of the copy that Typer uses."""
COMMAND_PAGES = [ROOT / "README.md", *(page for page in PAGES if (ROOT / "docs") in page.parents)]
OTHER_WORDS = ("greet", "installs")
"""The command of the example of a plugin, and a sentence that begins with wsi-fl."""


def parse_command(program, words):
    """Parse a command line without its values; raise UsageError for an unknown command or option."""
    command, context = program, typer.Context(program, info_name="wsi-fl")
    while hasattr(command, "get_command") and words and not words[0].startswith("-"):
        name, *words = words
        if (command := command.get_command(context, name)) is None:
            raise typer.BadParameter(f"no command {name}")
        context = typer.Context(command, info_name=name, parent=context)
    options, rest, _ = command.make_parser(context).parse_args(list(words))
    if rest:
        raise typer.BadParameter(f"{rest} is too much")
    return options


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_parses_and_its_keys_exist(page):
    program, known, wrong = typer.main.get_command(app), {row["key"] for row in find_keys()}, []
    for words in list_commands(page.read_text(encoding="utf-8")):
        try:
            options = parse_command(program, words)
        except UsageError as error:
            wrong.append((" ".join(words), error.format_message()))
            continue
        given = [key for keys in options.values() if isinstance(keys, list) for key in keys if "=" in str(key)]
        keys = {pair.partition("=")[0] for pair in given} - {"KEY"}
        wrong += [(" ".join(words), key) for key in keys - known if "." in key]
    assert not wrong, wrong


def test_the_parser_of_pages_finds_commands_and_refuses_what_does_not_exist():
    text = "    cd a && wsi-fl tile --all \\\n        --set 'tile.qc=[\"pen\"]' && wsi-fl check --all  # read\n"
    assert [*list_commands(text)] == [["tile", "--all", "--set", 'tile.qc=["pen"]'], ["check", "--all"]]
    assert sum(len([*list_commands(page.read_text(encoding="utf-8"))]) for page in COMMAND_PAGES) > 150
    program = typer.main.get_command(app)
    for line in ("tiles --all", "tile --every", "pack A B C", "tile --site"):
        with pytest.raises(UsageError):
            parse_command(program, line.split())


@pytest.mark.parametrize(
    ("commands", "kinds"),
    [
        ("`init`", (_InitDocument,)),
        ("`mosaic`, `features`, `import`", (BagsRow, BagsDocument)),
        ("`check`", (_SiteCheck, _CheckDocument)),
        ("`train`", (Summary, SummaryRow)),
        ("`train --seeds`, `--folds`, `--leave-site-out`", (SeriesSummary,)),
        ("`train --dry-run`", (_SiteCost, _RunCost)),
        ("`train --dry-run --plan`", (PlanDryRun,)),
        ("`federation plan` (the file of a plan)", (PlanDocument,)),
        ("`ledger show`, `ledger verify`", (LedgerSpending, RunSpending)),
    ],
)
def test_the_keys_of_json_documents_exist(commands, kinds):
    (row,) = [line for line in text_of("docs/reference/formats.md").splitlines() if line.startswith(f"| {commands} |")]
    assert {*re.findall(r"`(\w+)`", row.split("|")[2])} <= {key for kind in kinds for key in get_type_hints(kind)}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_refused_in_one_line_with_the_new_name(study, monkeypatch, capsys, old, new):
    table = text_of("CHANGELOG.md").partition("### Renamed before 1.0")[2].partition("\n### ")[0]
    assert old.removeprefix("wsi-fl ").split()[-1].strip("'-") in table
    assert new.removeprefix("wsi-fl ").split()[-1].strip("'-") in table
    words = old.split()[1:] if old.startswith("wsi-fl") else ["train", "--set", f"{old.replace(' ', '')}"]
    if not old.startswith("wsi-fl") and "=" not in old:
        words[-1] += "=1"
    monkeypatch.chdir(study.root)
    monkeypatch.setattr("sys.argv", ["wsi-fl", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert ended.value.code == 2 and len(said) == 1 and f"{old} was renamed: use {new}" in said[0]


def test_architectures_of_the_page_of_training_exist():
    section = text_of("docs/how-to/train.md").split("## Models\n")[1].split("### ")[0]
    named = {*re.findall(r"`([a-z_0-9]+)`", section)}
    assert {"resnet18", "linear_head", "abmil"} < named <= {*IMAGE_BUILDERS, *VECTOR_BUILDERS, *BAG_BUILDERS}


def test_defaults_that_pages_state_are_the_defaults():
    defaults = {row["key"]: row["default"] for row in find_keys()}
    stated = []
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text("utf-8") if path.name != "configuration.md" else ""
        stated += re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| `([^`]+)` \|", text, re.MULTILINE)
        stated += re.findall(r"`([a-z]+\.[a-z_]+)` \((\d+)[^)]*by default\)", text)
        stated += re.findall(r"`([a-z]+\.[a-z_]+) = \"(\w+)\"`, the default", text)
    wrong = [(key, value) for key, value in stated if str(defaults[key]).lower().removesuffix(".0") != value.lower()]
    assert len(stated) >= 5 and not wrong, (stated, wrong)
