"""pipelines/*.toml and sites/*.toml: load, extend, override, validate, dump.

Errors name the file, the key and what is allowed. Only `stages` and `cli` know this module; rooms take plain
values.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

Layout = Literal["camelyon17", "camelyon16", "tcga", "generic"]

Allowed = Literal["model", "buffer", "generator", "patches"]
"""What a site may let go without differential privacy; "patches" lets other sites' evaluation and joint training
read its store."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    without_effect: ClassVar[tuple[str, ...]] = ()
    """The beginnings of its keys that make no other method: they change nothing about what is learned from a given
    store or answered, repeat it, or are told of anyway; "" for all."""


class Slides(Section):
    """`native` decodes a slide's own JPEG tiles, `auto` does so where they give OpenSlide's pixels."""

    without_effect = ("",)
    reader: Literal["auto", "native", "openslide"] = "auto"


class Tile(Section):
    without_effect = ("",)
    size_px: int = Field(512, ge=8)
    mpp: float = Field(0.5, gt=0)
    stride_px: int | None = Field(None, ge=1)
    """Default: size_px."""
    min_tissue: float = Field(0.2, ge=0, le=1)
    min_tumor: float = Field(0.5, gt=0, le=1)
    tumor_groups: list[str] | None = None
    """Annotation groups that are tumour, holes in it, or nothing; default: what Camelyon, ASAP and QuPath use."""
    hole_groups: list[str] | None = None
    ignored_groups: list[str] = []
    balance: bool = True
    max_per_slide: int | None = Field(None, ge=1)
    test_fraction: float = Field(0.2, ge=0, lt=1)
    seed: int = 0


class Store(Section):
    without_effect = ("",)
    pixels: str = Field("raw", pattern=r"^(raw|native|none|jpeg:([1-9][0-9]?|100))$")
    """`raw`: as read. `native`: the slide's own JPEG streams where all of a slide's patches are whole tiles of it, else
    raw. `jpeg:90`: encoded anew, which loses detail. `none`: read from the slide whenever they are wanted."""


class Mosaic(Section):
    """A slide as a bag of features of its representative patches (Yottixel, Kalra et al. 2020)."""

    without_effect = ("",)
    size_px: int = Field(1000, ge=8)
    mpp: float = Field(0.5, gt=0)
    min_tissue: float = Field(0.7, ge=0, le=1)
    clusters: int = Field(9, ge=1)
    """Groups of patches alike in colour."""
    fraction: float = Field(0.05, gt=0, le=1)
    """Share of each group that is kept, spread over the slide."""
    encoder: str = "densenet121"
    """Any timm model; its pooled output is the feature."""
    weights: str | None = None
    """A local safetensors file; default: the encoder's published weights by name."""
    input_px: int | None = Field(None, ge=32)
    """Patches are resized to it for the encoder; default: as read, or the only size the encoder takes."""
    batch_size: int = Field(32, ge=1)
    test_fraction: float = Field(0.2, ge=0, lt=1)
    seed: int = 0


class Features(Section):
    """Deep features of every patch of a patch store; what is left out is as in [mosaic]."""

    without_effect = ("",)
    encoder: str | None = None
    weights: str | None = None
    input_px: int | None = Field(None, ge=32)
    batch_size: int | None = Field(None, ge=1)


class Stain(Section):
    """The stain of a laboratory in a few numbers, measured on the training rows and released with noise."""

    method: Literal["reinhard", "macenko"] = "reinhard"
    """Mean and spread of the tissue in CIELAB (Reinhard et al., 2001), or its two dyes (Macenko et al., 2009)."""
    sigma: float = Field(8.0, gt=0)
    clip: float = Field(1.5, gt=0)
    exchange: bool = False
    """Whether training shows each patch in its own or, as likely, another site's released stain."""


