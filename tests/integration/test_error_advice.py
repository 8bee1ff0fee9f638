"""Tests of advice in messages, of progress lines and of `doctor`."""

import ast
import errno
import json
import os
import re
import shlex
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import typer
from conftest import make_study, refused, write_features
from file_changes import edit, site_file
from rich.console import Console
from test_documentation import UsageError, parse_command
from test_oneshot import HEADS, rows_of
from training_runs import run_of

from wsi_fl import types
from wsi_fl.cli.main import app
from wsi_fl.cli.options import announce_start
from wsi_fl.federation import loop
from wsi_fl.stages import doctor
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.runtime import console
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.train import resume_run
from wsi_fl.system.files import read_lines
from wsi_fl.types import WsiFlError

PACKAGE = Path(__file__).parents[2] / "wsi_fl"
ROOT = typer.main.get_command(app)
_COMMAND = re.compile(r"`(wsi-fl [^`]*)`|next: (wsi-fl [^;`]*)|\((wsi-fl [^)]*)\)")


def _texts(tree: ast.AST):
    """Return (line, text) of all strings of a module, with 1 for each inserted value."""
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(one) for node in joined for one in node.values}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [str(one.value) if isinstance(one, ast.Constant) else "1" for one in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@cache
def find_commands() -> list[tuple[str, str]]:
    """Return (place, command) of every command named in a text of the package."""
    found = {}
    sources = ((path, path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py")))
    for path, source in ((path, source) for path, source in sources if "wsi-fl" in source):
        for line, text in _texts(ast.parse(source)):
            for match in _COMMAND.finditer(" ".join(text.split())):
                command = next(filter(None, match.groups()))
                found[f"{path.relative_to(PACKAGE)} {command}"] = (f"{path.name}:{line}", command)
    for path in sorted(PACKAGE.rglob("*.j2")):
        text = re.sub(r"\{%.*?%\}", "", re.sub(r"\{\{.*?\}\}", "1", path.read_text("utf-8"), flags=re.DOTALL))
        for match in re.finditer(r"(?:<code>|`)(wsi-fl [a-z][^`<]*)", text):
            found[f"{path.relative_to(PACKAGE)} {match[1]}"] = (path.name, match[1])
    return list(found.values())


def parse_stated_command(command: str) -> None:
    """Require that the command and its options exist; required arguments may be missing."""
    words = shlex.split(command.partition(" | ")[0])[1:]
    words = ["1" if word == "N" else word for word in words if word not in ("&&", "…")]
    if words[0] not in ("1", "ARGUMENTS", "--help") and words[1:] != ["1"]:  # what the text inserts, or help
        parse_command(ROOT, words)


def test_every_command_that_a_message_names_can_be_given():
    wrong = []
    for place, command in find_commands():
        try:
            parse_stated_command(command)
        except UsageError as error:
            wrong.append(f"{place}: `{command}`: {error}")
    assert not wrong, "\n".join(wrong)


def test_commands_that_do_not_exist_are_noticed():
    assert len(find_commands()) > 40
    for command in ("wsi-fl tiles", "wsi-fl train --again", "wsi-fl federation start --stop X"):
        with pytest.raises(UsageError):
            parse_stated_command(command)


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (KeyboardInterrupt(), "wsi-fl: error: interrupted; continue with"),
        (OSError(errno.ENOSPC, "No space left on device"), "free some space and continue"),
    ],
)
def test_an_interrupted_local_run_names_the_command_that_resumes_it(pair, wsi_fl, monkeypatch, ended, words):
    """The command resumes the run: no round is repeated and no second run begins."""
    real, calls = loop._log_round, []

    def log(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise ended
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_log_round", log)
        done = wsi_fl("train", "--method", "proxyfl", "--backend", "local", cwd=pair.root)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and words in last
    command = re.search(r"`wsi-fl train --resume (\S+)`", last)
    summary = resume_run(pair, command[1], backend="local")
    assert [row["rounds"] for row in summary["sites"]] == [2, 2] and len(list(pair.runs_path.glob("0*"))) == 1
    lines = [line for line in read_lines(pair.ledger_path("S0")) if line.get("released")]
    assert {line["run"] for line in lines} == {lines[0]["run"]}


FAILURES = {
    "bad input": (types.UsageError("no such site"), 2, "no such site"),
    "a failure": (WsiFlError("no such run"), 1, "no such run"),
    "Ctrl-C": (KeyboardInterrupt(), 1, "interrupted; finished work is kept"),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device", "a.h5"), 1, "a.h5: No space left on device"),
    "no memory": (MemoryError("9 GB"), 1, "there is not enough memory (9 GB)"),
    "a fault of wsi-fl": (KeyError("x"), 1, "unexpected KeyError: 'x'; WSI_FL_TRACEBACK=1 shows where"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_one_line_and_its_exit_code_is_2_for_bad_input_alone(wsi_fl, tmp_path, monkeypatch, kind):
    error, code, words = FAILURES[kind]

    def fail(**_):
        raise error

    monkeypatch.setattr("wsi_fl.__main__.app", fail)
    monkeypatch.delenv("WSI_FL_TRACEBACK", raising=False)
    done = wsi_fl("doctor", cwd=tmp_path)
    assert done.returncode == code and done.stderr.startswith(f"wsi-fl: error: {words}")
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_long_commands_alone_print_a_first_line_before_heavy_imports(tmp_path, wsi_fl):
    code = (
        "import sys; sys.argv = ['wsi-fl', 'train']; import wsi_fl.__main__ as m\n"
        "import wsi_fl.stages.training.train, wsi_fl.stages.prepare.tile\n"
        "heavy = {'torch', 'opacus', 'scipy', 'skimage', 'sklearn', 'tifffile', 'monai'}\n"
        "try: m.main()\nexcept SystemExit: print(*heavy & {*sys.modules})\n"
        "import wsi_fl.stages.evaluation.write_report, wsi_fl.evidence.compare, wsi_fl.stages.prepare.check_stores\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("wsi-fl train: starting …\nwsi-fl: error:") and done.stdout == "\nFalse\n"
    assert "starting" not in wsi_fl("config", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ],
)
def test_only_the_first_rank_reports_its_start(monkeypatch, capsys, size, rank):
    command = announce_start(lambda: None, "train")
    for number, said in (("1", ""), ("0", "wsi-fl train: starting …\n")):
        monkeypatch.setenv(size, "2")
        monkeypatch.setenv(rank, number)
        command()
        assert capsys.readouterr().err == said


@pytest.fixture
def _eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")


@pytest.mark.usefixtures("_eight_cores")
def test_ranks_started_by_the_users_mpiexec_share_the_cores(monkeypatch, capsys):
    taken = []
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name, value in (("SIZE", "4"), ("LOCAL_SIZE", "4"), ("RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    launch.share_threads()
    assert taken == [2] and "each takes 2" in capsys.readouterr().err
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    launch.share_threads()
    assert taken == [2, 2] and not capsys.readouterr().err


def test_without_a_terminal_progress_is_printed_from_the_start(monkeypatch, capsys):
    monkeypatch.setattr(console, "_LINE_EVERY_S", 0.02)
    monkeypatch.setattr(console, "stderr", Console(stderr=True, force_terminal=False, soft_wrap=True))
    with console.ProgressBars("tile") as bars:
        time.sleep(0.1)
        bars.update("A", 1, 4, "finding tissue")
        time.sleep(0.1)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("tile: preparing, ") and said[-1].startswith("tile: 25%") and len(said) > 3
    time.sleep(0.05)
    assert not capsys.readouterr().err


def test_progress_over_successive_tasks_never_goes_back(capsys):
    bars, shown = console.ProgressBars("train"), []
    for before in range(3):
        one = console.NestedProgress(bars, before, 3)
        for done in (0, 1, 2):
            one.update("C1", done, 2)
            bars._starting_points["C1"] = 0, bars._start_time - 60
            shown.append(bars._format_progress())
    shares = [int(line.split()[1].rstrip("%,")) for line in shown]
    assert shares == sorted(shares) == [0, 17, 33, 33, 50, 67, 67, 83, 100]
    assert "about 0 s left" not in " ".join(shown[2:]) and shown[-1] == "train: 100%, finishing"


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["--nothing"], 2)])
def test_a_process_ends_with_its_code_and_exit_functions_but_does_not_free_its_modules(tmp_path, arguments, code):
    program = (
        "import atexit, sys, wsi_fl.__main__ as m\n"
        "class Kept:\n    def __del__(self): print('freed', flush=True)\n"
        "m.kept = Kept()\natexit.register(print, 'exit function')\nm.run_program()"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code and done.stdout.endswith("exit function\n") and "freed" not in done.stdout


def test_local_ranks_do_not_search_for_network_cards_unless_asked_to(monkeypatch):
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    assert launch.rank_environment(2)["OMPI_MCA_btl"] == "^ofi"
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    assert launch.rank_environment(2)["OMPI_MCA_btl"] == "tcp,self"


@pytest.mark.usefixtures("_eight_cores")
def test_threads_beyond_the_cores_are_capped_in_one_line(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8,2")
    assert launch.rank_environment(4)["OMP_NUM_THREADS"] == "2"
    assert launch.describe_threads(4) == "OMP_NUM_THREADS = 8 in 4 ranks is more than 8 cores: each takes 2"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launch.rank_environment(4)["OMP_NUM_THREADS"] == "2" and not launch.describe_threads(4)


def test_doctor_checks_every_requirement(wsi_fl, tmp_path):
    document = json.loads(wsi_fl("doctor", "--json", cwd=tmp_path).stdout)
    names = [row["name"] for row in document["checks"]]
    assert names == ["Python", "OpenSlide", "PyTorch", "extras", "MPI", "cluster", "GPU", "disk"]
    assert all(row["said"] for row in document["checks"])
    assert document["ok"] == all(row["ok"] for row in document["checks"])
    assert all(row["ok"] for row in document["checks"] if row["name"] != "disk"), document


def test_a_gpu_that_a_pytorch_for_processors_alone_cannot_use_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor._check_gpu().startswith("none")
    monkeypatch.setattr(doctor, "_GPU_DEVICE", tmp_path)
    refused(doctor._check_gpu, "for processors alone", "--force-reinstall", error=WsiFlError)


@pytest.mark.parametrize("problem", [WsiFlError("no slide can be read"), ImportError("no module\nof that name")])
def test_a_failed_check_of_doctor_is_one_line_and_the_others_still_run(monkeypatch, problem):
    def broken():
        raise problem

    monkeypatch.setattr(doctor, "_check_openslide", broken)
    document = doctor.check_installation()
    failed = [row for row in document["checks"] if not row["ok"] and row["name"] != "disk"]
    assert not document["ok"] and [row["name"] for row in failed] == ["OpenSlide"]
    assert failed[0]["said"].startswith(" ".join(str(problem).split()))
    assert "\n" not in failed[0]["said"]


@pytest.mark.parametrize(("slides", "command"), [('slides = "none/*.tif"\n', "tile"), ("", "import")])
def test_a_study_without_test_patients_is_told_which_command_holds_some_out(tmp_path, slides, command):
    study = make_study(tmp_path / "study", n_sites=1)
    edit(site_file(study, "S0"), 'slides = "none/*.tif"\n', slides)
    x, labels = rows_of(20, 0)
    write_features(study, "S0", x, labels, [f"p{k}" for k in range(20)], ["train"] * 20)
    run = run_of(study, "regular", "privacy.enabled=false", *HEADS, "train.rounds=1").name
    refused(lambda: evaluate(study, f"runs/{run}"), f"; {command} with slides.test_fraction above 0", error=WsiFlError)
