"""Unusable arrays of a caller are refused in one line before the first round."""

import numpy as np
import pytest
import torch
from conftest import refused
from torch import nn

from wsi_fl.api import Cohort, NoisyStatistics, SharedHead, federate, loader, plan_of_round
from wsi_fl.data.tasks import NumberTask, SurvivalTask
from wsi_fl.learning.local_training import DPSettings, Learner, take_supervised_step
from wsi_fl.models import create_model
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.system.tensors import load_tensors, save_tensors
from wsi_fl.types import Images

N, D = 20, 8
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, D)).astype(np.float32), np.arange(N) % 2
BAGS = [RNG.normal(size=(m, D)).astype(np.float32) for m in RNG.integers(1, 5, N)]


def learn(part, method="fedavg", *, sigma=1.0, private=lambda: nn.Linear(D, 2), **options):
    sites = {"North": Cohort.from_arrays(X, Y), "South": part}
    return federate(sites, method, private=private, rounds=1, sigma=sigma, delta=1e-3, **options)


def with_value(values, row, value):
    values = np.array(values)
    values[row] = value
    return values


@pytest.mark.parametrize("sigma", [1.0, None])
@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (with_value(Y, 5, -1), "row 5 has the label -1, and 1 of 20"),
        (Y + 1, "row 1 has the label 2, and 10 of 20"),
        (with_value(Y, 7, 10**9), "row 7 has the label 1000000000"),
        (np.where(Y > 0, "yes", "no"), "row 0 has the label 'no', and 20 of 20"),
        (with_value(Y.astype(float), 3, np.nan), "row 3 has the label nan, and 1 of 20"),
        (with_value(Y.astype(float), 9, 0.5), "row 9 has the label 0.5, and 1 of 20"),
        (with_value(Y.astype(object), 2, None), "row 2 has the label None, and 1 of 20"),
        (with_value(Y.astype(float), 4, np.inf), "row 4 has the label inf"),
    ],
)
def test_invalid_labels_are_reported_with_site_row_and_classes(labels, words, sigma):
    refused(lambda: learn(Cohort.from_arrays(X, labels), sigma=sigma), "South: " + words, "2 classes, 0 to 1")


def test_labels_may_be_whole_numbers_of_any_type():
    for labels in (Y.tolist(), Y.astype(bool), Y.astype(float), Y.astype(np.uint8), Y.astype(str)):
        assert (
            np.array_equal(Cohort.from_arrays(X, labels).label, Y)
            and Cohort.from_arrays(X, labels).label.dtype == np.int64
        )


def test_a_loader_refuses_text_labels():
    refused(lambda: loader(Cohort.from_arrays(X, np.where(Y > 0, "yes", "no"))), "row 0 has the label 'no'")


@pytest.mark.parametrize("method", ["fedavg", "proxyfl", "oneshot"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_reported_with_their_count_and_the_first(method, value):
    x = with_value(X, ([3, 11], 2), value)
    refused(lambda: learn(Cohort.from_arrays(x, Y), method), "South: 2 of 20 rows", "not finite, the first in row 3")


def test_bags_and_test_sets_are_checked_like_rows():
    bags = [bag.copy() for bag in BAGS]
    bags[6][0, 0] = np.nan
    head = {"private": lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), "sigma": None}
    sites = {"A": Cohort.from_arrays(bags, Y), "B": Cohort.from_arrays(BAGS, Y)}
    refused(lambda: federate(sites, "oneshot", **head), "A: 1 of 20 rows", "row 6")
    tests = {"South": Cohort.from_arrays(X, with_value(Y, 1, 7))}
    refused(lambda: learn(Cohort.from_arrays(X, Y), tests=tests), "tests of South: row 1 has the label 7")


def test_values_that_overflow_float32_are_not_finite():
    refused(
        lambda: learn(Cohort.from_arrays(with_value(X.astype(np.float64), (8, 0), 1e300), Y)), "South: 1 of 20", "row 8"
    )


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((4, 6, 6), np.uint8), "images [n, h, w, channels], not [4, 6, 6]"),
        (np.zeros(4, np.float32), "features float32[n, d], not float32 [4]"),
        (np.full((4, 2), "a"), "features float32[n, d]"),
        ([np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)], "row 1: a bag is"),
        ([np.zeros(3, np.float32)], "row 0: a bag is"),
        ([[0.0, 1.0]], "row 0: a bag is an array float32[m, d], with the same d in all, not a list"),
    ],
)
def test_arrays_of_another_shape_are_refused(x, words):
    refused(lambda: Cohort.from_arrays(x), words)


