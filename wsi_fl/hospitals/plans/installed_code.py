"""The code that a plan is for: a hospital's approval is valid for the packages that the plan uses, and no others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from wsi_fl import __version__, plugins
from wsi_fl.hospitals.faults import mark_fault
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.hospitals.plans.signed_plan import FederationPlan

_GUARANTEE_PACKAGES = ("torch", "opacus", "numpy", "cryptography")
"""Packages that the guarantee rests on."""
_PACKAGE_FOLDER = Path(__file__).parents[2]
_UNUSED_FOLDERS = ("evidence", "shipped", "synthesis", "viewer")
"""Folders of wsi-fl that no plan runs, unless they give its method; a plan holds the settings of shipped pipelines."""


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that the guarantee rests on, without local build labels (`+cu126`).

    Packages that add methods, readers, encoders or commands are included, since their code runs too. WsiFlError if one
    is not installed.
    """
    try:
        versions = {name: version(name) for name in _GUARANTEE_PACKAGES} | plugins.plugin_versions()
    except PackageNotFoundError as error:
        raise WsiFlError(f"{error.name} is not installed; install wsi-fl again") from None
    return {name: number.partition("+")[0] for name, number in versions.items()}


def code_digest(method: str, package: Path = _PACKAGE_FOLDER) -> str:
    """Return the SHA-256 of the installed code that plans of a method run, which must be the same at all sites.

    It covers the versions of `package_versions`, and every file, such as code, tables, templates and weights, of the
    core, of this package, and of the package that gives the method. Compiled Python and hidden files are left out.
    WsiFlError if a file cannot be read.
    """
    digest = hashlib.sha256(json.dumps(package_versions(), sort_keys=True).encode())
    method_folder = _find_method_folder(method, package)
    try:
        for root in dict.fromkeys(filter(None, (package, method_folder))):
            for path in _list_files(root):
                name = path.relative_to(root.parent)
                if root != package or name.parts[1] not in _UNUSED_FOLDERS:
                    digest.update(f"{name.as_posix()}\n".encode())
                    digest.update(hashlib.sha256(path.read_bytes()).digest())
    except OSError as error:
        raise WsiFlError(f"the installed package cannot be read: {error}") from None
    return digest.hexdigest()


def _find_method_folder(method: str, package: Path) -> Path | None:
    """Return the folder, or the only file, of the package whose entry point gives a method; None for the core's own."""
    for point in entry_points(group="wsi_fl.methods", name=method):
        top, *parts = point.module.split(".")
        if top == package.name:
            return package / parts[0]
        spec = find_spec(top)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
        if spec is not None and spec.origin:
            return Path(spec.origin)
    return None


def _list_files(root: Path) -> Iterator[Path]:
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        parts = path.relative_to(root.parent).parts[1:]
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in parts):
            yield path


def check_code_version(plan: FederationPlan, site: str, accepted_codes: Collection[str] = ()) -> None:
    """Refuse a plan for other code, or other versions of the packages behind the guarantee, than a site has installed.

    Digests listed in its standing approval count as the same code.
    """
    plan_code, local_code = str(plan.document["code"]), code_digest(plan.method)
    if plan_code != local_code and {plan_code, local_code} <= set(accepted_codes):
        return
    local_packages, plan_packages = package_versions(), plan.document.get("packages")
    plan_packages = plan_packages if isinstance(plan_packages, dict) else local_packages
    differences = [
        (f"{name} {planned}", local)
        for name in sorted(local_packages | plan_packages)
        if (planned := plan_packages.get(name, "not installed")) != (local := local_packages.get(name, "not installed"))
    ]
    if plan_code != local_code:
        planned_label = f"wsi-fl {plan.document['wsi_fl']} ({plan_code[:8]})"
        differences.append((planned_label, f"{__version__} ({local_code[:8]})"))
    if differences:
        planned, local = differences[0]
        remedy = "install the plan's version, or agree on a new plan"
        text = f"the plan is for {planned}, and site {site} has {local}; {remedy}"
        raise mark_fault(UsageError(text), "other_code", site)
