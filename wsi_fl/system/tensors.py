"""Named tensors in safetensors files; PyTorch is imported where one is read or written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from wsi_fl.system.files import atomic
from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from torch import Tensor


def save_tensors(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """Write a safetensors file with a JSON document in its header, whole or not at all, for its owner alone to read."""
    from safetensors.torch import save_file

    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with atomic(path) as temporary:
        temporary.touch(mode=0o600)
        save_file(contiguous, temporary, metadata={"document": json.dumps(document)})


def load_tensors(path: Path, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the document that `save_tensors` wrote.

    Raises:
        WsiFlError: when the file is damaged; the error says what it was.
    """
    with _opened(path, "pt", what) as (file, document):
        return {key: file.get_tensor(key) for key in file.keys()}, document  # noqa: SIM118


def load_document(path: Path, what: str) -> dict[str, Any]:
    """Return the document that `save_tensors` wrote, without PyTorch and without the tensors.

    Raises:
        WsiFlError: as `load_tensors`.
    """
    with _opened(path, "np", what) as (_, document):
        return document


@contextmanager
def _opened(path: Path, framework: str, what: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a file of `save_tensors` and read its document."""
    try:
        with safe_open(path, framework) as file:
            yield file, dict(json.loads((file.metadata() or {})["document"]))
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise WsiFlError(f"{path}: damaged {what} ({error})") from None
    except RecursionError:
        raise WsiFlError(f"{path}: damaged {what} (its document is nested too deeply)") from None


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, whoever wrote it.

    Raises:
        WsiFlError: when the file is damaged.
    """
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise WsiFlError(f"{path}: damaged ({error})") from None
