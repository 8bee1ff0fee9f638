"""The settings of a pipeline, pipelines/*.toml.

Only `stages` and `cli` import this module; other packages take plain values. A key's docstring is its entry in
docs/reference/configuration.md and in `wsi-fl config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, create_model, field_validator, model_validator

from wsi_fl.plugins import load_entries
from wsi_fl.study.slide_settings import (
    FeatureSettings,
    MosaicSettings,
    SlideSettings,
    StoreSettings,
    TileSettings,
    TissueSettings,
)
from wsi_fl.study.toml import (
    MAX_SEED,
    MIN_SIGMA,
    ModelName,
    Section,
    SiteName,
    TableText,
    refuse_duplicates,
    settings_key,
)

_S = TypeVar("_S", bound=Section)
_METHOD_GRAPH = {"a method that orders sites anew": "its graph is another in every round"}
_NEEDS_CLASSES = dict.fromkeys(
    ("train.balance", "audit.canaries", "predict.model = ensemble", "train.init_from = oneshot"),
    "it works with classes alone",
)


class TrainSettings(Section):
    """How models are trained."""

    without_effect = ("seed", "eval_every", "fold", "left_out", "min_sites", "deadline")
    rounds: int = Field(30, ge=1, le=1_000_000)
    """Number of rounds. In each round the sites train locally, then exchange models."""
    eval_every: int = Field(1, ge=1, le=1_000_000)
    """Number of rounds from one evaluation to the next."""
    epochs_per_round: int = Field(1, ge=1, le=10_000)
    """Number of passes over a site's training examples in each round."""
    batch_size: int = Field(32, ge=1, le=1_000_000)
    """Expected number of examples in a training step; of patients with `privacy.unit = "patient"`."""
    lr: float = Field(1e-3, gt=0, le=1)
    """Learning rate of Adam: about the step of a weight in each batch; weights are rarely far above 1."""
    private_lr: float | None = Field(None, gt=0, le=1)
    """Learning rate of models that stay at their site and are trained without noise: the private and the local model.
    By default `train.lr`. Training with noise needs larger rates."""
    weight_decay: float = Field(0.0, ge=0, le=10_000)
    """Weight decay of Adam."""
    balance: bool = False
    """Whether the loss weights examples so that all classes count equally. Models with differential privacy are not
    weighted, since class counts are private; `predict.model = "ensemble"` centres their predictions instead."""
    tune: bool = False
    """Whether models without differential privacy choose hyperparameters by cross-validation over the site's patients.
    Linear heads are fitted in closed form; others choose `balance`, `weight_decay` and `lr`. `compare` always tunes the
    local baseline."""
    local_baseline: bool = True
    """Whether each site also trains a local model, which never leaves the site and which `predict.model` can choose. A
    linear head is fitted in closed form; other models take one more step for every batch."""
    alpha: float = Field(0.3, ge=0, le=1)
    """Weight α of distillation from the proxy in the loss of the private model: 0 is labels only, 1 the proxy only."""
    beta: float = Field(0.3, ge=0, le=1)
    """Weight β of distillation from the private model in the loss of the proxy. With `privacy.mode = "strict"` it is
    0."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Probability with which each training patient is held out for validation where the store has no validation split.
    These patients select the prediction model; methods without communication hold none out."""
    augment: str | list[str] = "flips"
    """Augmentation of training patches, or a list that is applied in order: `none`; `mirror` (left and right exchanged,
    probability 1/2); `quarter_turns` (by 0, 90, 180 or 270 degrees); `flips` (the eight symmetries of the square,
    unevenly); `stain` (`flips` and random colour changes); or a random transform of MONAI with its arguments, such as
    `monai:RandGaussianNoise(prob=0.5)`. Images range from −1 to 1."""
    input_px: int | None = Field(None, ge=8, le=4096)
    """Size to which patches are reduced for training, in pixels. By default they are not reduced."""
    data: Literal["patches", "features", "mosaics"] = settings_key(
        "patches", excludes={"a method of synthetic patches": "it needs train.data = 'patches'"}
    )
    """Training data: patches, the features of all patches, or the features of mosaics."""
    example: Literal["patch", "slide", "patient"] | None = None
    """Level of an example: a patch, a slide as the bag of its features, or a patient as the mean feature of all slides;
    in the last case ε per row is ε per patient. By default `slide` with mosaics, else `patch`."""
    max_patches: int | None = Field(None, ge=1, le=10_000_000)
    """Largest number of patches of a bag in one training step, drawn in each step. By default all are used. Predictions
    always use all patches of a slide."""
    any_patch_size: bool = False
    """Whether sites may have features of patches of different sizes or resolutions. Features depend on both, so by
    default sites that differ are refused."""
    folds: int | None = settings_key(
        None,
        ge=2,
        le=1000,
        needs={"train.fold": "a run tests one fold; `wsi-fl train --folds N` trains a run for each"},
        excludes=dict.fromkeys(
            ("train.from_released", "train.init_from = oneshot", "a method of synthetic patches"),
            "it rests on the training part of the stores' own split, of which a fold tests some patients",
        ),
    )
    """Number of folds of a cross-validation. The patients of every site are divided into folds by `train.seed`, in
    place of the store's split. `wsi-fl train --folds N` trains a run for each fold."""
    stratify: bool = settings_key(
        False, excludes={"privacy.enabled": "who is in a fold would depend on all other patients"}
    )
    """Whether folds are stratified by class and equal in size. A patient's fold then depends on the other patients,
    which ε does not cover, so it is refused with differential privacy. By default a patient's fold is a hash of the
    name, and at a real site of a secret of the hospital too."""
    fold: int | None = settings_key(None, ge=1, le=1000, needs={"train.folds": "it says how many folds there are"})
    """Index of the test fold among `train.folds`, counted from 1; all other patients are for training."""
    left_out: SiteName | None = None
    """Name of a site without part in training, whose slides are the test set of all models. `wsi-fl train
    --leave-site-out` trains a run for each site."""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Seed of all randomness in training except the privacy noise and the sampling of private batches."""
    optimizer_after_exchange: Literal["keep", "reset"] = "keep"
    """Whether Adam's moments are kept or reset when the parameters are exchanged."""
    from_released: bool = False
    """Whether `oneshot` computes its heads from the class statistics that `wsi-fl statistics` wrote into `statistics/`,
    instead of releasing and exchanging statistics itself. Sites without a store here take part by their file only;
    between hospitals each site sends its file to sites that lack it."""
    min_sites: int | None = settings_key(
        None,
        ge=1,
        le=10_000,
        excludes={"privacy.noise = shared": "secure aggregation tolerates privacy.dropouts sites; set that instead"},
    )
    """Smallest number of participating sites. The others continue without a site that timed out (`comm.timeout_s`), and
    it takes part again when it comes back; with fewer sites, and over a folder with half of them or fewer, all wait. By
    default all are needed. With `train.from_released`: smallest number of class statistics in `statistics/` from which
    heads are computed, by default those of all members, and any number after `train.deadline`. `train` computes the
    heads again whenever more have arrived."""
    deadline: str | None = None
    """Last day of waiting for sites or class statistics, such as "2027-01-31"."""
    init_from: Literal["fresh", "oneshot"] = "fresh"
    """Initial weights of the exchanged model: random (`fresh`), or the one-shot global head (`oneshot`) of the class
    statistics in `statistics/`, which must be there for every site. The model must be a linear head on features."""

    @field_validator("deadline", mode="before")
    @classmethod
    def _parse_day(cls, value: object) -> object:
        try:
            return None if value is None else date.fromisoformat(str(value)).isoformat()
        except ValueError:
            raise ValueError("write a day as YYYY-MM-DD") from None

    @model_validator(mode="after")
    def _check_fold(self) -> Self:
        if self.fold and self.folds and self.fold > self.folds:
            raise ValueError(f"train.fold = {self.fold}: there are train.folds = {self.folds} folds")
        return self


