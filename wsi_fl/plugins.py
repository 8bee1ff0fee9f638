"""Plugins: entry points of other packages in the groups `wsi_fl.methods`, `.commands`, `.encoders`, `.readers`, …

Packages are looked up on first use of a group, and imported on first use of their entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from types import UnionType
from typing import Any, Generic, TypeVar

from wsi_fl.types import WsiFlError, one_line

_T = TypeVar("_T")

_OWN = "wsi-fl"


def entries(group: str) -> dict[str, Any]:
    """Return a group's objects of installed packages by name, in the order of names; all are imported.

    Raises:
        WsiFlError: when a package cannot be imported, or two add the same name; it names them.
    """
    return {name: _loaded(point) for name, point in _found(group).items()}


class Table(Mapping[str, _T], Generic[_T]):
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

    def __init__(self, group: str, own: Mapping[str, _T], kind: type[_T] | UnionType) -> None:
        self.own = own
        self._group, self._kind = group, kind

    def _added(self) -> Mapping[str, EntryPoint]:
        found = _found(self._group)
        for name in found.keys() & self.own.keys():
            raise WsiFlError(
                f"{_named(found[name])} adds {name!r} to {self._group}, which wsi-fl has itself; uninstall it"
            )
        return found

    def __getitem__(self, name: str) -> _T:
        if name in self.own:
            return self.own[name]
        point = self._added()[name]
        row = _loaded(point)
        if not isinstance(row, self._kind):
            wanted = getattr(self._kind, "__name__", self._kind)
            raise WsiFlError(
                f"{_named(point)} adds {name!r} to {self._group}, but {point.value} is no {wanted}; "
                "update or uninstall it"
            )
        return row

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._added()

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self._added()

    def __len__(self) -> int:
        return len(self.own) + len(self._added())


def versions() -> dict[str, str]:
    """Return the versions of installed plugins of wsi-fl, by their names."""
    found = {
        one.name: one.version
        for one in distributions()
        if any(point.group.startswith("wsi_fl.") for point in one.entry_points)
    }
    return {name: version for name, version in sorted(found.items()) if name != _OWN}


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; a name is given once."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda one: one.name):
        if point.name in found:
            two = f"{_named(found[point.name])} and {_named(point)}"
            raise WsiFlError(f"{two} both add {point.name!r} to {group}; uninstall one of them")
        found[point.name] = point
    return found


@cache
def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except MemoryError:
        raise
    except Exception as error:  # any error of the package's import
        why = f"{type(error).__name__}: {one_line(error)}"
        raise WsiFlError(
            f"{_named(point)} adds {point.name!r} to {point.group}, but {point.value} cannot be imported "
            f"({why}); update or uninstall it"
        ) from None


def _named(point: EntryPoint) -> str:
    return f"the package {_dist(point).name} {_dist(point).version}"


def _dist(point: EntryPoint) -> Distribution:
    assert point.dist is not None  # always set by `entry_points`
    return point.dist
