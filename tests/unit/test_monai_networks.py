"""Networks of MONAI by name: classifiers without BatchNorm, whose clipped gradients are those of a loop."""

from importlib.util import find_spec

import pytest
import torch
from builders import compare_with_loop, vary
from conftest import nightly, refused
from torch.nn.modules.batchnorm import _BatchNorm

from wsi_fl.models import StartWeights, create_model
from wsi_fl.privacy.engine_selection import check_per_example_gradients
from wsi_fl.privacy.gradients import ENGINES
from wsi_fl.privacy.layer_gradients import find_obstacle
from wsi_fl.privacy.row_independence import model_origin, train_without_dropout
from wsi_fl.types import Images


def build(name, size_px=32, *, channels=3, seed=0, **more):
    return create_model(f"monai:{name}", n_classes=3, shape=Images(channels, size_px), seed=seed, **more)


@pytest.fixture(scope="module", autouse=True)
def classifiers():
    """Import MONAI before the first test; the names of its classifiers, once for each class."""
    from wsi_fl.models.monai_networks import _find_builders

    builders = _find_builders(3, Images(1, 64))
    return {getattr(network, "func", network): name for name, network in reversed(builders.items())}.values()


@pytest.mark.parametrize("name", ["resnet10", "DenseNet121", "efficientnet-b0", *nightly("SEResNext50")])
def test_a_classifier_maps_images_to_logits_of_single_rows_and_starts_at_the_seed(name):
    x = torch.randn(3, 1, 32, 32)
    before = torch.random.get_rng_state()
    model, again, other = (build(name, channels=1, seed=seed).eval() for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert model(x).shape == (3, 3)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-4)
    assert torch.equal(model(x), again(x)) and not torch.allclose(model(x), other(x))
    assert not any(isinstance(m, _BatchNorm) or getattr(m, "inplace", False) for m in model.modules())


@pytest.mark.parametrize("name", ["resnet18", "DenseNet121", *nightly("efficientnet-b0", "SEResNet50")])
def test_clipped_gradients_under_privacy_are_those_of_a_loop(name):
    model = vary(build(name))
    train_without_dropout(model)
    assert model_origin(model) == "library" and find_obstacle(model) is None
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    compare_with_loop(ENGINES["ghost"], model, x, torch.arange(3))


@pytest.mark.slow
def test_every_classifier_of_monai_is_found_and_gives_logits(classifiers):
    families = {"resnet200", "DenseNet264", "SENet154", "SEResNet152", "SEResNext101", "efficientnet-b0", "ViT"}
    assert families <= {*classifiers}
    for name in classifiers:
        if name != "ViT":
            with torch.device("meta"):
                assert build(name, 64).eval()(torch.empty(2, 3, 64, 64)).shape == (2, 3), name


@pytest.mark.skipif(find_spec("einops") is None, reason="MONAI's vision transformer needs einops")
def test_the_vision_transformer_trains_row_by_row_under_privacy():
    model = build("ViT", channels=1)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 3)
    assert check_per_example_gradients(model, (1, 32, 32), 3) == "singly"
    refused(lambda: build("ViT", 8), "MONAI makes no ViT of 3 classes and images of 3 channels and 8 px")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet19", ("MONAI has no network 'resnet19'", "monai:resnet10")),
        ("EfficientNetBN", ("EfficientNetBN does not classify images, or needs more", "use monai:efficientnet-b0,")),
        ("UNet", ("UNet does not classify images", "monai:resnet18, monai:DenseNet121")),
        ("MILModel", ("MILModel does not classify images",)),
    ],
)
def test_other_names_are_refused_with_those_that_are_known(name, words):
    refused(lambda: build(name), *words)


def test_missing_packages_and_weights_are_named(monkeypatch):
    monkeypatch.setattr("monai.networks.nets.ViT", lambda **_: __import__("no_such_package"))
    refused(lambda: build("ViT"), "monai:ViT needs a package", "pip install no_such_package")
    refused(lambda: build("resnet18", start=StartWeights()), "'monai:resnet18' starts from no weights")
