"""The privacy-preserving loss: synthetic images are pushed away from every real image of the batch.

Pennisi et al., "Decentralized distributed learning with privacy-preserving data synthesis", eq. 3, is

    L_PP = 1/b Σ_r Σ_s d(x_r, x_s),

with d the LPIPS distance, over all pairs of a real and a synthetic image of a batch, whatever their classes; it
shall "penalise the model proportionally to the similarity". **Sign.** d is a distance: minimising L_PP as it
stands would pull the generator *onto* the real images. What is minimised must fall as d grows. **Bound.** −L_PP
does, but its slope never ends: a generator can lower it for ever by leaving the images' manifold, and wins more
from pairs that are far apart already than from near ones. So each pair is charged a squared hinge instead,

    h(d) = max(0, 1 − d / m)²,        L = 1/b Σ_r Σ_s h(d(x_r, x_s)),

which lies in [0, 1] per pair, is steepest for a copy (d = 0, slope −2/m), and whose value *and slope* are zero
from the margin m on: a pair that is m apart says nothing more. L lies in [0, b]; for d well below m it falls like
−2/m · L_PP, so there eq. 3 with its sign turned is recovered up to a factor and a constant. m is measured on the
site's training images: a quantile of LPIPS between different real images (`margin_of`), so a synthetic image is
never pushed further from a real one than real images are from one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wsi_fl.synthesis.lpips import Lpips, pairwise_lpips, squared_distances


def hinged(distances: Tensor, margin: float) -> Tensor:
    """max(0, 1 − d/m)² of each distance; 1 for a copy, 0 from the margin on.

    Example:
        >>> hinged(torch.tensor([0.0, 0.25, 0.5, 9.0]), 0.5).tolist()
        [1.0, 0.25, 0.0, 0.0]
    """
    return (1 - distances / margin).clamp_min(0).square()


@dataclass(frozen=True)
class Keepaway:
    """What the second phase keeps synthetic images away from.

    Attributes:
        margin: m above.
        kept: embeddings [n, d] of real images that every batch is compared with; None for those of its own batch
            alone, as in eq. 3. Of a small batch hardly any image is near, so the margin has to be wide; of many
            images the nearest few are, and a narrow margin pushes away from them alone.
    """

    lpips: Lpips
    margin: float
    kept: Tensor | None = None

    def __call__(self, real: Tensor, synthetic: Tensor) -> Tensor:
        """The loss of synthetic [b, c, h, w] beside the real images [b, c, h, w] of the same batch."""
        if self.kept is not None:
            return _embedded_loss(self.kept, self.lpips(clamped(synthetic)), self.margin)
        return privacy_loss(self.lpips, real, synthetic, self.margin)


def privacy_loss(lpips: Lpips, real: Tensor, synthetic: Tensor, margin: float) -> Tensor:
    """The bounded eq. 3 over all pairs of real [n, c, h, w] and synthetic [b, c, h, w] images in [−1, 1].

    Images leave [−1, 1] at no gain: they are clamped as a store would clamp them.

    Returns:
        A scalar in [0, n]: the sum over pairs, divided by b as in eq. 3.
    """
    with torch.no_grad():
        fixed = lpips(real)
    return _embedded_loss(fixed, lpips(clamped(synthetic)), margin)


def _embedded_loss(real: Tensor, synthetic: Tensor, margin: float) -> Tensor:
    """The same of embeddings [n, d] and [b, d]."""
    return hinged(squared_distances(real, synthetic), margin).sum() / len(synthetic)


def clamped(images: Tensor) -> Tensor:
    """To [−1, 1], letting gradients through as if nothing had been clamped."""
    return images + (images.clamp(-1, 1) - images).detach()


def margin_of(lpips: Lpips, images: Tensor, quantile: float) -> float:
    """A quantile of LPIPS over all pairs of different images [n, c, h, w], n ≥ 2."""
    distances = pairwise_lpips(lpips, images, images)
    above = torch.triu_indices(len(images), len(images), offset=1)
    return max(float(torch.quantile(distances[above[0], above[1]], quantile)), 1e-6)
