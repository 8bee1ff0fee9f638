"""Tests of the step times of a dry run: few steps, half a minute, and estimates that say so."""

import pytest
from conftest import make_study
from file_changes import edit

from wsi_fl.stages.training import run_cost, step_timing
from wsi_fl.stages.training.run_cost import dry_run, plan_lines
from wsi_fl.stages.training.step_timing import StepTime, measure_step
from wsi_fl.stores.patch_store import PatchStore


class Clock:
    """A clock that a step of n units moves by `fixed` + n · `unit` seconds, and memory that n units raise."""

    def __init__(self, unit, fixed=0.0, warm_up=0.0):
        self.now, self.sizes = 0.0, []
        self._unit, self._fixed, self._warm_up = unit, fixed, warm_up

    def take_step(self, n):
        self.now += self._fixed + n * self._unit + (self._warm_up if not self.sizes else 0)
        self.sizes.append(n)

    def measure(self, n_units, budget_s=30.0):
        peak = lambda: 1000 + 10 * max(self.sizes)  # noqa: E731
        return measure_step(self.take_step, n_units, budget_s, clock=lambda: self.now, read_peak=peak)


@pytest.mark.parametrize(
    ("clock", "sizes", "timed"),
    [
        (Clock(0.01, 0.5), [2, 2, 32, 32, 32, 32], StepTime(0.82, None, 0)),
        (Clock(0.25), [2, 2, 32, 32, 32], StepTime(8.0, None, 0)),  # the third would be one too many
        (Clock(1.0), [2, 2, 26], StepTime(32.0, 26, 60)),
        (Clock(6.0), [2, 2], StepTime(192.0, 2, 0)),
        (Clock(6.0, warm_up=20.0), [2], StepTime(512.0, 2, 0)),
        (Clock(100.0), [2], StepTime(3200.0, 2, 0)),
    ],
    ids=["quick", "slow", "part", "two units", "selection of the engine is slow", "two units take all"],
)
def test_a_step_is_timed_within_the_budget_or_estimated_from_a_part_of_a_batch(clock, sizes, timed):
    assert clock.measure(32) == pytest.approx(timed) and clock.sizes == sizes


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_site_of_few_units_is_timed_on_all_of_them(n):
    clock = Clock(0.1, 0.1)
    assert clock.measure(n) == pytest.approx(StepTime(0.1 + n / 10, None, 0)) and {*clock.sizes} == {n}


@pytest.fixture
def taken(monkeypatch):
    """The steps that a dry run takes, as (site, units)."""
    steps, real = [], step_timing._SiteSteps.take_step

    def take_step(self, n):
        steps.append((self.site.name, n))
        real(self, n)

    monkeypatch.setattr(step_timing._SiteSteps, "take_step", take_step)
    return steps


def test_sites_with_the_same_models_and_batch_size_share_one_measurement(tmp_path, taken):
    study = make_study(tmp_path / "study", 3)
    edit(study.site_path("S2"), more='private_model = "mlp"\n')
    cost = dry_run(study, method="proxyfl", backend="local")
    assert {name for name, _ in taken} == {"S0", "S2"} and max(n for _, n in taken) == 18
    seconds = [row["seconds"] for row in cost["sites"]]
    assert seconds[0] == seconds[1] != seconds[2] and cost["seconds"] == pytest.approx(sum(seconds))
    assert {row["timed_units"] for row in cost["sites"]} == {None}
    assert "estimated" not in [*plan_lines(cost)][-1].text


def test_an_estimate_from_a_part_of_a_batch_says_so(pair, taken, monkeypatch):
    monkeypatch.setattr(step_timing, "_TIMING_S", 0.0)
    cost = dry_run(pair, method="proxyfl", backend="local")
    assert taken == [("S0", 2)]
    assert [*plan_lines(cost)][-1].text.endswith("; estimated from a step on 2 of 18 rows")
    peak = run_cost.peak_bytes()
    assert cost["memory_bytes"] >= peak  # and what the other site's models need in a step


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_dry_run_reads_the_patches_of_its_steps_alone_and_once_where_training_keeps_them(
    tmp_path, taken, monkeypatch, is_kept
):
    study, n_read, read = make_study(tmp_path / "study", 2), [], PatchStore.read

    def count_and_read(self, rows):
        n_read.append(len(rows))
        return read(self, rows)

    monkeypatch.setattr(PatchStore, "read", count_and_read)
    if not is_kept:
        monkeypatch.setattr(step_timing, "IN_MEMORY_BYTES", 0)
    dry_run(study, method="regular", backend="local")
    n_sizes = 2 * 3 * 2 + 2  # a patch tells the size of those of a split
    n_steps = [n for _, n in taken]
    assert sum(n_read) <= (max(n_steps) if is_kept else sum(n_steps)) + n_sizes < 2 * 60
    assert is_kept or sum(n_read) >= sum(n_steps)


def test_a_dry_run_counts_the_memory_of_all_examples_where_they_fit(tmp_path, monkeypatch):
    study = make_study(tmp_path / "study", 2)
    monkeypatch.setattr(run_cost, "peak_bytes", lambda: 0)
    memory = dry_run(study, method="regular", backend="local")["memory_bytes"]
    stores = [PatchStore(study.store_path(site)) for site in study.site_names()]
    kept = sum(len(store.table.split) * store.meta.spec.size_px**2 * 3 for store in stores)
    monkeypatch.setattr(run_cost, "IN_MEMORY_BYTES", 0)
    assert memory - dry_run(study, method="regular", backend="local")["memory_bytes"] == kept
