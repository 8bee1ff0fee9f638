"""The filter for NVIDIA FLARE releases nothing but clipped and noised updates, each charged once, whatever happens."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from wsi_fl.privacy.guarantee import RoundHistory
from wsi_fl.privacy.ledger_file import LedgerFile

pytest.importorskip("nvflare")
from crash_release import call_filter, make_context, pass_filter
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import ContentBlockedException, FilterChainType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import EventScope, FedEventHeader, FLContextKey
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.event import fire_event_to_components

from wsi_fl.hospitals.flare.ledger_filter import _CHANNELS, LedgerFilter

CRASH = Path(__file__).with_name("crash_release.py")
ACCOUNT = """
name = "C1"
ledger = "C1.jsonl"
unit = "site"
n = 400
clip = 2.0
sigma = 4.0
delta = 1e-5
max_epsilon = 3.0
"""
BASE = {"w": np.zeros((2, 3), np.float32), "norm.count": np.int64(7), "b": np.ones(2)}
TASKS, RESULTS = FilterChainType.TASK_DATA_CHAIN, FilterChainType.TASK_RESULT_CHAIN


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def account(tmp_path):
    path = tmp_path / "C1.toml"
    path.write_text(ACCOUNT)
    return path


def trained(step=1.0, **more):
    return {"w": BASE["w"] + np.float32(step), "norm.count": np.int64(9), "b": BASE["b"] + step} | more


def change(account, old, new):
    account.write_text(account.read_text().replace(old, new))


def entries(account):
    return LedgerFile(account.with_suffix(".jsonl")).entries


def charges(account):
    return [entry for entry in entries(account) if entry.mechanism]


def refuse(words, ledger_filter, context, *, chain=TASKS, message=None):
    """Require that a task, or another message, does not pass."""
    message = message or DXO(DataKind.WEIGHTS, dict(BASE)).to_shareable()
    with pytest.raises(ContentBlockedException, match=words):
        call_filter(ledger_filter, chain, message, context)


def blocked(account, *words, base=BASE, result=None, **given):
    """Require that nothing leaves and nothing is charged, with the reason in one line."""
    before = len(entries(account))
    with pytest.raises(ContentBlockedException) as caught:
        pass_filter(account, base, trained() if result is None else result, **given)
    text = str(caught.value)
    assert text.startswith("nothing leaves this site: ") and "\n" not in text
    assert all(word in text for word in words), text
    assert len(entries(account)) == before


def test_a_result_leaves_in_the_task_s_shapes_and_types_with_noise_around_the_clipped_update(account):
    change(account, "sigma = 4.0", "sigma = 1e3")  # so small a share of the update that it is all noise
    answer, _ = pass_filter(account, BASE, trained())
    assert answer.data_kind == DataKind.WEIGHTS and list(answer.data) == list(BASE)
    for name, start in BASE.items():
        assert answer.data[name].shape == start.shape and answer.data[name].dtype == start.dtype
    assert answer.data["norm.count"] == 7  # the task's count, not the site's
    wide = {"w": np.zeros(20_000, np.float32)}
    answer, _ = pass_filter(account, wide, {"w": wide["w"] + 5}, task="t2")
    assert np.std(answer.data["w"]) == pytest.approx(1e3 * 2.0, rel=0.02)
    difference, _ = pass_filter(account, BASE, trained(), task="t3", kind=DataKind.WEIGHT_DIFF)
    assert difference.data["norm.count"] == 0 and difference.data["w"].shape == (2, 3)


@pytest.mark.parametrize("step", [1e-3, 1.0, 1e30])
def test_without_noise_a_site_moves_what_leaves_by_the_clip_at_most(account, monkeypatch, step):
    from wsi_fl.privacy import model_updates

    monkeypatch.setattr(model_updates.CipherStream, "draw_normal", lambda self, n: np.zeros(n))
    answer, _ = pass_filter(account, BASE, trained(step))
    moved = np.concatenate([(answer.data[k] - BASE[k]).ravel() for k in ("w", "b")])
    assert np.linalg.norm(moved) == pytest.approx(min(2.0, step * np.sqrt(8)), rel=1e-6)
    assert np.linalg.norm(moved.astype(float)) <= 2.0 * (1 + 1e-6)


def test_what_is_no_part_of_the_model_stays_at_the_site_and_is_named_in_its_log(account, monkeypatch):
    controls = {"w": np.ones((2, 3))}  # SCAFFOLD's
    meta = {"NUM_STEPS_CURRENT_ROUND": 31, "initial_metrics": {"accuracy": 0.71}, "scaffold_c_diff": controls}
    said = []
    monkeypatch.setattr(LedgerFilter, "log_info", lambda self, context, text: said.append(text))
    answer, _ = pass_filter(account, BASE, trained(patients=np.arange(5.0)), meta=meta)
    assert "patients" not in answer.data and set(answer.meta) == {"wsi_fl_privacy", "initial_metrics"}
    assert set(answer.meta["initial_metrics"]) == {"epsilon"}
    price, line = said
    assert "ε = 0.9263 for this job, 0.9263 of 3 for all jobs" in price and line.startswith("not sent: ")
    for name in ("tensor patients", "values of norm.count", *(f"meta {key}" for key in meta)):
        assert name in line


def test_epsilon_of_each_round_is_that_of_an_independent_accountant_and_the_job_ends_at_the_budget(account):
    affordable = max(k for k in range(1, 99) if get_epsilon_gaussian(4.0 / np.sqrt(k), 1e-5) <= 3.0)
    for k in range(1, affordable + 1):
        answer, _ = pass_filter(account, BASE, trained(), task=f"t{k}")
        told = answer.meta["wsi_fl_privacy"]
        assert told["epsilon"] == pytest.approx(get_epsilon_gaussian(4.0 / np.sqrt(k), 1e-5), abs=1e-6)
        assert told["patient_epsilon"] == pytest.approx(get_epsilon_gaussian(2.0 / np.sqrt(k), 1e-5), abs=1e-6)
        assert (told["release"], told["unit"], told["delta"]) == (k, "site", 1e-5)
    blocked(account, f"round {affordable + 1} would raise epsilon", "above its 3", task="next")
    blocked(account, "would raise epsilon", job="job-b")
    assert len(charges(account)) == affordable == 8


def test_a_job_weeks_later_goes_on_with_the_same_budget(account, monkeypatch):
    from datetime import UTC, datetime, timedelta

    from wsi_fl.privacy import ledger

    for k in range(5):
        pass_filter(account, BASE, trained(), task=f"t{k}")

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(weeks=6)

    monkeypatch.setattr(ledger, "datetime", Later)
    for k in range(3):
        answer, _ = pass_filter(account, BASE, trained(), job="job-b", task=f"t{k}")
    assert answer.meta["wsi_fl_privacy"]["epsilon"] == pytest.approx(get_epsilon_gaussian(4 / np.sqrt(3), 1e-5))
    blocked(account, "would raise epsilon", job="job-b", task="t3")
    first, *_, last = (datetime.fromisoformat(entry.time) for entry in charges(account))
    assert (last - first).days == 42 and datetime.now(UTC) - first < timedelta(hours=1)


def test_epsilon_per_job_and_rounds_fix_the_noise_and_the_number_of_releases(account):
    change(account, "sigma = 4.0", "target_epsilon = 1.0\nrounds = 2")
    for k in range(2):
        answer, _ = pass_filter(account, BASE, trained(), task=f"t{k}")
    assert 0.99 < answer.meta["wsi_fl_privacy"]["epsilon"] <= 1.0
    blocked(account, "job job-a has had its 2 rounds", task="t2")
    assert pass_filter(account, BASE, trained(), job="job-b")[0].meta["wsi_fl_privacy"]["release"] == 1


def test_a_retry_sends_the_same_bytes_or_is_charged_again(account):
    first, _ = pass_filter(account, BASE, trained())
    again, _ = pass_filter(account, BASE, trained(-3.0))
    assert first.data["w"].tolist() == again.data["w"].tolist() and len(charges(account)) == 1
    account.with_name("C1.jsonl.last").unlink()
    anew, _ = pass_filter(account, BASE, trained())
    assert first.data["w"].tolist() != anew.data["w"].tolist() and len(charges(account)) == 2
    assert anew.meta["wsi_fl_privacy"]["epsilon"] == pytest.approx(get_epsilon_gaussian(4 / np.sqrt(2), 1e-5))


def run_child(account, task, crash, out):
    command = [sys.executable, str(CRASH), str(account), task, str(crash), str(out)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.mark.slow
@pytest.mark.end_to_end
def test_a_process_killed_at_any_flush_of_a_file_charges_its_task_once(account, tmp_path):
    """Each task is killed before one flush and after another, and retried until it ends: real processes."""
    change(account, "max_epsilon = 3.0", "max_epsilon = 50.0")
    out, kills = tmp_path / "left.jsonl", 0
    assert run_child(account, "whole", 0, out).returncode == 0
    flushes = json.loads(out.read_text())["flushes"]
    assert flushes >= 10  # two lines, two heads each, and the stored bytes
    tasks = [(f"t{crash}", crash) for at in range(1, flushes + 1) for crash in (at, -at)]
    for task, crash in tasks:
        kills += run_child(account, task, crash, out).returncode == -signal.SIGKILL
        kills += run_child(account, task, 2, out).returncode == -signal.SIGKILL  # and once more in its retry
        for _ in range(2):  # as if the transport had lost the first
            assert run_child(account, task, 0, out).returncode == 0
    assert kills == 2 * len(tasks) >= 40
    sent = {}
    for row in map(json.loads, out.read_text().splitlines()):
        sent.setdefault(row["task"], set()).add(tuple(row["values"]))
    assert len(sent) == len(tasks) + 1 and all(len(values) == 1 for values in sent.values())
    assert RoundHistory(entries(account)).n_charged == len(sent)


def test_noise_has_a_key_of_the_operating_system_for_each_release_which_is_nowhere(account, monkeypatch, tmp_path):
    import torch

    from wsi_fl.privacy import cipher

    keys = []
    monkeypatch.setattr(cipher.os, "urandom", lambda n: keys.append(os.getrandom(n)) or keys[-1])
    seen = []
    for k in range(3):
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        answer, _ = pass_filter(account, BASE, trained(), task=f"t{k}")
        seen.append(tuple(answer.data["w"].ravel()))
    assert len(set(seen)) == 3 and len({*keys}) == 3 and {len(key) for key in keys} == {32}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert all(key not in written and key.hex().encode() not in written for key in keys)


def test_patients_are_clipped_each_and_summed_where_the_job_gives_a_row_for_each(account, monkeypatch):
    from wsi_fl.privacy import model_updates

    change(account, 'unit = "site"', 'unit = "patient"')
    monkeypatch.setattr(model_updates.CipherStream, "draw_normal", lambda self, n: np.zeros(n))
    rows = np.zeros((3, 2, 3))
    rows[0, 0, 0], rows[1, 0, 0], rows[2, 1, 1] = 100.0, 0.5, np.nan
    given = {"kind": DataKind.WEIGHT_DIFF, "meta": {"privacy_unit": "patient"}}
    answer, _ = pass_filter(account, {"w": BASE["w"]}, {"w": rows}, **given)
    assert answer.data["w"].sum() == pytest.approx((2.0 + 0.5) / 400, rel=1e-6) and answer.data["w"].shape == (2, 3)
    blocked(account, "does not keep it", 'privacy_unit = "patient"', task="t2")
    nobody = {"w": np.zeros((0, 2, 3))}  # as of a draw of patients that took none
    answer, _ = pass_filter(account, {"w": BASE["w"]}, nobody, task="t3", **given)
    assert answer.data["w"].shape == (2, 3) and not answer.data["w"].any()  # but for noise, which is off here
    assert len(charges(account)) == 2
    change(account, 'unit = "patient"', 'unit = "site"')
    blocked(account, "does not keep it", base={"w": BASE["w"]}, result={"w": rows}, task="t2", **given)
    blocked(account, "counts ε per patient, this run per site", task="t2")


def test_tensors_of_pytorch_come_back_as_such(account):
    import torch

    base = {"w": torch.zeros(3), "count": torch.tensor(4)}
    answer, _ = pass_filter(account, base, {"w": torch.ones(3), "count": torch.tensor(9)})
    assert [type(value) for value in answer.data.values()] == [torch.Tensor] * 2
    assert answer.data["w"].dtype == torch.float32 and int(answer.data["count"]) == 4


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"w": BASE["w"]}, "lacks the tensor b"),
        ({"w": np.zeros(6, np.float32), "b": np.zeros(2)}, "w has the shape (6,) in the result and (2, 3) in the task"),
        ({"w": np.array(["a"]), "b": np.zeros(2)}, "w is no tensor of numbers"),
        ({"w": [[1.0]], "b": object()}, ""),
        ({"w": np.zeros((2, 3)), "b": [[1], [2, 3]]}, ""),
    ],
)
def test_a_result_that_does_not_fit_its_task_is_refused_in_one_line_whatever_it_holds(account, result, words):
    blocked(account, words, result=result)


def test_beside_a_release_without_noise_no_budget_is_kept_and_nothing_is_charged(account):
    pass_filter(account, BASE, trained())
    path = account.with_suffix(".jsonl")
    ledger = LedgerFile(path, [])
    with ledger.hold_lock():
        ledger.append({"run": "study", "site": "C1", "round": 1, "released": f"model {'0' * 64}", "real": True})
    for head in (account.with_suffix(".head.json"), *account.parent.rglob("state/**/*.json")):
        head.unlink(missing_ok=True)
    blocked(account, "no ε holds for what", task="t2")


def test_any_name_of_a_ledger_is_safe(account):
    change(account, "C1.jsonl", "C1.last")
    for task in ("t1", "t2"):
        pass_filter(account, BASE, trained(), task=task)
    assert len(LedgerFile(account.with_name("C1.last")).entries) == 4


def test_only_models_pass(account):
    blocked(account, "this result is METRICS", result={"accuracy": 0.7}, kind=DataKind.METRICS)
    blocked(account, "this result is COLLECTION", result={"w": DXO(DataKind.WEIGHTS, BASE)}, kind=DataKind.COLLECTION)
    ledger_filter = LedgerFilter(str(account))
    message = Shareable({"config": {}})  # as of swarm learning's first task
    refuse("this task is no model", ledger_filter, make_context(ledger_filter, "job-a", "t1"), message=message)
    blocked(account, "no floating-point tensors", base={"count": np.int64(1)}, result={"count": np.int64(1)})


def test_a_filter_that_is_named_at_one_place_alone_lets_nothing_pass(account):
    ledger_filter = LedgerFilter(str(account))
    context, result = make_context(ledger_filter, "j", "t"), DXO(DataKind.WEIGHTS, trained()).to_shareable()
    refuse("among the task data filters", ledger_filter, context, chain=RESULTS, message=result)
    refuse("among its components", ledger_filter, make_context(None, "j", "t"))
    refuse("among its task result", ledger_filter, make_context(ledger_filter, "j", "t", result_filter=False))


def test_a_failed_task_leaves_as_its_code_alone(account):
    _, ledger_filter = pass_filter(account, BASE, trained())
    reply = make_reply("EXECUTION_EXCEPTION", {"said": "patient 17"})
    reply["more"] = "patient 17"
    for code in ("EXECUTION_EXCEPTION", "patient 17", {"weights": [1.5]}):
        reply.set_return_code(code)
        answer = call_filter(ledger_filter, RESULTS, reply, make_context(ledger_filter, "job-a", "t2"))
        assert answer.get_return_code() == "EXECUTION_EXCEPTION"
        assert "patient 17" not in str(answer) and "1.5" not in str(answer)


def test_events_of_a_job_do_not_leave(account):
    _, ledger_filter = pass_filter(account, BASE, trained())
    for scope, stopped in ((EventScope.LOCAL, False), (EventScope.FEDERATION, True)):
        context, event = make_context(ledger_filter, "job-a", "t1"), Shareable({"weight_mean": 0.3})
        context.set_prop(FLContextKey.EVENT_DATA, event, private=True, sticky=False)
        context.set_prop(FLContextKey.EVENT_SCOPE, scope, private=True, sticky=False)
        ledger_filter.handle_event("fed.analytix_log_stats", context)
        assert (event.get_header(FedEventHeader.DIRECTION) == "in") == stopped


class Listener(FLComponent):
    """Stands for a component of a job: it notes each event, and where the event is from."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def handle_event(self, event_type, fl_ctx):
        data = fl_ctx.get_prop(FLContextKey.EVENT_DATA)
        came_from = data.get_header(FedEventHeader.DIRECTION) if isinstance(data, Shareable) else None
        self.heard.append((event_type, came_from))


