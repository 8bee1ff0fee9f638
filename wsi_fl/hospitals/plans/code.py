"""What runs at a hospital, in one digest: the package as it is installed, and what its guarantee rests on."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from wsi_fl import plugins
from wsi_fl.types import WsiFlError

_RESTS_ON = ("torch", "opacus", "numpy", "cryptography")
_PACKAGE = Path(__file__).parents[2]


def packages() -> dict[str, str]:
    """Return the versions of the packages that the guarantee rests on, without what a build calls itself (`+cu126`).

    Those that add methods, readers, encoders or commands are among them, since their code runs too.

    Raises:
        WsiFlError: when one is not installed.
    """
    try:
        found = {name: version(name) for name in _RESTS_ON} | plugins.versions()
    except PackageNotFoundError as error:
        raise WsiFlError(f"{error.name} is not installed; install wsi-fl again") from None
    return {name: number.partition("+")[0] for name, number in found.items()}


def code_digest(package: Path = _PACKAGE) -> str:
    """Return the SHA-256 over what runs, which all sites of a plan must have alike.

    That is every file of the package, such as code, templates, scripts of pages, tables and weights, and the versions
    of `packages`. Shipped pipelines are left out, since a plan has its settings in itself.

    Args:
        package: the folder of wsi-fl.

    Raises:
        WsiFlError: when it cannot be read.
    """
    digest = hashlib.sha256(json.dumps(packages(), sort_keys=True).encode())
    try:
        for path in sorted(package.rglob("*")):
            name = path.relative_to(package)
            if path.is_file() and not _runs_not(name):
                digest.update(f"{name.as_posix()}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    except OSError as error:
        raise WsiFlError(f"the installed package cannot be read: {error}") from None
    return digest.hexdigest()


def _runs_not(name: Path) -> bool:
    """Whether a file is no part of what runs: what Python compiled, hidden files, and shipped pipelines."""
    return name.parts[0] == "shipped" or any(
        part == "__pycache__" or part.startswith(".") for part in name.parts
    )
