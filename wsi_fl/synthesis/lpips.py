"""LPIPS (Zhang et al., CVPR 2018): perceptual distance of images by the layers of a VGG-16, here as a squared length.

The distance of the paper's eq. 1 sums, over five layers, the mean over positions of w_c (f_c − g_c)², where f and
g are feature maps scaled to unit length per position. The weights w are not negative, so with sqrt(w_c /
positions) on every feature an image becomes one vector, its *embedding*, and LPIPS the squared Euclidean distance
of two embeddings. Each image goes through the network once; all pairs of two sets then cost one matrix product.

The privacy loss, at the end of this module, uses the same embeddings.

The linear weights are those of the `lpips` package (version 0.1, VGG), five vectors of 1472 numbers in all, kept
beside this file with the package's licence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.vgg import cfgs, make_layers

from wsi_fl.models.weights import NoWeightsError, download_weights, read_weights, weights_digest
from wsi_fl.synthesis.training_state import normalize_pixels
from wsi_fl.types import UsageError, WsiFlError

_PAIRWISE_BYTES = 512 << 20
"""Default memory for embeddings."""

RANDOM = "random:"
"""`lpips.weights = "random:SEED"`: a substitute for tests, an untrained trunk."""

_CHANNELS = (64, 128, 256, 512, 512)
"""Numbers of features before each pooling."""
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""Normalisation of images in [−1, 1] for the trunk."""
_HUB_NAME = "timm/vgg16.tv_in1k"
_HEADS_FILE = Path(__file__).with_name("lpips_vgg16.safetensors")
_EPSILON = 1e-10
_ROUNDING_DISTANCE = 1e-5
"""Distances below are rounding."""
_MIN_PX = 16
"""Smallest image with pixels in the last block."""
_DIGEST_CHARS = 16


class Lpips(nn.Module):
    """An embedding of images whose squared Euclidean distance is LPIPS.

    Attributes:
        label: digest of the weights, or a note that the trunk is random, and so not `trained`.
    """

    def __init__(self, trunk: nn.ModuleList, label: str, *, trained: bool) -> None:
        super().__init__()
        self.trunk, self.label, self.trained = trunk, label, trained
        heads = load_file(_HEADS_FILE)
        for k in range(len(_CHANNELS)):
            self.register_buffer(f"head{k}", heads[f"lin{k}"].clamp_min(0).sqrt().view(1, -1, 1, 1))
        self.shift = nn.Buffer(torch.tensor(_SHIFT).view(1, 3, 1, 1))
        self.scale = nn.Buffer(torch.tensor(_SCALE).view(1, 3, 1, 1))
        self.requires_grad_(False).eval()
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings float32[b, d] of images float[b, c, h, w] in [−1, 1], c = 3 or 1; d grows with h · w."""
        if images.shape[-1] < _MIN_PX:
            raise UsageError(f"LPIPS needs images of at least {_MIN_PX} px, not {images.shape[-1]}")
        x = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
        x = (x.float() - self.shift) / self.scale
        parts = []
        with half_precision(images.device):
            for k, block in enumerate(self.trunk):
                x = block(functional.max_pool2d(x, 2) if k else x)
                features, weight = x.float(), getattr(self, f"head{k}")
                # unit length per position, weighted, averaged over positions
                length = features.square().sum(dim=1, keepdim=True).add(_EPSILON).sqrt()
                positions = features.shape[2] * features.shape[3]
                parts.append((features / length * (weight / positions**0.5)).flatten(1))
        return torch.cat(parts, dim=1)


def half_precision(device: torch.device) -> torch.autocast:
    """Return a context for bfloat16 on GPUs that support it.

    On CPUs it has no effect, so distances are reproducible there. Second derivatives are taken outside it.
    """
    is_supported = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=is_supported)


def load_lpips(weights: str | None) -> Lpips:
    """Return LPIPS on a VGG-16 trunk.

    Args:
        weights: a safetensors file with torchvision's names; None for torchvision's weights as timm publishes them;
            "random:SEED" for the substitute.

    Raises:
        WsiFlError: when the weights are not available or do not fit.
    """
    if weights is not None and weights.startswith(RANDOM):
        return _build_random_lpips(weights)
    try:
        path = download_weights("vgg16", _HUB_NAME) if weights is None else Path(weights)
    except NoWeightsError as error:
        raise NoWeightsError(f"{error}: lpips.weights = 'FILE.safetensors'") from None
    trunk = _build_trunk(read_weights(path), path)
    label = f"vgg16 sha256:{weights_digest(trunk)[:_DIGEST_CHARS]}"
    return Lpips(trunk, label, trained=True)


def _build_random_lpips(weights: str) -> Lpips:
    seed = weights.removeprefix(RANDOM)
    if not seed.isdecimal():
        raise UsageError(f"lpips.weights = {weights!r}: write {RANDOM}SEED with a whole number")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(seed))
        trunk = _build_trunk()
        for module in trunk.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    label = f"UNTRAINED vgg16, random from seed {seed}: a substitute for tests, no perceptual distance"
    return Lpips(trunk, label, trained=False)


def _build_trunk(state: Mapping[str, Tensor] | None = None, source: Path | None = None) -> nn.ModuleList:
    """Return the five blocks of VGG-16 without poolings, with weights by torchvision's names."""
    layers = make_layers(cfgs["D"])
    for name, parameter in layers.state_dict().items() if state is not None else ():
        value = (state or {}).get(f"features.{name}")
        if value is None or value.shape != parameter.shape:
            raise WsiFlError(
                f"{source}: features.{name} of a VGG-16 is missing or of another shape; "
                "lpips.weights wants torchvision's names"
            )
        parameter.copy_(value)
    blocks, block = nn.ModuleList(), nn.Sequential()
    for layer in layers:
        if isinstance(layer, nn.MaxPool2d):
            blocks.append(block)
            block = nn.Sequential()
        else:
            block.append(layer)
    return blocks


