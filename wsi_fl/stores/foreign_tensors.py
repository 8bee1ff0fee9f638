"""Features of slides in PyTorch's and NumPy's files, of CLAM, slide2vec, Slideflow and eva.

slide2vec (clemsgrs/slide2vec, versions 5 to 7): `tile_embeddings/<slide>.pt` or `.npz` (`features`), float[m, d], with
`<slide>.meta.json`: `encoder_name`, `requested_tile_size_px`, `requested_spacing_um`, `tile_size_lv0`,
`encoder_input_size_px`, and since 7 `compatibility.transform`. `tiles/<slide>.coordinates.npz` has `x`, `y` int64[m]
in level-0 pixels. Vectors of slides, patients and single images are float[d] in
`slide_embeddings`, `patient_embeddings` and `image_embeddings`. hs2p, its tiler, writes coordinates and no features.

Slideflow (slideflow/slideflow, `DatasetFeatures.to_torch`): `<slide>.pt` float32[m, d], `<slide>.index.npz` with the
centres of tiles in level-0 pixels, and `bags_config.json`: `extractor.class`, `normalizer.method`, `tile_px`, and
`tile_um` in µm or as a magnification ("20x").

eva (kaiko-ai/eva, `ClassificationEmbeddingsWriter`): `<name>.pt` below a folder with `manifest.csv`, a list of
float[d].
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores.foreign_slides import (
    MAGNIFICATION_UM,
    FileFacts,
    ForeignSlide,
    check_features,
    check_places,
    find_files,
    list_files,
    read_number,
)
from wsi_fl.stores.images import UNREADABLE, read_npz
from wsi_fl.system.files import refuse_unavailable, require_regular_file
from wsi_fl.types import WsiFlError, single_line

_SLIDE2VEC_PATIENTS = "patient_embeddings"
_SLIDE2VEC_FOLDERS = ("tile_embeddings", "slide_embeddings", _SLIDE2VEC_PATIENTS, "image_embeddings")
_SLIDEFLOW_CONFIG = "bags_config.json"


def read_tensor(path: Path) -> ForeignSlide:
    """Read the features of a `.pt` file that says nothing else: one tensor, or a list of them, a row each.

    Raises:
        WsiFlError: for an invalid file, or one of more than tensors.
    """
    loaded = _load_pickle(path)
    tensors = loaded if isinstance(loaded, list) and loaded else [loaded]
    rows = [_to_array(tensor, path.name) for tensor in tensors]
    if len({row.shape for row in rows}) > 1:
        raise WsiFlError(f"{path.name}: its vectors have several shapes")
    values = rows[0] if len(rows) == 1 else np.stack(rows).reshape(len(rows), -1)
    return ForeignSlide(check_features(values, path.name), None, FileFacts())


def _load_pickle(path: Path) -> Any:
    # `weights_only` loads only tensors and plain containers and runs no code. A zip with compressed entries is refused:
    # PyTorch writes none, but unpacks one of any size.
    import torch

    if is_zipfile(require_regular_file(path)):  # else of PyTorch before 1.6
        try:
            with ZipFile(path) as archive:
                is_packed = any(entry.compress_type != ZIP_STORED for entry in archive.infolist())
        except BadZipFile:
            is_packed = False  # reported by PyTorch below
        if is_packed:
            raise WsiFlError(
                f"{path.name}: its tensor is compressed, which PyTorch never does; save it anew by torch.save"
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on refused pickles
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise WsiFlError(
            f"{path.name}: damaged, or it holds more than a tensor; it could run code, so it is not opened"
        ) from None
    except Exception as error:  # torch raises errors of many types
        raise WsiFlError(f"{path.name}: damaged ({single_line(error)[:120]})") from None


def _to_array(tensor: Any, name: str) -> NDArray[Any]:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or not tensor.is_floating_point():
        raise WsiFlError(f"{name}: holds a {type(tensor).__name__}, not one tensor of features")
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise WsiFlError(f"{name}: damaged, it claims more numbers than it holds")
    array: NDArray[Any] = tensor.detach().float().numpy()
    return array


def _read_arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    try:
        arrays = read_npz(path, names)
        return [arrays[name] for name in names]
    except UNREADABLE as error:
        refuse_unavailable(error, path.name)
        raise WsiFlError(f"{path.name}: not a readable npz file with {', '.join(names)}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(require_regular_file(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        refuse_unavailable(error, path.name)
        raise WsiFlError(f"{path.name}: not a readable JSON file ({single_line(error)[:120]})") from None
    if not isinstance(content, dict):
        raise WsiFlError(f"{path.name}: its JSON is no object")
    return content


def _read_section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def find_slide2vec(folder: Path) -> dict[str, Path]:
    """Return slide2vec's files in a folder or, of a run's folder, in the first of its kinds of vectors."""
    kinds = (folder / name for name in _SLIDE2VEC_FOLDERS)
    place = next((kind for kind in kinds if kind.is_dir()), folder)
    suffix = ".npz" if list_files(place, ".npz", is_deep=True) else ".pt"
    return find_files(place, suffix, "tile_embeddings/<slide>.pt with its .meta.json")


def read_slide2vec(path: Path) -> ForeignSlide:
    """Read the features of one slide, patient or image, and what slide2vec says of them.

    Raises:
        WsiFlError: for an invalid file.
    """
    meta = _read_json(path.with_suffix(".meta.json"))
    if path.suffix.lower() == ".npz":
        features = check_features(_read_arrays(path, "features")[0], path.name)
    else:
        features = read_tensor(path).features
    mpp, size, size_l0, input_px = (
        read_number(meta, name)
        for name in ("requested_spacing_um", "requested_tile_size_px", "tile_size_lv0", "encoder_input_size_px")
    )
    transform = _read_section(_read_section(meta, "compatibility"), "transform")
    facts = FileFacts(
        encoder=str(meta["encoder_name"]) if meta.get("encoder_name") else None,
        size_px=round(size) if size else None,
        mpp=mpp,
        mpp_l0=mpp * size / size_l0 if mpp and size and size_l0 else None,
        input_px=round(input_px) if input_px else None,
        transform=transform or None,
        names_patients=_SLIDE2VEC_PATIENTS in (meta.get("artifact_type"), path.absolute().parent.name),
    )
    tiles = Path(*("tiles" if part == "tile_embeddings" else part for part in path.absolute().parent.parts))
    places, xy = tiles / f"{path.stem}.coordinates.npz", None
    if meta.get("artifact_type") == "tile_embeddings" and places.is_file():
        xy = check_places(np.stack(_read_arrays(places, "x", "y"), -1), len(features), path.name)
    return ForeignSlide(features, xy, facts)


def read_slideflow(path: Path) -> ForeignSlide:
    """Read a bag, and what its folder's configuration says; a stain normaliser becomes part of the encoder's name.

    Raises:
        WsiFlError: for an invalid file.
    """
    config = _read_json(path.parent / _SLIDEFLOW_CONFIG)
    features = read_tensor(path).features
    name = re.sub("_?Features$", "", str(_read_section(config, "extractor").get("class", "")).rpartition(".")[2])
    method = _read_section(config, "normalizer").get("method")
    size, extent_um, is_nominal = read_number(config, "tile_px"), read_number(config, "tile_um"), False
    if size and (match := re.fullmatch(r"(\d+(?:\.\d+)?)x", str(config.get("tile_um")))):
        extent_um, is_nominal = size * MAGNIFICATION_UM / float(match[1]), True
    facts = FileFacts(
        encoder=f"{name} after stain normalisation by {method}" if name and method else name or None,
        size_px=round(size) if size else None,
        mpp=extent_um / size if extent_um and size else None,
        nominal=is_nominal,
    )
    if not extent_um or not (index := path.with_suffix(".index.npz")).is_file():
        return ForeignSlide(features, None, facts)
    centres = check_places(_read_arrays(index, "arr_0")[0], len(features), path.name)
    return ForeignSlide(features, centres, facts, half_um=extent_um / 2)
