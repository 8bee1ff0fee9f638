"""Names in the code are words of the field; the counts of `benchmarks/names.py` may only fall."""

import sys
from pathlib import Path

import wsi_fl

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from names import begins_with_participle, count, words_of

MAX_STOP_WORDS = 23
MAX_PARTICIPLES = 0
MAX_FUNCTION_WORDS = 11
MAX_ONE_WORD = 300
"""Lower a number when fewer are left; never raise one."""


def test_uninformative_names_only_become_fewer():
    counts = count(Path(wsi_fl.__file__).parent)
    assert counts.stop_words <= MAX_STOP_WORDS, "python benchmarks/names.py --list wsi_fl"
    assert counts.participles <= MAX_PARTICIPLES
    assert counts.function_words <= MAX_FUNCTION_WORDS
    assert counts.one_word <= MAX_ONE_WORD
    assert counts.classes_defined_twice == 0
    assert counts.names > 25_000 and counts.functions > 3_000  # it counted at all


def test_every_kind_of_name_is_counted(tmp_path):
    (tmp_path / "a.py").write_text("class Plan: ...\ndef told(one, row):\n    found = row\n    return found\n")
    (tmp_path / "b.py").write_text("class _Plan: ...\ndef of_rows(): ...\ndef load_rows(): ...\n")
    counts = count(tmp_path)
    assert (counts.names, counts.stop_words, counts.functions) == (6, 3, 3)
    assert (counts.participles, counts.function_words, counts.one_word) == (1, 1, 1)
    assert counts.classes_defined_twice == 1


def test_words_and_participles_of_identifiers():
    assert words_of("_loadHTTPPage_twice") == ["load", "http", "page", "twice"]
    names = ("joined_rows", "_kept", "embed", "need_rows", "sorted_by", "read")
    assert [begins_with_participle(name) for name in names] == [True, True, False, False, True, False]
