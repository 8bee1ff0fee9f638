"""Tables of spreadsheets are read with declared separators and heading variants, and damaged names are refused."""

from functools import partial

import pytest
from conftest import refused
from test_archive_layouts import HEADER, generic, read_generic

from wsi_fl.slides.layouts.common import read_rows
from wsi_fl.slides.layouts.spreadsheets import normalize_columns, parse_cell_number
from wsi_fl.stages.prepare.feature_columns import read_columns

archive = partial(generic, files=[f"{name}.tif" for name in "abcd"])
read = partial(read_generic, site="A")
ROWS = "a.tif,p0,A,normal\nb.tif,p1,A,tumor\n"
TABLE = f"{HEADER}\n{ROWS}"


def patients_of(tmp_path, text, encoding="utf-8"):
    records, aside = read(archive(tmp_path, text.encode(encoding)))
    assert aside == []
    return [record.patient for record in records]


@pytest.mark.parametrize(
    ("first", "separator", "encoding"),
    [
        ("sep=;", ";", "utf-8"),
        ('"sep=,"', ",", "utf-8-sig"),
        ("SEP=|", "|", "utf-8"),
        ("sep=\t", "\t", "utf-16"),
        ("sep=;;;;", ";", "utf-8"),  # saved again by a spreadsheet that took it for a row
    ],
)
def test_the_line_in_which_a_table_names_its_separator_is_no_header(tmp_path, first, separator, encoding):
    text = f"{first}\r\n{TABLE}".replace(",", separator) if separator != "," else f"{first}\n{TABLE}"
    assert patients_of(tmp_path, text, encoding) == ["p0", "p1"]
    assert [row.where for row in read_rows(tmp_path / "slides.csv", ())] == [f"slides.csv line {n}" for n in (3, 4)]


@pytest.mark.parametrize("name", ["2.02E+11", "2.02501e+11", "1E+05", "#REF!", "#NAME?", "#VALUE!", "########"])
@pytest.mark.parametrize("column", ["slide", "patient", "site"])
def test_a_name_that_a_spreadsheet_has_damaged_is_refused(tmp_path, name, column):
    values = {"slide": "b.tif", "patient": "p1", "site": "A", "label": "tumor", column: name}
    table = f"{TABLE}{','.join(values.values())}\n"
    refused(lambda: read(archive(tmp_path, table)), "slides.csv line 4", f"{column} is '{name}'", "spreadsheet")


def test_a_shortened_name_with_a_decimal_comma_or_in_a_table_of_splits_is_refused(tmp_path):
    table = TABLE.replace(",", ";").replace("p0", "2,02E+11")
    refused(lambda: read(archive(tmp_path, table)), "line 2", "shortened")
    split = tmp_path / "split.csv"
    split.write_text("Patient,Split\n2.02E+11,test\n")
    refused(lambda: read(archive(tmp_path, TABLE), split=split), "split.csv line 2", "shortened")


@pytest.mark.parametrize("name", ["1E5", "12E4", "E+11", "202501234567", "#17", "2.02", "7e+1x"])
def test_a_name_that_only_looks_like_a_number_stays(tmp_path, name):
    assert patients_of(tmp_path, TABLE.replace("p0", name)) == [name, "p1"]


def test_zeros_that_a_formula_guards_are_the_name(tmp_path):
    rows = '"=""a.tif""","=""007""",A,normal\n="b.tif",= "008",A,tumor\n'
    assert patients_of(tmp_path, f"{HEADER}\n{rows}") == ["007", "008"]
    assert patients_of(tmp_path, TABLE.replace("p0", "=A1")) == ["=A1", "p1"]


@pytest.mark.parametrize("spelt", ["Split", "SPLIT", "split "])
def test_a_column_with_another_spelling_is_read(tmp_path, spelt):
    text = f"Slide,PATIENT,Site,Label,{spelt},MPP\na.tif,p0,A,normal,test,0.25\nb.tif,p1,A,tumor,train,0.5\n"
    records, _ = read(archive(tmp_path, text))
    assert [(one.split, one.mpp_override) for one in records] == [("test", 0.25), ("train", 0.5)]


def test_the_column_of_outlines_is_found_under_any_usual_heading(tmp_path):
    text = f"{HEADER},Annotations\na.tif,p0,A,tumor,a.geojson\n"
    refused(lambda: read(archive(tmp_path, text)), "line 2", "no such annotation", "a.geojson")