class Train(Section):
    without_effect = ("seed", "eval_every")
    rounds: int = Field(30, ge=1)
    eval_every: int = Field(1, ge=1)
    epochs_per_round: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    alpha: float = Field(0.3, ge=0, le=1)
    beta: float = Field(0.3, ge=0, le=1)
    listen: Literal["always", "competence"] = "always"
    """Whether the private model learns from its proxy by α always, or by the part of α that the proxy deserves,
    measured before every round."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Probability with which a site with a proxy holds out each of its training patients, to choose what predicts,
    where its store has no validation split."""
    augment: str = "flips"
    input_px: int | None = Field(None, ge=8)
    """Patches are reduced to this size for training; default: as stored."""
    data: Literal["patches", "features", "mosaics"] = "patches"
    """Whether an example is a patch, a patch's features, or a slide, the bag of its mosaic's features."""
    seed: int = 0
    optimizer_after_exchange: Literal["keep", "reset"] = "keep"
    """What becomes of Adam's moments when the parameters under them are exchanged."""
    after_budget: Literal["train", "stop"] = "train"
    """Whether a site's private model learns on once its budget is spent and it has left the graph."""


class Model(Section):
    private: str = "resnet18"
    proxy: str = "resnet18"


class Topology(Section):
    graph: str | None = None
    """none, star, ring, exponential, random, or a JSON file of edges; default: the method's own."""
    self_weight: float = Field(0.0, ge=0, lt=1)


class Communication(Section):
    without_effect = ("",)
    timeout_s: float = Field(1800.0, gt=0)


