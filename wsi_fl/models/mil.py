"""Models of features. Of bags: Deep Sets, gated attention, CLAM's branch, a small TransMIL. Of vectors: small heads.

A batch of bags is one tensor float32[b, m, d + 1] whose last column is 1 for a patch and 0 for padding. The other
columns of padding are ignored.

All begin with a LayerNorm, since encoders differ in scale, and keep examples independent. All parameters belong to
layers, so that differential privacy has the gradients of single examples (`wsi_fl.privacy.gradients`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_fl.models.cnn import build_perceptron

_HIDDEN_UNITS, _ATTENTION_UNITS = 256, 128  # units of φ and ρ, and of the attention
_SMALL_HIDDEN_UNITS = 64  # a fifth of the parameters on 1024 features
_TOKEN_UNITS, _N_HEADS, _N_LANDMARKS = 128, 4, 1024
"""Units of a token of TransMIL, heads of its attention, and maximum number of patches with exact attention."""

_Pool = Callable[[Tensor, Tensor], Tensor]
"""(φ float32[b, m, hidden] ≥ 0 and 0 at padding, mask bool[b, m]) → float32[b, hidden]."""


class BagModel(nn.Module):
    """A model of bags, optionally with attention weights."""

    def patch_attention(self, bags: Tensor) -> Tensor | None:
        """Return weights float32[b, m] of the patches, 0 at padding; None for a model without weights."""
        del bags
        return None


class _PooledBag(BagModel):
    """ρ of the pooled φ of each patch; φ ends in a ReLU."""

    def __init__(self, phi: nn.Module, pool: _Pool, rho: nn.Module) -> None:
        super().__init__()
        self.phi, self.pool, self.rho = phi, pool, rho

    def _embed_patches(self, bags: Tensor) -> tuple[Tensor, Tensor]:
        features, present = _split_bags(bags)
        return self.phi(features) * present.unsqueeze(2), present

    def forward(self, bags: Tensor) -> Tensor:
        logits: Tensor = self.rho(self.pool(*self._embed_patches(bags)))
        return logits

    def patch_attention(self, bags: Tensor) -> Tensor | None:
        return self.pool.attention_weights(*self._embed_patches(bags)) if isinstance(self.pool, _Attention) else None


def _split_bags(bags: Tensor) -> tuple[Tensor, Tensor]:
    """Return (features float32[b, m, d], 0 at padding, and the mask bool[b, m] of patches)."""
    present = bags[..., -1] > 0.5
    return torch.where(present.unsqueeze(2), bags[..., :-1], 0.0), present


def _mean_pool(phi: Tensor, present: Tensor) -> Tensor:
    return phi.sum(1) / present.sum(1, keepdim=True).clamp(min=1)


def _max_pool(phi: Tensor, present: Tensor) -> Tensor:
    del present  # φ ends in a ReLU, so the zeros of padding are never larger
    return phi.amax(1)


class _Attention(nn.Module):
    """A mean of the patches, weighted by the softmax of their scores over the bag (Ilse et al., ICML 2018)."""

    def __init__(self, score: nn.Module) -> None:
        super().__init__()
        self.score = score

    def attention_weights(self, phi: Tensor, present: Tensor) -> Tensor:
        """Return weights float32[b, m], 0 at padding, of sum 1 over each bag with a patch."""
        scores = self.score(phi).squeeze(2).masked_fill(~present, torch.finfo(phi.dtype).min)
        return torch.softmax(scores, dim=1) * present

    def forward(self, phi: Tensor, present: Tensor) -> Tensor:
        return (self.attention_weights(phi, present).unsqueeze(2) * phi).sum(1)


def build_deepset(n_classes: int, n_features: int, hidden: int = _HIDDEN_UNITS, pool: _Pool = _mean_pool) -> nn.Module:
    """Build two layers on each patch, a mean or other pooling over the bag, and two layers on the result."""
    phi = nn.Sequential(nn.LayerNorm(n_features), *build_perceptron(n_features, hidden, hidden), nn.ReLU())
    return _PooledBag(phi, pool, nn.Sequential(*build_perceptron(hidden, hidden, n_classes)))


def _deepset_attention(n_classes: int, n_features: int) -> nn.Module:
    score = nn.Sequential(nn.Linear(_HIDDEN_UNITS, _ATTENTION_UNITS), nn.Tanh(), nn.Linear(_ATTENTION_UNITS, 1))
    return build_deepset(n_classes, n_features, pool=_Attention(score))


class _Gated(nn.Module):
    """Scores wᵀ(tanh(V h) ⊙ σ(U h)) of patches (Ilse et al., eq. 9)."""

    def __init__(self, hidden: int, attending: int) -> None:
        super().__init__()
        self.v, self.u = nn.Linear(hidden, attending), nn.Linear(hidden, attending)
        self.w = nn.Linear(attending, 1)

    def forward(self, h: Tensor) -> Tensor:
        scores: Tensor = self.w(torch.tanh(self.v(h)) * torch.sigmoid(self.u(h)))
        return scores


def _build_gated(n_classes: int, n_features: int, hidden: int, attending: int) -> nn.Module:
    phi = nn.Sequential(nn.LayerNorm(n_features), nn.Linear(n_features, hidden), nn.ReLU())
    return _PooledBag(phi, _Attention(_Gated(hidden, attending)), nn.Linear(hidden, n_classes))


class _SelfAttention(nn.Module):
    """One block of TransMIL: self-attention with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_TOKEN_UNITS)
        self.query, self.key, self.value = (nn.Linear(_TOKEN_UNITS, _TOKEN_UNITS, bias=False) for _ in range(3))
        self.out = nn.Linear(_TOKEN_UNITS, _TOKEN_UNITS)

    def project_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, float32[b, 1 + m, units] each."""
        x = self.norm(tokens)
        return self.query(x), self.key(x), self.value(x)


def _split_heads(x: Tensor) -> Tensor:
    """float32[n, units] → float32[heads, n, units / heads]."""
    return x.view(len(x), _N_HEADS, -1).transpose(0, 1)


def _landmark_means(x: Tensor) -> Tensor:
    """Return the class token and 1024 means over runs of consecutive patches."""
    return torch.cat([x[:1], functional.adaptive_avg_pool1d(x[1:].T, _N_LANDMARKS).T])


def _attend_tokens(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the attention float32[n, units] of tokens of one bag, without n × n numbers in memory."""
    attended = functional.scaled_dot_product_attention(
        _split_heads(q)[None], _split_heads(k)[None], _split_heads(v)[None], attn_mask=bias
    )
    return attended[0].transpose(0, 1).flatten(1)


