"""Target tables of a hospital are matched to patients, and events are told from censoring."""

import pytest
from conftest import refused

from wsi_fl.stages.site.target_labels import _parse_truth, _read_by_name
from wsi_fl.study.pipeline import TargetSettings
from wsi_fl.study.site_file import SiteFile


def read_targets(tmp_path, table, *, patient=None, event="dead", time="days"):
    """Return time and event by patient, as `[target]` reads them."""
    (tmp_path / "table.csv").write_text(table)
    columns = {} if patient is None else {"patient": patient}
    site = SiteFile.model_validate({"name": "A", "slides": ["x"], "columns": columns})
    target = TargetSettings(time=time, event=event, intervals=[10, 20])
    found = _read_by_name(
        tmp_path / "table.csv", site, [time, event], lambda row, where: _parse_truth(row, target, where)
    )
    return {name: value for (_, name), value in found.items()}


@pytest.mark.parametrize("event", ["censored", "Censor", "is_censored", "Censoring status", "CNSR", "cens"])
@pytest.mark.parametrize("value", ["1", "0", "True", "no"])
def test_a_column_of_censoring_is_refused_as_event(tmp_path, event, value):
    table = f"patient,days,{event}\np0,7,{value}\n"
    refused(lambda: read_targets(tmp_path, table, event=event), "line 2", f"{event} = ", "dead or censored")


@pytest.mark.parametrize("event", ["dead", "censdead", "uncensored", "not censored", "incense"])
def test_a_column_of_events_counts_ones_as_events(tmp_path, event):
    table = f"patient,days,{event}\np0,7,1\np1,9,0\n"
    assert read_targets(tmp_path, table, event=event) == {"p0": (7, 1), "p1": (9, 0)}


def test_the_advice_on_a_refused_column_of_censoring_is_accepted(tmp_path):
    table = "patient,days,censored\np0,7,dead\np1,9,censored\n"
    assert read_targets(tmp_path, table, event="censored") == {"p0": (7, 1), "p1": (9, 0)}


@pytest.mark.parametrize("heading", ["PATIENT", "Patient ID", "patient-id", "Case_ID", "Slide", "SLIDE ID"])
def test_the_heading_of_patients_is_recognized_in_any_spelling(tmp_path, heading):
    assert read_targets(tmp_path, f"{heading},days,dead\np0,7,1\n") == {"p0": (7, 1)}


def test_the_configured_column_of_patients_precedes_the_usual_ones(tmp_path):
    table = "patient,Case ID,Fall-Nr,days,dead\np0,c0,f0,7,1\n"
    for heading, name in (("Case ID", "c0"), ("Fall-Nr", "f0"), (None, "p0")):
        assert read_targets(tmp_path, table, patient=heading) == {name: (7, 1)}


@pytest.mark.parametrize("heading", ["Fall-Nr", "Patient ID", "patient"])
@pytest.mark.parametrize("name", ["2.02E+11", "#REF!"])
def test_patients_merged_by_a_spreadsheet_are_not_counted_as_one(tmp_path, heading, name):
    table = f"{heading},days,dead\n{name},7,1\n{name},7,1\n"
    refused(lambda: read_targets(tmp_path, table, patient=heading), "table.csv line 2", name, "spreadsheet")


def test_slides_whose_names_have_dots_keep_their_own_values(tmp_path):
    table = "slide,days,dead\nS1.1,7,1\nS1.2,9,0\nS2.svs,5,1\n"
    assert read_targets(tmp_path, table) == {"S1.1": (7, 1), "S1.2": (9, 0), "S2": (5, 1), "S2.svs": (5, 1)}


@pytest.mark.parametrize("days", ["1_0", "7_", "0_0.5"])
def test_times_are_read_in_common_notations(tmp_path, days):
    refused(lambda: read_targets(tmp_path, f"patient,days,dead\np0,{days},1\n"), "line 2", f"'{days}' is no number")
