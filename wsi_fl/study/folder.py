"""A study: a folder with pipelines/ and sites/, and with the stores, runs and ledgers that commands write.

Only `stages` and `cli` import it.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wsi_fl.runs.site_folder import SITE_FILE
from wsi_fl.study.pipeline import Pipeline, pipeline_model
from wsi_fl.study.site_file import SNAPSHOT_KEYS, SiteFile, merge_site_snapshot
from wsi_fl.study.toml import parse_toml, read_toml, toml_or_repr, toml_value, validate_model
from wsi_fl.system.file_names import drop_companions
from wsi_fl.system.files import require_regular_file
from wsi_fl.types import UsageError, find_control_character, natural_key

_Table = dict[str, Any]
"""A table of TOML, whose values are not validated yet."""


def find_shipped_folder(kind: Literal["pipelines", "sites"]) -> Path:
    """Return the folder of shipped pipelines or site files, in an installed package or a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


class Study:
    """The paths, pipelines and site files of a study.

    Args:
        root: its folder.
        pinned_run: a run whose settings snapshots hold in the site files.
        stand_in: the site whose store is used for all, in a dry run.
        site_files: site files that were read before, by path; None to read them anew each time.
    """

    def __init__(
        self,
        root: Path,
        pinned_run: Path | None = None,
        *,
        stand_in: str = "",
        site_files: dict[Path, _SiteText] | None = None,
    ) -> None:
        self.root = root
        self._pinned_run = pinned_run
        self._stand_in = stand_in
        self._site_files = site_files

    def freeze_sites(self) -> Study:
        """Return the study in which each site file is read once, so that later edits change nothing."""
        if self._site_files is not None:
            return self
        return Study(self.root, self._pinned_run, stand_in=self._stand_in, site_files={})

    def pin_run(self, run: Path) -> Study:
        """Return the frozen study with the settings snapshot of a run in its site files."""
        site_files = {} if self._site_files is None else self._site_files
        return Study(self.root, run, stand_in=self._stand_in, site_files=site_files)

    def store_owner(self, site: str) -> str:
        """Return the site whose store is used for a site; in a dry run one site stands in for all."""
        return self._stand_in or site

    @staticmethod
    def find(start: Path | None = None) -> Study:
        """Return the nearest study at or above a folder (default: the current folder)."""
        start_path = (start or Path.cwd()).resolve()
        for folder in (start_path, *start_path.parents):
            if (folder / "pipelines").is_dir() and (folder / "sites").is_dir():
                return Study(folder)
        raise UsageError(
            f"{start_path}: no study here or above (a folder with pipelines/ and sites/); make one with `wsi-fl init`"
        )

    @property
    def runs_path(self) -> Path:
        return self.root / "runs"

    def store_path(self, site: str) -> Path:
        return self.root / "stores" / site / "patches.h5"

    def mosaic_path(self, site: str) -> Path:
        """The feature store of a site's mosaics."""
        return self.root / "stores" / site / "mosaic.h5"

    def features_path(self, site: str) -> Path:
        """The features of a site's patches."""
        return self.root / "stores" / site / "features.h5"

    def release_path(self, site: str) -> Path:
        """The released class statistics of a site, or a copy of another site's."""
        return self.root / "statistics" / f"{site}.safetensors"

    def local_release_path(self, site: str) -> Path:
        """The local part of a site's release with the exact statistics, which stays at the site."""
        return self.root / "stores" / site / "statistics.safetensors"

    def generator_path(self, site: str) -> Path:
        """The folder of a site's generator."""
        return self.root / "generators" / site

    def denoiser_path(self, site: str) -> Path:
        """The folder of a site's diffusion model."""
        return self.root / "denoisers" / site

    def synthetic_path(self, key: str) -> Path:
        """The store of images sampled from a site's denoiser."""
        return self.root / "generated" / key / "patches.h5"

    def site_path(self, site: str) -> Path:
        """The file of a site."""
        return self.root / "sites" / f"{site}.toml"

    def ledger_path(self, site: str) -> Path:
        """The privacy account of a site, by default in ledgers/."""
        file = self._load_current_site(site) if self._is_there(self.site_path(site)) else self.load_site_snapshot(site)
        ledger = file.ledger if file else None
        return self.resolve(ledger) if ledger else self.root / "ledgers" / f"{site}.jsonl"

    def relative_path(self, path: Path) -> str:
        """Return a path for JSON: relative to the study unless it lies outside."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def find_run(self, name: str) -> Path:
        """Return the folder of a run by path, name or unique number."""
        for candidate in (Path(name), self.root / name, self.runs_path / name):
            if (candidate / "config.toml").is_file():
                return candidate.resolve()
        matches = sorted(self.runs_path.glob(f"{name.zfill(5)}-*")) if name.isdigit() else []
        started = [path for path in matches if (path / "config.toml").is_file()]
        if len(started) == 1:
            return started[0]
        if not started and (killed := [path for path in (*matches, self.runs_path / name) if path.is_dir()]):
            killed_run = self.relative_path(killed[0])
            raise UsageError(f"{killed_run}: was ended before its run began; delete it and train again")
        last_runs = sorted(path.parent.name for path in self.runs_path.glob("*-*/config.toml"))[-5:]
        hint = f"the last are {', '.join(last_runs)}" if last_runs else "train one first: wsi-fl train"
        raise UsageError(f"no run {name!r}; {hint}")

    def site_names(self) -> list[str]:
        files = drop_companions((self.root / "sites").glob("*.toml"))
        return sorted((path.stem for path in files), key=natural_key)

    def load_site(self, name: str) -> SiteFile:
        """Return a site file, with the settings snapshot of the run if the study has one."""
        snapshot = self.load_site_snapshot(name)
        if snapshot is not None and not self._is_there(self.site_path(name)):
            return snapshot
        current = self._load_current_site(name)
        return current if snapshot is None else merge_site_snapshot(snapshot, current)

    def load_site_snapshot(self, name: str) -> SiteFile | None:
        """Return the run's snapshot of a site file; None without one."""
        return self._read_site(path).file if (path := self._snapshot_path(name)) else None

    def snapshot_digest(self, name: str) -> str:
        """Return the SHA-256 of the run's snapshot of a site file; "" without one."""
        return self._read_site(path).digest if (path := self._snapshot_path(name)) else ""

    def _snapshot_path(self, name: str) -> Path | None:
        path = self._pinned_run / "sites" / name / SITE_FILE if self._pinned_run else None
        return path if path and self._is_there(path) else None

    def find_changed_settings(self, name: str) -> list[str]:
        """Return the differences of the current site file from the run's, as "max_epsilon = 3 now, 2 in this run"."""
        snapshot = self.load_site_snapshot(name)
        if snapshot is None or not self._is_there(self.site_path(name)):
            return []
        current = self._load_current_site(name)
        pairs = [(key, getattr(snapshot, key), getattr(current, key)) for key in SNAPSHOT_KEYS]
        return [
            f"{key} = {_format_value(current_value)} now, {_format_value(run_value)} in this run"
            for key, run_value, current_value in pairs
            if run_value != current_value
        ]

    def _load_current_site(self, name: str) -> SiteFile:
        """Return the current file of a site; UsageError unless its `name` is the file's name."""
        path = self.site_path(name)
        if not self._is_there(path):
            names = self.site_names()
            close = difflib.get_close_matches(name, names, 1)
            raise UsageError(
                f"unknown site {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else "")
                + f"; sites/ has {', '.join(names) or 'none'}"
            )
        site = self._read_site(path).file
        if site.name != name:
            raise UsageError(
                f"{self._file_label(path)}: name = {site.name!r}, not the file's; "
                f"write name = {name!r}, or rename the file"
            )
        return site

    def _is_there(self, path: Path) -> bool:
        """Return whether a site file exists, or existed when it was read."""
        return path in (self._site_files or ()) or path.is_file()

    def _read_site(self, path: Path) -> _SiteText:
        """Return a site file or snapshot, from those already read where the study is frozen."""
        if self._site_files is not None and path in self._site_files:
            return self._site_files[path]
        content = require_regular_file(path).read_bytes()
        file = validate_model(SiteFile, parse_toml(content, path), self._file_label(path))
        site = _SiteText(file, hashlib.sha256(content).hexdigest())
        if self._site_files is not None:
            self._site_files[path] = site
        return site

    def load_sites(self, pipeline: Pipeline) -> list[SiteFile]:
        """Return the site files of a pipeline, in order."""
        names = pipeline.sites if pipeline.sites is not None else self.site_names()
        if not names:
            raise UsageError(
                "sites/ is empty; write a site file, or make a study with `wsi-fl init DIR --from ARCHIVE`"
            )
        return [self.load_site(name) for name in names]

    def pipeline_names(self) -> list[str]:
        """Return the names of the study's own pipelines."""
        return sorted(path.stem for path in drop_companions((self.root / "pipelines").glob("*.toml")))

    def read_header(self, name: str) -> str:
        """Return the first line of a pipeline's file where it is a comment, such as the command for it; "" without."""
        with self._pipeline_path(name).open(encoding="utf-8-sig", errors="replace") as file:
            line = file.readline()
        return line.strip() if line.startswith("#") else ""

    def pipeline_name(self, name: str | None) -> str:
        """Return the given name, else the only pipeline, else camelyon17; UsageError for several others."""
        names = self.pipeline_names()
        if not name and len(names) > 1 and "camelyon17" not in names:
            raise UsageError(f"the study has several pipelines; name one with --pipeline: {', '.join(names)}")
        return name or (names[0] if len(names) == 1 else "camelyon17")

    def load_pipeline(self, name: str, overrides: Sequence[str] = ()) -> Pipeline:
        """Return the pipeline with `extends` resolved and `--set key=value` applied."""
        path = self._pipeline_path(name)
        values = self._resolve_extends(path, visited=())
        for override in overrides:
            _apply_override(values, override)
        label = self._file_label(path) + (" with --set" if overrides else "")
        return validate_model(pipeline_model(), values, label)

    def _pipeline_path(self, name: str) -> Path:
        if name.endswith(".toml"):
            if not Path(name).is_file():
                raise UsageError(f"{name}: no such file")
            return Path(name).resolve()
        folders = [self.root / "pipelines", find_shipped_folder("pipelines")]
        for folder in folders:
            if (folder / f"{name}.toml").is_file():
                return folder / f"{name}.toml"
        names = sorted({p.stem for folder in folders for p in drop_companions(folder.glob("*.toml"))})
        raise UsageError(f"unknown pipeline {name!r}; known: {', '.join(names)}")

    def _resolve_extends(self, path: Path, visited: tuple[Path, ...]) -> _Table:
        if path in visited:
            raise UsageError(f"{self._file_label(path)}: extends itself")
        values = read_toml(path)
        base = values.pop("extends", None)
        if base is None:
            return values
        name = str(path.parent / str(base)) if str(base).endswith(".toml") else str(base)
        try:
            base_path = self._pipeline_path(name)
        except UsageError as error:
            raise UsageError(f"{self._file_label(path)}: extends = {toml_or_repr(base)}: {error}") from None
        return _merge_tables(self._resolve_extends(base_path, (*visited, path)), values)

    def _file_label(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.name

    def resolve(self, path: str) -> Path:
        """Return a path of a site file: relative to the study unless absolute; `~` and variables expand."""
        return self.root / os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111 unknown users stay


def _format_value(value: Any) -> str:
    return "not set" if value is None else toml_value(value)


def load_run_pipeline(path: Path) -> Pipeline:
    """Return the complete pipeline of a run."""
    return validate_model(pipeline_model(), read_toml(path), path.name)


class _SiteText(NamedTuple):
    """A site file that was read, and the SHA-256 of its bytes."""

    file: SiteFile
    digest: str


def _merge_tables(base: _Table, top: _Table) -> _Table:
    result = dict(base)
    for key, value in top.items():
        both_tables = isinstance(result.get(key), dict) and isinstance(value, dict)
        result[key] = _merge_tables(result[key], value) if both_tables else value
    return result


def _apply_override(values: _Table, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {override!r}: write it as section.key=value, for example train.rounds=5")
    text = text.lower() if text in ("True", "False") else text
    if (character := find_control_character(override)) is not None:
        raise UsageError(f"--set {key.strip()!r}: holds the character {character}; give one key with one value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except ValueError:
        raise UsageError(f"--set {key.strip()}: the number has thousands of digits") from None
    except RecursionError:
        raise UsageError(f"--set {key.strip()}: its value is nested too deeply") from None
    *sections, last = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UsageError(f"--set {override!r}: {section} is not a section")
    values[last] = value
