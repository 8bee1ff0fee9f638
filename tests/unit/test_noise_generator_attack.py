"""Noise with bits linear in a generator's state is solved for from one release; a cipher's noise is not."""

import sys
from pathlib import Path

import pytest

from wsi_fl.privacy.cipher import CipherStream

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from attacks.linear import Twister
from attacks.noise import attack, simulate_noise, simulate_release

SIZES = (200 * 300, 203, 2)


def test_the_noise_of_a_linear_generator_is_removed_from_a_release_and_that_of_a_cipher_is_not():
    """The generator is like PyTorch's, of 521 bits; `noise_attack.py prove` finds the 19 937 of PyTorch's own."""
    twister = Twister(n=17, m=8, r=23, a=0xC14C343C)
    told = attack(simulate_release(simulate_noise(twister, SIZES), SIZES), twister)
    assert told["rank"] == twister.n_bits == 521 and told["beyond_the_rank"] > 400 and told["contradictions"] == 0
    assert told["found"] and told["correlation"] > 0.999 and told["cosine"] > 0.999 and told["cosine_with_noise"] < 0.1
    told = attack(simulate_release(CipherStream.from_entropy().normal(sum(SIZES)), SIZES), twister)
    spare = told["beyond_the_rank"]  # equations of full rank, and half of the others contradict them
    assert told["rank"] == 521 and spare > 400
    assert told["contradictions"] == pytest.approx(spare / 2, abs=5 * spare**0.5 / 2)
    assert not told["found"] and "cosine" not in told and told["cosine_with_noise"] < 0.1
