"""Architectures are what their papers say, and ready for per-example gradients."""

import pytest
import torch
import torchvision
from conftest import nightly
from opacus.validators import ModuleValidator

from wsi_fl.models import BUILDERS, build, schema
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer, check_per_example_gradients
from wsi_fl.types import Images, UsageError

SIZES = {"mlp": 28, "lenet5": 28, "cnn1": 32, "cnn2": 32}


def make(name, size_px=None, seed=0, n_classes=2, in_channels=3):
    size_px = size_px or SIZES.get(name, 64)
    return build(name, n_classes=n_classes, shape=Images(in_channels, size_px), seed=seed), size_px


@pytest.mark.parametrize("name", [*BUILDERS, "timm:efficientnet_lite0", "timm:resnet10t"])
def test_every_model_maps_images_to_logits_and_passes_the_privacy_validator(name):
    model, size_px = make(name)
    assert model(torch.randn(3, 3, size_px, size_px)).shape == (3, 2)
    assert ModuleValidator.validate(model, strict=False) == []
    assert not any(getattr(m, "inplace", False) for m in model.modules())


def test_resnet18_has_torchvisions_parameters_name_by_name():
    ours, _ = make("resnet18", n_classes=1000)
    theirs = torchvision.models.resnet18(num_classes=1000)
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }
    assert sum(p.numel() for p in ours.parameters()) == 11_689_512


def test_resnet18_computes_what_torchvisions_in_place_version_computes():
    ours, _ = make("resnet18")
    theirs = torchvision.models.resnet18(num_classes=2, norm_layer=lambda c: torch.nn.GroupNorm(32, c))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.slow
def test_vgg11_has_torchvisions_convolutions_one_linear_layer_and_no_batch_norm():
    ours, theirs = make("vgg11", size_px=224, n_classes=8)[0], torchvision.models.vgg11().features

    def convolutions(model):
        return [m.weight.shape for m in model.modules() if isinstance(m, torch.nn.Conv2d)]

    assert convolutions(ours) == convolutions(theirs)
    assert [m.weight.shape for m in ours.modules() if isinstance(m, torch.nn.Linear)] == [(8, 25_088)]
    assert sum(isinstance(m, torch.nn.GroupNorm) for m in ours) == 8
    assert sum(isinstance(m, torch.nn.MaxPool2d) for m in ours) == 5


@pytest.mark.parametrize(
    "name",
    ["resnet10t", "convnext_atto", *nightly("resnet18", "efficientnet_lite0", "mobilenetv3_small_050")],
)
def test_a_private_step_of_a_timm_model_is_the_sum_of_clipped_gradients(name):
    """The oracle is a loop over single examples; no weight is constant, lest a gain of 0 hide the rest."""
    model, _ = make(f"timm:{name}", size_px=32)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.min() == p.max():
                p.uniform_(0.5, 1.5, generator=g)
    x, y, clip = torch.randn(2, 3, 32, 32, generator=g), torch.tensor([0, 1]), 0.3
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) or not list(module.children()) + list(module.parameters()):
            module.eval()
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(2):
        loss = torch.nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = sum(float(grad.square().sum()) for grad in grads) ** 0.5
        wanted = [w + grad * min(1, clip / norm) / 2 for w, grad in zip(wanted, grads, strict=True)]
    seen = {}
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    sgd.register_step_pre_hook(lambda *_: seen.update(enumerate(p.grad.clone() for p in model.parameters())))
    model.training = True
    trainer = DPTrainer(model, sgd, sigma=0.0, clip=clip, batch_size=2)
    trainer.step(x, lambda logits: torch.nn.functional.cross_entropy(logits, y), CipherStream.fresh())
    for k, (p_name, grad) in enumerate(zip(dict(model.named_parameters()), wanted, strict=True)):
        off = float((seen[k] - grad).norm())
        assert off <= 1e-3 * float(grad.norm()) + 1e-7, p_name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch16_224", "cannot take images of 3×32×32: Input height"),
        ("inception_v3", "cannot take images of 3×32×32: .*[Kk]ernel"),
        ("levit_128s", "BatchNorm"),
    ],
)
def test_timm_models_that_cannot_be_private_are_refused_in_one_line(name, message):
    with pytest.raises(UsageError, match=message) as caught:
        check_per_example_gradients(make(f"timm:{name}", size_px=32)[0], (3, 32, 32), 2)
    assert "\n" not in str(caught.value)


def test_initialisation_depends_on_the_seed_alone_and_leaves_the_global_generator_untouched():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, _ = make("gn_cnn", seed=3)
    torch.rand(7)
    second, _ = make("gn_cnn", seed=3)
    other, _ = make("gn_cnn", seed=4)
    torch.manual_seed(5)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_schema_tells_architectures_apart_and_ignores_values():
    assert schema(make("cnn1", seed=0)[0]) == schema(make("cnn1", seed=1)[0])
    assert schema(make("cnn1")[0]) != schema(make("cnn2")[0])
    assert schema(make("cnn1", size_px=32)[0]) != schema(make("cnn1", size_px=28)[0])


@pytest.mark.parametrize("name", ["lenet5", "cnn1", "gn_cnn", "vgg11"])
def test_images_too_small_are_refused(name):
    with pytest.raises(UsageError, match="at least"):
        make(name, size_px=8)
