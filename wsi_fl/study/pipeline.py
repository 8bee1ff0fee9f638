"""pipelines/*.toml: one study, what to do.

Only `stages` and `cli` know this module; rooms take plain values. A key's docstring is its entry in
docs/configuration.md and in `wsi-fl config`.
"""

from __future__ import annotations

from datetime import date
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import Field, create_model, field_validator, model_validator

from wsi_fl.plugins import entries
from wsi_fl.study.toml import (
    LEAST_SIGMA,
    MOST_SEED,
    EncoderName,
    ModelName,
    Section,
    SiteName,
    TableText,
    key,
    refuse_twice,
)

_S = TypeVar("_S", bound=Section)
_Fault = Literal["pen", "black", "fold", "bubble", "blur"]
_USUAL_SHARES: dict[str, float] = {"pen": 0.05, "black": 0.05, "fold": 0.25, "bubble": 0.25, "blur": 0.4}
"""How much of a patch may be at fault where only the fault is named; docs/quality.md says what that finds."""
_TissueMethod = Literal["auto", "saturation", "density", "texture"]
_OWN_GRAPH = {"a method that orders sites anew": "its graph is another in every round"}
_OF_CLASSES = dict.fromkeys(
    ("train.balance", "audit.canaries", "predict.model = ensemble", "train.init_from = oneshot"),
    "it works with classes alone",
)


class _Slides(Section):
    """How slides are read."""

    without_effect = ("",)
    reader: Literal["auto", "native", "openslide"] = "auto"
    """What decodes the pixels. `native` decodes a slide's own JPEG tiles, `openslide` leaves everything to OpenSlide,
    and `auto` decodes natively where that gives the same pixels as OpenSlide."""
    test_fraction: float = Field(0.2, ge=0, lt=1)
    """Share of patients that are held out for testing by `tile`, `mosaic` and `import`, where the site prescribes no
    split."""


class _Tile(Section):
    """How `tile` cuts slides into labelled patches."""

    without_effect = ("",)
    size_px: int = Field(512, ge=8, le=16_384)
    """Width and height of a patch, in pixels."""
    mpp: float = Field(0.5, ge=0.01, le=1000)
    """Resolution of a patch, in µm per pixel."""
    stride_px: int | None = Field(None, ge=1, le=1_000_000)
    """Distance from one patch to the next, in pixels of the patch. By default it equals `size_px`, so patches do not
    overlap."""
    min_tissue: float = Field(0.2, ge=0, le=1)
    """Smallest share of a patch that must be tissue; patches with less are left out."""
    groups: dict[str, Literal["tumor", "hole", "unsure", "ignored"]] = Field({})
    """What annotation groups outline, such as {DCIS = "tumor", stroma = "ignored"}: tumour, holes in it, what is not
    sure, or nothing that counts. The names that Camelyon, ASAP and QuPath use are known."""
    balance: bool = True
    """Whether a site keeps equally many patches of each label. The choice looks at all of the site's slides, so a
    guarantee that must also cover tiling needs `false`."""
    max_per_slide: int | None = Field(None, ge=1, le=1_000_000_000)
    """Largest number of patches that are kept of one slide, drawn at random. By default there is no limit."""
    qc: dict[_Fault, Annotated[float, Field(ge=0, le=1)]] = Field({})
    """Faults for which patches are set aside, and the largest share of a patch that may be at fault: ink of a marker,
    places that were not scanned, folds, air bubbles, and what is out of focus. A list, ["pen", "blur"], takes the usual
    shares: 0.05 of pen and black, 0.25 of folds and bubbles, 0.4 of blur. By default nothing is looked for."""
    segmenter: str | None = None
    """Path of a safetensors file with a torchvision segmentation model of your own, which tells those faults of
    `tile.qc` that it knows. Its header says what it is (docs/quality.md). By default all faults are told by classical
    measures."""

    @field_validator("qc", mode="before")
    @classmethod
    def _with_usual_shares(cls, asked: object) -> object:
        """Return what a list of faults stands for."""
        if not isinstance(asked, list):
            return asked
        return {str(fault): _USUAL_SHARES.get(fault, 1.0) for fault in asked}


