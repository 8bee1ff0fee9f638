"""The reference of configuration keys, from the models that validate them: `wsi-fl config` and its page."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from wsi_fl.study.pipeline import pipeline_model
from wsi_fl.study.renamed import new_name
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import toml_or_repr
from wsi_fl.types import UsageError

_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
_TYPES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
_PATTERNS = {"store.pixels": "raw, native, none or jpeg:90 (a quality from 1 to 100)"}

_INTRODUCTION = """\
# Configuration

This page is generated from the models that validate the configuration; `wsi-fl config KEY` prints the same, and
`wsi-fl config site` the keys of site files.

A pipeline, `pipelines/*.toml`, holds the settings of a study. `--set section.key=value` overrides a key for one
command. `extends = "NAME"` in the first line takes all other keys from another pipeline. A site file, `sites/*.toml`,
holds the paths of a hospital's slides, its privacy budget and its permissions. Unknown keys are errors.
"""


class _KeyRow(TypedDict):
    """A configuration key: type in words, default or None, and its needs and excludes as condition → reason."""

    key: str
    type: str
    default: Any
    meaning: str
    needs: dict[str, str]
    excludes: dict[str, str]


def find_keys(prefix: str = "") -> list[_KeyRow]:
    """Return the configuration keys at or under a prefix, those of a site file under `site.`; UsageError for none."""
    all_rows = [row for _, _, rows in _list_sections() for row in rows]
    rows = [row for row in all_rows if not prefix or f"{row['key']}.".startswith(f"{prefix}.")]
    if not rows:
        if why := new_name(prefix):
            raise UsageError(why)
        names = [row["key"] for row in all_rows]
        close = difflib.get_close_matches(prefix, [*names, *{key.split(".")[0] for key in names}], 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"unknown key {prefix!r}; {hint}`wsi-fl config` lists all")
    return rows


def render_key_lines(document: Mapping[str, list[_KeyRow]]) -> Iterator[str]:
    """Yield two lines for each key: type and default, and meaning."""
    for row in document["keys"]:
        yield f"{row['key']}: {row['type']}; default: {_default_text(row)}\n    {_full_meaning(row)}\n"


def render_reference_page() -> str:
    """Return the configuration reference as Markdown, a table for every section."""
    parts = [_INTRODUCTION]
    for title, about, rows in _list_sections():
        table = [
            f"| `{row['key'].removeprefix('site.')}` | {row['type']} "
            f"| {_default_text(row, '`')} | {_full_meaning(row)} |"
            for row in rows
        ]
        parts += [f"## {title}\n", f"{about}\n", "| key | type | default | meaning |\n|---|---|---|---|"]
        parts += ["\n".join(table) + "\n"]
    return "\n".join(parts)


def _list_sections() -> list[tuple[str, str, list[_KeyRow]]]:
    """Return (title, introduction, keys) of the top level of a pipeline, its sections, and the site file."""
    schema, site = pipeline_model().model_json_schema(), SiteFile.model_json_schema()
    sections: list[tuple[str, str, list[_KeyRow]]] = [("Top of a pipeline", schema["description"], [])]
    for name, field in schema["properties"].items():
        if "$ref" not in field:
            sections[0][2].append(_build_row(name, field))
            continue
        section = schema["$defs"][field["$ref"].rsplit("/", 1)[1]]
        rows = [_build_row(f"{name}.{key}", key_field) for key, key_field in section["properties"].items()]
        sections.append((f"[{name}]", _join_lines(section["description"]), rows))
    rows = [_build_row(f"site.{key}", key_field) for key, key_field in site["properties"].items()]
    return [*sections, ("Site files", _join_lines(site["description"]), rows)]


def _build_row(key: str, field: Mapping[str, Any]) -> _KeyRow:
    kind = _PATTERNS.get(key) or _type_words(field)
    return {
        "key": key,
        "type": kind,
        "default": field.get("default"),
        "meaning": _join_lines(field.get("description", "")),
        "needs": field.get("needs", {}),
        "excludes": field.get("excludes", {}),
    }


def _full_meaning(row: _KeyRow) -> str:
    parts = [row["meaning"]]
    for conditions_of, word in ((row["needs"], "Needs"), (row["excludes"], "Not with")):
        why: dict[str, list[str]] = {}
        for condition, reason in conditions_of.items():
            why.setdefault(reason, []).append(condition)
        parts += [f"{word} {', '.join(conditions)}: {reason}." for reason, conditions in why.items()]
    return " ".join(parts)


def _type_words(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type_words(option) for option in field["anyOf"] if option.get("type") != "null")
    if "enum" in field or "const" in field:
        *others, last = [str(option) for option in field.get("enum", [field.get("const")])]
        return f"{', '.join(others)} or {last}" if others else last
    if field["type"] == "array":
        return f"list of {_type_words(field['items'])}"
    if field["type"] == "object":
        return f"table of {_type_words(field['additionalProperties'])}"
    bounds = [words.format(field[bound]) for bound, words in _BOUNDS.items() if bound in field]
    return f"{_TYPES[field['type']]} {', '.join(bounds)}".strip()


def _default_text(row: _KeyRow, mark: str = "") -> str:
    if row["key"] == "privacy.unit":  # follows from the examples (`_default_unit` of a pipeline)
        return f'{mark}"row"{mark}; {mark}"patient"{mark} for slides and patients'
    if row["default"] is None:
        return "not set"
    return f"{mark}{toml_or_repr(row['default'])}{mark}"


def _join_lines(text: str) -> str:
    return " ".join(text.split())