def test_labels_and_patients_must_match_the_number_of_examples():
    refused(lambda: Cohort.from_arrays(X, Y[:-1]), "20 examples need as many labels, not [19]")
    refused(lambda: Cohort.from_arrays(X, Y[:, None]), "20 examples need as many labels, not [20, 1]")
    refused(lambda: Cohort.from_arrays(X, Y, ["P"]), "20 examples need as many patients, not [1]")


NUMBERS, TIMES = RNG.random(N).astype(np.float32), np.stack([RNG.random(N) * 3, Y], 1).astype(np.float32)
ENDS = SurvivalTask((1.0, 2.0))


def ask(task, truth):
    return Cohort.from_arrays(X).set_truth(truth, task)


@pytest.mark.parametrize(
    ("task", "truth", "n_outputs", "words"),
    [
        (NumberTask(0, 1), with_value(NUMBERS, 4, np.nan), 1, "A: row 4 has the label nan"),
        (NumberTask(0, 1), Y, 1, "finite numbers float32[n]"),
        (ENDS, with_value(TIMES, (5, 0), -1), 2, "A: row 5 has the label [-1.0, 1.0]"),
        (ENDS, with_value(TIMES, (6, 1), 0.5), 2, "A: row 6"),
        (ENDS, TIMES, 3, "for a model of 2 outputs"),
        (ENDS, NUMBERS, 2, "times from 0 on"),
    ],
)
def test_unusable_targets_of_regression_and_survival_are_refused(task, truth, n_outputs, words):
    sites = {"A": ask(task, truth)}
    refused(lambda: federate(sites, "fedavg", private=lambda: nn.Linear(D, n_outputs), delta=1e-3), words)


@pytest.mark.parametrize("method", ["fedavg", "oneshot"])
@pytest.mark.parametrize(("task", "truth", "k"), [(NumberTask(0, 1), NUMBERS, 1), (ENDS, TIMES, 2)])
def test_federate_learns_the_task_of_its_examples(method, task, truth, k):
    part = ask(task, truth)
    sites = {"A": part, "B": part}
    learned = federate(sites, method, private=lambda: nn.Linear(D, k), tests=sites, rounds=1, delta=1e-3)
    assert learned["A"].rounds[-1]["own"].keys() >= {task.scores[0]}
    both = {"A": part, "B": Cohort.from_arrays(X, Y)}
    refused(lambda: federate(both, method, private=lambda: nn.Linear(D, k), delta=1e-3), "the same task")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(D + 1, 2), "North: its private model cannot take the rows"),
        (lambda: nn.Linear(D, 2).double(), "North: its private model cannot take the rows"),
        (lambda: nn.Linear(D, 2).bfloat16(), "North: its private model cannot take the rows"),
        (lambda: nn.Sequential(nn.Linear(D, 2), nn.Flatten(0)), "must return float32[b, classes]"),
        (lambda: nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, 2)), "BatchNorm1d (0)"),
        (lambda: nn.Sequential(nn.Linear(D, 2), nn.Softmax(0)), "ties the rows"),
        (lambda: nn.utils.spectral_norm(nn.Linear(D, 2)), "changes its weight_"),
    ],
)
def test_models_that_do_not_fit_are_refused_before_the_first_round(model, words, tmp_path):
    refused(lambda: learn(Cohort.from_arrays(X, Y), private=model, folder=tmp_path), words)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_missing_sites_and_rows_are_refused():
    refused(lambda: federate({}, private=lambda: nn.Linear(D, 2)), "no site")
    refused(lambda: learn(Cohort.from_arrays(X[:0], Y[:0])), "South: it has no examples")
    images = Cohort.from_arrays(np.zeros((4, 6, 6, 3), np.uint8), [0, 1, 0, 1])
    refused(lambda: federate({"A": images}, "oneshot", private=lambda: nn.Linear(D, 2)), "features, not images")