class TargetSettings(Section):
    """The prediction target of slides or patients: a column of a table, as classes or a number, or the time of an
    event.

    By default the target is the stores' labels. The table is `clinical` in the site file.
    """

    column: TableText | None = None
    """Name of the target column, with `classes` or `range`."""
    classes: list[TableText] | None = Field(None, min_length=2, max_length=10_000)
    """Values of the column that are the classes, in order; the same at all sites."""
    ignore: list[TableText] = Field([])
    """Values of the column whose slides are excluded, as are slides without a value."""
    range: list[Annotated[float, Field(ge=-1e30, le=1e30)]] | None = settings_key(
        None, min_length=2, max_length=2, excludes=_NEEDS_CLASSES
    )
    """Smallest and largest number of the column. With it models predict a number within this range."""
    time: TableText | None = None
    """Name of the column that holds the time until the event, or until the patient was last seen without it."""
    event: TableText | None = None
    """Name of the column of observed events: 1 or 0, yes or no, dead or alive."""
    intervals: list[Annotated[float, Field(ge=0, le=1e9)]] | None = settings_key(
        None, min_length=1, max_length=1000, excludes=_NEEDS_CLASSES
    )
    """Ends of the time intervals of the hazard model, ascending, in the unit of `time`. Later times are censored at the
    last end. Ten or fewer are usual."""
    per: Literal["slide", "patient"] = "slide"
    """Level of an example: a slide, or all slides of a patient as one bag. Survival is always per patient."""

    @property
    def example_level(self) -> str:
        """Return the level of an example; with survival always "patient"."""
        return "patient" if self.intervals else self.per

    @property
    def target_kind(self) -> Literal["classes", "number", "survival"]:
        """Return the kind of task."""
        return "survival" if self.intervals else "number" if self.range else "classes"

    @property
    def is_set(self) -> bool:
        """Return whether the target differs from the stores' labels."""
        return any((self.column, self.classes, self.range, self.time, self.event, self.intervals))


