"""Run folders have unique numbers, and checkpoints load back or are reported as damaged."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from builders import refused
from conftest import same
from safetensors import safe_open

from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.types import WsiFlError


def test_runs_are_numbered_in_order(tmp_path):
    names = [RunFolder.create(tmp_path, method, "p").name for method in ("proxyfl", "regular", "proxyfl")]
    assert names == ["00001-proxyfl-p", "00002-regular-p", "00003-proxyfl-p"]
    (tmp_path / "00002-regular-p").rmdir()
    (tmp_path / "00041-older-x").mkdir()
    (tmp_path / "notes").mkdir()
    assert RunFolder.create(tmp_path, "proxyfl", "p").name == "00042-proxyfl-p"


def test_runs_started_at_once_get_different_numbers(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda k: RunFolder.create(tmp_path, f"m{k}", "p").name, range(120)))
    assert sorted(int(name[:5]) for name in names) == list(range(1, 121))


@pytest.fixture
def site(tmp_path):
    return SiteFolder(tmp_path / "sites" / "C1")


TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(7), "e": torch.empty(0)}


def test_saved_models_load_back(site):
    refused(lambda: site.load_model("proxy"), "proxy.safetensors: no such model")
    site.save_model("proxy", TENSORS)
    loaded = site.load_model("proxy")
    assert same(loaded, TENSORS)
    assert all(loaded[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_checkpoints_load_back_the_last_two_are_kept_and_they_hold_no_code(site):
    document = {"round": 0, "names": ["ä", "🔬"], "epsilon": 1.25, "none": None}
    for round_ in (0, 1, 2, 10, 11):
        site.save_checkpoint(round_, {"x": torch.full((2,), float(round_))}, document | {"round": round_})
    assert site.list_checkpoints() == [round_ for round_ in range(13) if site.has_checkpoint(round_)] == [10, 11]
    for round_ in (10, 11):
        tensors, found = site.load_checkpoint(round_)
        assert found == document | {"round": round_} and tensors["x"].tolist() == [round_, round_]
        with safe_open(site.checkpoint_path(round_), "pt") as file:
            assert set(file.metadata()) == {"document"}
    assert len(list((site.path / "state").iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "no document"])
def test_a_damaged_checkpoint_is_refused_in_one_line(site, damage):
    site.save_checkpoint(3, TENSORS, {"round": 3})
    path = site.checkpoint_path(3)
    if damage == "missing":
        path.unlink()
    elif damage == "no document":
        path.write_bytes(site.save_model("x", TENSORS).read_bytes().replace(b'"document"', b'"documemt"'))
    else:
        path.write_bytes(path.read_bytes()[:60] if damage == "truncated" else b"")
    refused(lambda: site.load_checkpoint(3), "round_00003.safetensors: damaged checkpoint")


def _line(round_, **more):
    cost = {"seconds": 0.5, "takes_part": True, "messages": 1, "bytes": 9, "communication_seconds": 0}
    return {"round": round_, **cost, **more}


def test_repeated_or_interrupted_rounds_are_dropped_from_the_log_and_the_next_is_whole(site):
    assert site.read_metrics() == []
    for round_ in range(4):
        site.log_round(_line(round_, site="Universität"))
    site.drop_rounds_from(2)
    kept = [_line(0, site="Universität"), _line(1, site="Universität")]
    assert site.read_metrics() == kept
    site.log_round(_line(2))
    site.metrics_path.write_bytes(site.metrics_path.read_bytes()[:-4])
    assert site.read_metrics() == kept
    site.log_round(_line(2))
    assert site.read_metrics() == [*kept, _line(2)]


@pytest.mark.parametrize("damage", ['"rounf": 1', '"round": "1"', '"round": null', '"seconds": {}'])
def test_a_metrics_line_without_required_keys_is_damaged(site, damage):
    site.log_round(_line(0))
    site.log_round(_line(1))
    key = damage.split('"')[1].replace("rounf", "round")
    broken = re.sub(rf'("{key}": [^,]+)(?=[^\n]*\n$)', damage, site.metrics_path.read_text())
    site.metrics_path.write_text(broken)
    with pytest.raises(WsiFlError, match=r"metrics\.jsonl: line [12] is damaged"):
        site.read_metrics()


def lines_of(run, site, rounds):
    for k in range(1, rounds + 1):
        run.site_folder(site).log_round(_line(k))


def test_a_lost_site_is_recorded_in_the_round_that_noticed_it(tmp_path):
    """Another hospital's rounds lie at that hospital, so the round is that of the remaining sites."""
    between = RunFolder(tmp_path / "00001-between")
    lines_of(between, "C1", 3)
    assert between.record_dropout("C3", "killed")["round"] == 4
    together = RunFolder(tmp_path / "00002-together")
    lines_of(together, "C1", 5)
    lines_of(together, "C3", 2)
    assert together.record_dropout("C3", "killed")["round"] == 3
    together.record_return("C3")
    assert together.record_dropout("C3", "killed again")["round"] == 6  # it came back to where the others stood
    lines_of(together, "C2", 0)
    (together.path / "sites" / "C2").mkdir(parents=True)
    assert together.record_dropout("C2", "killed")["round"] == 1


@pytest.mark.parametrize("text", ["{}", "[]", '{"epsilon": 1.0, "delta": 1e-5, "unit": "row"}', '"x"', "", None])
def test_a_damaged_or_missing_account_is_named_with_the_command_that_rewrites_it(tmp_path, text):
    site = SiteFolder(tmp_path / "00007-oneshot-x" / "sites" / "C1")
    site.account_path.parent.mkdir(parents=True)
    if text is not None:
        site.account_path.write_text(text)
    refused(site.read_account, "ledger.json", "wsi-fl train --resume 00007-oneshot-x")
    whole = {"epsilon": 1.0, "delta": 1e-5, "unit": "row", "guarantee": "none", "group": None}
    site.account_path.write_text(json.dumps(whole))
    assert site.read_account() == whole