class _Tissue(Section):
    """How tissue is told from background, by `tile`, `mosaic` and `predict`."""

    without_effect = ("",)
    method: str = "auto"
    """What tells tissue: `saturation` suits ordinary stains, `density` (of light that is absorbed) pale ones and
    immunohistochemistry, and `texture` tissue that hardly absorbs light. `auto` takes density where saturation would
    miss more than a twentieth of it; `tile` says on how many slides. Or the path of a folder with masks that others
    made, such as masks/C1: SLIDE.geojson with outlines in level-0 pixels (QuPath, TRIDENT's `contours_geojson`), or
    SLIDE.png over the whole slide or its scanned area, white on tissue. A slide without one is set aside."""

    @field_validator("method")
    @classmethod
    def _known_or_folder(cls, method: str) -> str:
        if method not in get_args(_TissueMethod) and "/" not in method:
            raise ValueError(
                f"use {', '.join(map(repr, get_args(_TissueMethod)))}, or a folder of masks, 'masks/C1'"
            )
        return method

    @property
    def masks(self) -> str | None:
        """The folder of masks that others made; None to find tissue here."""
        return self.method if self.method not in get_args(_TissueMethod) else None


class _Store(Section):
    """How a patch store keeps pixels."""

    without_effect = ("",)
    pixels: str = Field("native", pattern=r"^(raw|native|none|jpeg:([1-9][0-9]?|100))$")
    """How pixels are stored. `native` keeps the slide's own JPEG streams where all patches of a slide are whole tiles
    of it, and raw pixels elsewhere; `raw` keeps them as read everywhere; `jpeg:90` encodes them anew and loses detail;
    `none` keeps positions alone and reads pixels from the slide whenever they are needed."""


class Mosaic(Section):
    """How `mosaic` turns a slide into a bag of features of a few representative patches (Yottixel, 2020)."""

    without_effect = ("",)
    size_px: int = Field(1000, ge=8, le=16_384)
    """Width and height of a patch, in pixels."""
    mpp: float = Field(0.5, ge=0.01, le=1000)
    """Resolution of a patch, in µm per pixel."""
    min_tissue: float = Field(0.7, ge=0, le=1)
    """Smallest share of a patch that must be tissue."""
    clusters: int = Field(9, ge=1, le=10_000)
    """Number of groups into which the patches of a slide are sorted by colour."""
    fraction: float = Field(0.05, gt=0, le=1)
    """Share of each colour group that is kept, spread over the slide."""
    encoder: EncoderName = "densenet121"
    """Name of the encoder: a preset of `wsi-fl encoders`, or any timm model, whose pooled output is the feature."""
    weights: str | None = None
    """Path of a file with the encoder's weights: safetensors, or a .bin, .pt or .pth that holds tensors alone. By
    default the published weights, fetched by name."""
    input_px: int | None = Field(None, ge=32, le=4096)
    """Size to which patches are resized for the encoder, in pixels. By default they stay as read, unless the encoder
    takes one size alone."""


class _Features(Section):
    """How `features` encodes every patch of a patch store. A key that is not set is taken from [mosaic]."""

    without_effect = ("",)
    encoder: EncoderName | None = None
    """Name of the encoder: a preset of `wsi-fl encoders`, or any timm model. By default `mosaic.encoder`."""
    weights: str | None = None
    """Path of a file with the encoder's weights. By default `mosaic.weights`, for the same encoder."""
    input_px: int | None = Field(None, ge=32, le=4096)
    """Size to which patches are resized for the encoder, in pixels. By default `mosaic.input_px`, if the encoder is
    the same."""


