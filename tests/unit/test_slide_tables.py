"""Every row of a table is used, assigned to another site, or refused with its line, and tables print whole."""

from functools import partial

import pytest
from conftest import refused
from rich.console import Console
from test_archive_layouts import HEADER, generic, read_generic

from wsi_fl.slides.layouts import Sources, list_sites, read_site
from wsi_fl.slides.layouts.common import TableRow, describe_account, read_rows
from wsi_fl.stages.prepare.tile import render_tile_lines
from wsi_fl.stages.runtime import console
from wsi_fl.stages.runtime.console import print_lines

archive = partial(generic, files=[f"{name}.tif" for name in "abcd"])
read = partial(read_generic, site="A")
TABLE = f"{HEADER}\na.tif,p0,A,normal\nb.tif,p1,B,tumor\n\nc.tif,p2,A,tumor\n"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_table_is_read_in_any_format_of_spreadsheets(tmp_path, delimiter, encoding, ends):
    text = TABLE.replace(",", delimiter).replace("\n", ends)
    records, aside = read(archive(tmp_path, text.encode(encoding)))
    assert [(one.slide, one.patient) for one in records] == [("a", "p0"), ("c", "p2")] and aside == []


def test_every_row_is_accounted_for(tmp_path):
    said: list[str] = []
    read(archive(tmp_path, TABLE), tell=said.append)
    assert said == ["slides.csv: 3 rows, 2 of this site, 1 of others (B)"]
    rows = read_rows(tmp_path / "slides.csv", ())
    assert [row.where for row in rows] == [f"slides.csv line {n}" for n in (2, 3, 5)]
    assert describe_account("t", rows[:1], 1, "A") == "t: 1 rows, all of this site"
    others = [TableRow("", site=f"S{k}") for k in (10, 9, 2)]
    assert describe_account("t", others, 0, "A") == "t: 3 rows, 0 of this site, 3 of others (S2, S9, S10)"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('b.tif,"p1,A,tumor', ("line 3", "a quote is opened and never closed")),
        ('b.tif,"p1,A,tumor\nc.tif,p2",A,tumor', ("line 3", "over several lines")),
        ('b.tif,"p1"x,A,tumor', ("line 3", "not a readable CSV")),
        ("b.tif,p1", ("line 3", "has 2 fields, but the header has 4")),
        ("b.tif,p1,A,tumor,more", ("line 3", "has 5 fields, but the header has 4")),
        ("b.tif,p1,,tumor", ("line 3", "site is empty")),
        (",p1,A,tumor", ("line 3", "slide is empty")),
        ("b.tif,,A,tumor", ("line 3", "patient is empty")),
        ("b.tif,p\0,A,tumor", ("line 3", "U+0000")),
        ("b.tif,p\x1b[2J,A,tumor", ("line 3", "U+001B")),
    ],
)
def test_an_invalid_row_is_refused_with_its_line(tmp_path, row, words):
    root = archive(tmp_path, f"{HEADER}\na.tif,p0,A,normal\n{row}\nd.tif,p3,A,tumor\n")
    refused(lambda: read(root), *words)
    refused(lambda: list_sites(root, "generic") and read(root), *words)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("", ("the table is empty",)),
        (" , ,\n", ("the table is empty",)),
        ("slide,patient\n", ("column 'site' is missing; has slide, patient",)),
        (f"{HEADER}\n".encode() + b"Gr\xfc\xdfe,p,A,tumor\n", ("not UTF-8",)),
        (
            f"{HEADER},label\na.tif,p0,A,normal,normal\nb.tif,p1,A,normal,tumor\n",
            ("line 3: column 'label' is there twice",),
        ),
    ],
)
def test_an_unreadable_table_is_refused_with_the_reason(tmp_path, table, words):
    refused(lambda: read(archive(tmp_path, table)), "slides.csv", *words)


def test_two_rows_that_contradict_each_other_are_refused_in_every_archive(tmp_path):
    name, stages = "patient_000_node_0.tif", tmp_path / "stages.csv"
    (tmp_path / name).touch()
    stages.write_text(f"patient,stage\npatient_000.zip,pN0\n{name},negative\n{name},macro\n")
    sources = Sources("C1", "sites/C1.toml", (f"{tmp_path}/*.tif",), labels=stages)
    refused(lambda: read_site("camelyon17", sources), "stages.csv line 4", "in a line above")


def tile_document(n_sites: int, n_failed: int = 0) -> dict:
    counts = {"healthy": 3, "tumor": 4}
    row = {
        "failed": [{"slide": f"x{k}.tif", "reason": "no such slide file"} for k in range(n_failed)],
        "table": {"train": counts, "val": dict.fromkeys(counts, 0), "test": counts},
        "patients": {"train": 20, "test": 1},
        **{"healthy": 6, "tumor": 8, "train": 7, "store": "s", "excluded": {}, "tissue": {}},
    }
    return {"sites": [{"site": f"S{k + 1}", **row} for k in range(n_sites)], "next": ["wsi-fl train"]}


@pytest.mark.parametrize("n", [2, 64])
def test_a_table_of_many_sites_can_be_read(capsys, monkeypatch, n):
    monkeypatch.setattr(console, "stderr", Console(stderr=True, width=80))
    print_lines(render_tile_lines(tile_document(n)))
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if "│" in line or "┃" in line]
    assert max(map(len, lines)) <= 130
    assert all(any(f"S{k + 1} " in line for line in lines) for k in range(n))
    assert f" {14 * n} " not in said and f" {7 * n} " in said


def test_excluded_slides_are_named_and_the_rest_counted(capsys):
    print_lines(render_tile_lines(tile_document(1, n_failed=100_000)))
    said = capsys.readouterr().err
    assert "few patients are for the test (S1 1); `wsi-fl train --folds 5` tests each once" in said
    assert said.count("no such slide file") == 20 and "and 99980 more excluded" in said


def test_a_site_without_test_patches_is_named(capsys, monkeypatch):
    monkeypatch.setattr(console, "stderr", Console(stderr=True, width=400))
    document = tile_document(3)
    for row, n_healthy in zip(document["sites"], (3, 0), strict=False):
        row["table"] = row["table"] | {"test": {"healthy": n_healthy, "tumor": 0}}
    print_lines(render_tile_lines(document))
    said = capsys.readouterr().err
    assert "S1: has no tumor patch for testing" in said and "S2: has no test patch" in said
    assert "S3: has no" not in said