def _self_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the self-attention of one bag: exact, or for many patches with landmarks weighted by their patches."""
    n = len(k) - 1
    if n <= _N_LANDMARKS:
        return _attend_tokens(q, k, v)
    bias = functional.pad(k.new_full((1, _N_LANDMARKS), log(n / _N_LANDMARKS)), (1, 0))
    return _attend_tokens(q, _landmark_means(k), _landmark_means(v), bias)


class _TransMil(BagModel):
    """TransMIL (Shao et al., NeurIPS 2021), made small: two blocks of self-attention over 128 units, 4 heads.

    Differences from TransMIL: attention is exact in bags of up to 1024 patches. In larger ones patches attend to 1024
    means over runs of consecutive patches, in place of Nyström's approximation; the class token attends to every patch,
    so memory grows linearly with the number of patches. There are no convolutions over the patches laid out in a square
    (PPEG and Nyström's residual), since the order in a list is not spatial: in bags of up to 1024 patches it does not
    matter. There is no dropout. The class token comes first, then those of the patches.
    """

    def __init__(self, n_classes: int, n_features: int) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.LayerNorm(n_features), nn.Linear(n_features, _TOKEN_UNITS), nn.ReLU())
        self.token = nn.Linear(1, _TOKEN_UNITS, bias=False)  # of a constant: so the parameter belongs to a layer
        self.among, self.onto = _SelfAttention(), _SelfAttention()
        self.rho = nn.Sequential(nn.LayerNorm(_TOKEN_UNITS), nn.Linear(_TOKEN_UNITS, n_classes))

    def _first_block(self, bags: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return tokens float32[b, 1 + m, units] after the first block, and the indices of those in each bag."""
        features, present = _split_bags(bags)
        first = self.token(features.new_ones(len(features), 1, 1))
        tokens = torch.cat([first, self.phi(features)], dim=1)
        indices = [functional.pad(row, (1, 0), value=True).nonzero().flatten() for row in present]
        blocks = [
            torch.zeros_like(row).index_copy(0, index, _self_attend(q[index], k[index], v[index]))
            for row, q, k, v, index in zip(tokens, *self.among.project_tokens(tokens), indices, strict=True)
        ]
        return tokens + self.among.out(torch.stack(blocks)), indices

    def forward(self, bags: Tensor) -> Tensor:
        tokens, indices = self._first_block(bags)
        attended = [
            _attend_tokens(q[:1], k[index], v[index])  # the attention of patches is not needed here
            for q, k, v, index in zip(*self.onto.project_tokens(tokens), indices, strict=True)
        ]
        logits: Tensor = self.rho(tokens[:, 0] + self.onto.out(torch.cat(attended)))
        return logits

    def patch_attention(self, bags: Tensor) -> Tensor:
        """Return the attention float32[b, m] of the class token to patches in the second block, the mean over heads."""
        tokens, indices = self._first_block(bags)
        rows = []
        for q, k, index in zip(*self.onto.project_tokens(tokens)[:2], indices, strict=True):
            query, keys = _split_heads(q[:1]), _split_heads(k[index])
            weights = torch.softmax(query @ keys.mT / keys.shape[2] ** 0.5, dim=2).mean((0, 1))[1:]
            zeros = q.new_zeros(bags.shape[1])
            rows.append(zeros.index_copy(0, index[1:] - 1, weights / weights.sum()))
        return torch.stack(rows)


class MeanOfBag(nn.Module):
    """The mean of bags: float32[b, m, d + 1] to features float32[b, d]."""

    def forward(self, bags: Tensor) -> Tensor:
        return _mean_pool(*_split_bags(bags))


def build_linear_head(n_classes: int, n_features: int) -> nn.Module:
    """Build LayerNorm and fc(n_classes), small enough to train under differential privacy."""
    return nn.Sequential(nn.LayerNorm(n_features), nn.Linear(n_features, n_classes))


def _mlp_head(n_classes: int, n_features: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(n_features), *build_perceptron(n_features, 64, n_classes))


def _mean_head(n_classes: int, n_features: int) -> nn.Module:
    return nn.Sequential(MeanOfBag(), *build_linear_head(n_classes, n_features))  # type: ignore[misc]


VECTOR_BUILDERS: dict[str, Callable[[int, int], nn.Module]] = {"linear_head": build_linear_head, "mlp_head": _mlp_head}
"""(n_classes, n_features) → a model of vectors."""

BAG_BUILDERS: dict[str, Callable[[int, int], nn.Module]] = {
    "deepset": build_deepset,
    "deepset_small": partial(build_deepset, hidden=_SMALL_HIDDEN_UNITS),
    "deepset_max": partial(build_deepset, pool=_max_pool),
    "deepset_attention": _deepset_attention,
    "abmil": partial(_build_gated, hidden=_HIDDEN_UNITS, attending=_ATTENTION_UNITS),
    "clam_sb": partial(_build_gated, hidden=512, attending=256),
    "transmil": _TransMil,
    "mean_head": _mean_head,
}
"""(n_classes, n_features) → a model of bags.

`deepset_small` is a proxy for private models of `deepset`, lighter to send (ProxyFL's patent, FIG. 8D, without sizes).
`abmil` is gated attention (Ilse, Tomczak and Welling, ICML 2018, eq. 9) on a projection to 256 units. `clam_sb` is the
single attention branch of CLAM (Lu et al., Nature Biomedical Engineering 2021), `small` in the paper's code, without
the clustering loss on the patches of highest and lowest attention, since here every model has a single loss on its
logits; without dropout; and with a LayerNorm first. So it differs from `abmil` only in size.
"""
