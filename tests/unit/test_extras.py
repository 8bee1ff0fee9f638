"""Extras: one table of what needs them, and one line where one is missing."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import refused

from wsi_fl.hospitals.faults import find_fault
from wsi_fl.hospitals.flare.flare_files import require_flare
from wsi_fl.stages import doctor
from wsi_fl.system.extras import EXTRAS, describe_install, explain_missing, has_extra, require_extra
from wsi_fl.types import UsageError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NOT_IMPORTED = {"mpi", "dev", "docs"}


def test_the_table_has_the_extras_of_the_package_and_their_limits():
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - NOT_IMPORTED
    for name, extra in EXTRAS.items():
        limits = {tuple(map(int, found)) for found in re.findall(r"python_version < '(\d+)\.(\d+)'", str(extras[name]))}
        assert limits == ({extra.python_below} if extra.python_below else set()), name


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_extra_is_named_with_what_needs_it_and_how_to_install_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, EXTRAS[name].modules[-1], None)
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    assert not has_extra(name)
    refused(lambda: require_extra(name), EXTRAS[name].purpose, f"`{name}`", f"pip install -e '.[{name}]'", "--no-index")
    said = doctor._check_extras()
    assert f"{name} ({EXTRAS[name].purpose})" in said and describe_install("NAME") in said


def test_an_extra_without_a_wheel_for_this_python_is_not_to_be_installed(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    monkeypatch.setitem(sys.modules, "pylibCZIrw", None)
    assert (
        explain_missing("czi")
        == "CZI slides need the extra `czi`, which has no wheel for this Python; use an older one"
    )
    assert "pip install" in explain_missing("isyntax")
    monkeypatch.setattr(doctor, "has_extra", lambda name: name != "czi")
    said = doctor._check_extras()
    assert said.endswith("view; without czi, which this Python has no wheel of") and "pip" not in said


def test_a_federation_without_flare_is_refused_as_a_fault_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvflare", None)
    with pytest.raises(UsageError, match="federations over NVIDIA FLARE") as caught:
        require_flare()
    assert find_fault(caught.value).code == "no_flare"
