"""Settings in TOML: reading, writing, validation, and error messages."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from wsi_fl.study.renamed import new_name
from wsi_fl.system.file_names import compose_text
from wsi_fl.system.files import require_regular_file
from wsi_fl.types import PLAIN_NAME_MESSAGE, UsageError, find_control_character, is_plain_name

_S = TypeVar("_S", bound=BaseModel)


MAX_SEED = 2**63 - 1
"""The largest seed of all libraries."""

MIN_SIGMA = 1e-3
"""The smallest noise multiplier that privacy accountants can handle."""

SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
"""Name of a site, of its file, its folders and its store."""


def _check_plain_name(name: str) -> str:
    library, _, architecture = name.partition(":")
    if library in {"timm", "monai"} and ":" in name and not is_plain_name(architecture):
        raise ValueError(f"{name!r} {PLAIN_NAME_MESSAGE}")
    return name


ModelName = Annotated[str, AfterValidator(_check_plain_name)]
"""Name of an architecture; `timm:` precedes a name of timm's registry, `monai:` that of a network of MONAI."""


def _check_encoder_name(name: str) -> str:
    if ":" in name:  # the error for a path is raised where encoders are built
        raise ValueError(f"{name!r} {PLAIN_NAME_MESSAGE}")
    return name


EncoderName = Annotated[str, AfterValidator(_check_encoder_name)]
"""Name of an encoder: a preset, or an architecture of timm's registry."""


TableText = Annotated[str, AfterValidator(compose_text)]
"""Name of a column or a value of a site's table, in the Unicode form of tables."""


def refuse_duplicates(names: list[str] | None) -> list[str] | None:
    """Return the names, or raise ValueError where one is listed twice."""
    if duplicates := [name for name in names or () if (names or []).count(name) > 1]:
        raise ValueError(f"listed twice: {duplicates[0]}")
    return names


class Section(BaseModel):
    """A section of settings; the docstring of a key is its documentation, its field's `needs` and `excludes` its
    rules."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_characters(cls, values: object) -> object:
        _refuse_strange(values)
        return values

    without_effect: ClassVar[tuple[str, ...]] = ()
    """Prefixes of keys that do not distinguish rows of a comparison: they change neither training on a given store nor
    predictions, are repetitions (seed, fold), or are compared otherwise; "" for all keys."""
    compared: ClassVar[bool] = False
    """Whether all sites of a run must have the same settings, for sections of plug-ins; `train` checks the core's."""


def settings_key(
    default: Any,
    *,
    needs: Mapping[str, str] | None = None,
    excludes: Mapping[str, str] | None = None,
    **field_options: Any,
) -> Any:
    """Return a field whose value, unless it is the default, is refused by unmet needs or met exclusions.

    Args:
        needs: condition → reason. A condition is a key that is set ("train.folds"), a key with a value
            ("predict.model = ensemble"), or a trait of a method ("a method of sums").
        excludes: the same.
        field_options: arguments of pydantic's `Field`.
    """
    others: Any = {"needs": dict(needs or {}), "excludes": dict(excludes or {})}
    return Field(default, json_schema_extra=others, **field_options)


def find_clash(settings: Section, traits: Collection[str]) -> str:
    """Return one line on the first key with an unmet need or a met exclusion; "" without any.

    Args:
        traits: conditions that the method meets.
    """
    for name, section in settings:
        for last, field in type(section).model_fields.items() if isinstance(section, Section) else ():
            conditions_of_key, value = field.json_schema_extra, getattr(section, last)
            if not isinstance(conditions_of_key, dict) or value == field.get_default(call_default_factory=True):
                continue
            setting_text = f"{name}.{field.alias or last} = {toml_or_repr(value)}"
            for verb, is_required in (("needs", True), ("excludes", False)):
                conditions = conditions_of_key.get(verb, {})
                assert isinstance(conditions, dict)
                for condition, why in conditions.items():
                    if _is_met(settings, traits, condition) is not is_required:
                        return f"{setting_text} {verb} {condition}: {why}"
    return ""


