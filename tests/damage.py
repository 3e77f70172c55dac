"""Ways to change the files of a checkpoint, for tests that need wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lily.tensor_files import read_header


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_text_config(folder: Path, values: dict[str, Any]) -> None:
    edit_json(folder / "config.json", lambda config: config["text_config"].update(values))


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header, data = split(path)
    change(header)
    join(path, header, data)


def rebuild(path: Path, change: Callable[[dict[str, tuple[str, list[int], bytes]]], object]) -> None:
    """Rewrite a file, with a valid layout, after `change` has edited name -> (dtype, shape, bytes)."""
    header, data = split(path)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"], data[start:end])
    change(tensors)
    new_header: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, (dtype, shape, raw) in tensors.items():
        new_header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        parts.append(raw)
    join(path, new_header, b"".join(parts))


def poke(path: Path, name: str, element: int, value: float) -> None:
    """Overwrite one value of a BF16 or F32 tensor."""
    stored = read_header(path)[name]
    raw = np.float32(value).tobytes()
    raw = raw[2:] if stored.dtype == "BF16" else raw
    with path.open("r+b") as file:
        file.seek(stored.offset + element * len(raw))
        file.write(raw)
