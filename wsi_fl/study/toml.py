"""TOML as people read and write it: documents of settings, and what is wrong with one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from wsi_fl.study.renamed import new_name
from wsi_fl.system.names import compose_text
from wsi_fl.types import NOT_PLAIN, UsageError, is_plain, strange_character

_S = TypeVar("_S", bound=BaseModel)


MOST_SEED = 2**63 - 1
"""The largest seed that every library takes."""

LEAST_SIGMA = 1e-3
"""The least noise multiplier that accountants can price."""

SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
"""What a site is called: its file, its folders and its store bear the name."""


def _plain(name: str) -> str:
    if name.startswith("timm:") and not is_plain(name.removeprefix("timm:")):
        raise ValueError(f"{name!r} {NOT_PLAIN}")
    return name


ModelName = Annotated[str, AfterValidator(_plain)]
"""What an architecture is called; what follows `timm:` is in timm's own table."""


def _of_no_hub(name: str) -> str:
    if ":" in name:  # of a file's path `encoder` itself says that it goes into weights
        raise ValueError(f"{name!r} {NOT_PLAIN}")
    return name


EncoderName = Annotated[str, AfterValidator(_of_no_hub)]
"""What an encoder is called: a preset, or an architecture in timm's own table."""


TableText = Annotated[str, AfterValidator(compose_text)]
"""What stands in a table of a site too: a column or a value, in the form in which tables are read."""


def refuse_twice(names: list[str] | None) -> list[str] | None:
    """Return the names, or raise ValueError where one is listed twice."""
    if twice := [name for name in names or () if (names or []).count(name) > 1]:
        raise ValueError(f"listed twice: {twice[0]}")
    return names


class Section(BaseModel):
    """A table of settings; the docstring of each key is its meaning for people, and `key` says what it goes with."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _no_strange_characters(cls, values: object) -> object:
        _refuse_strange(values)
        return values

    without_effect: ClassVar[tuple[str, ...]] = ()
    """Beginnings of its keys that make no other method: they change nothing about what is learned from a given store or
    answered, repeat it, or are told of anyway; "" for all."""
    compared: ClassVar[bool] = False
    """Whether the sites of a run must share its settings, of a section that has joined; of the core's `train` knows."""


def key(
    default: Any,
    *,
    needs: Mapping[str, str] | None = None,
    excludes: Mapping[str, str] | None = None,
    **more: Any,
) -> Any:
    """Return the field of a key that is refused without what it needs, or beside what it excludes, once it is set to
    anything but its default.

    Args:
        needs: condition → why. A condition is a key that is set ("train.folds"), a key with one value
            ("predict.model = ensemble"), or what a method is ("a method of sums").
        excludes: the same.
        more: what pydantic's `Field` takes.
    """
    others: Any = {"needs": dict(needs or {}), "excludes": dict(excludes or {})}
    return Field(default, json_schema_extra=others, **more)


def clash(settings: Section, traits: Collection[str]) -> str:
    """Return in one line what the first key that is set lacks, or does not go with; "" where all go together.

    Among the conditions that keys name are `traits` of the method.
    """
    for name, section in settings:
        for last, field in type(section).model_fields.items() if isinstance(section, Section) else ():
            said, value = field.json_schema_extra, getattr(section, last)
            if not isinstance(said, dict) or value == field.get_default(call_default_factory=True):
                continue
            here = f"{name}.{field.alias or last} = {toml_or_repr(value)}"
            for does, wanted in (("needs", True), ("excludes", False)):
                conditions = said.get(does, {})
                assert isinstance(conditions, dict)
                for condition, why in conditions.items():
                    if _holds(settings, traits, condition) is not wanted:
                        return f"{here} {does} {condition}: {why}"
    return ""


def _holds(settings: Section, traits: Collection[str], condition: str) -> bool:
    key, _, wanted = condition.partition(" = ")
    if "." not in key:
        return condition in traits
    value = value_of(settings, key)
    return str(value) == wanted if wanted else bool(value)


def value_of(settings: Section, key: str) -> Any:
    """Return the value of a key, "train.rounds"; None where its section has not joined, KeyError for an unknown key."""
    name, _, last = key.partition(".")
    section = getattr(settings, name, None)
    return section.model_dump(by_alias=True)[last] if isinstance(section, Section) else None


def _refuse_strange(value: object, key: str = "") -> None:
    """Raise ValueError for a control character in a text, or in the texts of a list or table."""
    if isinstance(value, str) and (found := strange_character(value)) is not None:
        raise ValueError(f"{key or 'a name'} holds the character {found}; leave it out")
    if isinstance(value, Mapping):
        for name, each in value.items():
            _refuse_strange(name)
            _refuse_strange(each, f"{key}.{name}".removeprefix("."))
    if isinstance(value, list | tuple):
        for each in value:
            _refuse_strange(each, key)


def dump_toml(model: BaseModel, first_line: str = "") -> str:
    """Return the model as TOML that loads back to it; None and empty tables are left out."""
    values = model.model_dump(exclude_none=True, by_alias=True)
    text = tomli_w.dumps({key: value for key, value in values.items() if value != {}})
    return f"{first_line}\n{text}" if first_line else text


def toml_value(value: Any) -> str:
    """Return one TOML value on one line; TypeError for what is none, such as a table or None.

    Example:
        >>> toml_value([1, True, 1e-05, "a"])
        '[1, true, 1e-05, "a"]'
    """
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        raise TypeError("a table is no value")
    return tomli_w.dumps({"x": value})[len("x = ") : -1]


def validated(model: type[_S], values: Mapping[str, Any], label: str) -> _S:
    """Return the model of these values; UsageError in one line names `label`, the key and what is allowed."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # a misspelt key says more than the one that is missing because of it
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        raise UsageError(f"{label}: {_explain(model, first)}") from None


_NOT_KEYS = ("str", "list[str]", "[key]")
"""What pydantic adds to a location to say which member of a union it tried, or that a key itself is wrong."""


def _explain(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    location = [str(part) for part in error["loc"] if part not in _NOT_KEYS]
    key = ".".join(location)
    if why := new_name(key) or new_name(f"{key} = {error['input']!r}"):
        return why
    if error["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        close = difflib.get_close_matches(location[-1], known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"unknown key {key!r}; {hint}allowed here: {', '.join(known)}"
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
    """Return the value as TOML where there is any, else as Python shows it, for messages."""
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
