"""The sections of a pipeline about synthetic patches: generators, their checks, and the methods that use them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from wsi_fl.study.toml import MAX_SEED, Section


class Synthesis(Section):
    """The kind of generator of `synthesize`."""

    without_effect = ("",)
    generator: Literal["gan", "ddpm"] = "gan"
    """Kind of generator: a StyleGAN2-ADA (`gan`) or a denoising diffusion model (`ddpm`)."""


class Gan(Section):
    """The StyleGAN2-ADA of a site and how it is checked. Apart from the sizes of a check, which diffusion models
    share, only `synthesize` reads it."""

    without_effect = ("",)
    resolution: Literal[16, 32, 64, 128, 256, 512] = 256
    """Width and height of a synthetic patch, in pixels."""
    iterations: int = Field(800_000, ge=1, le=1_000_000_000)
    """Number of training steps of the first phase, without the privacy loss."""
    privacy_iterations: int = Field(150_000, ge=0, le=1_000_000_000)
    """Number of training steps of the second phase, with the privacy loss."""
    batch_size: int = Field(32, ge=2, le=100_000)
    """Number of images in a training step."""
    lr: float = Field(0.0025, gt=0, le=100)
    """Learning rate of generator and discriminator."""
    z_dim: int = Field(512, ge=1, le=65_536)
    """Length of the random vector from which an image is drawn."""
    w_dim: int = Field(512, ge=1, le=65_536)
    """Length of the style vector, the output of the mapping network."""
    mapping_layers: int = Field(8, ge=1, le=100)
    """Number of layers of the mapping network."""
    channel_base: int = Field(16384, ge=64, le=1_000_000)
    """Controls the width of the networks: at resolution r a layer has channel_base / r feature maps, at most
    `channel_max`."""
    channel_max: int = Field(512, ge=1, le=65_536)
    """Largest number of feature maps of a layer."""
    r1_gamma: float | None = Field(None, ge=0, le=1_000_000)
    """Weight of the R1 penalty on the discriminator's gradient. By default 0.0002 · resolution² / batch_size."""
    path_weight: float = Field(2.0, ge=0, le=1_000_000)
    """Weight of path-length regularisation; 0 leaves it out, which pays at low resolutions."""
    mixing: float = Field(0.9, ge=0, le=1)
    """Probability that an image is drawn from two styles instead of one while training."""
    ema_images: float = Field(10_000, gt=0, le=1_000_000_000)
    """Half-life of the moving average of the generator's weights, in images."""
    ada_images: float = Field(500_000, gt=0, le=1_000_000_000)
    """Number of images over which the probability of augmentation can go from 0 to 1."""
    privacy_weight: float = Field(1.0, ge=0, le=1_000_000)
    """Weight of the privacy loss in the second phase."""
    privacy_loss: Literal["hinge", "negative_distance"] = "hinge"
    """Loss of a pair of a real and a synthetic image in the second phase: a squared hinge up to a margin (`hinge`), or
    minus their LPIPS distance, eq. 3 of the paper with its sign turned (`negative_distance`), which has no end."""
    privacy_quantile: float = Field(0.5, gt=0, le=1)
    """Quantile of the LPIPS distance between different training images that is the margin of the hinge; pairs further
    apart than the margin cost nothing."""
    privacy_images: int = Field(0, ge=0, le=10_000_000)
    """Number of real images in the privacy loss of each synthetic one; their embeddings are held in memory. With 0
    they are those of the batch, as in the paper."""
    checkpoint_every: int = Field(500, ge=1, le=1_000_000_000)
    """Number of training steps between two checkpoints."""
    check_images: int = Field(1000, ge=1, le=10_000_000)
    """Largest number of training images, and of held-out images, in `check`'s search for near synthetic images."""
    check_samples: int = Field(2000, ge=2, le=10_000_000)
    """Number of synthetic images in `check`'s search for the nearest ones."""
    projections: int = Field(64, ge=1, le=1_000_000)
    """Largest number of training images, and of held-out images, in `check`'s search of the latent space."""
    projection_steps: int = Field(200, ge=0, le=1_000_000)
    """Number of steps of each search of the latent space."""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Seed of training and checking the GAN."""


class Ddpm(Section):
    """The class-conditional diffusion model of a site, for `synthesize` and the method mpcpa."""

    resolution: Literal[8, 16, 32, 64, 128, 256] = 64
    """Width and height of a generated image, in pixels."""
    channels: list[Annotated[int, Field(ge=1, le=65_536)]] = Field([64, 128, 128], min_length=2, max_length=8)
    """Number of feature maps of the U-Net at each resolution, the finest first; the coarsest has attention."""
    chain: int = Field(1000, ge=2, le=100_000)
    """Number of steps of the diffusion, from image to noise."""
    steps: int | None = Field(None, ge=1, le=1_000_000_000)
    """Number of training steps. By default a rule decides, with more epochs for more classes and for fewer images."""
    batch_size: int = Field(16, ge=1, le=100_000)
    """Number of images in a training step."""
    lr: float = Field(2e-4, gt=0, le=100)
    """Learning rate of the diffusion model."""
    class_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of training images without their class. Guidance other than 1 needs some, for example 0.1."""
    guidance: float = Field(1.0, ge=0, le=1000)
    """Strength of classifier-free guidance: 1 draws from the plain model, more draws images more typical of their
    class."""
    sampler: Literal["ddpm", "ddim", "dpm++"] = "ddim"
    """How images are drawn: the full chain (`ddpm`), DDIM or DPM-Solver++."""
    sampling_steps: int = Field(25, ge=1, le=100_000)
    """Number of steps in which an image is drawn. The paper uses the sampler `ddpm` with the whole chain."""
    samples_per_class: int = Field(3200, ge=1, le=10_000_000)
    """Number of images of each class in `check`, and in a site's draw from another site's model."""
    checkpoint_every: int = Field(500, ge=1, le=1_000_000_000)
    """Number of training steps between two checkpoints."""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Seed of training and of drawing images."""


class Mpcpa(Section):
    """The method mpcpa: diffusion models are sent once, and predictions are aggregated."""

    without_effect = ("aggregate", "unchecked", "curve", "fedavg_rounds")
    aggregate: Literal["mean", "weighted_mean", "absolute", "relative", "weighted"] = "mean"
    """How `evaluate` makes one prediction of all sites': the mean of their probabilities, that mean weighted by
    training rows, or an absolute, relative or weighted majority of votes. It holds for every method."""
    per_class: int | None = Field(None, ge=1, le=10_000_000)
    """Number of generated training images of each class from each model, as `curve` varies it. By default all drawn
    ones."""
    unchecked: bool = False
    """Whether a simulated site may release a diffusion model that failed its check, for studies of the check itself. A
    real site never may."""
    curve: list[Annotated[int, Field(ge=1, le=10_000_000)]] = Field([], max_length=100)
    """Numbers of generated images, for example [100, 400, 1600], with which `train --baselines` also trains
    classifiers."""
    fedavg_rounds: int | None = Field(None, ge=1, le=1_000_000)
    """Number of rounds of FedAvg among the baselines of `train --baselines`; the paper has 200. By default
    `train.rounds`, which all other classifiers train."""


class LpipsKeys(Section):
    """The perceptual distance between images (LPIPS) and the memory of comparisons."""

    without_effect = ("",)
    weights: str | None = None
    """Path of a safetensors file of a VGG-16 with torchvision's names, or "random:SEED" for an untrained substitute in
    tests. By default torchvision's weights as timm publishes them."""
    memory_mb: int = Field(512, ge=16, le=10_000_000)
    """Largest amount of memory, in MiB, for comparing two sets of images."""


class Replay(Section):
    """The method replay: models and buffers of synthetic samples are exchanged, both without differential privacy."""

    compared = True
    variant: Literal["replay", "buffer_only", "synthetic_only", "no_buffer", "central"] = "replay"
    """Exchanged parts and training data: models and buffers (`replay`), buffers alone (`buffer_only`), synthetic
    samples in place of real patches (`synthetic_only`), models alone (`no_buffer`), or all buffers once (`central`)."""
    buffer: int = Field(512, ge=1, le=10_000_000)
    """Number of shared samples of a site's generator, equally many of each class."""
    unchecked: bool = False
    """Whether a generator that has not passed its check may be sampled for the buffer."""
