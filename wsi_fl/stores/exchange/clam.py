"""CLAM's layout (mahmoodlab/CLAM, `extract_features_fp.py`): `h5_files/<slide>.h5`, `pt_files/<slide>.pt`.

The HDF5 file has `features` float32[m, d] and `coords` int32[m, 2] in level-0 pixels, and says neither encoder nor
patch size. The `.pt` file is the features alone as a tensor, which is what CLAM's training reads.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

from wsi_fl.stores.bags import BagStore
from wsi_fl.stores.exchange.foreign import Facts, Foreign, by_slide, checked_features, mpp_of_each
from wsi_fl.stores.exchange.trident import attrs_of, read_trident, write_bag
from wsi_fl.system.files import atomic, ordinary
from wsi_fl.types import UsageError, WsiFlError


def find_clam(folder: Path) -> dict[str, Path]:
    """Return the file of every slide: the HDF5 file, or the `.pt` where there is none.

    Raises:
        UsageError: when the folder has neither.
    """
    whole, bare = folder.glob("h5_files/*.h5"), folder.glob("pt_files/*.pt")
    found = by_slide(bare) | by_slide(whole)
    if not found:
        raise UsageError(f"{folder}: neither h5_files/*.h5 nor pt_files/*.pt in it")
    return dict(sorted(found.items()))


def read_clam(path: Path) -> Foreign:
    """Return the features of one slide; those of a `.pt` have no places.

    Raises:
        WsiFlError: in one line, when the file is damaged, or holds anything but one tensor.
    """
    return read_trident(path) if path.suffix == ".h5" else _read_tensor(path)


def _read_tensor(path: Path) -> Foreign:
    """Return the features of a `.pt`: a pickle, of which `weights_only` loads tensors alone and runs no code.

    Raises:
        WsiFlError: when it is damaged, or holds anything but one tensor of features.
    """
    import torch

    _refuse_packed(ordinary(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that are refused anyway
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise WsiFlError(
            f"{path.name}: damaged, or it holds more than a tensor; it could run code, so it is not opened"
        ) from None
    except Exception as error:  # torch wraps what it finds in whatever comes first
        raise WsiFlError(f"{path.name}: damaged ({str(error).strip().splitlines()[0][:120]})") from None
    if not isinstance(found, torch.Tensor) or found.layout != torch.strided or not found.is_floating_point():
        raise WsiFlError(f"{path.name}: holds a {type(found).__name__}, not one tensor of features")
    if found.untyped_storage().nbytes() < found.nbytes:
        raise WsiFlError(f"{path.name}: damaged, it claims more numbers than it holds")
    return Foreign(checked_features(found.detach().float().numpy(), path.name), None, Facts())


def _refuse_packed(path: Path) -> None:
    """Refuse a zip whose entries are compressed: PyTorch writes none, but would unpack one of any size.

    Raises:
        WsiFlError: when an entry is compressed.
    """
    if not is_zipfile(path):
        return  # of PyTorch before 1.6
    try:
        with ZipFile(path) as archive:
            packed = any(one.compress_type != ZIP_STORED for one in archive.infolist())
    except BadZipFile:
        return  # for PyTorch to say
    if packed:
        raise WsiFlError(
            f"{path.name}: its tensor is compressed, which PyTorch never does; save it anew by torch.save"
        )


def write_clam(store: BagStore, folder: Path, *, tensors: bool = False) -> list[Path]:
    """Write `h5_files/<slide>.h5` for every bag, with the attributes that TRIDENT's readers want; return their paths.

    Args:
        tensors: whether `pt_files/<slide>.pt` is written too, one float32[m, d] each, which CLAM's training reads.
    """
    files = []
    for k, mpp_l0 in enumerate(mpp_of_each(store).tolist()):
        slide, bag = str(store.table.slide[k]), store.bag(k)
        files.append(folder / "h5_files" / f"{slide}.h5")
        write_bag(files[-1], bag, store.meta.encoder, attrs_of(slide, store.meta.spec, mpp_l0))
        if tensors:
            import torch

            with atomic(folder / "pt_files" / f"{slide}.pt") as temporary:
                torch.save(torch.from_numpy(bag.features), temporary)
    return files