class Train(Section):
    """How models are trained."""

    without_effect = ("seed", "eval_every", "fold", "left_out", "min_sites", "deadline")
    rounds: int = Field(30, ge=1, le=1_000_000)
    """Number of rounds. In each the sites train alone, then exchange what travels."""
    eval_every: int = Field(1, ge=1, le=1_000_000)
    """Number of rounds from one evaluation to the next."""
    epochs_per_round: int = Field(1, ge=1, le=10_000)
    """Number of passes over a site's training rows in each round."""
    batch_size: int = Field(32, ge=1, le=1_000_000)
    """Number of rows in a training step, on average; of patients where `privacy.unit` is "patient"."""
    lr: float = Field(1e-3, gt=0, le=1)
    """Learning rate of Adam. A step moves each weight by about so much, and no weight of a model is far above 1."""
    private_lr: float | None = Field(None, gt=0, le=1)
    """Learning rate of models that stay at their site and have no noise: a private one, and the one that the site would
    have alone. By default `train.lr`. Noise needs larger rates than they do."""
    weight_decay: float = Field(0.0, ge=0, le=10_000)
    """Weight decay of Adam."""
    balance: bool = False
    """Whether rows are weighed in training so that all classes count alike. Models under differential privacy are left
    alone, since weights that follow private counts would void ε; `predict.model = "ensemble"` centres what they
    answer."""
    tune: bool = False
    """Whether models without differential privacy choose their own settings by cross-validation over the site's own
    patients. Linear heads are fitted at once; others choose `balance`, `weight_decay` and `lr`. `compare` always
    tunes the hospital alone."""
    local_baseline: bool = True
    """Whether each site also learns the model that it would have alone, which never leaves, so that joining
    need not cost anything: see `predict.model`. A linear head is fitted at once; other models take one more step for
    every batch."""
    alpha: float = Field(0.3, ge=0, le=1)
    """How far the private model learns from its proxy (α) instead of from the labels: 0 not at all, 1 from the proxy
    alone."""
    beta: float = Field(0.3, ge=0, le=1)
    """How far the proxy learns from the private model (β) instead of from the labels. With `privacy.mode = "strict"`
    it counts as 0."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Probability with which each training patient is held out for validation where the store has no validation split.
    They say what answers best; only methods by which sites send each other something hold patients out."""
    augment: str = "flips"
    """How training patches are varied: not at all (`none`), by the eight symmetries of the square (`flips`), or by
    these and random colour changes (`stain`)."""
    input_px: int | None = Field(None, ge=8, le=4096)
    """Size to which patches are reduced for training, in pixels. By default they stay as stored."""
    data: Literal["patches", "features", "mosaics"] = key(
        "patches", excludes={"a method of synthetic patches": "it needs train.data = 'patches'"}
    )
    """What is learned from: patches, the features of all patches, or the features of mosaics."""
    example: Literal["patch", "slide", "patient"] | None = None
    """What an example is: a patch, all features of a slide as a bag, or a patient as the mean of all features of the
    patient's slides. A patient is then one row, and ε per row is ε per patient. By default slides of mosaics, and
    patches otherwise."""
    max_patches: int | None = Field(None, ge=1, le=10_000_000)
    """Largest number of patches of a slide in one training step, drawn anew in each step; for bags of features. By
    default all are seen. A slide is predicted from all of its patches."""
    any_patch_size: bool = False
    """Whether sites may bring features of patches of different sizes or resolutions. An encoder makes other features
    where it sees more tissue, or sees it finer, so by default sites that differ are refused."""
    folds: int | None = key(
        None,
        ge=2,
        le=1000,
        needs={"train.fold": "a run tests one fold; `wsi-fl train --folds N` trains a run for each"},
        excludes=dict.fromkeys(
            ("train.from_released", "train.init_from = oneshot", "a method of synthetic patches"),
            "it rests on the training part of the stores' own split, of which a fold tests some patients",
        ),
    )
    """Number of folds of a cross-validation. The patients of every site are divided into as many folds, drawn by
    `train.seed`, in place of the store's own split. `wsi-fl train --folds N` trains a run for each fold."""
    stratify: bool = key(
        False, excludes={"privacy.enabled": "who is in a fold would depend on all other patients"}
    )
    """Whether folds hold all classes alike, and as many patients. Whose fold a patient is in then depends on who else
    there is, which ε does not cover, so it is refused under differential privacy. By default a patient's fold follows
    from the name, and at a real site from a secret of the hospital too."""
    fold: int | None = key(None, ge=1, le=1000, needs={"train.folds": "it says how many folds there are"})
    """Which of `train.folds` is the test part of a run, counted from 1; all other patients are for training."""
    left_out: SiteName | None = None
    """Name of a site that takes no part in training, and whose slides are the test set of all models.
    `wsi-fl train --leave-site-out` trains a run for each site."""
    seed: int = Field(0, ge=0, le=MOST_SEED)
    """Seed of everything in training that is not secret. Noise and private batches never follow it."""
    optimizer_after_exchange: Literal["keep", "reset"] = "keep"
    """What becomes of Adam's moments when the parameters they belong to are exchanged."""
    from_released: bool = False
    """Whether `oneshot` makes its heads of the sums that lie in `statistics/` already, as `wsi-fl statistics` writes
    them, instead of releasing and exchanging sums itself. Sites without a store here take part by their file alone;
    between hospitals each sends its own to those who lack it."""
    min_sites: int | None = key(
        None,
        ge=1,
        le=10_000,
        excludes={
            "privacy.noise = shared": "a sum survives as many as privacy.dropouts says; set that instead"
        },
    )
    """How many sites must be there. The others go on without one that was silent for `comm.timeout_s`, and it takes
    part again when it comes back; below so many, and over a folder below more than half, all wait. By default all are
    needed. With `train.from_released`: how many letters must lie in `statistics/` before heads are made of those that
    are there, by default those of all sites that write one, and any after `train.deadline`. Whenever another has come,
    `train` makes the heads again."""
    deadline: str | None = None
    """Last day on which sites, or letters that are missing, are waited for, as "2027-01-31"."""
    init_from: Literal["fresh", "oneshot"] = "fresh"
    """Where the model that travels starts: at random weights (`fresh`), or with `oneshot` from the head that the sums
    in `statistics/` make, which must be there for every site. It must be a linear head on features."""

    @field_validator("deadline", mode="before")
    @classmethod
    def _day(cls, until: object) -> object:
        try:
            return None if until is None else date.fromisoformat(str(until)).isoformat()
        except ValueError:
            raise ValueError("write a day as YYYY-MM-DD") from None

    @model_validator(mode="after")
    def _one_of_the_folds(self) -> Self:
        if self.fold and self.folds and self.fold > self.folds:
            raise ValueError(f"train.fold = {self.fold}: there are train.folds = {self.folds} folds")
        return self


