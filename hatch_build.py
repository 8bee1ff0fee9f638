"""Compiles wsi_fl/slides/reading/_scatter.c where there is a C compiler; where there is none, numpy copies, slower."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.errors import BaseError, CompileError, LinkError

_NAME = "wsi_fl.slides.reading._scatter"


class Compiled(BuildHookInterface):
    """For wheels and editable installations alike, beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        path = _NAME.replace(".", "/")
        compiled = f"{path}{sysconfig.get_config_var('EXT_SUFFIX')}"
        with contextlib.chdir(self.root):
            Path(compiled).unlink(missing_ok=True)  # an older one must not stay where this one fails
            try:
                _compile(f"{path}.c")
            except (BaseError, CompileError, LinkError) as error:
                print(f"{path}.c is not compiled, slides will be read more slowly: {error}", file=sys.stderr)
                return
        build_data["artifacts"].append(f"/{compiled}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _compile(source: str) -> None:
    distribution = Distribution({"name": "wsi-fl", "ext_modules": [Extension(_NAME, [source])]})
    command = distribution.get_command_obj("build_ext")
    command.inplace = True
    with tempfile.TemporaryDirectory() as folder:
        command.build_lib = command.build_temp = folder
        command.ensure_finalized()
        command.run()