class _ModelSettings(Section):
    """Which architectures are trained."""

    private: ModelName = "resnet18"
    """Architecture of the private models, which stay at their site. For patches: `resnet18`, `gn_cnn`, `gn_cnn_small`,
    `lenet5`, `mlp`, `cnn1`, `cnn2`, `vgg11`, `timm:NAME` for any timm architecture, or `monai:NAME` for a network of
    MONAI that classifies images, such as `resnet18`, `DenseNet121` or `efficientnet-b0`. For features: `linear_head`,
    `mlp_head`. For mosaics: `deepset`, `deepset_small`, `deepset_max`, `deepset_attention`, `abmil`, `clam_sb`,
    `transmil`, `mean_head`."""
    proxy: ModelName = "resnet18"
    """Architecture of the proxies, which are exchanged. The names are those of `model.private`."""
    weights: str = settings_key("", needs={"train.data = patches": "heads on features and bags start at random"})
    """Pretrained weights of networks of patches, `timm:NAME` and `resnet18`: a file, a folder with a file
    `NAME.safetensors` for each architecture, or `hub` for those that timm publishes. The classifier starts at random.
    By default all weights do. All sites need the same weights, which must be public: ε does not cover their training
    data."""
    train: Literal["all", "head", "last", "norm", "lora"] = settings_key(
        "all", needs={"model.weights": "the rest of a network stays as its weights are"}
    )
    """Trained part of a network with `model.weights`: everything, the classifier (`head`), the last block and the
    classifier (`last`), gains and biases of normalisation layers and the classifier (`norm`), or low-rank adapters and
    the classifier (`lora`). Only this part is exchanged, with noise."""
    projection: Annotated[int, Field(ge=0, le=65_536)] | str = 128
    """Projection of features for `oneshot`: the path in the study of the file that `wsi-fl projection` computed from
    public reference slides, or a number of random dimensions, which lose more (0: counts alone). All sites need one."""


class _TopologySettings(Section):
    """Who sends to whom."""

    graph: str | None = settings_key(None, excludes=_METHOD_GRAPH)
    """The graph of each round: `none`, `star`, `ring`, `exponential`, `complete`, `random` (a new ring through
    all sites in each round, drawn from `train.seed`), or the path of a JSON file of edges. By default it is the
    method's own."""
    self_weight: float = settings_key(0.0, ge=0, lt=1, excludes=_METHOD_GRAPH)
    """Weight of a site's local model in its mixing step. With 0 a model is replaced by the received one; with 0.5 the
    two are averaged."""
    weights: Literal["equal", "rows"] = "equal"
    """How sites count in the mean that a star's hub takes: all alike (`equal`), or by their number of training rows, of
    patients with `privacy.unit = "patient"` (`rows`). FedAvg's paper has the latter. The number is public."""


class _GpuSettings(Section):
    """How GPUs compute."""

    without_effect = ("",)
    encode: Literal["half", "float32"] = "half"
    """Precision of an encoder's matrix products on GPUs: `half` is bfloat16, or float16 where a GPU lacks bfloat16."""
    train: Literal["bfloat16", "float32"] = "float32"
    """Precision of matrix products in training, on any device, of models without differential privacy. Models with it
    stay in float32, since bfloat16 is no faster for them."""
    compile: bool = False
    """Whether encoders are compiled for the GPU: about a minute for a third more patches a second with vision
    transformers. It needs a C compiler."""


