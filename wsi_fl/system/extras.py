"""Extras of the installation: what needs them, and how to add one that is missing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec

from wsi_fl.types import UsageError


@dataclass(frozen=True)
class Extra:
    """An extra of pyproject.toml; its modules are imported on first use.

    Attributes:
        purpose: what needs it, in the plural.
        modules: top-level modules that it installs.
        python_below: the first Python version without a wheel of it; None where every one has a wheel.
    """

    purpose: str
    modules: tuple[str, ...]
    python_below: tuple[int, int] | None = None

    @property
    def has_wheel(self) -> bool:
        """Whether this Python has a wheel of it."""
        return self.python_below is None or sys.version_info < self.python_below


EXTRAS = {
    "flare": Extra("federations over NVIDIA FLARE", ("nvflare",)),
    "dossier": Extra("lists of all software", ("cyclonedx_py",)),
    "synthesis": Extra("diffusion models", ("diffusers",)),
    "export": Extra("ONNX files", ("onnx", "onnxruntime", "onnxscript")),
    "formats": Extra("OME-Zarr, OME-TIFF and rare codecs", ("zarr",)),
    "czi": Extra("CZI slides", ("pylibCZIrw",), python_below=(3, 14)),
    "isyntax": Extra("iSyntax slides", ("isyntax",)),
    "view": Extra("slides in a browser", ("starlette", "uvicorn")),
}


def has_extra(name: str) -> bool:
    """Return whether the modules of an extra are installed."""
    return all(find_spec(module) for module in EXTRAS[name].modules)


def describe_install(extra: str) -> str:
    """Return how to install an extra: wsi-fl is on no package index, so from a checkout or a wheelhouse."""
    wheelhouse = f"pip install --no-index --find-links wheelhouse 'wsi-fl[{extra}]'"
    return f"run `pip install -e '.[{extra}]'` in the checkout, or `{wheelhouse}`"


def explain_missing(name: str) -> str:
    """Return which extra is missing for what, and how to install it."""
    extra = EXTRAS[name]
    if not extra.has_wheel:
        return f"{extra.purpose} need the extra `{name}`, which has no wheel for this Python; use an older one"
    return f"{extra.purpose} need the extra `{name}`: {describe_install(name)}"


def require_extra(name: str) -> None:
    """Require the modules of an extra, without importing them.

    Raises:
        UsageError: says what needs the extra, and how to install it.
    """
    if not has_extra(name):
        raise UsageError(explain_missing(name))
