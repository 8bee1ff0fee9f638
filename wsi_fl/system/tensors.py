"""Named tensors in safetensors files, with a digest of them; PyTorch is imported where one is read or written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from wsi_fl.system.files import atomic_path, refuse_unavailable, require_regular_file
from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from torch import Tensor


_DIGEST_KEY = "tensors_sha256"
"""A key of the document in the file, hidden from callers. A second entry beside the document would have no fixed order,
and the file no fixed bytes."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """Write a safetensors file with a JSON document in its header, atomically and readable by its owner alone.

    Tensors with shared memory, such as a layer with two names in a model, are written under each name.
    """
    from safetensors.torch import save_file

    contiguous: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in tensors.items():
        plain = value.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        contiguous[name] = plain.clone() if place in storages else plain
        storages.add(place)
    with atomic_path(path) as temporary:
        temporary.touch(mode=0o600)
        facts = json.loads(json.dumps(document))
        header = facts | {_DIGEST_KEY: _tensors_digest(contiguous, facts)}
        save_file(contiguous, temporary, metadata={"document": json.dumps(header)})


def load_tensors(path: Path, kind: str, advice: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the document of such a file; WsiFlError, with advice, where it is damaged."""
    return _read_tensors(path, f" {kind}", advice)


def load_document(path: Path, kind: str) -> dict[str, Any]:
    """Return the document of such a file, without PyTorch and without the tensors."""
    return _read_tensors(path, f" {kind}", "", framework="np")[1]


def load_weights(path: Path, advice: str) -> dict[str, Tensor]:
    """Return the tensors of a file of any program; WsiFlError, with advice, where it is damaged."""
    return _read_tensors(path, "", advice, ours=False)[0]


def _read_tensors(
    path: Path, kind: str, advice: str, *, framework: str = "pt", ours: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors (none with numpy) and the document; the toolkit's own files have a digest."""
    advice_text = f"; {advice}" if advice else ""
    try:
        with safe_open(require_regular_file(path), framework) as file:
            metadata = file.metadata() or {}
            document = dict(json.loads(metadata["document"] if ours else metadata.get("document", "{}")))
            stored_digest = document.pop(_DIGEST_KEY, None)
            if framework == "np":
                return {}, document
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if (ours or stored_digest is not None) and stored_digest != _tensors_digest(tensors, document):
                raise ValueError("not the bytes that were written")
            return tensors, document
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        refuse_unavailable(error, path)
        raise WsiFlError(f"{path}: damaged{kind} ({error}){advice_text}") from None
    except RecursionError:
        raise WsiFlError(f"{path}: damaged{kind} (its document is nested too deeply){advice_text}") from None


def _tensors_digest(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document and contiguous tensors: their names, types, shapes and bytes."""
    import torch

    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
