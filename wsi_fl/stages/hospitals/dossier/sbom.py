"""The parts that an installation of wsi-fl is made of, as a CycloneDX document (ECMA-424)."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from typing_extensions import TypedDict

from wsi_fl import __version__
from wsi_fl.system.files import write_text

INSTALL = "pip install 'wsi-fl[dossier]'"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")


class Component(TypedDict):
    """A package that is installed."""

    name: str
    version: str
    license: str


class Parts(TypedDict):
    """What the dossier says of software; `file` is None where no document could be written, and `says` why."""

    file: str | None
    components: list[Component]
    says: str


def write_parts(out: Path) -> Parts:
    """Write the CycloneDX document of this installation, where the library for it is there, and return its parts."""
    components = components_of("wsi-fl")
    try:
        text = _cyclonedx(components)
    except ImportError:
        out.unlink(missing_ok=True)  # one of before would be of other versions
        return {"file": None, "components": components, "says": f"for the CycloneDX document, {INSTALL}"}
    write_text(out, text)
    return {"file": out.name, "components": components, "says": "CycloneDX 1.6, JSON"}


def components_of(name: str) -> list[Component]:
    """Return every installed package that one needs, directly or not, in the order of names.

    Requirements of extras count where they are installed: a part that is there can be run.

    Args:
        name: of a distribution; it is no part of itself.
    """
    found: dict[str, Distribution] = {}
    waiting = [name]
    while waiting:
        key = _normal(waiting.pop())
        if key in found:
            continue
        try:
            found[key] = distribution(key)
        except PackageNotFoundError:
            continue
        waiting += [match[0] for one in found[key].requires or () if (match := _NAME.match(one))]
    found.pop(_normal(name), None)
    return [_component(found[key]) for key in sorted(found)]


def _component(one: Distribution) -> Component:
    said = [str(one.metadata[key]) for key in ("License-Expression", "License") if key in one.metadata]
    lines = said[0].strip().splitlines() if said else []  # of some it is the whole text
    return {"name": str(one.metadata["Name"]), "version": one.version, "license": (lines or [""])[0]}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _cyclonedx(parts: list[Component]) -> str:
    """The document; ImportError where the library is not installed."""
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component as Described
    from cyclonedx.model.component import ComponentType
    from cyclonedx.model.license import DisjunctiveLicense
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from packageurl import PackageURL

    root = Described(name="wsi-fl", version=__version__, type=ComponentType.APPLICATION, bom_ref="wsi-fl")
    bom = Bom()
    bom.metadata.component = root
    described = [
        Described(
            name=one["name"],
            version=one["version"],
            type=ComponentType.LIBRARY,
            bom_ref=f"{_normal(one['name'])}@{one['version']}",
            purl=PackageURL("pypi", None, _normal(one["name"]), one["version"]),
            licenses=[DisjunctiveLicense(name=one["license"])] if one["license"] else None,
        )
        for one in parts
    ]
    for one in described:
        bom.components.add(one)
    bom.register_dependency(root, described)
    return str(make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)) + "\n"