def begin_run(ledger_filter, *others):
    """Return the context of a run in which the filter was last among the handlers when the run began."""
    context = make_context(ledger_filter, "job-a", "t1")
    engine = context.get_engine()
    engine.handlers = [*others, ledger_filter]
    engine.fire_event = lambda event, context: fire_event_to_components(event, engine.handlers, context)
    engine.fire_event(EventType.ABOUT_TO_START_RUN, context)
    return context


def test_a_component_of_the_job_hears_an_event_after_it_was_stopped(account):
    ledger_filter, listeners = LedgerFilter(str(account)), [Listener(), Listener()]
    context = begin_run(ledger_filter, *listeners)
    context.set_prop(FLContextKey.EVENT_DATA, Shareable(), private=True, sticky=False)
    context.set_prop(FLContextKey.EVENT_SCOPE, EventScope.FEDERATION, private=True, sticky=False)
    context.get_engine().fire_event("fed.analytix_log_stats", context)
    for listener in listeners:
        assert listener.heard == [(EventType.ABOUT_TO_START_RUN, None), ("fed.analytix_log_stats", "in")]
    context.get_engine().handlers.insert(0, Listener())
    refuse("another component hears events before this filter", ledger_filter, context)


@pytest.mark.parametrize("module", _CHANNELS)
def test_a_component_with_a_channel_of_its_own_ends_the_job_before_it_begins(account, module):
    assert importlib.util.find_spec(module)  # FLARE has it
    base = type("Base", (FLComponent,), {"__module__": module})
    ledger_filter, listener = LedgerFilter(str(account)), Listener()
    context = begin_run(ledger_filter, listener, type("Sender", (base,), {})())
    assert (EventType.FATAL_SYSTEM_ERROR, None) in listener.heard  # which ends the run
    refuse("Sender sends past the filters, by a channel of its own", ledger_filter, context)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("n = 400", "n = 200000", "delta = 1e-05 would allow publishing one of 200000 patients"),
        ("sigma = 4.0", "", "write one of sigma and target_epsilon"),
        ("sigma = 4.0", "target_epsilon = 1.0", "write rounds"),
        ("sigma = 4.0", "target_epsilon = 4.0\nrounds = 3", "target_epsilon exceeds max_epsilon"),
        ("sigma = 4.0", "sigma = 0.5", "sigma is so small that a single release exceeds max_epsilon"),
        ("clip = 2.0", "clips = 2.0", "unknown key 'clips'; did you mean 'clip'?"),
        (
            "clip = 2.0",
            "clip = 1e39",
            "clip = 1e+39 with sigma = 4 makes numbers above those of float32; write a clip of",
        ),
        ('unit = "site"', 'unit = "row"', "unit"),
    ],
)
def test_an_account_file_that_cannot_be_is_refused_in_one_line(account, old, new, words):
    change(account, old, new)
    blocked(account, "C1.toml", words)