class _CommunicationSettings(Section):
    """How sites wait for each other."""

    without_effect = ("",)
    timeout_s: float = Field(1800.0, gt=0, le=10_000_000)
    """Time, in seconds, without a sign of life after which a site has timed out."""


class _PrivacySettings(Section):
    """Differential privacy of what leaves a site."""

    without_effect = ("enabled", "insecure_seed")
    enabled: bool = True
    """Whether models and statistics leave a site with differential privacy only."""
    mode: Literal["paper", "strict"] = "strict"
    """Guarantee level of ε. With `strict` the proxy learns from labels only and its ε is guaranteed; with `paper` it
    also learns from the private model, as in ProxyFL's Algorithm 1, and its ε is nominal."""
    sigma: float = Field(1.4, ge=0, le=1_000_000)
    """Noise multiplier σ: the standard deviation of the noise is σ times `clip`."""
    clip: float = Field(0.7, ge=1e-3, le=1e3)
    """Clipping norm C of the gradient of each row (or patient). The noise is proportional to C. Below 0.001 gradients
    would come near Adam's 10⁻⁸; above 1000 hardly any gradient is clipped."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """Default δ of simulated sites. A real site's δ is in its site file."""
    target_epsilon: float | None = Field(None, gt=0, le=1_000_000)
    """Target ε of all rounds together, at most the site's `max_epsilon`. It replaces `sigma` and `train.batch_size`:
    each site gets the values for its number of rows."""
    unit: Literal["row", "patient"] = "row"
    """Privacy unit: one row of the store (a patch), or all rows of one patient. With "patient" whole patients are
    sampled, clipped and counted. The papers have "row"."""
    max_rows: int = Field(32, ge=1, le=1_000_000)
    """Largest number of rows of one patient in a step, drawn in each step; for `privacy.unit = "patient"`."""
    noise: Literal["own", "shared"] = settings_key(
        "own", needs={"a method of sums": "only what is released once is added up; use oneshot"}
    )
    """Noise of the class statistics of `oneshot`. With `own` each site adds all of it, and trusts nobody. `shared` is
    distributed noise with secure aggregation, which reveals only the sum over sites: less noise, but ε depends on the
    other sites. A real site must allow it by name (`allow = ["shared"]`)."""
    colluding: int = Field(1, ge=1, le=10_000)
    """With `noise = "shared"`: number of colluding sites against which ε holds; at least 1, since every site knows its
    own share of the noise."""
    dropouts: int = Field(0, ge=0, le=10_000)
    """With `noise = "shared"`: number of sites that may drop out during secure aggregation; the result is then the sum
    of the others, at no second charge. It needs `colluding` + 2 `dropouts` + 1 sites, and each site adds the noise for
    `dropouts` fewer sites. With 0 a dropout makes the sum unreadable, and the next attempt is charged again."""
    insecure_seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """Seed of fixed noise, for tests only. The ledger records it, and no guarantee is given."""

    @field_validator("sigma")
    @classmethod
    def _check_sigma(cls, sigma: float) -> float:
        if 0 < sigma < MIN_SIGMA:
            raise ValueError(f"use 0 for no noise, or at least {MIN_SIGMA:g}")
        return sigma

    @property
    def has_noise(self) -> bool:
        """Return whether any noise is added."""
        return self.enabled and (self.sigma > 0 or self.target_epsilon is not None)


class AuditSettings(Section):
    """Canaries in training, which `audit` attacks."""

    canaries: int = settings_key(
        0,
        ge=0,
        le=1_000_000,
        excludes={
            "a method without differential privacy": "they test the guarantee of differential privacy",
            "train.from_released": "they need new statistics; set train.from_released = false",
        },
    )
    """Number of random examples (canaries) among each site's training rows, each included with probability one half.
    `audit` guesses which were included; its accuracy gives a lower bound on ε."""


class _EvaluateSettings(Section):
    """How `evaluate` measures models."""

    without_effect = ("",)
    bootstrap: int = Field(1000, ge=0, le=1_000_000)
    """Number of bootstrap samples of patients for confidence intervals; 0 for no intervals."""
    external: list[SiteName] = Field([])
    """Names of sites without part in training; every model is also evaluated on all of their patches."""

    _external_once = field_validator("external")(refuse_duplicates)