SUMS = NoisyStatistics.from_plan(plan_of_round(n=N, batch_size=N, epochs=1, sigma=0.0, clip=1.0, delta=1e-3))


@pytest.mark.parametrize(
    ("labels", "kind", "words"),
    [
        (torch.from_numpy(Y) - 1, "classes", "row 0 has the label -1; labels are 0 to 1"),
        (torch.from_numpy(Y) + 1, "classes", "row 1 has the label 2"),
        (torch.from_numpy(Y).double(), "classes", "20 rows need as many columns int64"),
        (torch.full((N,), 7.0), "number", "row 0 has the label 7; labels are 0 to 1"),
        (torch.full((N,), torch.nan), "number", "row 0 has the label nan"),
        (torch.from_numpy(Y)[:5], "classes", "20 rows need as many columns int64, not [5]"),
    ],
)
def test_a_label_outside_the_classes_is_refused_for_class_statistics(labels, kind, words):
    """A weight of 7 would let one row move the sums by 7 C."""
    head = SharedHead(2, D, kind=kind, projection=4)
    refused(lambda: SUMS.fill(head, torch.from_numpy(X), labels, CipherStream.from_entropy()), words)


def test_a_head_for_other_features_is_refused():
    head, y = SharedHead(2, D + 1, projection=4), torch.from_numpy(Y)
    refused(lambda: SUMS.fill(head, torch.from_numpy(X), y, CipherStream.from_entropy()), "sums 9 features", "have 8")


def two_names():
    layer = nn.Linear(D, D)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(D, 2))


def tied_weights():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2))
    model[1].weight = model[0].weight
    return model


def a_view_of_its_weights():
    model = nn.Linear(D, 2)
    model.register_buffer("first", model.weight.detach()[:1])
    return model


@pytest.mark.parametrize("make", [two_names, tied_weights, a_view_of_its_weights])
@pytest.mark.parametrize("dp", [None, DPSettings(1.0, 1.0, N)])
def test_shared_tensors_of_a_model_are_restored_from_a_checkpoint(make, dp, tmp_path):
    def fresh():
        return Learner(make(), lr=0.1, weight_decay=0.0, device=torch.device("cpu"), dp=dp)

    batch, stream = (torch.from_numpy(X), torch.from_numpy(Y)), CipherStream.from_seed(0)
    learner, restored = fresh(), fresh()
    take_supervised_step(learner, batch, stream)
    save_tensors(tmp_path / "c.safetensors", learner.state_tensors(), {})
    restored.load_state(load_tensors(tmp_path / "c.safetensors", "state")[0])
    assert np.array_equal(learner.parameter_vector(), restored.parameter_vector())
    for one in (learner, restored):
        take_supervised_step(one, batch, CipherStream.from_seed(1))
    assert np.array_equal(learner.parameter_vector(), restored.parameter_vector())


def test_a_layer_under_two_names_survives_a_round():
    learned = learn(Cohort.from_arrays(X, Y), "proxyfl", private=two_names)
    assert learned["South"].guarantee == "guaranteed" and learned["South"].models["proxy"][0] is not None


@pytest.mark.slow
def test_an_architecture_of_timm_with_modules_under_two_names_is_saved(tmp_path):
    model = create_model("timm:coat_lite_tiny", n_classes=2, shape=Images(3, 64), seed=0)
    save_tensors(tmp_path / "c.safetensors", model.state_dict(), {})
    other = create_model("timm:coat_lite_tiny", n_classes=2, shape=Images(3, 64), seed=1)
    other.load_state_dict(load_tensors(tmp_path / "c.safetensors", "state")[0])
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_federate_computes_without_denormal_numbers():
    class Multiplier(nn.Linear):
        """A layer that notes what two small numbers make."""

        def forward(self, x):
            products.append(float(torch.full((64,), 1e-30).mul(1e-10).sum()))
            return super().forward(x)

    products: list[float] = []
    site = (np.ones((4, 8), np.float32), np.array([0, 1, 0, 1]))
    federate({"A": Cohort.from_arrays(*site)}, "regular", private=lambda: Multiplier(8, 2), rounds=1, sigma=None)
    assert products[-1] == 0.0  # earlier calls check the model
