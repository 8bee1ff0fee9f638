"""Heads of whole slides by their names in the literature, and slides that are too large for one training step."""

import numpy as np
import pytest
import torch
from test_bags import OPEN, D, as_tensor, make_bag_study, model_of, unequal
from torch.nn import functional
from trained import trained

from wsi_fl.learning.examples import bag_examples, batches, with_drawn_patches
from wsi_fl.models import mil
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import _summed_by_patient
from wsi_fl.stages.answers.predictor import load_predictor
from wsi_fl.types import BagTable

CPU = torch.device("cpu")
HEADS = ("abmil", "clam_sb", "transmil")


@pytest.mark.parametrize("name", [*HEADS, "deepset_attention"])
def test_attention_sums_to_one_over_the_patches_and_padding_has_none(name):
    x = as_tensor([*unequal(), np.zeros((1, D), np.float32)])
    x[4, :, -1] = 0  # a bag without a patch
    x[..., :-1][x[..., -1] == 0] = torch.nan
    weights = model_of(name).attention(x)
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.0, 1, 1, 1, 0]))
    assert (weights[x[..., -1] == 0] == 0).all() and (weights[x[..., -1] == 1] > 0).all()
    assert model_of("deepset").attention(x) is None


def test_attention_is_what_the_answer_rests_on():
    """ABMIL's answer is its last layer on the mean of the projected patches that attention weighs."""
    model, x = model_of("abmil"), as_tensor(unequal())
    weighted = (model.attention(x).unsqueeze(2) * model.phi(x[..., :-1])).sum(1)
    torch.testing.assert_close(model(x), model.rho(weighted))


def test_transmil_with_as_many_landmarks_as_patches_is_exact(monkeypatch):
    model, x = model_of("transmil"), as_tensor(unequal(lengths=(9, 12)))
    exact = model(x)
    monkeypatch.setattr(mil, "_LANDMARKS", 12)
    torch.testing.assert_close(model(x), exact)
    monkeypatch.setattr(mil, "_LANDMARKS", 8)
    assert (model(x) - exact).abs().max() > 1e-6


def test_transmil_never_sees_padding_where_it_has_landmarks(monkeypatch):
    monkeypatch.setattr(mil, "_LANDMARKS", 4)
    model, bags = model_of("transmil"), unequal(lengths=(9, 2, 17))
    x = functional.pad(as_tensor(bags), (0, 0, 0, 11), value=torch.nan)
    x[:, 17:, -1] = 0
    x[..., :-1][x[..., -1] == 0] = torch.nan
    whole = model(x)
    for k, bag in enumerate(bags):
        torch.testing.assert_close(model(as_tensor([bag]))[0], whole[k])


@pytest.mark.parametrize("name", HEADS)
def test_gradients_of_patients_are_means_over_their_slides(name):
    model, x, y = model_of(name), as_tensor(unequal()), torch.arange(4) % 3
    parameters, patient = list(model.parameters()), torch.tensor([5, 2, 5, 5])
    means = []
    for one in (2, 5):
        rows = patient == one
        loss = functional.cross_entropy(model(x[rows]), y[rows])
        means.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    norms = []

    def weigh(norm):
        norms.append(float(norm))
        return torch.tensor([0.5])

    sums, _ = _summed_by_patient(model, x, patient, lambda logits: functional.cross_entropy(logits, y), weigh)
    assert norms == pytest.approx([float(mean.norm()) for mean in means], rel=1e-4)
    torch.testing.assert_close(torch.cat([g.flatten() for g in sums]), 0.5 * sum(means), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "unit"), [("abmil", "row"), ("transmil", "patient")])
def test_heads_train_as_private_models_and_proxies_under_privacy(tmp_path, name, unit):
    study = make_bag_study(tmp_path / "study", n_sites=2)
    models = [f"model.private={name}", f"model.proxy={name}"]
    overrides = [*models, "train.max_patches=3", f"privacy.unit={unit}"]
    summary = trained(study, "proxyfl", *overrides)
    assert all(row["epsilon"] > 0 and row["guarantee"] == "guaranteed" for row in summary["sites"])


def test_attention_of_every_head_reaches_predict(tmp_path):
    study = make_bag_study(tmp_path / "study", n_sites=1)
    for name in HEADS:
        overrides = [OPEN, f"model.private={name}", "train.rounds=1"]
        run = trained(study, "regular", *overrides)["run"]
        predictor = load_predictor(study, run, "S0")
        bag = predictor.store.bag(2)
        attention = predictor.answer(bag, None).attention
        assert attention.shape == (len(bag.features),) and attention.sum() == pytest.approx(1, abs=1e-5)


def many(lengths=(3, 50, 20), d=2):
    """Bags whose k-th patch is numbered k."""
    bags = [np.stack([np.arange(m), np.full(m, m)], 1).astype(np.float32) for m in lengths]
    n, names = len(bags), np.array([f"s{m}" for m in lengths])
    table = BagTable(np.zeros(n, np.int64), np.full(n, ""), names, names, np.full(n, "train"))
    given = {"n_features": d, "in_memory": True, "at_once": 1}
    return bag_examples(bags.__getitem__, table, np.ones((n, 2), bool), **given)


def seen(examples, seed, rows=(0, 1, 2)):
    """The numbers of the patches that a training step sees, by bag."""
    draws = CipherStream.seeded(seed)
    ((x, _),) = batches(examples, iter([np.array(rows)]), augment=None, device=CPU, draws=draws)
    return [bag[bag[:, -1] > 0][:, 0].int().tolist() for bag in x]


def test_a_training_step_sees_some_patches_drawn_anew_and_predictions_all():
    examples = with_drawn_patches(many(), 10)
    first, second = seen(examples, 1), seen(examples, 2)
    assert [len(bag) for bag in first] == [3, 10, 10] and first[0] == [0, 1, 2]
    assert all(bag == sorted(set(bag)) for bag in first)
    assert first == seen(examples, 1) and first[1:] != second[1:]
    assert examples.read(np.arange(3)).shape == (3, 50, 3)


def test_every_patch_is_drawn_alike():
    examples, counts = with_drawn_patches(many((40,)), 10), np.zeros(40)
    for seed in range(400):
        counts[seen(examples, seed, [0])[0]] += 1
    assert counts.sum() == 4000 and counts.min() > 60 and counts.max() < 145  # 100 each, ± 4.6 sd


def test_what_is_seen_of_a_bag_does_not_depend_on_what_is_in_the_others():
    """The promise of ε: one record changes one gradient."""
    one, other = with_drawn_patches(many((30, 50, 20)), 10), with_drawn_patches(many((30, 7, 20)), 10)
    for seed in range(5):
        a, b = seen(one, seed), seen(other, seed)
        assert (a[0], a[2]) == (b[0], b[2])
