"""The drawing of the architecture agrees with the imports, which keep extensions out of the core."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "docs"))
from draw_architecture import EXTENSIONS, drop_implied, find_imports, render_files


def test_the_page_and_the_drawing_show_the_imports_of_the_code():
    for path, text in render_files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make docs`"


def test_no_package_of_the_core_imports_an_extension():
    imports = find_imports()
    assert set(EXTENSIONS) < set(imports) and "types" in imports["system"]
    for package in set(imports) - set(EXTENSIONS):
        assert not imports[package] & set(EXTENSIONS), package


def test_arrows_are_the_imports_that_follow_from_no_others():
    imports = {"a": frozenset("bcd"), "b": frozenset("c"), "c": frozenset(), "d": frozenset()}
    assert list(drop_implied(imports)) == [("a", "b"), ("a", "d"), ("b", "c")]
