"""One row or patient moves the clipped sum by at most C for any accepted model and loss; others are refused."""

import pytest
import torch
from builders import Net, Recorder, clipped, cross_entropy, norms_of, refused
from row_dependent_losses import PATIENTS, RIGHT, WRONG, B, Case, D, data, mlp
from torch import nn
from torch.nn import functional

from wsi_fl.privacy import engine_selection, row_independence
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer
from wsi_fl.types import UsageError


def clipped_sum(make, loss_for, x, y, clip, patient=None):
    """Return Σ c_i g_i of a fresh model, float64[n], of one step without noise."""
    torch.manual_seed(1)
    model = make()
    recorder = Recorder([p for p in model.parameters() if p.requires_grad])
    unit = "row" if patient is None else "patient"
    trainer = DPTrainer(model, recorder, sigma=0.0, clip=clip, batch_size=B, unit=unit)
    trainer.step(x, loss_for(y), CipherStream.from_entropy(), patient)
    return recorder.mean * B


def worst_move(make, loss_for, kind, unit, clip):
    """Return the largest change of the sum, in units of C, by the removal of one of three units."""
    x, y = data(kind)
    whose = PATIENTS if unit == "patient" else torch.arange(B)
    given = (lambda rows: whose[rows]) if unit == "patient" else (lambda rows: None)
    everybody = torch.arange(B)
    whole = clipped_sum(make, loss_for, x, y, clip, given(everybody))
    moves = []
    for k in {int(whose[row]) for row in (0, 1, -1)}:  # the unit with the rare class, and two others
        rows = everybody[whose != k]
        moves.append(float((whole - clipped_sum(make, loss_for, x[rows], y[rows], clip, given(rows))).norm()))
    return max(moves) / clip


BOUNDED = ["tied on some rows", "tied from the fifth call on", "a gradient of the batch", "a gradient times the batch"]
"""Wrong models that may pass, since they are never shown two rows: where the fault does not show in two of them."""


@pytest.mark.parametrize(("name", "clip"), [*((name, 0.01) for name in WRONG), *((name, 5.0) for name in BOUNDED)])
def test_a_row_dependent_model_is_refused_or_moves_the_sum_by_at_most_one_clip(name, clip):
    """Every gradient is cut to the first of both norms, hardly any to the second."""
    case = WRONG[name]
    try:
        move = worst_move(case.make, case.loss, case.kind, case.unit, clip)
    except UsageError as error:
        assert "\n" not in str(error) and "differential privacy" in str(error)
    else:
        assert name in BOUNDED and move <= 1 + 1e-5


@pytest.mark.parametrize("name", RIGHT)
def test_a_row_independent_model_is_accepted_and_gives_the_sum_of_a_loop(name):
    check_right(RIGHT[name])


def check_right(case):
    """Check that no unit moves the sum by more than C, and that the sum is that of a loop; half of all are cut."""
    x, y = data(case.kind)
    whose = PATIENTS if case.unit == "patient" else None
    each = looped_gradients(case, x, y, torch.arange(B) if whose is None else whose)
    clip = float(norms_of(each).median())
    assert worst_move(case.make, case.loss, case.kind, case.unit, clip) <= 1 + 1e-5
    found = clipped_sum(case.make, case.loss, x, y, clip, whose)
    wanted = torch.cat([g.flatten().double() for g in clipped(each, clip)])
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-5 * clip)


def looped_gradients(case, x, y, whose):
    """Return the gradients [units, …] by a loop over units, each of its rows in a batch of one."""
    torch.manual_seed(1)
    model = case.make()
    for module in model.modules():
        module.training = any(True for _ in module.parameters(recurse=False))
    weights = [p for p in model.parameters() if p.requires_grad]
    units = []
    for k in sorted(set(whose.tolist())):
        rows = (whose == k).nonzero().flatten()
        loss = sum(case.loss(y)(among_constants(model(x[r : r + 1]), r, len(x))) for r in rows.tolist())
        units.append(torch.autograd.grad(loss * len(x) / len(rows), weights))
    return [torch.stack(column) for column in zip(*units, strict=True)]


def among_constants(output, row, n):
    """Return outputs [n, …] whose other rows are constants."""
    return torch.cat([output.detach() if k != row else output for k in range(n)])


@pytest.mark.parametrize("n_rows", [1, 70])
def test_a_patient_moves_the_sum_by_at_most_one_clip_however_many_rows(n_rows):
    """More rows than fit a forward pass are as exact as few."""
    (x, y), more = data("vectors"), torch.arange(n_rows) % B
    x, y = torch.cat([x[:3], 50 * x[more]]), torch.cat([y[:3], 1 - y[more]])
    whose = torch.tensor([0, 0, 1] + [9] * n_rows)
    whole, rest = (clipped_sum(mlp, cross_entropy, x[:n], y[:n], 0.3, whose[:n]) for n in (len(x), 3))
    assert 0.9 * 0.3 < float((whole - rest).norm()) <= 0.3 * (1 + 1e-4)
    wanted = clipped(looped_gradients(Case(mlp), x, y, whose), 0.3)
    torch.testing.assert_close(whole, torch.cat([g.flatten().double() for g in wanted]), rtol=2e-3, atol=1e-5)
    model = mlp()
    trainer = DPTrainer(model, Recorder(model.parameters()), sigma=0.0, clip=1.0, batch_size=B, unit="patient")
    told = trainer.step(x, cross_entropy(y), CipherStream.from_entropy(), whose)
    assert told == pytest.approx(float(cross_entropy(y)(model(x))), rel=1e-5)
    refused(lambda: step(trainer, x, cross_entropy(y)), "needs the patient of each row")


