"""A study: a folder with pipelines/ and sites/, in which stores, runs and ledgers grow.

Like `config`, only `stages` and `cli` know it.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from wsi_fl.runs.site import SITE_FILE
from wsi_fl.study.pipeline import Pipeline, pipeline_model
from wsi_fl.study.site import PROMISES, SiteFile, as_agreed
from wsi_fl.study.toml import toml_or_repr, toml_value, validated
from wsi_fl.system.files import ordinary
from wsi_fl.system.names import drop_companions
from wsi_fl.types import UsageError, natural, strange_character


def shipped(kind: Literal["pipelines", "sites"]) -> Path:
    """The folder of shipped pipelines or site files, in an installed package or a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


class Study:
    """A folder with pipelines/ and sites/; stores, runs and ledgers grow in it."""

    def __init__(self, root: Path, run: Path | None = None, *, rehearses: str = "") -> None:
        self.root = root
        self._run = run
        self._rehearses = rehearses

    def as_of(self, run: Path) -> Study:
        """Return the study as a run sees it: its site files promise what they did when the run began."""
        return Study(self.root, run, rehearses=self._rehearses)

    def owner(self, site: str) -> str:
        """Return whose a site's store must be: its own, or, where one site's rows stand for all, that site's."""
        return self._rehearses or site

    @staticmethod
    def find(start: Path | None = None) -> Study:
        """The nearest study at or above `start` (default: the current folder)."""
        here = (start or Path.cwd()).resolve()
        for folder in (here, *here.parents):
            if (folder / "pipelines").is_dir() and (folder / "sites").is_dir():
                return Study(folder)
        raise UsageError(
            f"{here}: no study here or above (a folder with pipelines/ and sites/); make one with `wsi-fl init`"
        )

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def store(self, site: str) -> Path:
        return self.root / "stores" / site / "patches.h5"

    def mosaic(self, site: str) -> Path:
        """The feature store of a site's mosaics."""
        return self.root / "stores" / site / "mosaic.h5"

    def features(self, site: str) -> Path:
        """The features of a site's patches."""
        return self.root / "stores" / site / "features.h5"

    def release(self, site: str) -> Path:
        """A site's released sums, its own or a copy of another's."""
        return self.root / "statistics" / f"{site}.safetensors"

    def release_at_home(self, site: str) -> Path:
        """What a site keeps of its release for itself, its exact sums among it."""
        return self.root / "stores" / site / "statistics.safetensors"

    def generator(self, site: str) -> Path:
        """The folder of a site's generator."""
        return self.root / "generators" / site

    def denoiser(self, site: str) -> Path:
        """The folder of a site's diffusion model."""
        return self.root / "denoisers" / site

    def generated(self, key: str) -> Path:
        """The store of images drawn from a denoiser that a site released, or is about to."""
        return self.root / "generated" / key / "patches.h5"

    def site_path(self, site: str) -> Path:
        """The file of a site."""
        return self.root / "sites" / f"{site}.toml"

    def ledger(self, site: str) -> Path:
        """The privacy account of a site, where its file says."""
        file = self._site_today(site) if self.site_path(site).is_file() else self.site_of_run(site)
        own = file.ledger if file else None
        return self.resolve(own) if own else self.root / "ledgers" / f"{site}.jsonl"

    def relative(self, path: Path) -> str:
        """As it stands in JSON: relative to the study unless it lies outside."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def run(self, name: str) -> Path:
        """The directory of a run given by path, name or unique number."""
        for candidate in (Path(name), self.root / name, self.runs / name):
            if (candidate / "config.toml").is_file():
                return candidate.resolve()
        matches = sorted(self.runs.glob(f"{name.zfill(5)}-*")) if name.isdigit() else []
        begun = [path for path in matches if (path / "config.toml").is_file()]
        if len(begun) == 1:
            return begun[0]
        if not begun and (killed := [path for path in (*matches, self.runs / name) if path.is_dir()]):
            where = self.relative(killed[0])
            raise UsageError(f"{where}: was ended before its run began; delete it and train again")
        known = sorted(path.parent.name for path in self.runs.glob("*-*/config.toml"))[-5:]
        there = f"the last are {', '.join(known)}" if known else "train one first: wsi-fl train"
        raise UsageError(f"no run {name!r}; {there}")

    def site_names(self) -> list[str]:
        files = drop_companions((self.root / "sites").glob("*.toml"))
        return sorted((path.stem for path in files), key=natural)

    def site(self, name: str) -> SiteFile:
        """One site, with the promises of the run where the study is seen as of one."""
        began = self.site_of_run(name)
        if began is None:
            return self._site_today(name)
        return as_agreed(began, self._site_today(name)) if self.site_path(name).is_file() else began

    def site_of_run(self, name: str) -> SiteFile | None:
        """The site file that the run keeps; None without one."""
        kept = self._kept(name)
        return validated(SiteFile, _read_toml(kept), self._label(kept)) if kept else None

    def promise(self, name: str) -> str:
        """SHA-256 of the site file that the run keeps; "" without one."""
        kept = self._kept(name)
        return hashlib.sha256(kept.read_bytes()).hexdigest() if kept else ""

    def _kept(self, name: str) -> Path | None:
        kept = self._run / "sites" / name / SITE_FILE if self._run else None
        return kept if kept and kept.is_file() else None

    def changed_promises(self, name: str) -> list[str]:
        """What today's site file promises otherwise than the run's, as "max_epsilon = 3 now, 2 in this run"."""
        began = self.site_of_run(name)
        if began is None or not self.site_path(name).is_file():
            return []
        today = self._site_today(name)
        pairs = [(key, getattr(began, key), getattr(today, key)) for key in PROMISES]
        return [
            f"{key} = {_shown(now)} now, {_shown(was)} in this run" for key, was, now in pairs if was != now
        ]

    def _site_today(self, name: str) -> SiteFile:
        """One site; its file's name and its `name` are the same."""
        path = self.site_path(name)
        if not path.is_file():
            names = self.site_names()
            close = difflib.get_close_matches(name, names, 1)
            raise UsageError(
                f"unknown site {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else "")
                + f"; sites/ has {', '.join(names) or 'none'}"
            )
        site = validated(SiteFile, _read_toml(path), self._label(path))
        if site.name != name:
            raise UsageError(
                f"{self._label(path)}: it says name = {site.name!r}; write name = {name!r}, or rename the file"
            )
        return site

    def sites(self, pipeline: Pipeline) -> list[SiteFile]:
        """The sites of a pipeline, in order."""
        names = pipeline.sites if pipeline.sites is not None else self.site_names()
        if not names:
            raise UsageError(
                "sites/ is empty; write a site file, or make a study with `wsi-fl init DIR --from ARCHIVE`"
            )
        return [self.site(name) for name in names]

    def pipeline_name(self, name: str | None) -> str:
        """The name asked for, else the study's only pipeline, else camelyon17; UsageError where several others are."""
        own = [path.stem for path in drop_companions((self.root / "pipelines").glob("*.toml"))]
        if not name and len(own) > 1 and "camelyon17" not in own:
            raise UsageError(f"the study has several pipelines; name one with --pipeline: {', '.join(own)}")
        return name or (own[0] if len(own) == 1 else "camelyon17")

    def pipeline(self, name: str, overrides: Sequence[str] = ()) -> Pipeline:
        """The pipeline with its `extends` resolved and `--set key=value` applied."""
        path = self._pipeline_path(name)
        values = self._resolved(path, seen=())
        for override in overrides:
            _override(values, override)
        label = self._label(path) + (" with --set" if overrides else "")
        return validated(pipeline_model(), values, label)

    def _pipeline_path(self, name: str) -> Path:
        if name.endswith(".toml"):
            if not Path(name).is_file():
                raise UsageError(f"{name}: no such file")
            return Path(name).resolve()
        folders = [self.root / "pipelines", shipped("pipelines")]
        for folder in folders:
            if (folder / f"{name}.toml").is_file():
                return folder / f"{name}.toml"
        known = sorted({p.stem for folder in folders for p in drop_companions(folder.glob("*.toml"))})
        raise UsageError(f"unknown pipeline {name!r}; known: {', '.join(known)}")

    def _resolved(self, path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
        if path in seen:
            raise UsageError(f"{self._label(path)}: extends itself")
        values = _read_toml(path)
        base = values.pop("extends", None)
        if base is None:
            return values
        name = str(path.parent / str(base)) if str(base).endswith(".toml") else str(base)
        try:
            base_path = self._pipeline_path(name)
        except UsageError as error:
            raise UsageError(f"{self._label(path)}: extends = {toml_or_repr(base)}: {error}") from None
        return _merged(self._resolved(base_path, (*seen, path)), values)

    def _label(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.name

    def resolve(self, path: str) -> Path:
        """A path in a site file: relative to the study unless absolute; `~` and variables expand."""
        return self.root / os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111 unknown users stay


def _shown(value: Any) -> str:
    return "not set" if value is None else toml_value(value)


def load_pipeline(path: Path) -> Pipeline:
    """Return the complete pipeline that a run keeps."""
    return validated(pipeline_model(), _read_toml(path), path.name)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(ordinary(path).read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise UsageError(f"{path.parent.name}/{path.name}: not valid TOML: it is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path.parent.name}/{path.name}: not valid TOML: {error}") from None
    except ValueError:
        raise UsageError(f"{path.parent.name}/{path.name}: a number has thousands of digits") from None
    except RecursionError:
        raise UsageError(f"{path.parent.name}/{path.name}: nested too deeply; write it flatter") from None


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in top.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {override!r}: write it as section.key=value, for example train.rounds=5")
    text = text.lower() if text in ("True", "False") else text
    if (found := strange_character(override)) is not None:
        raise UsageError(f"--set {key.strip()!r}: holds the character {found}; give one key with one value")
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
