"""The diffusion model: noise prediction, moving average, guidance, samplers, and bit-exact resumption of training."""

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import check, refused, same, train_generator
from test_mpcpa import make_study

from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.synthesis import ddpm
from wsi_fl.synthesis.ddpm import (
    DdpmShape,
    DdpmState,
    Sampling,
    UNet,
    build_denoiser,
    draw_images,
    flatten_parameters,
    step,
)
from wsi_fl.synthesis.keys import Ddpm
from wsi_fl.synthesis.stages.ddpm import KIND
from wsi_fl.synthesis.stages.generator_types import load_kind
from wsi_fl.synthesis.stages.synthetic_stores import sample_generator
from wsi_fl.system.extras import explain_missing
from wsi_fl.types import WsiFlError

CPU = torch.device("cpu")
SHAPE = DdpmShape(8, 1, 2, (8, 16), chain=40)


def pictures(n=24):
    labels = torch.arange(n) % 2
    images = torch.randint(0, 60, (n, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    return (images + 180 * labels[:, None, None, None]).to(torch.uint8), labels


def state_of(seed=0, **terms):
    return DdpmState(SHAPE, Ddpm(**{"batch_size": 4, "seed": seed, **terms}), device=CPU)


def trained(steps, **terms):
    state = state_of(**terms)
    for _ in range(steps):
        step(state, *pictures())
    return state


def test_training_resumes_bit_for_bit():
    whole = trained(6, class_dropout=0.3)
    first = trained(3, class_dropout=0.3)
    tensors, document = first.copy_tensors(), first.build_document()
    second = state_of(seed=7, class_dropout=0.3)
    second.load(tensors, document)
    for _ in range(3):
        step(second, *pictures())
    for name in ("denoiser", "average"):
        assert same(*(getattr(one, name).state_dict() for one in (whole, second)))
    assert whole.iteration == second.iteration == 6


def test_the_loss_is_noise_prediction():
    """A denoiser that always predicts zero has the expected loss E‖ε‖² = 1 per value; a trained one less."""
    state = state_of(lr=2e-3, batch_size=16)
    torch.nn.init.zeros_(state.denoiser.conv_out.weight)
    torch.nn.init.zeros_(state.denoiser.conv_out.bias)
    assert step(state, *pictures()) == pytest.approx(1, abs=0.15)
    last = [step(state, *pictures()) for _ in range(30)][-10:]
    assert np.mean(last) < 0.8


def test_the_moving_average_is_the_recursion():
    state = state_of()
    mean = [p.clone() for p in state.average.parameters()]
    for number in range(4):
        step(state, *pictures())
        kept, present = ddpm._ema_decay(number), state.denoiser.parameters()
        mean = [kept * m + (1 - kept) * p.detach() for m, p in zip(mean, present, strict=True)]
    average = state.average.parameters()
    assert all(torch.allclose(m, p, atol=1e-6) for m, p in zip(mean, average, strict=True))
    assert [ddpm._ema_decay(k) for k in (0, 90, 10**6)] == [0.1, 0.91, 0.999]


def test_guidance_is_the_formula():
    denoiser = UNet(SHAPE).eval()
    x, t, y = torch.randn(3, 1, 8, 8), torch.tensor(5), torch.tensor([0, 1, 0])
    with torch.no_grad():
        named = denoiser(x, t, y).sample
        unnamed = denoiser(x, t, torch.full((3,), SHAPE.null)).sample
        for g in (1.0, 0.0, 2.5):
            found = ddpm._predict_noise(denoiser, x, t, y, g)
            assert torch.allclose(found, unnamed + g * (named - unnamed), atol=1e-5)


class Oracle(torch.nn.Module):
    """The optimal denoiser of two images, dark for class 0 and bright for class 1, without training."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.anchor = torch.nn.Parameter(torch.zeros(()))
        self.kept = ddpm._build_scheduler(shape, Sampling("ddpm", 1)).alphas_cumprod

    def forward(self, x, t, y):
        clean = (y.float() - 0.5)[:, None, None, None].expand_as(x)
        kept = self.kept[t]
        return SimpleNamespace(sample=(x - kept.sqrt() * clean) / (1 - kept).sqrt())


@pytest.mark.parametrize(("sampler", "chain"), [("ddpm", 40), ("ddim", 1000), ("dpm++", 1000)])
def test_every_sampler_finds_the_image_of_the_class(sampler, chain):
    shape = replace(SHAPE, chain=chain)
    how = Sampling(sampler, chain if sampler == "ddpm" else 10, batch_size=3)
    images = torch.cat(list(draw_images(Oracle(shape), np.array([0, 1, 0, 1, 1]), how, seed=0)))
    expected = torch.tensor([64.0, 191.0])[torch.tensor([0, 1, 0, 1, 1])]
    assert torch.allclose(images.float().mean(dim=(1, 2, 3)), expected, atol=3)
    assert images.float().std(dim=(1, 2, 3)).max() < 6


class Gaussian(Oracle):
    """The optimal denoiser of pixels N(0.2, 0.25²)."""

    def forward(self, x, t, y):
        kept = self.kept[t].double()
        noise = (1 - kept).sqrt() * (x - kept.sqrt() * 0.2) / (kept * 0.25**2 + 1 - kept)
        return SimpleNamespace(sample=noise)


def first_noise(n):
    """What `drawn` begins with, for seed 0 and one batch."""
    return torch.randn((n, 1, 8, 8), generator=torch.Generator().manual_seed(ddpm._batch_seed(0, 0)))


def exact_ddim(shape, steps, n):
    """Song et al., eq. 12 without noise: round(T (s − k) / s) − 1 are the times, clean images are clipped."""
    model, x = Gaussian(shape), first_noise(n).double()
    times = [int(np.round(shape.chain - shape.chain / steps * k)) - 1 for k in range(steps)]
    for t, following in zip(times, [*times[1:], None], strict=True):
        kept, then = model.kept[t].double(), 1.0 if following is None else model.kept[following].double()
        noise = model(x, t, None).sample
        clean = ((x - (1 - kept).sqrt() * noise) / kept.sqrt()).clamp(-1, 1)
        x = then**0.5 * clean + (1 - then) ** 0.5 * noise
    return x


@pytest.mark.parametrize(
    ("chain", "steps"), [(40, 25), (100, 60), (100, 29), (300, 7), (1000, 10), (1000, 122), (365, 364)]
)
def test_each_ddim_step_ends_where_the_next_begins_for_any_number_of_steps(chain, steps):
    shape = replace(SHAPE, chain=chain)
    labels = np.zeros(256, np.int64)
    (images,) = draw_images(Gaussian(shape), labels, Sampling("ddim", steps, batch_size=256), seed=0)
    right = exact_ddim(shape, steps, 256)
    assert (images / 127.5 - 1 - right.clamp(-1, 1)).abs().max() < 0.012  # 1.5 of 255 grey levels
    if steps >= 122:
        assert float((images / 127.5 - 1).std()) == pytest.approx(0.25, abs=0.012)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpm++"])
def test_a_sampler_takes_the_requested_number_of_steps_all_within_the_chain(sampler):
    """Rounding gives the library a time before the chain's first in each of these: it stands for pure noise there."""
    for chain, steps in ((100, 29), (300, 7), (1000, 61), (1000, 122), (999, 13)):
        found = ddpm._build_scheduler(replace(SHAPE, chain=chain), Sampling(sampler, steps))
        times = found.timesteps.tolist()
        assert len(times) == steps and times[0] == chain - 1 and times[-1] >= 0
        assert times == sorted(set(times), reverse=True)
    shape = replace(SHAPE, chain=300)
    images = torch.cat([*draw_images(Gaussian(shape), np.zeros(256, np.int64), Sampling(sampler, 7), seed=0)])
    assert float((images / 127.5 - 1).mean()) == pytest.approx(0.2, abs=0.01)
    assert float((images / 127.5 - 1).std()) < 0.25


def test_a_denoiser_is_sent_as_one_vector():
    state = trained(2)
    again = build_denoiser(flatten_parameters(state.average), SHAPE)
    assert same(state.average.state_dict(), again.state_dict())
    assert flatten_parameters(state.average).size == sum(p.numel() for p in UNet(SHAPE).parameters())
    with pytest.raises(ValueError, match="expected"):
        build_denoiser(flatten_parameters(state.average)[:-1], SHAPE)
    assert SHAPE.schema != replace(SHAPE, chain=50).schema


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    made = make_study(tmp_path_factory.mktemp("ddpm") / "study", n_sites=2, n=200)
    train_generator(made, site="S1")
    return made


def test_other_settings_need_again_and_invalid_ones_are_named(study):
    refused(lambda: train_generator(study, site="S1", overrides=["ddpm.lr=0.1"]), "terms", "--again")
    for setting, words in (
        ("guidance=2.0", "class_dropout"),
        ("sampling_steps=50", "10 steps"),
        ("resolution=32", "16 px"),
        ("channels=[8,12]", "multiples of 8"),
    ):
        refused(partial(train_generator, study, site="S2", overrides=[f"ddpm.{setting}"]), words)


def test_sampling_is_refused_before_a_passed_check_and_otherwise_than_in_it(study, wsi_fl):
    folder = KIND.find_folder(study, "S1")
    folder.check_path.unlink(missing_ok=True)
    refused(lambda: sample_generator(study, site="S1", n_per_class=3), "was not run", error=WsiFlError)
    document = check(study, site="S1")
    assert document["passed"] and document["memorization"]["n_generated"] == 10, document["reasons"]
    page = (study.root / document["files"]["page"]).read_text()
    assert "Nearest training images" in page and "Closest pairs" in page and "Passed" in page
    made = sample_generator(study, site="S1", n_per_class=3, as_site=True)
    with PatchStore(study.root / made["store"]) as store:
        assert np.bincount(store.table.label).tolist() == [3, 3] and store.meta.spec.size_px == 8
    assert made["generator"]["sampling"] == document["sampling"]
    command = ("synthesize", "sample", "--site", "S1", "--n-per-class", "3", "--pipeline", study.pipeline_name(None))
    assert wsi_fl(*command, cwd=study.root).returncode == 0
    done = wsi_fl(*command, "--set", "ddpm.sampler=ddpm", cwd=study.root)
    assert done.returncode == 2 and "another sampler than this pipeline" in done.stderr
    refused(lambda: train_generator(study, site=made["name"]), "synthetic already")


def test_a_diffusion_model_without_its_library_is_refused_in_one_line(monkeypatch):
    for name in ("wsi_fl.synthesis.ddpm", "wsi_fl.synthesis.stages.ddpm"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    refused(lambda: load_kind("ddpm"), explain_missing("synthesis"))