def compute_squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return float[n, m] ≥ 0 between embeddings a [n, d] and b [m, d].

    In single precision it is exact to about 1e-6 of the embeddings' squared lengths, which are of order 1.
    """
    lengths = a.square().sum(1)[:, None] + b.square().sum(1)[None, :]
    return torch.addmm(lengths, a, b.T, alpha=-2).clamp_min(0)


@torch.no_grad()
def _pairwise_lpips(lpips: Lpips, a: Tensor, b: Tensor, *, memory_bytes: int = _PAIRWISE_BYTES) -> Tensor:
    """Return LPIPS float32[n, m] between all images of a [n, c, h, w] and b [m, c, h, w], on the CPU.

    Embeddings take at most `memory_bytes`: a is embedded in blocks as large as possible, and b in small pieces, again
    for each block.
    """
    h, w = a.shape[-2:]
    image_bytes = 4 * sum(channels * (h >> k) * (w >> k) for k, channels in enumerate(_CHANNELS))
    max_images = max(2, memory_bytes // image_bytes)
    piece = max(1, min(32, max_images // 8))
    rows = []
    for images in torch.split(a, max(1, max_images - 2 * piece)):
        embeddings, others = embed_images(lpips, images, piece), torch.split(b, piece)
        columns = [compute_squared_distances(embeddings, embed_images(lpips, other, piece)).cpu() for other in others]
        rows.append(torch.cat(columns, 1))
    return torch.cat(rows)


def find_nearest_lpips(
    lpips: Lpips,
    images: Tensor,
    others: Tensor,
    patients: tuple[NDArray[np.str_], NDArray[np.str_]] | None = None,
    *,
    memory_bytes: int = _PAIRWISE_BYTES,
) -> NDArray[np.float64]:
    """Return LPIPS float64[n] of each image uint8[n, c, h, w] to the nearest of the others uint8[m, c, h, w].

    It is exactly 0 for differences by rounding.

    Args:
        patients: of images and others, str[n] and str[m]; then only different images of other patients count, and
            without any the distance is infinite.
    """
    pairs = _pairwise_lpips(lpips, normalize_pixels(images), normalize_pixels(others), memory_bytes=memory_bytes)
    distances: NDArray[np.float64] = pairs.double().numpy()
    distances[distances < _ROUNDING_DISTANCE] = 0.0
    if patients is not None:
        distances[(patients[0][:, None] == patients[1]) | (distances == 0)] = np.inf
    nearest: NDArray[np.float64] = distances.min(axis=1, initial=np.inf)
    return nearest


@torch.no_grad()
def embed_images(lpips: Lpips, images: Tensor, piece: int = 16) -> Tensor:
    """Return embeddings [n, d] of images in [−1, 1], on the device of the network, `piece` at a time."""
    device = lpips.shift.device
    return torch.cat([lpips(batch.to(device)) for batch in torch.split(images, piece)])


# ---- the privacy loss


@dataclass(frozen=True)
class Keepaway:
    """The privacy loss: a repulsion of synthetic from real images, up to the distance between real ones.

    Pennisi et al., "Decentralized distributed learning with privacy-preserving data synthesis", eq. 3, is

        L_PP = 1/b Σ_r Σ_s d(x_r, x_s),

    with d the LPIPS distance, over all pairs of a real and a synthetic image of a batch, of any classes. **Sign.**
    Minimising L_PP would pull the generator *onto* the real images: the loss must fall as d grows. **Bound.** −L_PP is
    unbounded, so a generator lowers it for ever by leaving the images' manifold, most with pairs that are far apart
    already. So each pair has a squared hinge instead,

        L = 1/b Σ_r Σ_s max(0, 1 − d(x_r, x_s) / m)²,

    in [0, 1] per pair, steepest for a copy, and without value or slope from the margin m on. For d well below m it
    falls like −2/m · L_PP. m is a quantile of LPIPS between different real images (`compute_margin`). Without a margin
    the loss is −L_PP itself, for comparison with the paper.

    Attributes:
        margin: m; None for −L_PP.
        references: embeddings [n, d] of real images for all batches; None for those of each batch, as in eq. 3. Hardly
            any image of a small batch is near, so the margin has to be wide; of many images the nearest few are, and a
            narrow margin pushes away only from them.
    """

    lpips: Lpips
    margin: float | None
    references: Tensor | None = None

    def __call__(self, real: Tensor, synthetic: Tensor) -> Tensor:
        """Return the loss of synthetic [b, c, h, w] beside real images [n, c, h, w] of the same batch, in [−1, 1].

        Images are clamped to [−1, 1], as in a store.
        """
        with torch.no_grad():
            real_embeddings = self.lpips(real) if self.references is None else self.references
        distances = compute_squared_distances(real_embeddings, self.lpips(clamp_images(synthetic)))
        losses = -distances if self.margin is None else _hinge_loss(distances, self.margin)
        return losses.sum() / len(synthetic)


def _hinge_loss(distances: Tensor, margin: float) -> Tensor:
    return (1 - distances / margin).clamp_min(0).square()


def clamp_images(images: Tensor) -> Tensor:
    """Return images clamped to [−1, 1], with the gradient of unclamped ones."""
    return images + (images.clamp(-1, 1) - images).detach()


def compute_margin(lpips: Lpips, images: Tensor, quantile: float) -> float:
    """Return a quantile of LPIPS over all pairs of different images [n, c, h, w], n ≥ 2."""
    distances = _pairwise_lpips(lpips, images, images)
    pairs = torch.triu_indices(len(images), len(images), offset=1)
    return max(float(torch.quantile(distances[pairs[0], pairs[1]], quantile)), 1e-6)
