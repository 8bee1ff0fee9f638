"""Networks of any layers, gradients of a loop, pyramids and JPEG tables for the unit tests."""

from functools import partial
from importlib.util import find_spec

import conftest
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from wsi_fl.types import WsiFlError

refused = partial(conftest.refused, error=WsiFlError)
"""What fails in one line that holds these words, whoever is to blame."""


class Net(nn.Module):
    """Layers and parameters by name, with a forward function of the module and images."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.run(self, x)


def cross_entropy(y):
    return lambda out: functional.cross_entropy(out, y)


class Recorder(torch.optim.SGD):
    """Keeps the gradient that it is given, float64[n]."""

    def step(self, closure=None):
        self.mean = torch.cat([p.grad.flatten().double() for p in self.param_groups[0]["params"]])


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def vary(model, low=0.5, high=1.5):
    """Randomize constant weights: a gain of 0 would hide errors."""
    with torch.no_grad():
        for p in trainable(model):
            if p.min() == p.max():
                p.uniform_(low, high, generator=torch.Generator().manual_seed(0))
    return model


def each_gradient(model, x, y):
    """Compute the gradients [b, …] of cross-entropy by each trained parameter, one example at a time."""
    rows = []
    for k in range(len(x)):
        loss = functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1])
        rows.append(torch.autograd.grad(loss, trainable(model)))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def norms_of(each):
    """Return float[b], the norm of each example's gradient."""
    return torch.stack([g.flatten(1).norm(dim=1) for g in each]).norm(dim=0)


def clipped(each, clip):
    """Return Σ_i g_i · min(1, C / |g_i|) for each parameter."""
    c = (clip / norms_of(each)).clamp(max=1.0)
    return [torch.einsum("n,n...->...", c, g) for g in each]


def compare_with_loop(sums_of, model, x, y, rtol=1e-3):
    """Check that sums, with some examples clipped, equal those of a loop over examples, parameter by parameter."""
    each = each_gradient(model, x, y)
    norms, told = norms_of(each), []
    clip = float(norms.sort().values[: len(x) // 2 + 1].mean())
    assert 0 < int((norms > clip).sum()) < len(x)

    def weigh(found):
        told.append(found)
        return (clip / found).clamp(max=1.0)

    sums, loss = sums_of(model, x, cross_entropy(y), weigh)
    torch.testing.assert_close(torch.cat(told), norms.double(), rtol=rtol, atol=0.0)
    for found, wanted in zip(sums, clipped(each, clip), strict=True):
        assert found.shape == wanted.shape
        assert float((found - wanted).norm()) <= rtol * float(wanted.norm()) + 1e-6 * clip
    torch.testing.assert_close(loss, functional.cross_entropy(model(x), y).detach())


def halves(picture, n=3):
    """Return levels of a pyramid, each half as wide as the previous one."""
    levels = [picture]
    for _ in range(n - 1):
        levels.append(np.asarray(Image.fromarray(levels[-1]).reduce(2)))
    return levels


needs_formats = pytest.mark.skipif(find_spec("zarr") is None, reason="the libraries of wsi-fl[formats] are not here")


def write_tiff(path, levels, mpp=0.5, unit="CENTIMETER", **how):
    """Write a pyramid of tiles of 64 px; `mpp` is that of level 0, of both axes or of each, or None."""
    usual = {"tile": (64, 64), "photometric": "rgb", "compression": "deflate", "metadata": None}
    with tifffile.TiffWriter(path, bigtiff=True) as tif:
        for k, level in enumerate(levels):
            um = {"CENTIMETER": 1e4, "INCH": 25_400.0}[unit] * level.shape[1] / levels[0].shape[1]
            said = {"resolution": tuple(um / np.broadcast_to(mpp, 2)), "resolutionunit": unit} if mpp else {}
            tif.write(level, subfiletype=int(k > 0), **(usual | said | how))
    return path


def write_ome(path, levels, *, planes=False, mpp=0.5, channel=None, **how):
    """Write an OME-TIFF with its pyramid in SubIFDs; its colours lie in each pixel, or in planes of their own."""
    levels = [np.moveaxis(level, 2, 0).copy() if planes else level for level in levels]
    said = {"axes": "CYX" if planes else "YXS", "PhysicalSizeX": mpp, "PhysicalSizeXUnit": "µm"}
    said |= {"PhysicalSizeY": mpp * 1000, "PhysicalSizeYUnit": "nm"} | ({"Channel": channel} if channel else {})
    how = {"photometric": "minisblack" if planes else "rgb"} | how
    with tifffile.TiffWriter(path, bigtiff=True, ome=True) as tif:
        tif.write(levels[0], subifds=len(levels) - 1, metadata=said, **how)
        for level in levels[1:]:
            tif.write(level, subfiletype=1, **how)
    return path


def change_tag(path, tag, change, pages=(0,)):
    """Replace the value of a tag of some pages by a function of it, in place."""
    with tifffile.TiffFile(path, mode="r+b") as tif:
        for page in pages:
            found = tif.pages[page].tags[tag]
            found.overwrite(change(found.value))


def tables_apart(stream, without=()):
    """Return (tables, the JPEG stream without them and without some markers), as TIFF stores them."""
    tables, rest, place = [], [], 2
    while stream[place + 1] != 0xDA:
        end = place + 2 + int.from_bytes(stream[place + 2 : place + 4])
        if stream[place + 1] not in without:
            (tables if stream[place + 1] in {0xDB, 0xC4} else rest).append(stream[place:end])
        place = end
    return b"\xff\xd8" + b"".join(tables) + b"\xff\xd9", b"\xff\xd8" + b"".join(rest) + stream[place:]