class Privacy(Section):
    without_effect = ("enabled", "insecure_seed", "grad_mode")
    enabled: bool = True
    mode: Literal["paper", "strict"] = "strict"
    sigma: float = Field(1.4, ge=0)
    clip: float = Field(0.7, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    target_epsilon: float | None = Field(None, gt=0)
    """Instead of sigma and train.batch_size: every site takes its own of both, so that all rounds together cost at most
    so much, or its max_epsilon where that is less."""
    grad_mode: Literal["auto", "ghost", "hooks", "functorch"] = "auto"
    """How per-example gradients are clipped: book-keeping with ghost norms, Opacus's hooks or its functorch;
    `auto` is the fastest on the first batch."""
    unit: Literal["row", "patient"] = "row"
    """What ε protects. With "patient" batches are of patients, train.batch_size of them on average, and the rows of
    one give one clipped gradient."""
    max_rows: int = Field(32, ge=1)
    """The most rows of one patient in one step, drawn anew in each, where the unit is a patient."""
    insecure_seed: int | None = None
    """Fixed noise for tests; the ledger says so and no guarantee is given."""

    @property
    def noisy(self) -> bool:
        """Whether what is under differential privacy is given noise at all."""
        return self.enabled and (self.sigma > 0 or self.target_epsilon is not None)


class Audit(Section):
    canaries: int = Field(0, ge=0)
    """Meaningless examples planted among each site's training rows, each as a coin falls, for `audit` to look for."""


class Evaluate(Section):
    without_effect = ("",)
    bootstrap: int = Field(1000, ge=0)
    external: list[str] = []
    """Sites that take no part, on all of whose patches every model is measured too."""


class Predict(Section):
    without_effect = ("threshold", "top_k")
    with_: Literal["auto", "private", "proxy", "mean", "competence"] = Field("auto", alias="with")
    """The model that answers, or the mean of both models' probabilities; `auto` is what does best on the site's own
    validation split, and private without one; `competence` needs none: the proxy where the site sees mostly one class,
    else the mean, and private while chance may explain the proxy. Without a proxy the private model answers."""
    threshold: float = Field(0.5, gt=0, le=1)
    """Patches of this probability or more are outlined and counted."""
    top_k: int = Field(20, ge=1)
    """A slide's score is the mean of its so many highest patches."""


class Gan(Section):
    """The StyleGAN2-ADA of a site, and how it is checked; `synthesize` alone reads it."""

    without_effect = ("",)
    resolution: Literal[16, 32, 64, 128, 256, 512] = 256
    iterations: int = Field(800_000, ge=1)
    """Of the first phase, without the privacy loss."""
    privacy_iterations: int = Field(150_000, ge=0)
    """Of the second phase, with it."""
    batch_size: int = Field(32, ge=2)
    lr: float = Field(0.0025, gt=0)
    z_dim: int = Field(512, ge=1)
    w_dim: int = Field(512, ge=1)
    mapping_layers: int = Field(8, ge=1)
    channel_base: int = Field(16384, ge=64)
    """Feature maps at resolution r are channel_base / r, at most channel_max."""
    channel_max: int = Field(512, ge=1)
    r1_gamma: float | None = Field(None, ge=0)
    """Default: 0.0002 · resolution² / batch_size."""
    path_weight: float = Field(2.0, ge=0)
    """Of path-length regularisation; 0 leaves it out, which pays at low resolutions."""
    mixing: float = Field(0.9, ge=0, le=1)
    ema_images: float = Field(10_000, gt=0)
    """Half-life of the moving average of the generator, in images."""
    ada_target: float = Field(0.6, ge=0, le=1)
    """Of r_t; 1 switches augmentation off."""
    ada_images: float = Field(500_000, gt=0)
    """Images shown while the probability of augmentation would go from 0 to 1."""
    privacy_weight: float = Field(1.0, ge=0)
    privacy_quantile: float = Field(0.5, gt=0, le=1)
    """The margin of the privacy loss is this quantile of LPIPS between different training images."""
    privacy_images: int = Field(0, ge=0)
    """Real images that every synthetic one is kept away from, their embeddings held in memory; 0: those of the batch,
    as in the paper."""
    truncation: float = Field(1.0, gt=0, le=1)
    """Less than 1 draws styles towards their mean, in `check` and so in `sample`: cleaner images, less varied."""
    checkpoint_every: int = Field(500, ge=1)
    """Iterations."""
    check_images: int = Field(1000, ge=1)
    """Most real images of each kind, training and held out, whose nearest synthetic images `check` looks for."""
    check_samples: int = Field(2000, ge=2)
    projections: int = Field(64, ge=1)
    """Most real images of each kind that are projected."""
    projection_steps: int = Field(200, ge=0)
    seed: int = 0


class Synthesis(Section):
    without_effect = ("",)
    generator: Literal["gan", "ddpm"] = "gan"
    """What `synthesize` trains, checks and samples: a StyleGAN2-ADA or a denoising diffusion model."""


class Ddpm(Section):
    """The conditional denoising diffusion model of a site; `synthesize` and the method mpcpa read it."""

    resolution: Literal[8, 16, 32, 64, 128, 256] = 64
    channels: list[int] = Field([64, 128, 128], min_length=2)
    """Feature maps of the U-Net at each resolution, the finest first; attention at the coarsest."""
    layers: int = Field(1, ge=1)
    """Residual blocks at each."""
    chain: int = Field(1000, ge=2)
    """Steps of the diffusion."""
    schedule: Literal["linear", "squaredcos_cap_v2"] = "linear"
    steps: int | None = Field(None, ge=1)
    """Of training; default: by the rule for epochs, more for more classes and for fewer images."""
    batch_size: int = Field(16, ge=1)
    lr: float = Field(2e-4, gt=0)
    ema: float = Field(0.999, ge=0, lt=1)
    """What the moving average of the weights keeps of itself at each step."""
    class_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of images shown without their class while training; classifier-free guidance needs some, 0.1 say."""
    guidance: float = Field(1.0, ge=0)
    """1 draws from the conditional model as it is; more draws images more typical of their class."""
    sampler: Literal["ddpm", "ddim", "dpm++"] = "ddim"
    sampling_steps: int = Field(25, ge=1)
    """Of each image; sampler ddpm with the whole chain is the paper's."""
    sampling_batch: int = Field(64, ge=1)
    samples_per_class: int = Field(3200, ge=1)
    """Images of each class that `check` looks at and that a site draws from another's denoiser."""
    checkpoint_every: int = Field(500, ge=1)
    """Steps."""
    seed: int = 0


class Mpcpa(Section):
    """Diffusion models travel once, predictions are aggregated (method mpcpa)."""

    without_effect = ("aggregate", "unchecked", "curve")
    aggregate: Literal["mean", "weighted_mean", "absolute", "relative", "weighted"] = "mean"
    """How the sites' predictions become one: the mean of their probabilities, as it is or weighted by training rows, or
    an absolute, relative or weighted majority of votes."""
    per_class: int | None = Field(None, ge=1)
    """How many of each denoiser's images of each class classifiers learn from; default: all that were drawn."""
    unchecked: bool = False
    """Whether a simulated site's denoiser is released that did not pass its check: for studies of the check itself. A
    real site's never is."""
    curve: list[PositiveInt] = []
    """`train --baselines` also measures classifiers that learn from so many, [100, 400, 1600] say."""


class Lpips(Section):
    without_effect = ("",)
    weights: str | None = None
    """A local safetensors file of a VGG-16 with torchvision's names, or "random:SEED", an untrained substitute for
    tests; default: torchvision's weights as timm publishes them."""
    memory_mb: int = Field(512, ge=16)
    """Embeddings held at a time while sets are compared."""


class Replay(Section):
    """Experience replay: models and buffers of synthetic samples go round, both without differential privacy."""

    variant: Literal["replay", "buffer_only", "synthetic_only", "no_buffer", "central"] = "replay"
    buffer: int = Field(512, ge=1)
    """Samples that a site shares, of its own generator, all classes alike often."""
    unchecked: bool = False
    """Whether a generator may be sampled whose check was not passed."""


class Pipeline(Section):
    """One study: what to do."""

    sites: list[str] | None = Field(None, min_length=1)
    """Default: every site of the study."""
    slides: Slides = Slides()
    tile: Tile = Tile()
    store: Store = Store()
    subtypes: dict[str, list[str]] = {}
    """Tumour type → the diagnoses it may have, for studies of whole slides; a class is a diagnosis."""
    mosaic: Mosaic = Mosaic()
    features: Features = Features()
    stain: Stain = Stain()
    train: Train = Train()
    model: Model = Model()
    topology: Topology = Topology()
    comm: Communication = Communication()
    privacy: Privacy = Privacy()
    audit: Audit = Audit()
    evaluate: Evaluate = Evaluate()
    predict: Predict = Predict()
    synthesis: Synthesis = Synthesis()
    gan: Gan = Gan()
    ddpm: Ddpm = Ddpm()
    mpcpa: Mpcpa = Mpcpa()
    lpips: Lpips = Lpips()
    replay: Replay = Replay()

    @property
    def encoding(self) -> Mosaic:
        """[features] over [mosaic], whose weights and size belong to its own encoder."""
        own = self.features.model_dump(exclude_none=True)
        if "encoder" in own and own["encoder"] != self.mosaic.encoder:
            own = {"weights": None, "input_px": None} | own
        return self.mosaic.model_copy(update=own)


class SiteFile(Section):
    """One hospital: where and who."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    real: bool = True
    slides: str | list[str] | None = None
    """None for a site whose store was made by `partition`."""
    annotations: str | None = None
    layout: Layout = "generic"
    labels: str | None = None
    split: str | None = None
    columns: dict[Literal["patient", "diagnosis", "tumor_type", "project"], str] = {}
    """What columns of a clinical table (`labels` of layout tcga) are called; default: the GDC's names."""
    manifest: str | list[str] | None = None
    """Of layout tcga: the GDC's manifests, which say what the archive should hold."""
    verify: bool | None = None
    """Whether slides are compared with the manifest's sizes and MD5; default: yes. Digests are remembered."""
    slide_types: list[Literal["DX", "TS", "BS", "MS"]] | None = Field(None, min_length=1)
    """Of layout tcga; default: diagnostic slides, ["DX"]. TS and BS are frozen sections."""
    mpp_override: float | None = Field(None, gt=0)
    private_model: str | None = None
    max_epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)
    """δ of the site's promise, part of its budget; default for a simulated site: privacy.delta."""
    ledger: str | None = None
    """The file of the site's privacy account; default: ledgers/<site>.jsonl. A hospital with several studies on the
    same patients names one file in all of them, so that they share one budget."""
    allow: list[Allowed] = []

    def allows(self, what: Allowed) -> bool:
        """Whether `what` may leave without differential privacy; a simulated site allows all."""
        return not self.real or what in self.allow

    @property
    def allowed(self) -> tuple[str, ...]:
        return tuple(self.allow) if self.real else get_args(Allowed)


def as_agreed(began: SiteFile, today: SiteFile) -> SiteFile:
    """Return today's site file with the promises that a run began with; nothing is allowed that either file forbids.

    Where things lie (slides, tables, the ledger) is today's; what the site is and promised is the run's.
    """
    limits = [limit for limit in (began.max_epsilon, today.max_epsilon) if limit is not None]
    return today.model_copy(
        update={
            "real": began.real or today.real,
            "allow": [what for what in get_args(Allowed) if began.allows(what) and today.allows(what)],
            "max_epsilon": min(limits, default=None),
            "delta": began.delta,
            "private_model": began.private_model,
        }
    )


PROMISES = ("real", "allow", "max_epsilon", "delta", "private_model")
"""The keys of a site file that a run keeps as they were when it began."""