def test_the_largest_clip_that_an_error_names_fits_float32(account):
    change(account, "clip = 2.0", "clip = 1e39")
    with pytest.raises(ContentBlockedException) as caught:
        pass_filter(account, BASE, trained())
    change(account, "clip = 1e39", f"clip = {str(caught.value).split()[-1]}")
    answer, _ = pass_filter(account, {"w": np.zeros(100_000, np.float32)}, {"w": np.full(100_000, 3e38, np.float32)})
    assert np.isfinite(answer.data["w"]).all()


def test_a_larger_delta_than_the_ledger_s_is_refused_with_the_one_to_write(account):
    change(account, "delta = 1e-5", "delta = 1e-6")
    pass_filter(account, BASE, trained())
    change(account, "delta = 1e-6", "delta = 1e-5")
    blocked(
        account, "priced at delta = 1e-06", "set delta = 1e-06 or less in the account file, and start again", task="t2"
    )
    change(account, "delta = 1e-5", "delta = 1e-6")
    pass_filter(account, BASE, trained(), task="t2")


def test_a_missing_account_file_or_an_older_ledger_lets_nothing_pass(account, tmp_path):
    pass_filter(account, BASE, trained())
    older = account.with_suffix(".jsonl").read_bytes()
    pass_filter(account, BASE, trained(), task="t2")
    account.with_suffix(".jsonl").write_bytes(older)
    with pytest.raises(Exception, match="this is not the ledger that"):
        pass_filter(account, BASE, trained(), task="t3")
    with pytest.raises(Exception, match="no such file; write the account"):
        pass_filter(tmp_path / "other.toml", BASE, trained())


HEAVY = (
    "torch torchvision pandas sklearn skimage h5py monai timm opacus matplotlib openslide mpi4py typer rich statsmodels"
)


def test_the_filter_loads_no_heavy_module(account):
    script = (
        f"import sys; sys.path.insert(0, {str(CRASH.parent)!r}); import crash_release; "
        f"crash_release.main({str(account)!r}, 't1', 0, {str(account) + '.out'!r}); "
        f"print(sorted({{name.partition('.')[0] for name in sys.modules}} & set({HEAVY!r}.split())))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "[]"
