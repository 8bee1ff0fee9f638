"""pipelines/*.toml and sites/*.toml: load, extend, override, validate, dump.

Errors name the file, the key and what is allowed. Only `stages` and `cli` know this module; rooms take plain
values.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wsi_fl.types import UsageError

S = TypeVar("S", bound="Section")
Layout = Literal["camelyon17", "camelyon16", "generic"]
Allowed = Literal["model", "buffer", "generator", "patches"]
"""What a site may let go without differential privacy; "patches" lets other sites' evaluation and joint training
read its store."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Slides(Section):
    reader: Literal["auto", "openslide"] = "auto"


class Tile(Section):
    size_px: int = Field(512, ge=8)
    mpp: float = Field(0.5, gt=0)
    stride_px: int | None = Field(None, ge=1)
    """Default: size_px."""
    min_tissue: float = Field(0.2, ge=0, le=1)
    min_tumor: float = Field(0.5, gt=0, le=1)
    tumor_groups: list[str] | None = None
    """Annotation groups that are tumour, holes in it, or nothing; default: what Camelyon, ASAP and QuPath use."""
    hole_groups: list[str] | None = None
    ignored_groups: list[str] = []
    balance: bool = True
    max_per_slide: int | None = Field(None, ge=1)
    test_fraction: float = Field(0.2, ge=0, lt=1)
    seed: int = 0


class Store(Section):
    pixels: Literal["raw"] = "raw"


class Train(Section):
    rounds: int = Field(30, ge=1)
    eval_every: int = Field(1, ge=1)
    epochs_per_round: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    alpha: float = Field(0.3, ge=0, le=1)
    beta: float = Field(0.3, ge=0, le=1)
    augment: str = "flips"
    input_px: int | None = Field(None, ge=8)
    """Patches are reduced to this size for training; default: as stored."""
    seed: int = 0


class Model(Section):
    private: str = "resnet18"
    proxy: str = "resnet18"


class Topology(Section):
    self_weight: float = Field(0.0, ge=0, lt=1)


class Communication(Section):
    timeout_s: float = Field(1800.0, gt=0)