class _PredictSettings(Section):
    """Which model predicts."""

    model: Literal["auto", "private", "proxy", "shared", "mean", "local", "ensemble"] = "auto"
    """Prediction model: the private model, the proxy (of `oneshot` the `shared` head), the mean of both, or the `local`
    model. `ensemble` is the ensemble of the local and the federated models, weighted by their gain on held-out rows, 0
    where there is none. `auto` is `ensemble` with `train.local_baseline`; else the best model on the validation split,
    or the private model without one. Numbers and survival of methods in rounds have no ensemble: `auto` takes the best
    model on validation rows."""


NO_CHOICE = "no tumour type has two diagnoses, so nothing is to choose"


def has_choice(subtypes: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a tumour type has several diagnoses."""
    return any(len(set(diagnoses)) > 1 for diagnoses in subtypes.values())


class Pipeline(Section):
    """The settings of a study."""

    sites: list[SiteName] | None = Field(None, min_length=1, max_length=10_000)
    """Names of the sites that take part, in order. By default every site of the study."""
    slides: SlideSettings = SlideSettings()
    tile: TileSettings = TileSettings()
    tissue: TissueSettings = TissueSettings()
    store: StoreSettings = StoreSettings()
    subtypes: dict[TableText, list[TableText]] = Field({})
    """Possible diagnoses of each tumour type, for studies of whole slides. With it the classes are diagnoses, without
    it healthy and tumour. Slides whose tumour type has one diagnosis are trained on and not scored."""
    mosaic: MosaicSettings = MosaicSettings()
    features: FeatureSettings = FeatureSettings()
    train: TrainSettings = TrainSettings()
    target: TargetSettings = TargetSettings()
    model: _ModelSettings = _ModelSettings()
    gpu: _GpuSettings = _GpuSettings()
    topology: _TopologySettings = _TopologySettings()
    comm: _CommunicationSettings = _CommunicationSettings()
    privacy: _PrivacySettings = _PrivacySettings()
    audit: AuditSettings = AuditSettings()
    evaluate: _EvaluateSettings = _EvaluateSettings()
    predict: _PredictSettings = _PredictSettings()

    _sites_once = field_validator("sites")(refuse_duplicates)

    @field_validator("subtypes")
    @classmethod
    def _require_choice(cls, subtypes: dict[str, list[str]]) -> dict[str, list[str]]:
        if subtypes and not has_choice(subtypes):
            raise ValueError(NO_CHOICE)
        return subtypes

    @model_validator(mode="before")
    @classmethod
    def _default_unit(cls, values: Any) -> Any:
        """Set the privacy unit to patients where examples are slides or patients and the pipeline sets none."""
        if not isinstance(values, dict):
            return values
        train, target, privacy = (values.get(name) or {} for name in ("train", "target", "privacy"))
        if not all(isinstance(section, dict) for section in (train, target, privacy)):
            return values
        of_patients = target or train.get("example") in ("slide", "patient") or train.get("data") == "mosaics"
        return values | {"privacy": {"unit": "patient"} | privacy} if of_patients else values

    @property
    def example_level(self) -> Literal["patch", "slide", "patient"]:
        """The level of an example: `train.example`, else slides of mosaics and patches of all other data."""
        return self.train.example or ("slide" if self.train.data == "mosaics" else "patch")

    @property
    def encoder_settings(self) -> MosaicSettings:
        """The encoder of patches: [features] over [mosaic], whose weights and size apply to the same encoder only."""
        overrides = self.features.model_dump(exclude_none=True)
        if "encoder" in overrides and overrides["encoder"] != self.mosaic.encoder:
            overrides = {"weights": None, "input_px": None} | overrides
        return self.mosaic.model_copy(update=overrides)

    def replace_keys(self, **sections: Mapping[str, object]) -> Self:
        """Return the pipeline with other values of some keys, without validation."""
        changed_sections = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=changed_sections)

    def find_section(self, kind: type[_S]) -> _S:
        """Return the section of a plug-in; its defaults where this pipeline was made without it."""
        return next((value for _, value in self if isinstance(value, kind)), kind())


@cache
def pipeline_model() -> type[Pipeline]:
    """Return the model of a pipeline with the core's sections, then those of plug-ins by name."""
    added_sections = sorted(load_entries("wsi_fl.settings").items())
    if duplicates := [name for name, _ in added_sections if name in Pipeline.model_fields]:
        raise ValueError(f"[{duplicates[0]}] is a section of every pipeline")
    fields: Any = {name: (section, section()) for name, section in added_sections}
    return create_model("Pipeline", __base__=Pipeline, __doc__=Pipeline.__doc__, **fields)