class Target(Section):
    """What models of slides learn to answer: a column of a table as classes or as a number, or the time of an event.

    Without it they answer what the stores are labelled with. It is for examples that are slides or patients. The table
    is the site's own, `clinical` in its site file.
    """

    column: TableText | None = None
    """Name of the column that holds the answer, with `classes` or `range`."""
    classes: list[TableText] | None = Field(None, min_length=2, max_length=10_000)
    """The values of the column, in order, that models tell apart. All sites agree on them, so that no site's table
    decides."""
    ignore: list[TableText] = Field([])
    """Values of the column whose slides are left out, like those without a value."""
    range: list[Annotated[float, Field(ge=-1e30, le=1e30)]] | None = key(
        None, min_length=2, max_length=2, excludes=_OF_CLASSES
    )
    """Smallest and largest number of the column. With it models answer a number within this range."""
    time: TableText | None = None
    """Name of the column that holds the time until the event, or until the patient was last seen without it."""
    event: TableText | None = None
    """Name of the column that says whether the event was seen: 1 or 0, yes or no, dead or alive."""
    intervals: list[Annotated[float, Field(ge=0, le=1e9)]] | None = key(
        None, min_length=1, max_length=1000, excludes=_OF_CLASSES
    )
    """Ends of the intervals in which the event may happen, rising, in the unit of `time`. Times after the last end are
    not told apart. Ten or fewer are usual."""
    per: Literal["slide", "patient"] = "slide"
    """What one example is: a slide, or all slides of a patient as one bag. Survival is always asked per patient."""

    @property
    def of(self) -> str:
        """Return what one example is: survival is asked of patients whatever `per` says."""
        return "patient" if self.intervals else self.per

    @property
    def kind(self) -> Literal["classes", "number", "survival"]:
        """Return the kind of question."""
        return "survival" if self.intervals else "number" if self.range else "classes"

    @property
    def asked(self) -> bool:
        """Return whether anything is asked beside what stores are labelled with."""
        return any((self.column, self.classes, self.range, self.time, self.event, self.intervals))