def test_a_configured_column_is_not_renamed():
    header = ["Patient ID", "Diagnosis", "OS time", "Age"]
    assert normalize_columns(header, ["Diagnosis", "os_time"]) == ["patient_id", "Diagnosis", "os_time", "Age"]
    both = ["Label", "label", "Patient ID", "patient-id"]
    assert normalize_columns(both, ["label"]) == both  # which is meant is not for a program to say


def test_features_are_read_from_a_table_with_another_spelling_of_label(tmp_path):
    table = tmp_path / "features.csv"
    table.write_text("Label,Patient,f0,f1\nx,p0,1,2\ny,p1,3,4\n")
    x, labels, patients = read_columns(table)
    assert (x.tolist(), labels.tolist(), patients.tolist()) == ([[1, 2], [3, 4]], ["x", "y"], ["p0", "p1"])


@pytest.mark.parametrize("text", ["0.2_5", "1_000", "_1"])
def test_a_name_with_an_underscore_is_no_number(tmp_path, text):
    with pytest.raises(ValueError, match=r"\w"):
        parse_cell_number(text)
    table = f"{HEADER},mpp\na.tif,p0,A,tumor,{text}\n"
    refused(lambda: read(archive(tmp_path, table)), "line 2", f"mpp is '{text}'")
    table = tmp_path / "features.csv"
    table.write_text(f"label,f0\nx,{text}\n")
    refused(lambda: read_columns(table), "is no number")


CBIOPORTAL = "#Patient Identifier\tSlide\n#Who it is\tIts file\n#STRING\tSTRING\n#1\t1\n"


@pytest.mark.parametrize(
    ("remarks", "separator"),
    [
        (CBIOPORTAL, "\t"),
        ('# export of "2026-01-01, checked\n\n', ","),  # a quote that is never closed
        ('"# slides, of all patients";\n', ";"),
        ("sep=;\n# site and label\n", ";"),
    ],
)
def test_remarks_before_the_headings_are_skipped(tmp_path, remarks, separator):
    assert patients_of(tmp_path, remarks + TABLE.replace(",", separator)) == ["p0", "p1"]
    first = len(remarks.splitlines()) + 2
    for needed in ((), ("label",)):
        rows = read_rows(tmp_path / "slides.csv", needed)
        assert [row.where for row in rows] == [f"slides.csv line {first + k}" for k in range(2)]


@pytest.mark.parametrize("needed", [["SEX"], ["OS_MONTHS", "SEX"], []])
def test_a_remark_that_names_the_same_columns_is_still_none(tmp_path, needed):
    """Clinical tables of cBioPortal describe each column above the headings."""
    table = tmp_path / "data_clinical_patient.txt"
    remarks = "#Patient ID\tSex\tOS months\n#Identifier\tSex\tMonths\n#STRING\tSTRING\tNUMBER\n#1\t1\t1\n"
    table.write_text(f"{remarks}PATIENT_ID\tSEX\tOS_MONTHS\nTCGA-02\tMale\t4.5\n")
    (row,) = read_rows(table, needed)
    assert dict(row) == {"patient_id": "TCGA-02", "SEX": "Male", "OS_MONTHS": "4.5"}


@pytest.mark.parametrize("heading", ["#", "#row", "# Case"])
def test_headings_that_begin_as_a_remark_are_headings(tmp_path, heading):
    rows = "".join(f"{k},{row}\n" for k, row in enumerate(ROWS.splitlines()))
    assert patients_of(tmp_path, f"{heading},{HEADER}\n{rows}") == ["p0", "p1"]
    assert len(read_rows(tmp_path / "slides.csv", ())) == 2


@pytest.mark.parametrize("text", ["sep=;\n", "# nothing\n#\n", "\n\n", "sep=,\n\n# nothing"])
def test_a_table_of_remarks_alone_is_empty(tmp_path, text):
    refused(lambda: read(archive(tmp_path, text)), "slides.csv", "the table is empty")


@pytest.mark.parametrize("mark", ["\ufeff", "\u200b", "\u2060"])
def test_marks_without_width_are_no_part_of_names(tmp_path, mark):
    text = f"{mark}{HEADER}{mark}\na.tif{mark},{mark}p0,A,normal\nb.tif,p1 {mark},A,tumor\n"
    assert patients_of(tmp_path, text) == ["p0", "p1"]
