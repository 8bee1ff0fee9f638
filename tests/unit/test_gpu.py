"""Results on a GPU equal those of the processor; skipped without a GPU."""

import copy
import itertools

import numpy as np
import pytest
import torch
from builders import clipped, each_gradient, norms_of
from safetensors.torch import save_file
from scipy.stats import kstest
from torch.nn import functional

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import Cohort
from wsi_fl.learning.local_training import DPSettings, Learner, predict_examples, take_supervised_step
from wsi_fl.models import create_model
from wsi_fl.models.encoder import Encoder, encode_batches
from wsi_fl.models.mil import build_deepset
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.gradients import ENGINES
from wsi_fl.types import Images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


MODELS = {
    "resnet18": (lambda: create_model("resnet18", n_classes=3, shape=Images(3, 64), seed=0), (6, 3, 64, 64)),
    "lenet5": (lambda: create_model("lenet5", n_classes=3, shape=Images(1, 28), seed=0), (6, 1, 28, 28)),
    "deepset": (lambda: build_deepset(3, 32), (6, 9, 33)),
}
EVERY = pytest.mark.parametrize(("name", "engine"), itertools.product(MODELS, sorted(ENGINES)))


def build_case(name):
    torch.manual_seed(0)
    model, shape = MODELS[name]
    x = torch.randn(shape)
    if name == "deepset":
        x[..., -1] = 1  # no padding
    return model(), x


@EVERY
def test_clipped_sums_are_those_of_double_precision(name, engine):
    model, x = build_case(name)
    y = torch.arange(len(x)) % 3
    each = each_gradient(copy.deepcopy(model).double().train(), x.double(), y)
    told = []

    def weigh(norms):
        told.append(norms.cpu())
        return (0.5 / norms).clamp(max=1.0)

    def loss_of(logits):
        return functional.cross_entropy(logits, y.to(CUDA))

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # which sends a few ReLUs the other way
        sums, _ = ENGINES[engine](model.to(CUDA).train(), x.to(CUDA), loss_of, weigh)
    torch.testing.assert_close(told[0].double(), norms_of(each), rtol=2e-3, atol=0)
    wanted, found = (torch.cat([one.flatten().cpu().double() for one in ones]) for ones in (clipped(each, 0.5), sums))
    assert (found - wanted).norm() <= 5e-3 * wanted.norm()


@EVERY
def test_norms_are_those_of_the_summed_gradients(name, engine):
    """Clipping rests on these norms, so TensorFloat-32 must have no part in them."""
    model, x = build_case(name)
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
        there, noise = torch.zeros(300_001, device=CUDA), CipherStream.from_seed(3, "noise")
        if ahead:
            noise.draw_ahead(len(there), CUDA)
        noise.add_normal([there], 2.0)
        found.append(there.cpu())
    assert torch.equal(*found)
    assert kstest(found[0].double().numpy() / 2, "norm").pvalue > 1e-4
    assert len(torch.unique(found[0])) > 0.99 * len(found[0])


@pytest.mark.parametrize("dp", [False, True])
def test_training_on_the_gpu_matches_the_processor(dp):
    x = np.random.default_rng(0).integers(0, 256, (64, 28, 28, 1)).astype(np.uint8)
    examples = Cohort.from_arrays(x, np.arange(64) % 2)
    found = []
    for device in (CPU, CUDA):
        settings = DPSettings(sigma=0.0, clip=0.5, batch_size=16) if dp else None
        model = create_model("lenet5", n_classes=2, shape=Images(1, 28), seed=0)
        learner = Learner(model, lr=1e-3, weight_decay=0.0, device=device, dp=settings)
        rows = np.array_split(np.arange(64), 4)
        for batch in load_batches(examples, iter(rows), augment=None, device=device):
            take_supervised_step(learner, batch, CipherStream.from_seed(0, "noise"))
        found.append(predict_examples(learner.predict_logits, examples, device))
    np.testing.assert_allclose(found[1], found[0], atol=5e-3)


def encode_patches(folder, name, **how):
    """Return the features of forty patches by random weights."""
    import timm

    torch.manual_seed(0)
    path = folder / "weights.safetensors"
    save_file(timm.create_model(name, num_classes=0).state_dict(), path)
    patches = np.random.default_rng(0).integers(0, 256, (40, 160, 160, 3)).astype(np.uint8)
    return encode_batches([patches], Encoder(name, path, batch_size=16, **how))


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet"])
def test_features_on_the_gpu_are_those_of_the_processor(tmp_path, name):
    here, there = (encode_patches(tmp_path, name, device=device) for device in (CPU, CUDA))
    centred = [one - here.mean(0) for one in (here, there)]
    assert np.linalg.norm(centred[1] - centred[0]) <= 0.1 * np.linalg.norm(centred[0])  # bfloat16


@pytest.fixture
def little_memory():
    """Limit the GPU to hardly more memory than is in use."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 30)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("dp", [False, True])
def test_memory_that_runs_out_makes_parts_smaller(little_memory, dp):
    settings = DPSettings(sigma=1.0, clip=0.5, batch_size=64) if dp else None
    model = create_model("resnet18", n_classes=2, shape=Images(3, 512), seed=0)
    learner = Learner(model, lr=1e-3, weight_decay=0.0, device=CUDA, dp=settings)
    x = np.random.default_rng(0).integers(0, 256, (64, 512, 512, 3)).astype(np.uint8)
    examples = Cohort.from_arrays(x, np.arange(64) % 2)
    for batch in load_batches(examples, iter([np.arange(64)]), augment=None, device=CUDA):
        assert np.isfinite(take_supervised_step(learner, batch, CipherStream.from_entropy()))
    assert (learner.trainer if dp else learner)._batch_finder._max_rows < 64


@pytest.mark.end_to_end
def test_an_encoder_is_compiled_for_every_number_of_patches(tmp_path):
    plain, fast = (encode_patches(tmp_path, "test_vit", device=CUDA, compiled=one) for one in (False, True))
    assert np.linalg.norm(fast - plain) <= 0.02 * np.linalg.norm(plain)
