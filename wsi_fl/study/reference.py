"""What every configuration key means, taken from the models that validate it: `wsi-fl config` and its page."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from wsi_fl.study.pipeline import pipeline_model
from wsi_fl.study.renamed import new_name
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import toml_or_repr
from wsi_fl.types import UsageError

_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
_TYPES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
_PATTERNS = {"store.pixels": "raw, native, none or jpeg:90 (a quality from 1 to 100)"}

_INTRODUCTION = """\
# Configuration

This page is made from the models that validate the configuration; `wsi-fl config KEY` prints the same, and
`wsi-fl config site` the keys of site files.

A pipeline, `pipelines/*.toml`, says what to do. `--set section.key=value` overrides one of its keys for one command.
`extends = "NAME"` as a first line takes all other keys from another pipeline. A site file, `sites/*.toml`, says where
a hospital's slides are and what the hospital allows. Unknown keys are errors.
"""


class _Key(TypedDict):
    """A configuration key: type in words, default or None, and condition → why of what it needs and excludes."""

    key: str
    type: str
    default: Any
    meaning: str
    needs: dict[str, str]
    excludes: dict[str, str]


def keys(prefix: str = "") -> list[_Key]:
    """Return the configuration keys at or under a prefix, those of a site file under `site.`; UsageError for none."""
    every = [row for _, _, rows in _sections() for row in rows]
    found = [row for row in every if not prefix or f"{row['key']}.".startswith(f"{prefix}.")]
    if not found:
        if why := new_name(prefix):
            raise UsageError(why)
        known = [row["key"] for row in every]
        close = difflib.get_close_matches(prefix, [*known, *{key.split(".")[0] for key in known}], 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"unknown key {prefix!r}; {hint}`wsi-fl config` lists all")
    return found


def keys_lines(document: Mapping[str, list[_Key]]) -> Iterator[str]:
    """Yield keys for people, each with its type, its default and its meaning."""
    for row in document["keys"]:
        yield f"{row['key']}: {row['type']}; default: {_default(row)}\n    {_meaning(row)}\n"


def page() -> str:
    """Return the configuration reference as Markdown, a table for every section."""
    parts = [_INTRODUCTION]
    for title, about, rows in _sections():
        table = [
            f"| `{row['key'].removeprefix('site.')}` | {row['type']} | {_default(row, '`')} | {_meaning(row)} |"
            for row in rows
        ]
        parts += [f"## {title}\n", f"{about}\n", "| key | type | default | meaning |\n|---|---|---|---|"]
        parts += ["\n".join(table) + "\n"]
    return "\n".join(parts)


def _sections() -> list[tuple[str, str, list[_Key]]]:
    """Return (title, introduction, keys) of the top of a pipeline, of each of its sections and of a site file."""
    schema, site = pipeline_model().model_json_schema(), SiteFile.model_json_schema()
    found: list[tuple[str, str, list[_Key]]] = [("Top of a pipeline", schema["description"], [])]
    for name, field in schema["properties"].items():
        if "$ref" not in field:
            found[0][2].append(_row(name, field))
            continue
        section = schema["$defs"][field["$ref"].rsplit("/", 1)[1]]
        rows = [_row(f"{name}.{key}", each) for key, each in section["properties"].items()]
        found.append((f"[{name}]", _plain(section["description"]), rows))
    rows = [_row(f"site.{key}", each) for key, each in site["properties"].items()]
    return [*found, ("Site files", _plain(site["description"]), rows)]


def _row(key: str, field: Mapping[str, Any]) -> _Key:
    kind = _PATTERNS.get(key) or _kind(field)
    return {
        "key": key,
        "type": kind,
        "default": field.get("default"),
        "meaning": _plain(field.get("description", "")),
        "needs": field.get("needs", {}),
        "excludes": field.get("excludes", {}),
    }


def _meaning(row: _Key) -> str:
    parts = [row["meaning"]]
    for conditions_of, word in ((row["needs"], "Needs"), (row["excludes"], "Not with")):
        why: dict[str, list[str]] = {}
        for condition, reason in conditions_of.items():
            why.setdefault(reason, []).append(condition)
        parts += [f"{word} {', '.join(conditions)}: {reason}." for reason, conditions in why.items()]
    return " ".join(parts)


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(each) for each in field["anyOf"] if each.get("type") != "null")
    if "enum" in field or "const" in field:
        *others, last = [str(each) for each in field.get("enum", [field.get("const")])]
        return f"{', '.join(others)} or {last}" if others else last
    if field["type"] == "array":
        return f"list of {_kind(field['items'])}"
    if field["type"] == "object":
        return f"table of {_kind(field['additionalProperties'])}"
    bounds = [words.format(field[bound]) for bound, words in _BOUNDS.items() if bound in field]
    return f"{_TYPES[field['type']]} {', '.join(bounds)}".strip()


def _default(row: _Key, mark: str = "") -> str:
    if row["default"] is None:
        return "not set"
    return f"{mark}{toml_or_repr(row['default'])}{mark}"


def _plain(text: str) -> str:
    return " ".join(text.split())
