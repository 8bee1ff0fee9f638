"""Architectures match their papers and support per-example gradients."""

import pytest
import torch
import torchvision
from opacus.validators import ModuleValidator

from wsi_fl.models import IMAGE_BUILDERS, create_model, schema_digest
from wsi_fl.types import Images, UsageError

SIZES = {"mlp": 28, "lenet5": 28, "cnn1": 32, "cnn2": 32}


def make(name, size_px=None, seed=0, n_classes=2, in_channels=3):
    size_px = size_px or SIZES.get(name, 64)
    return create_model(name, n_classes=n_classes, shape=Images(in_channels, size_px), seed=seed), size_px


@pytest.mark.parametrize("name", [*IMAGE_BUILDERS, "timm:efficientnet_lite0", "timm:resnet10t"])
def test_every_model_maps_images_to_logits_and_passes_the_privacy_validator(name):
    model, size_px = make(name)
    assert model(torch.randn(3, 3, size_px, size_px)).shape == (3, 2)
    assert ModuleValidator.validate(model, strict=False) == []
    assert not any(getattr(m, "inplace", False) for m in model.modules())


def test_resnet18_has_torchvisions_parameters_and_computes_what_its_in_place_version_computes():
    ours, published = make("resnet18", n_classes=1000)[0], torchvision.models.resnet18(num_classes=1000)
    shapes = [{n: p.shape for n, p in model.named_parameters()} for model in (ours, published)]
    assert shapes[0] == shapes[1]
    theirs = torchvision.models.resnet18(norm_layer=lambda c: torch.nn.GroupNorm(32, c))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x))


def test_initialisation_depends_on_the_seed_alone_and_leaves_the_global_generator_untouched():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = (make("gn_cnn", seed=seed)[0] for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_schema_tells_architectures_apart_and_ignores_values():
    assert schema_digest(make("cnn1", seed=0)[0]) == schema_digest(make("cnn1", seed=1)[0])
    assert schema_digest(make("cnn1")[0]) != schema_digest(make("cnn2")[0])
    assert schema_digest(make("cnn1", size_px=32)[0]) != schema_digest(make("cnn1", size_px=28)[0])


@pytest.mark.parametrize("name", ["lenet5", "cnn1", "gn_cnn", "vgg11"])
def test_images_too_small_are_refused(name):
    with pytest.raises(UsageError, match="at least"):
        make(name, size_px=8)