class _Model(Section):
    """Which architectures are trained."""

    private: ModelName = "resnet18"
    """Architecture of the private models, which stay at home. For patches: `resnet18`, `gn_cnn`, `gn_cnn_small`,
    `lenet5`, `mlp`, `cnn1`, `cnn2`, `vgg11`, or `timm:NAME` for any timm architecture. For features: `linear_head`,
    `mlp_head`. For mosaics: `deepset`, `deepset_max`, `deepset_attention`, `abmil`, `clam_sb`, `transmil`,
    `mean_head`."""
    proxy: ModelName = "resnet18"
    """Architecture of the proxies, which travel. The names are those of `model.private`."""
    weights: str = key("", needs={"train.data = patches": "heads on features and bags start at random"})
    """What networks of patches start from, `timm:NAME` and `resnet18`: a file of weights, a folder with a file
    `NAME.safetensors` for each architecture, or `hub` for those that timm publishes. The classifier is fresh. By
    default all starts at random. All sites need the same weights, which must be public: ε is not about what made
    them."""
    train: Literal["all", "head", "last", "norm", "lora"] = key(
        "all", needs={"model.weights": "the rest of a network stays as its weights are"}
    )
    """Which part of a network with `model.weights` is trained: everything, the classifier (`head`), the last block and
    the classifier, gains and biases of normalisation layers and the classifier (`norm`), or low-rank adapters and the
    classifier (`lora`). Only that part travels, and is given noise."""
    projection: Annotated[int, Field(ge=2, le=65_536)] | str = 128
    """Directions along which `oneshot` sums features: the file that `wsi-fl projection` made of public tissue, by its
    path in the study, or a number of random ones, which lose more. All sites need the same ones."""


class _Topology(Section):
    """Who sends to whom."""

    graph: str | None = key(None, excludes=_OWN_GRAPH)
    """The graph of each round: `none`, `star`, `ring`, `exponential`, `complete`, `random`, or the path of a JSON file
    of edges. By default it is the method's own."""
    self_weight: float = key(0.0, ge=0, lt=1, excludes=_OWN_GRAPH)
    """Share of its own model that a site keeps when it passes the rest on. With 0 models are passed on whole; with 0.5
    they are averaged."""


class Gpu(Section):
    """How GPUs compute."""

    without_effect = ("",)
    encode: Literal["half", "float32"] = "half"
    """Precision of an encoder's matrix products on GPUs: `half` is bfloat16, or float16 where a GPU knows no other."""
    train: Literal["bfloat16", "float32"] = "float32"
    """Precision of matrix products in training, on any device, of models without differential privacy. Those under it
    stay in float32, where bfloat16 is no faster."""
    compile: bool = False
    """Whether encoders are compiled for the GPU. Vision transformers then encode a third more patches a second, after
    a minute; it takes a C compiler."""


class _Communication(Section):
    """How sites wait for each other."""

    without_effect = ("",)
    timeout_s: float = Field(1800.0, gt=0, le=10_000_000)
    """Longest time, in seconds, that others wait for a site that gives no sign of life before it counts as lost."""


