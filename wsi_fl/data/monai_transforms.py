"""Random transforms of MONAI by name, as augmentation of training images.

MONAI is imported when a transform is named, which takes seconds, and never else.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wsi_fl.types import UsageError, WsiFlError, single_line

if TYPE_CHECKING:
    from torch import Tensor

    from wsi_fl.data.augmentation import Augment
    from wsi_fl.privacy.cipher import CipherStream

_SEED_WORDS = 4
"""Words of 64 bits that seed the generator of one image: 256 bits, as many as the stream's key has."""
_PROBE_SHAPE, _PROBES = (3, 33, 33), 3


def build_transform(call: str, stream: CipherStream) -> Augment:
    """Return a random transform of MONAI on images float32[c, h, w] in [−1, 1], such as `RandZoom(prob=0.5)`.

    MONAI draws from a `RandomState`, a Mersenne Twister. It is seeded anew for each image, with 256 bits of the
    stream. ε is unaffected. Its proof takes two data sets that differ in a record, and needs that the views of the
    other records have the same distribution in both, so that one gradient of bounded norm differs. For this seeds must
    be independent and secret, and they are, for the stream is; a view must depend on its record and seed alone, which
    `check_transform` tries. That the numbers of one image predict each other does not matter.

    Raises:
        UsageError: for a name or an argument that MONAI does not know, or no random transform of an image.
        WsiFlError: where MONAI is not installed. The transform raises it where it fails or changes an image's shape.
    """
    return _seed_by_stream(_create_transform(call), call, stream)


def check_transform(call: str) -> None:
    """Refuse a transform that fails on images of noise, changes their shape, or draws elsewhere than from its state.

    Raises:
        UsageError: see above and `build_transform`.
        WsiFlError: where MONAI is not installed.
    """
    import torch

    from wsi_fl.privacy.cipher import CipherStream

    transform = _create_transform(call)
    transform.prob = 1.0  # else most probes come back unchanged

    def draw_view(image: Tensor, seed: int) -> Tensor:
        return _seed_by_stream(transform, call, CipherStream.from_seed(seed))(image)

    images = [
        torch.from_numpy(CipherStream.from_seed(k, "probe").uniform(int(np.prod(_PROBE_SHAPE))) * 2 - 1)
        .float()
        .view(_PROBE_SHAPE)
        for k in range(_PROBES)
    ]
    for seed in range(_PROBES):
        views = [[draw_view(image, seed) for image in order] for order in (images, images[::-1])]
        if not all(map(torch.equal, views[0], views[1][::-1])):
            raise UsageError(
                f"train.augment: monai:{call} makes different images of the same image and random state; use another"
            )


def _seed_by_stream(transform: Any, call: str, stream: CipherStream) -> Augment:
    import torch

    state = np.random.RandomState(0)  # seeded anew for each image: a new object takes ten times as long

    def apply_transform(image: Tensor) -> Tensor:
        state.seed(stream.random_words(_SEED_WORDS).view(np.uint32))
        transform.set_random_state(state=state)
        try:
            view = torch.as_tensor(transform(image.clone())).as_subclass(torch.Tensor)
        except Exception as error:  # whatever MONAI raises
            shape = "×".join(map(str, image.shape))
            raise UsageError(f"train.augment: monai:{call} fails on {shape}: {single_line(error)}") from None
        if view.shape != image.shape:
            shapes = ["×".join(map(str, shape)) for shape in (image.shape, view.shape)]
            raise UsageError(f"train.augment: monai:{call} makes {shapes[1]} of {shapes[0]}; use one that keeps shapes")
        return view.to(image)

    return apply_transform


def _create_transform(call: str) -> Any:
    """Return an instance of MONAI's class for "NAME" or "NAME(argument=value, …)"."""
    name, arguments = _parse_call(call)
    if "lazy" in arguments:
        raise UsageError(f"train.augment: monai:{call}: leave out lazy, which puts the transform off")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from monai import transforms
    except ModuleNotFoundError:
        raise WsiFlError(f"train.augment = monai:{name} needs MONAI: pip install monai") from None
    kind = getattr(transforms, name, None)
    is_random = isinstance(kind, type) and issubclass(kind, transforms.RandomizableTransform)
    if kind is None:
        raise UsageError(f"train.augment: MONAI has no transform {name!r}")
    if not is_random or issubclass(kind, transforms.MapTransform) or not name.startswith("Rand"):
        raise UsageError(f"train.augment: MONAI's {name!r} is no random transform of an image, such as RandZoom")
    try:
        return kind(**arguments)
    except Exception as error:  # whatever MONAI raises
        raise UsageError(f"train.augment: monai:{call}: {single_line(error)}") from None


def _parse_call(call: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of a call, which are literals of Python such as 0.5, "edge" and [0.9, 1.1]."""
    try:
        node = ast.parse(call, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, dict(_parse_argument(keyword) for keyword in node.keywords)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        pass
    raise UsageError(f"train.augment: monai:{call}: write monai:NAME or monai:NAME(argument=value)")


def _parse_argument(keyword: ast.keyword) -> tuple[str, Any]:
    if keyword.arg is None:
        raise ValueError("** is no argument")
    return keyword.arg, ast.literal_eval(keyword.value)
