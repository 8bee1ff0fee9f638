"""Resource limits of a container or a cluster's job: Linux's control groups, versions 1 and 2.

All processors and memory of the machine are visible inside a container too, beyond its limits. A limit holds for all
groups within a group, so the least limit above a process counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
"""Lines `number:controllers:path` of the groups that this process is in; version 2 is number 0 without controllers."""


def cores_allowed() -> int | None:
    """Return the number of processor cores available to this process, rounded up; None without a limit."""
    shares = []
    for group in _list_groups("cpu"):
        quota, period = (*_read_numbers(group / "cpu.max"), None, None)[:2]
        if quota is None and not (group / "cpu.max").exists():
            quota = (*_read_numbers(group / "cpu.cfs_quota_us"), None)[0]
            period = (*_read_numbers(group / "cpu.cfs_period_us"), None)[0]
        if quota is not None and period and quota > 0:
            shares.append(max(1, ceil(quota / period)))
    return min(shares, default=None)


def bytes_allowed() -> int | None:
    """Return the bytes of memory still available to this process; None without a limit.

    The inactive part of the page cache is released first, and counts as free.
    """
    free_bytes = []
    for group in _list_groups("memory"):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = (
                (*_read_numbers(group / limit_name), None)[0],
                (*_read_numbers(group / usage_name), None)[0],
            )
            if limit is not None and usage is not None and limit < _UNLIMITED_BYTES:
                free_bytes.append(max(0, limit - usage + _read_statistic(group / "memory.stat", cache_name)))
    return min(free_bytes, default=None)


_UNLIMITED_BYTES = 1 << 60
"""Bytes: version 1 writes the most that 63 bits hold, in whole pages, where there is no limit."""


def _list_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the group of this process and of those above it.

    A container's own group may be the root, or have a path that is not visible: then the root is its group.
    """
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            root = _ROOT
        elif controller in controllers.split(","):
            root = next((r for r in (_ROOT / controllers, _ROOT / controller) if r.is_dir()), _ROOT / controller)
        else:
            continue
        group = root / path.strip("/")
        yield group
        yield from (above for above in group.parents if above == root or root in above.parents)


def _read_numbers(file: Path) -> list[int | None]:
    """Return the whole numbers in a file; None for a word such as "max"; [] where there is no such file."""
    try:
        words = file.read_text().split()
    except OSError:
        return []
    return [int(word) if word.lstrip("-").isdecimal() else None for word in words]


def _read_statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