class Privacy(Section):
    enabled: bool = True
    mode: Literal["paper", "strict"] = "strict"
    sigma: float = Field(1.4, ge=0)
    clip: float = Field(0.7, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    grad_mode: Literal["auto", "hooks"] = "auto"
    unit: Literal["row"] = "row"
    insecure_seed: int | None = None
    """Fixed noise for tests; the ledger says so and no guarantee is given."""


class Evaluate(Section):
    bootstrap: int = Field(1000, ge=0)


class Pipeline(Section):
    """One study: what to do."""

    sites: list[str] | None = Field(None, min_length=1)
    """Default: every site of the study."""
    slides: Slides = Slides()
    tile: Tile = Tile()
    store: Store = Store()
    train: Train = Train()
    model: Model = Model()
    topology: Topology = Topology()
    comm: Communication = Communication()
    privacy: Privacy = Privacy()
    evaluate: Evaluate = Evaluate()


class Site(Section):
    """One hospital: where and who."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    real: bool = True
    slides: str | list[str]
    annotations: str | None = None
    layout: Layout = "generic"
    labels: str | None = None
    split: str | None = None
    mpp_override: float | None = Field(None, gt=0)
    private_model: str | None = None
    max_epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)
    allow: list[Allowed] = []

    def allows(self, what: Allowed) -> bool:
        """Whether `what` may leave without differential privacy; a simulated site allows all."""
        return not self.real or what in self.allow

    @property
    def allowed(self) -> tuple[str, ...]:
        return tuple(self.allow) if self.real else get_args(Allowed)


def shipped(kind: Literal["pipelines", "sites"]) -> Path:
    """The folder of shipped pipelines or site files, in an installed package or a checkout."""
    package = Path(__file__).parent
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


class Study:
    """A folder with pipelines/ and sites/; stores, runs and ledgers grow in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

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

    def ledger(self, site: str) -> Path:
        return self.root / "ledgers" / f"{site}.jsonl"

    def relative(self, path: Path) -> str:
        """As it stands in JSON: relative to the study unless it lies outside."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def run(self, name: str) -> Path:
        """The directory of a run given by path, name or unique number."""
        for candidate in (Path(name), self.root / name, self.runs / name):
            if (candidate / "config.toml").is_file():
                return candidate.resolve()
        matches = sorted(self.runs.glob(f"{name.zfill(5)}-*")) if name.isdigit() else []
        if len(matches) == 1:
            return matches[0]
        known = sorted(p.name for p in self.runs.glob("*-*"))[-5:]
        raise UsageError(f"no run {name!r}; {'the last are ' + ', '.join(known) if known else 'none yet'}")

    def site_names(self) -> list[str]:
        return sorted(p.stem for p in (self.root / "sites").glob("*.toml"))

    def site(self, name: str) -> Site:
        """One site; its file's name and its `name` are the same."""
        path = self.root / "sites" / f"{name}.toml"
        if not path.is_file():
            names = self.site_names()
            close = difflib.get_close_matches(name, names, 1)
            raise UsageError(
                f"unknown site {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else "")
                + f"; sites/ has {', '.join(names) or 'none'}"
            )
        site = validated(Site, _read_toml(path), self._label(path))
        if site.name != name:
            raise UsageError(f"{self._label(path)}: name is {site.name!r}, but the file says {name!r}")
        return site

    def sites(self, pipeline: Pipeline) -> list[Site]:
        """The sites of a pipeline, in order."""
        names = pipeline.sites if pipeline.sites is not None else self.site_names()
        if not names:
            raise UsageError(
                "sites/ is empty; write a site file, or make a study with `wsi-fl init DIR --from ARCHIVE`"
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"sites: {twice[0]} is listed twice")
        return [self.site(name) for name in names]

    def pipeline_name(self, name: str | None) -> str:
        """The name asked for, else the study's only pipeline, else camelyon17."""
        own = sorted(p.stem for p in (self.root / "pipelines").glob("*.toml"))
        return name or (own[0] if len(own) == 1 else "camelyon17")

    def pipeline(self, name: str, overrides: Sequence[str] = ()) -> Pipeline:
        """The pipeline with its `extends` resolved and `--set key=value` applied.

        Raises:
            UsageError: one line with file, key and allowed values.
        """
        path = self._pipeline_path(name)
        values = self._resolved(path, seen=())
        for override in overrides:
            _override(values, override)
        label = self._label(path) + (" with --set" if overrides else "")
        return validated(Pipeline, values, label)

    def _pipeline_path(self, name: str) -> Path:
        if name.endswith(".toml"):
            if not Path(name).is_file():
                raise UsageError(f"{name}: no such file")
            return Path(name).resolve()
        folders = [self.root / "pipelines", shipped("pipelines")]
        for folder in folders:
            if (folder / f"{name}.toml").is_file():
                return folder / f"{name}.toml"
        known = sorted({p.stem for folder in folders for p in folder.glob("*.toml")})
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


def load_pipeline(path: Path) -> Pipeline:
    """A complete pipeline file, as a run keeps it."""
    return validated(Pipeline, _read_toml(path), path.name)


def dump_toml(model: Section, first_line: str = "") -> str:
    """The model as TOML that loads back to it; None is left out."""
    lines = [first_line] if first_line else []
    values = model.model_dump(exclude_none=True)
    plain = {k: v for k, v in values.items() if not isinstance(v, dict)}
    lines += [f"{key} = {toml_value(value)}" for key, value in plain.items()]
    for section, content in values.items():
        if isinstance(content, dict) and content:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
            lines += [f"{key} = {toml_value(value)}" for key, value in content.items()]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """One TOML value.

    Example:
        >>> toml_value('C:\\\\x "y"'), toml_value([1, True]), toml_value(1e-05)
        ('"C:\\\\\\\\x \\\\"y\\\\""', '[1, true]', '1e-05')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.parent.name}/{path.name}: not valid TOML: {error}") from None


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
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UsageError(f"--set {override!r}: {section} is not a section")
    values[last] = value


def validated(model: type[S], values: Mapping[str, Any], label: str) -> S:
    """The model of these values; UsageError in one line that begins with `label`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # a misspelt key says more than the one that is missing because of it
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        raise UsageError(f"{label}: {_explain(model, first)}") from None


_UNION_TAGS = ("str", "list[str]")
"""What pydantic adds to a location to say which member of a union it tried."""


def _explain(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    """The key, what is wrong with it, and what is allowed."""
    location = [str(part) for part in error["loc"] if part not in _UNION_TAGS]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        close = difflib.get_close_matches(location[-1], known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"unknown key {key!r}; {hint}allowed here: {', '.join(known)}"
    if error["type"] == "missing":
        return f"key {key!r} is missing"
    if error["type"] == "model_type":
        return f"{key} is a section, [{key}], with keys {', '.join(_fields_at(model, location))}"
    message = str(error["msg"])
    return f"{key} = {toml_or_repr(error['input'])}: {message[0].lower()}{message[1:]}"


def toml_or_repr(value: Any) -> str:
    """For messages: TOML where there is any."""
    try:
        return toml_value(value)
    except TypeError:
        return repr(value)


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    for part in location:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
