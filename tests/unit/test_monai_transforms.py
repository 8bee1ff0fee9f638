"""Random transforms of MONAI as augmentation, against MONAI itself."""

import warnings

import numpy as np
import pytest
import torch
from conftest import refused

from wsi_fl.data.augmentation import build_augmentation, check_augmentation
from wsi_fl.privacy.cipher import CipherStream


@pytest.fixture(scope="module")
def transforms():
    """MONAI's transforms, imported outside of the tests' time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from monai import transforms

        return transforms


def noise(seed=0, shape=(3, 24, 24)):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


CALLS = {
    "RandAdjustContrast(prob=0.7, gamma=[0.5, 2.0])": {"prob": 0.7, "gamma": (0.5, 2.0)},
    "RandGaussianNoise": {},
    "RandGaussianSmooth(prob=0.5)": {"prob": 0.5},
    "RandZoom(prob=0.9, min_zoom=0.8, mode='bilinear')": {"prob": 0.9, "min_zoom": 0.8, "mode": "bilinear"},
    "RandFlip(prob=0.5, spatial_axis=1)": {"prob": 0.5, "spatial_axis": 1},
}


@pytest.mark.parametrize("call", CALLS)
def test_a_named_transform_is_monais_own_with_a_state_of_the_stream(transforms, call):
    seeds, images = CipherStream.from_seed(8), [noise(k) for k in range(6)]
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    augment = build_augmentation(f"monai:{call}", CipherStream.from_seed(8))
    views = [augment(image) for image in images]
    assert np.array_equal(np.random.get_state()[1], before[0])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[1])
    for image, view in zip(images, views, strict=True):
        own = getattr(transforms, call.partition("(")[0])(**CALLS[call])
        own.set_random_state(state=np.random.RandomState(seeds.random_words(4).view(np.uint32)))
        assert type(view) is torch.Tensor and view.dtype == torch.float32
        assert torch.equal(view, own(image.numpy()))


def test_own_names_and_monais_are_applied_in_order(transforms):
    names = ["mirror", "monai:RandShiftIntensity(prob=1, offsets=0.5)"]
    both, image = build_augmentation(names, CipherStream.from_seed(1)), noise()
    views = [both(image) for _ in range(20)]
    flat = [(view - image).round(decimals=4).unique().numel() == 1 for view in views]
    mirrored = [(view - image.flip(2)).round(decimals=4).unique().numel() == 1 for view in views]
    assert sum(flat) + sum(mirrored) == 20 and 4 < sum(flat) < 16


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("RandZom", "MONAI has no transform 'RandZom'"),
        ("Zoom(zoom=2)", "'Zoom' is no random transform"),
        ("RandFlipd(keys='image')", "'RandFlipd' is no random transform"),
        ("RandSimulateLowResolution", "fails on 3×33×33"),
        ("RandGridPatch(patch_size=8)", "makes 4×3×8×33 of 3×33×33"),
        ("RandIntensityRemap", "different images of the same image and random state"),
        ("RandGaussianNoise(sigma=1)", "unexpected keyword argument 'sigma'"),
        ("RandFlip(lazy=True)", "leave out lazy"),
        ("RandZoom(0.5)", "write monai:NAME or monai:NAME(argument=value)"),
        ("RandZoom(**{'prob': 1})", "write monai:NAME"),
        ("RandZoom(prob=open('x'))", "write monai:NAME"),
    ],
)
def test_a_call_that_is_no_random_transform_of_an_image_is_refused(transforms, call, words):
    refused(lambda: check_augmentation(f"monai:{call}"), words)


def test_an_image_that_changes_its_shape_in_training_is_refused(transforms):
    crop = build_augmentation("monai:RandGridPatch(patch_size=8)", CipherStream.from_seed(0))
    refused(lambda: crop(noise()), "makes", "of 3×24×24")