def _is_met(settings: Section, traits: Collection[str], condition: str) -> bool:
    key, _, expected = condition.partition(" = ")
    if "." not in key:
        return condition in traits
    value = read_setting(settings, key)
    return str(value) == expected if expected else bool(value)


def read_setting(settings: Section, key: str) -> Any:
    """Return the value of a key such as "train.rounds"; None without its section, KeyError for an unknown key."""
    name, _, last = key.partition(".")
    section = getattr(settings, name, None)
    return section.model_dump(by_alias=True)[last] if isinstance(section, Section) else None


def _refuse_strange(value: object, key: str = "") -> None:
    """Raise ValueError for a control character in a text, or in the texts of a list or table."""
    if isinstance(value, str) and (character := find_control_character(value)) is not None:
        raise ValueError(f"{key or 'a name'} holds the character {character}; leave it out")
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_strange(name)
            _refuse_strange(item, f"{key}.{name}".removeprefix("."))
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_strange(item, key)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file; UsageError, in one line, where it is not one."""
    return parse_toml(require_regular_file(path).read_bytes(), path)


def parse_toml(content: bytes, path: Path) -> dict[str, Any]:
    """Return the table in the bytes of a TOML file; UsageError, in one line, where it is not one."""
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UsageError(f"{path.parent.name}/{path.name}: not valid TOML: it is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path.parent.name}/{path.name}: not valid TOML: {error}") from None
    except ValueError:
        raise UsageError(f"{path.parent.name}/{path.name}: a number has thousands of digits") from None
    except RecursionError:
        raise UsageError(f"{path.parent.name}/{path.name}: nested too deeply; write it flatter") from None


def dump_toml(model: BaseModel, first_line: str = "") -> str:
    """Return the model as TOML without None and empty tables; loading it gives an equal model."""
    values = model.model_dump(exclude_none=True, by_alias=True)
    text = tomli_w.dumps({key: value for key, value in values.items() if value != {}})
    return f"{first_line}\n{text}" if first_line else text


def toml_value(value: Any) -> str:
    """Return one TOML value on one line; TypeError for a table or None.

    Example:
        >>> toml_value([1, True, 1e-05, "a"])
        '[1, true, 1e-05, "a"]'
    """
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        raise TypeError("a table is no value")
    return tomli_w.dumps({"x": value})[len("x = ") : -1]


def validate_model(model: type[_S], values: Mapping[str, Any], label: str) -> _S:
    """Validate values; the UsageError is one line with the label, the key and the allowed values."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # a misspelt key explains more than the missing key that it causes
        first = min(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        raise UsageError(f"{label}: {_explain_error(model, first)}") from None


_NOT_KEYS = ("str", "list[str]", "[key]")
"""Parts of pydantic's error locations that are union members or mark a wrong key."""


def _explain_error(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    location = [str(part) for part in error["loc"] if part not in _NOT_KEYS]
    key = ".".join(location)
    if why := new_name(key) or new_name(f"{key} = {error['input']!r}"):
        return why
    if error["type"] == "extra_forbidden":
        names = _fields_at(model, location[:-1])
        close = difflib.get_close_matches(location[-1], names, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"unknown key {key!r}; {hint}allowed here: {', '.join(names)}"
    if error["type"] == "missing":
        return f"key {key!r} is missing"
    if error["type"] == "model_type":
        return f"{key} is a section, [{key}], with keys {', '.join(_fields_at(model, location))}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error" and not isinstance(error["input"], str | int | float | list):
        return message
    if key == "store.pixels":
        message = "use 'raw', 'native', 'none' or 'jpeg:90' (a quality from 1 to 100)"
    elif error["type"] == "list_type":
        message = f'write a list, {location[-1]} = ["{error["input"]}"]'
    elif error["type"] == "string_pattern_mismatch":
        message = "use letters, digits, '.', '_' and '-', beginning with a letter or digit"
    return f"{key} = {toml_or_repr(error['input'])}: {message[0].lower()}{message[1:]}"


def toml_or_repr(value: Any) -> str:
    """Return the value as TOML, else as Python's `repr`, for messages."""
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
    return [field.alias or name for name, field in model.model_fields.items()]