class Privacy(Section):
    """Differential privacy of what leaves a site."""

    without_effect = ("enabled", "insecure_seed")
    enabled: bool = True
    """Whether what leaves a site is trained with differential privacy."""
    mode: Literal["paper", "strict"] = "strict"
    """What the ε is worth. With `strict` the proxy learns from labels alone and its ε is guaranteed; with `paper` it
    also learns from the private model, as in ProxyFL's Algorithm 1, and its ε is nominal."""
    sigma: float = Field(1.4, ge=0, le=1_000_000)
    """Noise multiplier σ: the standard deviation of the noise is σ times `clip`."""
    clip: float = Field(0.7, ge=1e-3, le=1e3)
    """Norm C to which the gradient of each row (or patient) is clipped. The noise grows with it. Below 0.001 it would
    come near the 10⁻⁸ that Adam adds to every gradient's size; above 1000 hardly any gradient is clipped."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """The δ of simulated sites that do not set their own. A real site's δ is in its site file."""
    target_epsilon: float | None = Field(None, gt=0, le=1_000_000)
    """The ε that all rounds together may cost a site, or its `max_epsilon` where that is less. It replaces `sigma` and
    `train.batch_size`: each site gets the values that suit its number of rows."""
    unit: Literal["row", "patient"] = "row"
    """What ε protects: one row of the store, or all rows of one patient. With "patient" whole patients are sampled,
    clipped and counted. It is the default where slides or patients are asked about; else "row" is, as in the papers."""
    max_rows: int = Field(32, ge=1, le=1_000_000)
    """Largest number of rows of one patient in one step, drawn anew in each step. It matters where the unit is a
    patient."""
    noise: Literal["own", "shared"] = key(
        "own", needs={"a method of sums": "only what is released once is added up; use oneshot"}
    )
    """Whose noise protects what `oneshot` releases. With `own` each site adds all of it, and trusts nobody. With
    `shared` the sites add it together and mask their sums, so that only the sum of all can be read: less noise, but
    its ε rests on the other sites. A real site must allow it by name (`allow = ["shared"]`)."""
    colluding: int = Field(1, ge=1, le=10_000)
    """With `noise = "shared"`: how many sites may put together what they know without learning more than ε says. It is
    at least 1, since every site knows its own share of the noise."""
    dropouts: int = Field(0, ge=0, le=10_000)
    """With `noise = "shared"`: how many sites may go away while the sum is made; it is that of the others then, at no
    second charge. There must be `colluding` + 2 `dropouts` + 1 sites or more, and noise grows as if so many sites were
    fewer. With 0 a site that goes away makes the sum unreadable, and the next attempt is charged again."""
    insecure_seed: int | None = Field(None, ge=0, le=MOST_SEED)
    """Seed of fixed noise, for tests alone. The ledger notes it, and no guarantee is given."""

    @field_validator("sigma")
    @classmethod
    def _none_or_some(cls, sigma: float) -> float:
        if 0 < sigma < LEAST_SIGMA:
            raise ValueError(f"use 0 for no noise, or at least {LEAST_SIGMA:g}")
        return sigma

    @property
    def noisy(self) -> bool:
        """Whether anything is given noise at all."""
        return self.enabled and (self.sigma > 0 or self.target_epsilon is not None)


class Audit(Section):
    """What is planted in training so that `audit` can attack the run."""

    canaries: int = key(
        0,
        ge=0,
        le=1_000_000,
        excludes={
            "a method without differential privacy": "they test what differential privacy promises",
            "train.from_released": "they need new releases; set train.from_released = false",
        },
    )
    """Number of meaningless examples (canaries) planted among each site's training rows. A coin decides for each
    whether it is in or out; from how well `audit` tells them apart follows a lower bound on ε."""


class _Evaluate(Section):
    """How `evaluate` measures models."""

    without_effect = ("",)
    bootstrap: int = Field(1000, ge=0, le=1_000_000)
    """Number of times patients are drawn anew for a confidence interval; 0 leaves the intervals out."""
    external: list[SiteName] = Field([])
    """Names of sites that take no part in training; every model is also measured on all of their patches."""

    _external_once = field_validator("external")(refuse_twice)


