"""TOML as people read and write it: documents of settings, and what is wrong with one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from wsi_fl.types import UsageError

S = TypeVar("S", bound=BaseModel)


def dump_toml(model: BaseModel, first_line: str = "") -> str:
    """The model as TOML that loads back to it; None is left out."""
    lines = [first_line] if first_line else []
    values = model.model_dump(exclude_none=True, by_alias=True)
    plain = {k: v for k, v in values.items() if not isinstance(v, dict)}
    lines += [f"{key} = {toml_value(value)}" for key, value in plain.items()]
    for section, content in values.items():
        if isinstance(content, dict) and content:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
            lines += [f"{toml_key(key)} = {toml_value(value)}" for key, value in content.items()]
    return "\n".join(lines) + "\n"


def toml_key(key: str) -> str:
    """A key, quoted where it has to be.

    Example:
        >>> toml_key("alpha"), toml_key("Head and Neck")
        ('alpha', '"Head and Neck"')
    """
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


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


def validated(model: type[S], values: Mapping[str, Any], label: str) -> S:
    """The model of these values; UsageError in one line that begins with `label`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # a misspelt key says more than the one that is missing because of it
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        raise UsageError(f"{label}: {_explain(model, first)}") from None


_NOT_KEYS = ("str", "list[str]", "[key]")
"""What pydantic adds to a location to say which member of a union it tried, or that a key itself is wrong."""


def _explain(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    """The key, what is wrong with it, and what is allowed."""
    location = [str(part) for part in error["loc"] if part not in _NOT_KEYS]
    key = ".".join(location)
    if why := getattr(model, "removed", {}).get(key):
        return f"{key} was removed: {why}"
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
    if key == "store.pixels":
        message = "use 'raw', 'native', 'none' or 'jpeg:90' (a quality from 1 to 100)"
    elif error["type"] == "string_pattern_mismatch":
        message = "use letters, digits, '.', '_' and '-', beginning with a letter or digit"
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
    return [field.alias or name for name, field in model.model_fields.items()]
