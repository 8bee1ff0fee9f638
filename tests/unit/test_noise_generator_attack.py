"""Noise with bits linear in a generator's state is solved for from one release; a cipher's noise is not."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from wsi_fl.models import create_model
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer
from wsi_fl.types import Images

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from attacks.linear import Twister, tempered
from attacks.noise import _ORTHONORMAL, MT19937, Release, attack, chunks_of, noise_of, words_of

SIZES = (200 * 300, 203, 2)
SIGMA, CLIP, BATCH_SIZE, LR, ADAM_EPS = 3.7, 0.01, 150, 1e-3, 1e-8


@pytest.fixture
def small_twister():
    """Return a Mersenne Twister like PyTorch's, of 521 bits and period 2⁵²¹ − 1."""
    return Twister(n=17, m=8, r=23, a=0xC14C343C)


def outputs(twister, n):
    """Return the first n outputs from one fixed state: some other states make a certain sign wrong."""
    first = np.random.default_rng(0).integers(1 << 32, size=twister.n, dtype=np.uint32)
    return tempered(twister.words(first, twister.n + n)[twister.n :])


def release_step(noise, sizes):
    """Return a peer's view of one step of Adam on gradients under this noise, float64[d] in units of σC."""
    rng = np.random.default_rng(0)
    true = rng.standard_normal(len(noise))
    true *= 0.1 * BATCH_SIZE * CLIP / np.linalg.norm(true)  # gradients agree in part
    start = rng.uniform(-0.01, 0.01, len(noise)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    gradient = (true + np.nan_to_num(noise) * SIGMA * CLIP) / BATCH_SIZE
    parameter.grad = torch.from_numpy(gradient.astype(np.float32))
    torch.optim.Adam([parameter], lr=LR, eps=ADAM_EPS, fused=True).step()
    after = parameter.detach().numpy()
    return Release(start, after, sizes, LR, ADAM_EPS, SIGMA, CLIP, BATCH_SIZE, true_sum=true)


def has_found_nothing(told, unknowns):
    """Return whether the equations have full rank, and half of the others contradict them, within five deviations."""
    spare = told["beyond_the_rank"]
    assert told["rank"] == unknowns and spare > 400
    assert abs(told["contradictions"] - spare / 2) < 5 * spare**0.5 / 2
    return not told["found"] and "cosine" not in told and told["cosine_with_noise"] < 0.1


def has_found_all(told):
    assert told["beyond_the_rank"] > 400 and told["contradictions"] == 0
    assert told["cosine_with_noise"] < 0.1 and told["correlation"] > 0.999
    return told["found"] and told["cosine"] > 0.999


def test_the_noise_of_a_linear_generator_is_removed_from_a_release_and_that_of_a_cipher_is_not(small_twister):
    told = attack(release_step(noise_of(outputs(small_twister, words_of(SIZES)), SIZES), SIZES), small_twister)
    assert told["rank"] == small_twister.n_bits == 521 and has_found_all(told)
    assert has_found_nothing(
        attack(release_step(CipherStream.from_entropy().normal(sum(SIZES)), SIZES), small_twister), 521
    )


def test_the_noise_of_the_attack_is_that_of_pytorch():
    """Sizes with even and uneven ends, of several chunks, and too small to be filled in blocks."""
    sizes = (2, 100_000, 10, 200, 49_153, 37, 7)
    seeded = np.random.RandomState(5).get_state()[1].astype(np.uint32)  # as PyTorch takes 32 bits of a seed
    words = tempered(MT19937.words(seeded, 624 + words_of(sizes))[624:])
    generator = torch.Generator().manual_seed(5)
    noise, n_small = noise_of(words, sizes), 0
    for chunk in chunks_of(sizes):
        normals = torch.empty(4 * chunk.k).normal_(generator=generator).double().numpy().reshape(4, -1)
        mine = noise[chunk.first : chunk.first + chunk.n]
        n_small += chunk.small
        assert np.isnan(mine).all() == chunk.small
        assert chunk.small or np.allclose(mine, (_ORTHONORMAL @ normals).ravel()[: chunk.n], atol=1e-5)
    assert n_small >= 3


FULL = (200 * 12_288, 200, 200 * 200, 200, 400, 2)
"""The MLP that travels, on images of 64 pixels."""


@pytest.mark.slow
def test_the_whole_state_of_pytorchs_generator_follows_from_a_release():
    told = attack(release_step(noise_of(outputs(MT19937, words_of(FULL)), FULL), FULL))
    assert told["rank"] == 19_937 and has_found_all(told)


@pytest.mark.slow
def test_the_attack_finds_no_state_from_a_step_of_wsi_fl():
    """The step, on an empty batch, and its noise are wsi-fl's."""
    model = create_model("mlp", n_classes=2, shape=Images(3, 64), seed=0)
    vector = torch.nn.utils.parameters_to_vector
    before = vector(model.parameters()).detach().numpy().copy()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, eps=ADAM_EPS, fused=True)
    trainer = DPTrainer(model, optimizer, sigma=SIGMA, clip=CLIP, batch_size=BATCH_SIZE)
    trainer.step(torch.empty(0, 3, 64, 64), lambda logits: logits.sum(), CipherStream.from_entropy())
    after = vector(model.parameters()).detach().numpy()
    true = np.random.default_rng(0).standard_normal(len(after))
    release = Release(before, after, FULL, LR, ADAM_EPS, SIGMA, CLIP, BATCH_SIZE, true_sum=true)
    assert has_found_nothing(attack(release), 19_937)
