"""What other packages add: their entry points in the groups `wsi_fl.methods`, `.commands`, `.encoders`, `.readers`, …

A package is looked up when a group is first asked for, and imported when its row is.
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
    """Return what installed packages add to a group, by name, in the order of names; all of it is imported.

    Raises:
        WsiFlError: when a package cannot be imported, or two add the same name; it names them.
    """
    return {name: _loaded(point) for name, point in _found(group).items()}


class Table(Mapping[str, _T], Generic[_T]):
    """Rows by name: wsi-fl's own, then those of a group of entry points, each imported when it is first asked for.

    Args:
        group: such as "wsi_fl.methods".
        own: those that need no plugin.
        kind: what a plugin's row has to be.

    Attributes:
        own: as given.

    Example:
        >>> table = Table("wsi_fl.nothing", {"own": 1}, int)
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
                f"{_named(point)} adds {name!r} to {self._group}, but {point.value} is no {wanted}; update or "
                "uninstall it"
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
    """Return the versions of the installed packages that add anything to wsi-fl, by their names."""
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
    except Exception as error:  # whatever the package does when it is imported
        why = f"{type(error).__name__}: {one_line(error)}"
        raise WsiFlError(
            f"{_named(point)} adds {point.name!r} to {point.group}, but {point.value} cannot be imported ({why}); "
            "update or uninstall it"
        ) from None


def _named(point: EntryPoint) -> str:
    return f"the package {_dist(point).name} {_dist(point).version}"


def _dist(point: EntryPoint) -> Distribution:
    assert point.dist is not None  # `entry_points` always says whose they are
    return point.dist
