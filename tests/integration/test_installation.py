"""What pages, messages and recipes say about installing agrees with pyproject.toml, and names no foreign package."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from wsi_fl import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MADE = {"build", "dist", "wheelhouse", "demo", "federation-demo", "docs/_build"}
CODE, PAGES, SETTINGS = {".py", ".sh", ""}, {".md", ".j2", ".html", ".txt"}, {".toml", ".yml", ".yaml", ".json"}
SUFFIXES = {*CODE, *PAGES, *SETTINGS, ".def", ".sbatch", ".service"}
INSTALL = re.compile(r"\b(?:pip3?|pipx|uvx?|poetry|conda|mamba|micromamba|pixi)\b[^`\n&;|]*")
OWN_NAME = re.compile(r"(?<![\w./-])wsi[-_]fl(?:\[[\w,]*\])?(?![\w./-])")
OTHER_SOURCE = re.compile(r" --no-index | @ file:")


def list_texts():
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        is_source = parts[0] == ".ci" or not any(part.startswith(".") for part in parts)
        if path.suffix in SUFFIXES and is_source and not MADE & {parts[0], "/".join(parts[:2])} and path.is_file():
            yield path, path.read_text("utf-8", errors="replace")


def find_installs_by_name(text):
    """Return the commands of a text that would fetch wsi-fl from an index, where its name belongs to nobody."""
    commands = INSTALL.findall(text.replace("\\\n", " "))
    return [command for command in commands if OWN_NAME.search(command) and not OTHER_SOURCE.search(command)]


@pytest.mark.parametrize(
    ("text", "n_found"),
    [
        ("pip install wsi-fl", 1),
        ("run `pip install 'wsi-fl[flare]'`", 1),
        ("/opt/wsi-fl/bin/pip install --quiet \\\n  wsi_fl==1.0", 1),
        ("uv tool install wsi-fl; uvx wsi-fl", 2),
        ("conda install -c conda-forge wsi-fl", 1),
        ("pip install --no-index --find-links wheelhouse 'wsi-fl[flare]'", 0),
        ("pip install -e '.[flare]'", 0),
        ("pip install dist/wsi_fl-1.0-py3-none-any.whl", 0),
        ("pip install 'wsi-fl[mpi] @ file:///srv/wsi_fl-1.0-py3-none-any.whl'", 0),
        ("conda env create -f environment.yml && wsi-fl doctor", 0),
    ],
)
def test_an_installation_by_name_is_found(text, n_found):
    assert len(find_installs_by_name(text)) == n_found


def test_nothing_tells_anybody_to_install_a_name_that_belongs_to_nobody():
    texts = {path: text for path, text in list_texts() if path != Path(__file__)}
    assert len(texts) > 500
    assert {str(path): found for path, text in texts.items() if (found := find_installs_by_name(text))} == {}


def test_extras_that_texts_name_exist():
    extras, named = PROJECT["optional-dependencies"], set()
    for path, text in list_texts():
        if path.suffix != ".py" or "tests" not in path.parts:
            named |= {*re.findall(r"(?:wsi-fl|['\" ]\.)\[([a-z,]+)\]", text)}
    assert named and {name for names in named for name in names.split(",")} <= set(extras)
    page = (ROOT / "docs/start/installation.md").read_text("utf-8")
    assert [name for name in extras if f"`{name}`" not in page] == []


def test_every_place_says_the_same_pythons():
    first, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    versions = [f"3.{minor}" for minor in range(int(first), int(end))]
    assert [f"Programming Language :: Python :: {version}" for version in versions] == [
        row for row in PROJECT["classifiers"] if row.startswith("Programming Language")
    ]
    for name in ("README.md", "docs/start/installation.md", "docs/llms.txt", "Makefile"):
        assert f"{versions[0]} to {versions[-1]}" in (ROOT / name).read_text("utf-8"), name
    environment = (ROOT / "environment.yml").read_text("utf-8")
    assert f"python{PROJECT['requires-python']}" in environment.replace(" ", "")


def test_pins_are_within_the_ranges_of_the_package():
    requirements = pytest.importorskip("packaging.requirements")
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {}
    for line in lines:
        if not line.startswith("#"):
            pin = requirements.Requirement(line)
            pins[pin.name.lower().replace("_", "-")] = str(pin.specifier).removeprefix("==")
    wanted = [*PROJECT["dependencies"], *(row for rows in PROJECT["optional-dependencies"].values() for row in rows)]
    for row in map(requirements.Requirement, wanted):
        assert row.specifier.contains(pins[row.name.lower()]), row


def test_the_conda_recipe_needs_what_the_package_needs():
    recipe = yaml.safe_load((ROOT / "deploy/conda/recipe.yaml").read_text("utf-8"))
    names = {"torch": "pytorch", "isal": "python-isal", "matplotlib": "matplotlib-base"}
    needed = {names.get(name, name) + f" {limits}" for name, limits in map(split_range, PROJECT["dependencies"])}
    found = {*recipe["requirements"]["run"]}
    assert recipe["context"]["version"] == __version__
    assert needed - found == {"openslide-bin >=4.0.0.6"}
    assert found - needed == {"openslide >=4.0.0", "python >=${{ python_min }},<3.15"}
    assert PROJECT["requires-python"] == ">=" + recipe["context"]["python_min"] + ",<3.15"


def split_range(requirement):
    return re.fullmatch(r"([\w-]+)(.*)", requirement).groups()


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not here")


def copy_project(folder):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)


@needs_make
def test_the_demo_installs_what_it_needs_alone_and_the_tests_the_rest(tmp_path):
    copy_project(tmp_path)

    def plan(*goals):
        done = subprocess.run(["make", "-n", *goals], cwd=tmp_path, capture_output=True, text=True, check=True)
        return re.findall(r"-e '\.\[([a-z,]+)\]'", done.stdout), done.stdout

    assert plan("demo")[0] == ["mpi"]
    assert plan("federation-demo")[0] == ["mpi", "flare"]
    extras, commands = plan("test", f"PYTHON={sys.executable}")
    assert extras[0] == "mpi" and {*extras[1].split(",")} == set(PROJECT["optional-dependencies"]) - {"docs"}
    assert f"{sys.executable} -m venv --clear .venv" in commands


class _Index(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/torch/" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def index():
    """Return the address of a package index on this machine."""
    with HTTPServer(("127.0.0.1", 0), _Index) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@needs_make
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyTorch has one build")
@pytest.mark.parametrize(
    ("address", "has_gpu", "is_for_processors"),
    [("{}", False, True), ("{}", True, False), ("{}/none", False, False), ("", False, False)],
)
def test_pytorch_for_processors_is_taken_without_a_gpu_where_its_index_answers(
    tmp_path, monkeypatch, index, address, has_gpu, is_for_processors
):
    copy_project(tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "pip"):
        (tmp_path / ".venv/bin" / name).symlink_to(sys.executable)
    version = "{}.{}".format(*sys.version_info)
    (tmp_path / f".venv/lib/python{version}").mkdir(parents=True)
    if has_gpu:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    elif shutil.which("nvidia-smi"):
        pytest.skip("this machine has one")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    goal = [f".venv/.demo-{version}", f"CPU_WHEELS={address.format(index)}", "PIP_INSTALL=echo install"]
    said = subprocess.run(["make", *goal], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    pinned = re.findall(r"^torch(?:vision)?==.*", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert (f"--index-url {index} {' '.join(pinned)}" in said) == is_for_processors and len(pinned) == 2
    assert "install -c constraints.txt -e .[mpi]" in said
