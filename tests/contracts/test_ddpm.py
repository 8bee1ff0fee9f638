"""The diffusion model: noise prediction, moving average, guidance, samplers, and training that goes on bit for bit."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import check, refused, train_generator
from safetensors.torch import load_file
from test_mpcpa import make_study

from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.synthesis.ddpm import (
    DdpmShape,
    DdpmState,
    DdpmTerms,
    Sampling,
    build_denoiser,
    denoiser_from,
    drawn,
    ema_decay,
    epochs_by_rule,
    predicted_noise,
    scheduler_of,
    schema_of,
    step,
    steps_by_rule,
    vector_of,
)
from wsi_fl.synthesis.stages.ddpm import KIND
from wsi_fl.synthesis.stages.sample import sample
from wsi_fl.types import UsageError, WsiFlError

CPU = torch.device("cpu")
SHAPE = DdpmShape(8, 1, 2, (8, 16), chain=40)
DDPM = ["synthesis.generator=ddpm"]


def pictures(n=24):
    labels = torch.arange(n) % 2
    images = torch.randint(0, 60, (n, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    return (images + 180 * labels[:, None, None, None]).to(torch.uint8), labels


def state_of(seed=0, **terms):
    return DdpmState(SHAPE, DdpmTerms(**{"batch_size": 4, **terms}), seed=seed, device=CPU)


def trained(steps, **terms):
    state = state_of(**terms)
    for _ in range(steps):
        step(state, *pictures())
    return state


def all_drawn(denoiser, labels, sampling, seed=0):
    return torch.cat(list(drawn(denoiser, SHAPE, np.asarray(labels), sampling, seed=seed)))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_training_goes_on_bit_for_bit():
    whole = trained(6, class_dropout=0.3)
    first = trained(3, class_dropout=0.3)
    tensors, document = first.tensors(), first.document()
    second = state_of(seed=7, class_dropout=0.3)
    second.load(tensors, document)
    for _ in range(3):
        step(second, *pictures())
    assert same(whole.denoiser, second.denoiser) and same(whole.average, second.average)
    assert whole.iteration == second.iteration == 6


def test_the_loss_is_noise_prediction():
    """A denoiser that always says zero has the expected loss E‖ε‖² = 1 per value; a trained one less."""
    state = state_of(lr=2e-3, batch_size=16)
    torch.nn.init.zeros_(state.denoiser.conv_out.weight)
    torch.nn.init.zeros_(state.denoiser.conv_out.bias)
    assert step(state, *pictures()) == pytest.approx(1, abs=0.15)
    last = [step(state, *pictures()) for _ in range(60)][-10:]
    assert np.mean(last) < 0.8


def test_the_moving_average_is_the_recursion():
    state = state_of(ema=0.5)
    mean = [p.clone() for p in state.average.parameters()]
    for number in range(4):
        step(state, *pictures())
        kept = ema_decay(number, 0.5)
        mean = [
            kept * m + (1 - kept) * p.detach() for m, p in zip(mean, state.denoiser.parameters(), strict=True)
        ]
    assert all(torch.allclose(m, p, atol=1e-6) for m, p in zip(mean, state.average.parameters(), strict=True))
    assert [ema_decay(k, 0.999) for k in (0, 90)] == [0.1, 0.91]


def test_guidance_is_the_formula():
    denoiser = build_denoiser(SHAPE).eval()
    x, t, y = torch.randn(3, 1, 8, 8), torch.tensor(5), torch.tensor([0, 1, 0])
    with torch.no_grad():
        named = denoiser(x, t, y).sample
        unnamed = denoiser(x, t, torch.full((3,), SHAPE.null)).sample
        for g in (1.0, 0.0, 2.5):
            found = predicted_noise(denoiser, SHAPE, x, t, y, g)
            assert torch.allclose(found, unnamed + g * (named - unnamed), atol=1e-5)


class Oracle(torch.nn.Module):
    """The best denoiser there is of two images, dark for class 0 and bright for class 1; nothing is learned."""

    def __init__(self, shape):
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(()))
        self.kept = scheduler_of(shape, Sampling("ddpm", 1)).alphas_cumprod

    def forward(self, x, t, y):
        clean = (y.float() - 0.5)[:, None, None, None].expand_as(x)
        kept = self.kept[t]
        return SimpleNamespace(sample=(x - kept.sqrt() * clean) / (1 - kept).sqrt())


@pytest.mark.parametrize("chain", [40, 1000])
@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpm++"])
def test_every_sampler_finds_the_image_of_the_class(sampler, chain):
    shape = replace(SHAPE, chain=chain)
    how = Sampling(sampler, chain if sampler == "ddpm" else 10, batch_size=3)
    images = torch.cat(list(drawn(Oracle(shape), shape, np.array([0, 1, 0, 1, 1]), how, seed=0)))
    expected = torch.tensor([64.0, 191.0])[torch.tensor([0, 1, 0, 1, 1])]
    assert torch.allclose(images.float().mean(dim=(1, 2, 3)), expected, atol=3)
    assert images.float().std(dim=(1, 2, 3)).max() < 6


@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpm++"])
def test_no_sampler_believes_in_a_clean_image_beyond_black_and_white(sampler):
    """Of noise alone an error of a hundredth becomes one of the whole range."""
    scheduler = scheduler_of(replace(SHAPE, chain=1000), Sampling(sampler, 25))
    x, said = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
    t = scheduler.timesteps[0]
    if sampler == "dpm++":
        scheduler._init_step_index(t)
        clean = scheduler.convert_model_output(said, sample=x)
    else:
        clean = scheduler.step(said, t, x).pred_original_sample
    assert clean.abs().max() <= 1


@pytest.mark.parametrize("chain", [20, 40, 1000])
@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
def test_every_chain_ends_in_noise(chain, schedule):
    found = scheduler_of(replace(SHAPE, chain=chain, schedule=schedule), Sampling("ddpm", 1))
    assert float(found.alphas_cumprod[-1]) < 1e-3
    assert float(found.alphas_cumprod[0]) > 0.8


def test_the_same_seed_draws_the_same_images():
    denoiser = build_denoiser(SHAPE).eval()
    how = Sampling("ddpm", 4, batch_size=3)
    a, b = all_drawn(denoiser, [0, 1] * 4, how), all_drawn(denoiser, [0, 1] * 4, how)
    assert torch.equal(a, b)
    assert not torch.equal(a, all_drawn(denoiser, [0, 1] * 4, how, seed=1))
    assert not torch.equal(a[0], a[2]), "nor is any image of a class the same as another"


def test_sampling_tells_how_far_it_is():
    told = []
    list(
        drawn(
            build_denoiser(SHAPE),
            SHAPE,
            np.zeros(5, np.int64),
            Sampling("ddim", 4, batch_size=3),
            seed=0,
            told=told.append,
        )
    )
    assert told == sorted(told)
    assert told[-1] == 5


def test_a_denoiser_travels_as_one_vector():
    state = trained(2)
    again = denoiser_from(vector_of(state.average), SHAPE)
    assert same(state.average, again)
    assert vector_of(state.average).size == sum(p.numel() for p in build_denoiser(SHAPE).parameters())
    with pytest.raises(ValueError, match="expected"):
        denoiser_from(vector_of(state.average)[:-1], SHAPE)
    assert schema_of(SHAPE) != schema_of(replace(SHAPE, chain=50))


def test_more_epochs_for_more_classes_and_for_fewer_images():
    assert epochs_by_rule(500, 2) > epochs_by_rule(1000, 2)
    assert epochs_by_rule(1000, 6) > epochs_by_rule(1000, 2)
    assert steps_by_rule(1000, 2, 16) == epochs_by_rule(1000, 2) * 63


# through the commands


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    made = make_study(tmp_path_factory.mktemp("ddpm") / "study", n_sites=2, n=200)
    train_generator(made, site="S1")
    return made


def test_training_keeps_json_and_safetensors_alone(study):
    folder = KIND.folder(study, "S1")
    document = folder.document()
    assert document["finished"]
    assert document["sha256"] == folder.digest("denoiser")
    assert folder.metrics()[-1]["iteration"] == 6
    kinds = {path.suffix for path in folder.path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert kinds == {".json", ".jsonl", ".safetensors", ".png"}


def test_other_settings_want_again_and_wrong_ones_are_named(study):
    refused(lambda: train_generator(study, site="S1", overrides=["ddpm.lr=0.1"]), "terms", "--again")
    refused(lambda: train_generator(study, site="S2", overrides=["ddpm.guidance=2.0"]), "class_dropout")
    refused(lambda: train_generator(study, site="S2", overrides=["ddpm.sampling_steps=50"]), "20 steps")
    refused(lambda: train_generator(study, site="S2", overrides=["ddpm.resolution=32"]), "16 px")
    refused(lambda: train_generator(study, site="S2", overrides=["ddpm.channels=[8,12]"]), "multiples of 8")


def test_sampling_waits_for_a_passed_check(study):
    folder = KIND.folder(study, "S1")
    folder.check_path.unlink(missing_ok=True)
    refused(lambda: sample(study, site="S1", n_per_class=3), "was not run", error=WsiFlError)
    document = check(study, site="S1")
    assert document["memorization"]["n_generated"] == 10
    assert document["passed"], document["reasons"]
    page = (study.root / document["files"]["page"]).read_text()
    assert "Nearest training images" in page and "Closest pairs" in page and "Passed" in page
    made = sample(study, site="S1", n_per_class=3, as_site=True)
    with PatchStore(study.root / made["store"]) as store:
        assert np.bincount(store.table.label).tolist() == [3, 3]
        assert store.meta.spec.size_px == 8
    assert made["generator"]["sampling"] == document["sampling"]
    refused(
        lambda: train_generator(study, site=made["name"]),
        "synthetic already",
    )


@pytest.mark.slow
def test_a_killed_training_goes_on_bit_for_bit(study, tmp_path):
    """SIGKILL between checkpoints, then the same command; against a training that nobody disturbed."""
    more = ["ddpm.steps=12", "ddpm.checkpoint_every=3"]
    whole = make_study(tmp_path / "whole", n_sites=2, n=60)
    train_generator(whole, site="S1", overrides=more)
    other = make_study(tmp_path / "other", n_sites=2, n=60)
    command = [sys.executable, "-m", "wsi_fl", "synthesize", "train", "--site", "S1", "--generator", "ddpm"]
    command += [word for one in more for word in ("--set", one)]
    process = subprocess.Popen(command, cwd=other.root, stderr=subprocess.DEVNULL)
    folder = KIND.folder(Study(other.root), "S1")
    deadline = time.monotonic() + 60
    while max(folder.iterations(), default=0) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.document()["finished"]
    train_generator(other, site="S1", overrides=more)
    a, b = (load_file(s.denoiser("S1") / "denoiser.safetensors") for s in (whole, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    lines = [line["iteration"] for line in folder.metrics()]
    assert lines == sorted(set(lines))


def test_unknown_generator():
    with pytest.raises(UsageError, match="gan or ddpm"):
        sample(Study("."), site="S1", n_per_class=1, generator="vae")
