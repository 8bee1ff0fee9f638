"""Count names that a reader must decode: `python benchmarks/names.py PACKAGE_FOLDER...` prints a row for each folder.

Names are what code introduces: variables, parameters, functions, methods and classes; dunders do not count. Words are
split at underscores and capitals. Verbs have forms that look like participles (`read`, `set`, `put`); these count as
verbs.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STOP_WORDS = frozenset(
    """one found told said known seen asked wanted aside some mine theirs kept made given taken began own whole few most
    rest held meant here there way what which of beside both every each them it moved tried drawn written gone apart
    again anew alone together outside inside before after still now once shown left right""".split()  # noqa: SIM905
)
"""Pronouns, participles and adverbs that name nothing."""

_IRREGULAR = frozenset(
    """found told said known seen kept made given taken begun held meant drawn written gone shown left built bought
    brought caught chosen come done driven fallen felt fought forgotten frozen got grown heard hidden hung laid lain led
    lent lost met paid proven run_out sent shaken shut slept sold sought spent spoken spread stood stolen struck sworn
    taught thought thrown understood woken won worn""".split()  # noqa: SIM905
)
_REGULAR_VERBS = frozenset(("need", "seed", "feed", "embed", "speed", "proceed", "exceed", "succeed", "shed", "breed"))

_FUNCTION_WORDS = frozenset(
    """about above across after again all alone along also among and any anything apart around aside at away because
    before behind below beneath beside between beyond both but by during each either else every everybody everything few
    for from here how if in inside into it its just least less like many mine more most much near nearest neither no
    nobody none not nothing now of off on once one only onto or other others out outside over own per quite rather same
    so some somebody something still such surely than that the their theirs them then there these they this those though
    through to together too toward under until unless up upon very was were what when where whether which while who
    whole whom whose why with within without yet""".split()  # noqa: SIM905
)
"""Pronouns, prepositions, conjunctions and adverbs."""


class Counts(NamedTuple):
    """What `count` finds in a package."""

    names: int
    stop_words: int
    functions: int
    participles: int
    function_words: int
    one_word: int
    classes_defined_twice: int

    def shares(self) -> dict[str, float]:
        """Return the four shares in percent."""
        return {
            "stop words": 100 * self.stop_words / max(1, self.names),
            "participles": 100 * self.participles / max(1, self.functions),
            "function words": 100 * self.function_words / max(1, self.functions),
            "one word": 100 * self.one_word / max(1, self.functions),
        }


def words_of(name: str) -> list[str]:
    """Return the lower-case words of an identifier.

    >>> words_of("_loadHTTPPage_twice")
    ['load', 'http', 'page', 'twice']
    """
    words, word, previous = [], "", ""
    for k, letter in enumerate(name):
        following = name[k + 1] if k + 1 < len(name) else ""
        starts = letter.isupper() and (previous.islower() or (previous.isupper() and following.islower()))
        if letter == "_" or starts:
            words.append(word)
            word = ""
        word += "" if letter == "_" else letter
        previous = letter
    return [part.lower() for part in [*words, word] if part]


def introduced_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that is bound by assignment, as a parameter or by `def`, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def begins_with_participle(name: str) -> bool:
    """Return whether the first word is a participle.

    >>> [begins_with_participle(name) for name in ("joined_rows", "_kept", "embed", "need_rows", "sorted_by")]
    [True, True, False, False, True]
    """
    first = words_of(name)[0]
    return first in _IRREGULAR or (len(first) > 4 and first.endswith("ed") and first not in _REGULAR_VERBS)


def is_dunder(name: str) -> bool:
    """Return whether Python gives the name its meaning."""
    return name.startswith("__") and name.endswith("__")


def parse_package(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the syntax tree of each module below a folder, those named test_* and folders named tests left out."""
    for path in sorted(folder.rglob("*.py")):
        if "tests" in path.relative_to(folder).parts or path.name.startswith(("test_", "conftest")):
            continue
        try:
            yield path, ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue


def count(folder: Path) -> Counts:
    """Return the counts of a package."""
    names, functions, classes = Counter[str](), list[str](), defaultdict[str, set[tuple[Path, int]]](set)
    for path, tree in parse_package(folder):
        names.update(name for name, _ in introduced_names(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_dunder(node.name):
                functions.append(node.name)
            elif isinstance(node, ast.ClassDef):
                classes[node.name.strip("_")].add((path, node.lineno))
    functions = [name for name in functions if words_of(name)]
    return Counts(
        names=sum(names.values()),
        stop_words=sum(n for name, n in names.items() if name.strip("_").lower() in STOP_WORDS),
        functions=len(functions),
        participles=sum(map(begins_with_participle, functions)),
        function_words=sum(words_of(name)[0] in _FUNCTION_WORDS for name in functions),
        one_word=sum(len(words_of(name)) == 1 for name in functions),
        classes_defined_twice=sum(len(places) > 1 for places in classes.values()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Count names that a reader must decode.")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="the places of all that count")
    arguments = parser.parse_args()
    if arguments.list:
        for folder in arguments.folders:
            for line in listed_places(folder):
                print(line)
        return
    table = {str(folder): count(folder) for folder in arguments.folders}
    if arguments.json:
        print(json.dumps({name: row._asdict() | row.shares() for name, row in table.items()}, indent=2))
        return
    for name, row in table.items():
        shares = ", ".join(f"{what} {share:.1f} %" for what, share in row.shares().items())
        print(
            f"{name}: {row.names} names, {row.stop_words} of the stop list, {row.functions} functions; {shares}; ",
            end="",
        )
        print(f"{row.classes_defined_twice} classes defined twice")


def listed_places(folder: Path) -> Iterator[str]:
    """Yield a line for each name that counts."""
    classes = defaultdict[str, list[str]](list)
    for path, tree in parse_package(folder):
        for name, line in introduced_names(tree):
            if name.strip("_").lower() in STOP_WORDS:
                yield f"{path}:{line}: {name}: stop word"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_dunder(node.name):
                first, *others = words_of(node.name) or [""]
                reasons = ["participle"] * begins_with_participle(node.name)
                reasons += ["function word"] * (first in _FUNCTION_WORDS) + ["one word"] * (not others)
                for reason in reasons:
                    yield f"{path}:{node.lineno}: {node.name}: {reason}"
            elif isinstance(node, ast.ClassDef):
                classes[node.name.strip("_")].append(f"{path}:{node.lineno}")
    for name, places in classes.items():
        if len(places) > 1:
            yield f"{', '.join(places)}: {name}: defined twice"


if __name__ == "__main__":
    main()
