"""Encoders read slides ahead in order and within bounds, and adapt to the device's memory."""

import time
from functools import partial

import numpy as np
import pytest
import timm
import torch
from conftest import refused
from torch._subclasses import FakeTensorMode

from wsi_fl.models.encoder import Encoder, EncoderError, Network, build_preset_model, encode_items
from wsi_fl.models.presets import PRESETS, Transform

PX = 32


@pytest.fixture
def encoder(tiny_weights):
    return partial(Encoder, "test_efficientnet", tiny_weights)


def patches(n, seed):
    return np.random.default_rng(seed).integers(0, 256, (n, PX, PX, 3)).astype(np.uint8)


class Marking:
    """An encoder whose features are the first pixels."""

    n_features = 1

    def __call__(self, batch):
        return batch[:, 0, 0, :1].astype(np.float32)

    def start_batch(self, batch):
        return partial(self, batch)

    def allocate_batch(self, shape):
        return np.empty(shape, np.uint8)

    def batch_size_for(self, _):
        return 4


def test_features_of_each_slide_are_returned_in_its_order(encoder):
    tiny = encoder(batch_size=4)
    slides = [(k, [patches(n, k)]) for k, n in enumerate((3, 0, 9, 1, 4))]
    found = list(encode_items(iter(slides), tiny))
    assert [one.item for one in found] == [0, 1, 2, 3, 4]
    for one, (_, (own,)) in zip(found, slides, strict=True):
        assert one.features.shape == (len(own), tiny.n_features)
        if len(own):
            np.testing.assert_allclose(one.features, tiny(own), atol=1e-5)


def test_a_slide_that_cannot_be_read_leaves_the_others(encoder):
    def broken():
        yield patches(4, 1)
        raise ValueError("cut short")

    slides = [("a", [patches(2, 0)]), ("b", broken()), ("c", [patches(3, 2)])]
    a, b, c = encode_items(iter(slides), encoder(batch_size=4))
    assert str(b.error) == "cut short" and a.error is c.error is None
    assert len(a.features) == 2 and len(c.features) == 3


def test_the_next_slides_are_read_while_one_is_encoded_and_no_more_than_a_few():
    drawn, done, most = [], [], []

    class Watching(Marking):
        def __call__(self, batch):
            time.sleep(0.01)
            most.append(len(drawn) - len(done))
            done.append(0)
            return super().__call__(batch)

    def slide():
        drawn.append(0)
        yield np.zeros((4, 8, 8, 3), np.uint8)

    list(encode_items(((k, slide()) for k in range(30)), Watching()))
    assert 2 <= max(most) <= 5


def limit_memory(encoder, most):
    """Make the encoder run out of memory above a number of patches; return the list of tried batch sizes."""
    whole, tried = encoder.network.forward, []

    def forward(pixels):
        tried.append(len(pixels))
        if len(pixels) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(pixels)

    encoder.network.forward = forward
    return tried


def test_a_batch_too_large_is_halved_until_it_fits(encoder):
    told, plain = [], encoder(batch_size=8)
    tiny, small = encoder(batch_size=8, tell=told.append), encoder(batch_size=8)
    tried = limit_memory(tiny, 4)
    for seed in (0, 1):  # the second was read before it was halved
        np.testing.assert_allclose(tiny(patches(8, seed)), plain(patches(8, seed)), atol=1e-5)
        assert tried[:3] == [8, 4, 4] and tiny.batch_size == 4
        assert len(told) == 1 and "no memory for 8 patches of 32 px" in told[0] and "with 4" in told[0]
    (one,) = encode_items([(0, [patches(8, 2)])], tiny)
    assert tried[-2:] == [4, 4] and len(one.features) == 8
    tried = limit_memory(small, 1)
    np.testing.assert_allclose(small(patches(8, 0)), plain(patches(8, 0)), atol=1e-5)
    assert small.batch_size == 1 and tried[:4] == [8, 4, 2, 1]
    limit_memory(small, 0)
    refused(lambda: small(patches(2, 0)), "no memory for a patch of 32 px; lower input_px", error=EncoderError)


def move_to_fake_gpu(network):
    """Do to fake tensors what `.to("cuda")` does to registered ones."""
    for module in network.modules():
        for table in (module._parameters, module._buffers):
            for name, one in table.items():
                table[name] = one if one is None else torch.empty(one.shape, dtype=one.dtype, device="cuda")
    return network


@pytest.mark.parametrize("name", ["h0-mini", "timm"])
def test_all_that_a_network_needs_moves_to_the_gpu(name):
    preset = PRESETS.get(name)
    transform = preset.transform if preset else Transform((0.5,) * 3, (0.5,) * 3, 64, "bicubic")
    model = build_preset_model(preset) if preset else timm.create_model("test_efficientnet", num_classes=0)
    with FakeTensorMode():
        network = move_to_fake_gpu(Network(model.eval(), transform, preset.pooling if preset else None))
        pixels = torch.empty(2, 256, 256, 3, dtype=torch.uint8, device="cuda")
        with torch.inference_mode():
            features = network(pixels)
            assert features.device.type == "cuda"
            assert features.shape == (2, preset.n_features if preset else 256)
            network.mean = network.mean.cpu()
            with pytest.raises(RuntimeError, match="device"):
                network(pixels)