def trainer_of(model, clip=1.0):
    recorder = Recorder([p for p in model.parameters() if p.requires_grad])
    return DPTrainer(model, recorder, sigma=0.0, clip=clip, batch_size=B), recorder


def step(trainer, x, loss_of):
    return trainer.step(x, loss_of, CipherStream.from_entropy())


def test_a_model_changed_after_the_first_step_is_checked_again():
    model = nn.Sequential(nn.Linear(D, D), nn.Identity(), nn.Linear(D, 2))
    (x, y), (trainer, _) = data("vectors"), trainer_of(model)
    step(trainer, x, cross_entropy(y))
    assert trainer.engine == "ghost"
    model[1] = nn.BatchNorm1d(D, affine=False)
    refused(lambda: step(trainer, x, cross_entropy(y)), "BatchNorm1d (1)")
    model[1] = Net(lambda net, z: z - z.mean(0) if len(z) > 8 else z)  # is shown one row now
    assert moves_of(trainer, x, y) <= 1 + 1e-5
    for layer in (nn.Softmax(0), Net(lambda net, z: z - z.mean(0))):
        model[1] = layer
        refused(lambda: step(trainer, x, cross_entropy(y)), "ties the rows")
    model[1] = nn.Linear(D, D)
    refused(lambda: step(trainer, x, cross_entropy(y)), "make a new DPTrainer")


def moves_of(trainer, x, y):
    """Return the change of the sum by the first row, in units of C."""
    sums = []
    for rows in (slice(0, B), slice(1, B)):
        step(trainer, x[rows], cross_entropy(y[rows]))
        sums.append(trainer._optimizer.mean * B)
    return float((sums[0] - sums[1]).norm()) / trainer.clip


def test_gradients_left_from_before_a_step_have_no_part_in_it():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2))
    x, y = data("vectors")
    functional.cross_entropy(model(x), y).backward()
    model[0].requires_grad_(False)  # its gradient of private rows stays
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].weight.clone()
    trainer = DPTrainer(model, sgd, sigma=0.0, clip=1.0, batch_size=B)
    step(trainer, x, cross_entropy(y))
    assert torch.equal(model[0].weight, before)


def test_rows_that_are_not_finite_do_not_decide_how_a_model_is_computed():
    x, y = data("vectors")
    for bad in (slice(0, 1), slice(0, 8)):
        trainer, recorder = trainer_of(nn.Linear(D, 2))
        rows = x.clone()
        rows[bad] = torch.nan
        step(trainer, rows, cross_entropy(y))
        step(trainer, x, cross_entropy(y))
        assert trainer.engine == "ghost" and recorder.mean.isfinite().all()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_refused(kind):
    refused(lambda: trainer_of(nn.Linear(D, 2).to(kind)), "make them float32 by model.float()")


def test_double_precision_is_right_and_a_mixture_is_refused():
    x, y = data("vectors")
    torch.manual_seed(0)
    model = nn.Linear(D, 2)
    single, double = trainer_of(model), trainer_of(nn.Linear(D, 2).double())
    double[0]._model.load_state_dict(model.state_dict())
    refused(lambda: step(double[0], x, cross_entropy(y)), "float64", "float32")
    for (trainer, _), rows in ((single, x), (double, x.double())):
        step(trainer, rows, cross_entropy(y))
    torch.testing.assert_close(single[1].mean, double[1].mean, rtol=1e-5, atol=1e-6)


def test_autocast_around_a_step_changes_nothing():
    x, y = data("images")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(48, 2))
    found = []
    for on in (False, True):
        trainer, recorder = trainer_of(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            step(trainer, x, cross_entropy(y))
        found.append(recorder.mean)
    assert torch.equal(*found)


def test_built_in_models_skip_the_row_by_row_check(monkeypatch):
    """The product's own models keep their fast engines, and callers' plain layers too."""
    monkeypatch.setattr(engine_selection, "ROW_BY_ROW", "nobody")
    for name, case in RIGHT.items():
        if name in ("linear", "GroupNorm", "LayerNorm without bias", "cnn1", "abmil", "transmil", "a layer twice"):
            trainer, _ = trainer_of(case.make())
            x, y = data(case.kind)
            step(trainer, x, case.loss(y))
            assert trainer.engine == "ghost" and row_independence.model_origin(case.make()) == "built-in"