class _Predict(Section):
    """Which model answers."""

    model: Literal["auto", "private", "proxy", "shared", "mean", "local", "ensemble"] = "auto"
    """Which model answers: the private one, the proxy (of `oneshot` the `shared` head), the mean of both, or the site's
    own `local` one. `ensemble` mixes that one with what the site has by joining: by so much as rows show that no model
    knows by heart, and not at all where they do not. `auto` is `ensemble` with `train.local_baseline`; else what does
    best on the validation split, or the private model without one. Numbers and survival that rounds learned are not
    mixed: of them `auto` takes the best on validation rows."""


class Pipeline(Section):
    """One study: what is done, with which settings."""

    sites: list[SiteName] | None = Field(None, min_length=1, max_length=10_000)
    """Names of the sites that take part, in order. By default every site of the study."""
    slides: _Slides = _Slides()
    tile: _Tile = _Tile()
    tissue: _Tissue = _Tissue()
    store: _Store = _Store()
    subtypes: dict[TableText, list[TableText]] = Field({})
    """The diagnoses that each tumour type may have, for studies of whole slides. With it the classes are diagnoses,
    without it healthy and tumour."""
    mosaic: Mosaic = Mosaic()
    features: _Features = _Features()
    train: Train = Train()
    target: Target = Target()
    model: _Model = _Model()
    gpu: Gpu = Gpu()
    topology: _Topology = _Topology()
    comm: _Communication = _Communication()
    privacy: Privacy = Privacy()
    audit: Audit = Audit()
    evaluate: _Evaluate = _Evaluate()
    predict: _Predict = _Predict()

    _sites_once = field_validator("sites")(refuse_twice)

    @model_validator(mode="before")
    @classmethod
    def _patients_are_units(cls, said: Any) -> Any:
        """Privacy counts patients where slides or patients are asked about, unless told otherwise."""
        if not isinstance(said, dict):
            return said
        train, target, privacy = (said.get(name) or {} for name in ("train", "target", "privacy"))
        if not all(isinstance(section, dict) for section in (train, target, privacy)):
            return said
        of_patients = target or train.get("example") in ("slide", "patient") or train.get("data") == "mosaics"
        return said | {"privacy": {"unit": "patient"} | privacy} if of_patients else said

    @property
    def example(self) -> Literal["patch", "slide", "patient"]:
        """What a row is: as `train.example` says, else slides of mosaics and patches of everything else."""
        return self.train.example or ("slide" if self.train.data == "mosaics" else "patch")

    @property
    def encoding(self) -> Mosaic:
        """The encoder of patches: [features] over [mosaic], whose weights and size belong to its own encoder."""
        own = self.features.model_dump(exclude_none=True)
        if "encoder" in own and own["encoder"] != self.mosaic.encoder:
            own = {"weights": None, "input_px": None} | own
        return self.mosaic.model_copy(update=own)

    def changed(self, **sections: dict[str, Any]) -> Self:
        """Return the pipeline with other values of keys of some sections, which nobody validates again."""
        found = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=found)

    def section(self, kind: type[_S]) -> _S:
        """Return the section of a kind that has joined; its defaults where this pipeline was made without it."""
        return next((value for _, value in self if isinstance(value, kind)), kind())


@cache
def pipeline_model() -> type[Pipeline]:
    """Return the model of a whole pipeline: the core's sections, then those that have joined, by name."""
    joined = sorted(entries("wsi_fl.settings").items())
    if twice := [name for name, _ in joined if name in Pipeline.model_fields]:
        raise ValueError(f"[{twice[0]}] is a section of every pipeline")
    fields: Any = {name: (section, section()) for name, section in joined}
    return create_model("Pipeline", __base__=Pipeline, __doc__=Pipeline.__doc__, **fields)
