"""What a GPU computes is what the processor computes; skipped where there is none."""

import copy

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from scipy.stats import kstest
from torch.nn import functional

from wsi_fl.learning.examples import Examples, batches
from wsi_fl.learning.local import DPSettings, Learner, probabilities, supervised_step
from wsi_fl.models import build
from wsi_fl.models.encoder import Encoder, encode
from wsi_fl.models.mil import deepset
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.gradients import ENGINES, trained
from wsi_fl.types import Images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def models():
    torch.manual_seed(0)
    return {
        "resnet18": (
            build("resnet18", n_classes=3, shape=Images(3, 64), seed=0),
            torch.randn(6, 3, 64, 64),
        ),
        "lenet5": (build("lenet5", n_classes=3, shape=Images(1, 28), seed=0), torch.randn(6, 1, 28, 28)),
        "deepset": (deepset(3, 32), torch.cat([torch.randn(6, 9, 32), torch.ones(6, 9, 1)], 2)),
    }


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("name", ["resnet18", "lenet5", "deepset"])
def test_clipped_sums_are_those_of_double_precision(name, engine):
    model, x = models()[name]
    y = torch.arange(len(x)) % 3
    exact = copy.deepcopy(model).double().train()
    rows = []
    for k in range(len(x)):
        loss = functional.cross_entropy(exact(x[k : k + 1].double()), y[k : k + 1])
        rows.append(torch.autograd.grad(loss, trained(exact)))
    wanted = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    told = []

    def weigh(norms):
        told.append(norms.cpu())
        return (0.5 / norms).clamp(max=1.0)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # which sends a few ReLUs the other way
        sums, _ = ENGINES[engine](
            model.to(CUDA).train(),
            x.to(CUDA),
            lambda logits: functional.cross_entropy(logits, y.to(CUDA)),
            weigh,
        )
    norms = wanted.norm(dim=1)
    torch.testing.assert_close(told[0].double(), norms, rtol=2e-3, atol=0)
    clipped = ((0.5 / norms).clamp(max=1.0)[:, None] * wanted).sum(0)
    found = torch.cat([one.flatten() for one in sums]).cpu().double()
    assert (found - clipped).norm() <= 5e-3 * clipped.norm()


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("name", ["resnet18", "lenet5", "deepset"])
def test_norms_are_those_of_what_is_summed(name, engine):
    """Clipping rests on it, so TensorFloat-32 must have no part in it."""
    model, x = models()[name]
    model, x, y = model.to(CUDA).train(), x.to(CUDA), torch.arange(len(x), device=CUDA) % 3
    for k in range(len(x)):
        told = []

        def weigh(norms, k=k, told=told):
            told.append(norms)
            return functional.one_hot(torch.tensor(k), len(norms)).to(norms)

        sums, _ = ENGINES[engine](model, x, lambda logits: functional.cross_entropy(logits, y), weigh)
        found = torch.cat([one.flatten() for one in sums]).double().norm()
        assert 0.99 * told[0][k] <= found <= (1 + 1e-5) * told[0][k]  # never too short


def test_noise_is_normal_and_the_same_whether_it_was_drawn_ahead():
    found = []
    for ahead in (False, True):
        there, noise = torch.zeros(300_001, device=CUDA), CipherStream.seeded(3, "noise")
        if ahead:
            noise.draw_ahead(len(there), CUDA)
        noise.add_normal([there], 2.0)
        found.append(there.cpu())
    assert torch.equal(*found)
    assert kstest(found[0].double().numpy() / 2, "norm").pvalue > 1e-4
    assert len(torch.unique(found[0])) > 0.99 * len(found[0])


@pytest.mark.parametrize("dp", [False, True])
def test_training_goes_the_same_way(dp):
    x = np.random.default_rng(0).integers(0, 256, (64, 28, 28, 1)).astype(np.uint8)
    examples = Examples.of(x, np.arange(64) % 2)
    found = []
    for device in (CPU, CUDA):
        settings = DPSettings(sigma=0.0, clip=0.5, batch_size=16) if dp else None
        model = build("lenet5", n_classes=2, shape=Images(1, 28), seed=0)
        learner = Learner(model, lr=1e-3, weight_decay=0.0, device=device, dp=settings)
        rows = np.array_split(np.arange(64), 4)
        for batch in batches(examples, iter(rows), augment=None, device=device):
            supervised_step(learner, batch, CipherStream.seeded(0, "noise"))
        found.append(probabilities(learner.logits, examples, device))
    np.testing.assert_allclose(found[1], found[0], atol=5e-3)


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet"])
def test_features_are_those_of_the_processor(tmp_path, name):
    torch.manual_seed(0)
    path = tmp_path / "weights.safetensors"
    save_file(timm.create_model(name, num_classes=0).state_dict(), path)
    patches = np.random.default_rng(0).integers(0, 256, (40, 160, 160, 3)).astype(np.uint8)
    here, there = (
        encode([patches], Encoder(name, path, batch_size=16, device=device)) for device in (CPU, CUDA)
    )
    centred = [one - here.mean(0) for one in (here, there)]
    assert np.linalg.norm(centred[1] - centred[0]) <= 0.1 * np.linalg.norm(centred[0])  # bfloat16


@pytest.fixture
def little_memory():
    """A GPU of which hardly more is left than what stands there already."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 30)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("dp", [False, True])
def test_memory_that_runs_out_makes_parts_smaller(little_memory, dp):
    settings = DPSettings(sigma=1.0, clip=0.5, batch_size=64) if dp else None
    model = build("resnet18", n_classes=2, shape=Images(3, 512), seed=0)
    learner = Learner(model, lr=1e-3, weight_decay=0.0, device=CUDA, dp=settings)
    x = np.random.default_rng(0).integers(0, 256, (64, 512, 512, 3)).astype(np.uint8)
    examples = Examples.of(x, np.arange(64) % 2)
    for batch in batches(examples, iter([np.arange(64)]), augment=None, device=CUDA):
        assert np.isfinite(supervised_step(learner, batch, CipherStream.fresh()))
    assert (learner.trainer if dp else learner)._portion._most < 64


@pytest.mark.story
def test_an_encoder_is_compiled_for_every_number_of_patches(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), path)
    patches = np.random.default_rng(0).integers(0, 256, (40, 160, 160, 3)).astype(np.uint8)
    plain, compiled = (
        encode([patches], Encoder("test_vit", path, batch_size=16, device=CUDA, compiled=one))
        for one in (False, True)
    )
    assert np.linalg.norm(compiled - plain) <= 0.02 * np.linalg.norm(plain)
