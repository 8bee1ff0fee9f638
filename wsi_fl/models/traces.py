"""Removal of traces of the exporting machine, mainly paths, from exported models."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch

_TRACE_SUFFIX = ".debug_pkl"
"""Suffix of the source lines of a code file in a TorchScript archive."""


def remove_onnx_traces(message: Any) -> None:
    """Remove stack traces and notes from each part of an ONNX message; the model's metadata stay.

    Args:
        message: `onnx.ModelProto`, changed in place.
    """
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE:
            continue
        for part in value if hasattr(value, "__len__") else [value]:
            for note in ("metadata_props", "doc_string"):
                if note in part.DESCRIPTOR.fields_by_name:
                    part.ClearField(note)
            remove_onnx_traces(part)


def remove_torchscript_traces(path: Path) -> None:
    """Rewrite a TorchScript archive without source lines and its original name."""
    reader, buffer = torch._C.PyTorchFileReader(str(path)), BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name in reader.get_all_records():
        if not name.endswith(_TRACE_SUFFIX) and name not in ("version", "byteorder", ".data/serialization_id"):
            data = reader.get_record(name)
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    path.write_bytes(buffer.getvalue())
