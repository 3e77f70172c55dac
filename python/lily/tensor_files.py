"""Find a checkpoint's safetensors files and parse their headers.

Only headers are read. The parser accepts exactly the published format: an 8-byte little-endian length, a JSON
object, and tensors that fill the rest of the file without gap or overlap.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from lily.errors import CheckpointError
from lily.files import FileIdentity, identity, is_there, named, open_regular, shown
from lily.model_config import canonical_name, is_ignored, listed, parse_json, read_json

MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `nbytes` bytes at byte `offset` of `path`, which was `file` at that time."""

    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int
    nbytes: int
    file: FileIdentity


def read_tensor_table(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the text model in `folder` by its canonical name.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or index and shards disagree.
    """
    index_path = folder / _INDEX
    if is_there(index_path):
        return _read_shards(folder, index_path)
    if not is_there(folder / _SINGLE):
        weights = (".safetensors", ".gguf", ".bin")
        try:
            others = sorted(named(path.name) for path in folder.iterdir() if path.suffix in weights)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error
        found = f"; found {', '.join(others[:3])}" if others else ""
        raise CheckpointError(f"{folder}: neither {_SINGLE} nor {_INDEX}{found}")
    return _named(read_header(folder / _SINGLE), {})


def _read_shards(folder: Path, index_path: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is missing or empty")
    by_shard: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        # A shard name is a plain file name: an index must not lead out of its folder.
        plain = isinstance(shard, str) and shard.isprintable() and {"/", "\\"}.isdisjoint(shard)
        if not plain or shard in ("", ".", ".."):
            raise CheckpointError(f"{index_path}: {named(name)}: bad shard name {shown(shard)}")
        by_shard.setdefault(shard, []).append(name)
    missing = [named(shard) for shard in sorted(by_shard) if not os.path.exists(folder / shard)]
    if missing:
        raise CheckpointError(f"{folder}: incomplete, shards named by {_INDEX} are missing:{listed(missing)}")
    table: dict[str, StoredTensor] = {}
    for shard in sorted(by_shard):
        stored = read_header(folder / shard)
        absent = [named(name) for name in by_shard[shard] if name not in stored and not is_ignored(name)]
        if absent:
            raise CheckpointError(f"{folder / shard}: lacks tensors that {_INDEX} names:{listed(absent)}")
        table = _named(stored, table)
    return table


def _named(stored: dict[str, StoredTensor], table: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    for name, tensor in stored.items():
        if is_ignored(name):
            continue
        key = canonical_name(name)
        if key in table:
            what = f"duplicate tensor {named(name)}, also in {table[key].path}"
            raise CheckpointError(f"{tensor.path}: {what}")
        table[key] = tensor
    return table


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Parse the header of one safetensors file into name -> `StoredTensor`.

    Raises:
        CheckpointError: the file cannot be read or breaks the format; the message names file and tensor.
    """
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Parse the header of one safetensors file, and what it says of the file itself.

    Raises:
        CheckpointError: the file cannot be read or breaks the format; the message names file and tensor.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8:
            raise CheckpointError(f"{path}: truncated, {size} bytes are too few for a safetensors file")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: header length {length} is above the limit of {MAX_HEADER_BYTES} bytes, "
                "so this is no safetensors file"
            )
        if length > size - 8:
            raise CheckpointError(f"{path}: truncated, the header needs {length} bytes of {size - 8}")
        header = file.read(length)
    if len(header) != length:
        raise CheckpointError(f"{path}: truncated while it was read")
    entries = parse_json(header, f"{path}: header")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: header: __metadata__ must have texts only, not {shown(metadata)}")
    start = 8 + length
    file_identity = identity(status)
    stored = {name: _entry(path, file_identity, name, entry, start) for name, entry in entries.items()}
    _check_layout(path, stored, start, size)
    return stored, metadata


def _is_naturals(value: object) -> bool:
    if not isinstance(value, list) or len(value) > 8:
        return False
    return all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _entry(path: Path, file: FileIdentity, name: str, entry: object, start: int) -> StoredTensor:
    where = f"{path}: header of {named(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise CheckpointError(f"{where}: unknown dtype {shown(dtype)}")
    if not _is_naturals(shape):
        raise CheckpointError(f"{where}: bad shape {shown(shape)}")
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: bad data_offsets {shown(offsets)}")
    nbytes = offsets[1] - offsets[0]
    needed = math.prod(shape) * _DTYPE_BYTES[dtype]
    if nbytes != needed:
        raise CheckpointError(f"{where}: data_offsets span {nbytes} bytes, {dtype} {shape} needs {needed}")
    return StoredTensor(dtype, tuple(shape), str(path), start + offsets[0], nbytes, file)


def _check_layout(path: Path, stored: dict[str, StoredTensor], start: int, size: int) -> None:
    if stored:
        last = max(stored, key=lambda name: stored[name].offset + stored[name].nbytes)
        missing = stored[last].offset + stored[last].nbytes - size
        if missing > 0:
            raise CheckpointError(
                f"{path}: truncated, tensor {named(last)} ends {missing} bytes after the file's end"
            )
    end, previous = start, "the header"
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {named(name)} {what} {previous}")
        end, previous = tensor.offset + tensor.nbytes, named(name)
    if end != size:
        raise CheckpointError(f"{path}: {size - end} bytes after the last tensor belong to none")
