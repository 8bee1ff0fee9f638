"""Plugins: entry points of other packages in the groups `wsi_fl.methods`, `.commands`, `.encoders`, `.readers`, …

Packages are looked up on first use of a group, and imported on first use of their entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from types import FunctionType, UnionType
from typing import Any, Generic, TypeVar

from wsi_fl.types import WsiFlError, single_line

_T = TypeVar("_T")

_OWN_DISTRIBUTION = "wsi-fl"


def load_entries(group: str) -> dict[str, Any]:
    """Return a group's objects of installed packages by name, in the order of names; all are imported.

    Raises:
        WsiFlError: when a package cannot be imported, or two add the same name; it names them.
    """
    return {name: _load_point(point) for name, point in _find_points(group).items()}


class PluginTable(Mapping[str, _T], Generic[_T]):
    """Objects by name: wsi-fl's own, then those of a group of entry points, each imported on first use.

    Args:
        group: such as "wsi_fl.methods".
        builtin: objects that need no plugin.
        kind: required type of a plugin's object.

    Attributes:
        builtin: objects that need no plugin.

    Example:
        >>> table = PluginTable("wsi_fl.nothing", {"own": 1}, int)
        >>> list(table), table["own"], "another" in table
        (['own'], 1, False)
    """

    def __init__(self, group: str, builtin: Mapping[str, _T], kind: type[_T] | UnionType) -> None:
        self.builtin = builtin
        self._group, self._kind = group, kind

    def _find_plugins(self) -> Mapping[str, EntryPoint]:
        points = _find_points(self._group)
        for name in points.keys() & self.builtin.keys():
            raise WsiFlError(
                f"{_package_text(points[name])} adds {name!r} to {self._group}, which wsi-fl has itself; uninstall it"
            )
        return points

    def __getitem__(self, name: str) -> _T:
        if name in self.builtin:
            return self.builtin[name]
        point = self._find_plugins()[name]
        row = _load_point(point)
        if not isinstance(row, self._kind):
            expected = getattr(self._kind, "__name__", self._kind)
            raise WsiFlError(
                f"{_package_text(point)} adds {name!r} to {self._group}, but {point.value} is no {expected}; "
                "update or uninstall it"
            )
        return row

    def package_version(self, name: str) -> str:
        """Return the package with its version that an object comes from, such as "neighbourly 1.2"; "" for own ones."""
        return "" if name in self.builtin else _package_text(self._find_plugins()[name]).removeprefix("the package ")

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self._find_plugins()

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from self._find_plugins()

    def __len__(self) -> int:
        return len(self.builtin) + len(self._find_plugins())


PAYLOAD_MODELS: PluginTable[FunctionType] = PluginTable("wsi_fl.payload_models", {}, FunctionType)
"""Builders (n_classes, shape, *options) of models that are computed as a method's payload instead of being trained.

The name of such a model is its key here and its options, with colons between."""


def plugin_versions() -> dict[str, str]:
    """Return the versions of installed plugins of wsi-fl, by their names."""
    versions = {
        distribution.name: distribution.version
        for distribution in distributions()
        if any(point.group.startswith("wsi_fl.") for point in distribution.entry_points)
    }
    return {name: version for name, version in sorted(versions.items()) if name != _OWN_DISTRIBUTION}


@cache
def _find_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; a name is given once."""
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda entry: entry.name):
        if point.name in points:
            two = f"{_package_text(points[point.name])} and {_package_text(point)}"
            raise WsiFlError(f"{two} both add {point.name!r} to {group}; uninstall one of them")
        points[point.name] = point
    return points


@cache
def _load_point(point: EntryPoint) -> Any:
    try:
        return point.load()
    except MemoryError:
        raise
    except Exception as error:  # any error of the package's import
        why = f"{type(error).__name__}: {single_line(error)}"
        raise WsiFlError(
            f"{_package_text(point)} adds {point.name!r} to {point.group}, but {point.value} cannot be imported "
            f"({why}); update or uninstall it"
        ) from None


def _package_text(point: EntryPoint) -> str:
    return f"the package {_require_distribution(point).name} {_require_distribution(point).version}"


def _require_distribution(point: EntryPoint) -> Distribution:
    assert point.dist is not None  # always set by `entry_points`
    return point.dist
