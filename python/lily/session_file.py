"""Sessions in files: tokens, cache, recurrent state and logits, in safetensors format.

The metadata has a fingerprint of the model, so that no session continues on other weights, and a CRC-32 of
every tensor.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lily.errors import CheckpointError, ContextFullError, LilyError
from lily.files import identity, open_regular
from lily.replacing import replacing
from lily.tensor_files import StoredTensor, read_header_and_metadata

if TYPE_CHECKING:
    from lily import _native
    from lily.core import Progress

_FORMAT = "lily-session"
_LAYOUT = "1"  # changes when older files can no longer be read
_PIECE = 4 << 20  # bytes on their way at once
_TOKENS = "tokens"

Part = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, bytes


def save(
    native: _native.Session,
    fingerprint: str,
    path: str | os.PathLike[str],
    progress: Progress | None,
) -> None:
    """Write a session. See Session.save()."""
    tokens = native.tokens()
    if not len(tokens):
        raise LilyError("the session has no token yet")
    parts: list[Part] = [(_TOKENS, "I32", (len(tokens),), 4 * len(tokens)), *native.parts(len(tokens))]
    data = tokens.astype("<i4").tobytes()
    crcs = [0] * len(parts)
    metadata = {"fingerprint": fingerprint, "prompt_tokens": str(native.prompt_tokens())}
    start = len(_header(parts, crcs, metadata))
    total = sum(part[3] for part in parts)
    done = 0
    with replacing(path) as file:
        file.seek(start)
        for i, (_, _, _, size) in enumerate(parts):
            for at in range(0, size, _PIECE):
                count = min(_PIECE, size - at)
                piece = data[at : at + count] if i == 0 else native.read_part(i - 1, at, count)
                file.write(piece)
                crcs[i] = zlib.crc32(piece, crcs[i])
                done += count
                if progress is not None:
                    progress(done, total)
        file.seek(0)
        file.write(_header(parts, crcs, metadata))


def _header(parts: list[Part], crcs: list[int], metadata: dict[str, str]) -> bytes:
    """Return the header with its length; that does not depend on the checksums."""
    crc = {part[0]: f"{value:08x}" for part, value in zip(parts, crcs, strict=True)}
    header: dict[str, object] = {
        "__metadata__": {"format": _FORMAT, "layout": _LAYOUT, **metadata, "crc32": json.dumps(crc)}
    }
    at = 0
    for name, dtype, shape, size in parts:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load(
    native: _native.Session,
    fingerprint: str,
    context: int,
    path: str | os.PathLike[str],
    progress: Progress | None,
) -> None:
    """Read a session into an empty one. See Engine.load_session()."""
    path = Path(path)
    stored, metadata = read_header_and_metadata(path)
    tokens, prompt_tokens, crcs = _checked(path, stored, metadata, fingerprint)
    if tokens > context:
        raise ContextFullError(f"{path}: the session has {tokens} tokens, the context {context}")
    parts: list[Part] = [(_TOKENS, "I32", (tokens,), 4 * tokens), *native.parts(tokens)]
    names = {part[0] for part in parts}
    for name, dtype, shape, _ in parts:
        found = stored.get(name)
        if found is None or (found.dtype, found.shape) != (dtype, tuple(shape)):
            raise CheckpointError(f"{path}: {name} is missing, or not {dtype} {list(shape)}")
    if names != stored.keys():
        raise CheckpointError(f"{path}: has tensors that no session has")
    native.begin_load(tokens)
    ids = b""
    total, done = sum(part[3] for part in parts), 0
    with open_regular(path) as file:
        if identity(os.fstat(file.fileno())) != stored[_TOKENS].file:
            raise CheckpointError(f"{path}: was changed while it was read")
        for i, (name, _, _, size) in enumerate(parts):
            file.seek(stored[name].offset)
            crc = 0
            for at in range(0, size, _PIECE):
                piece = file.read(min(_PIECE, size - at))
                if len(piece) != min(_PIECE, size - at):
                    raise CheckpointError(f"{path}: truncated while it was read")
                crc = zlib.crc32(piece, crc)
                if i == 0:
                    ids += piece
                else:
                    native.write_part(i - 1, at, piece)
                done += len(piece)
                if progress is not None:
                    progress(done, total)
            if f"{crc:08x}" != crcs.get(name):
                raise CheckpointError(f"{path}: {name} is damaged, its checksum differs")
    try:
        native.end_load(np.frombuffer(ids, dtype="<i4").astype(np.int32), prompt_tokens)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _checked(
    path: Path, stored: dict[str, StoredTensor], metadata: dict[str, str], fingerprint: str
) -> tuple[int, int, dict[str, object]]:
    """Return the number of tokens, of prompt tokens among them, and the checksums."""
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: is not a session file")
    if metadata.get("layout") != _LAYOUT:
        raise CheckpointError(f"{path}: was written by another version of Lily")
    if metadata.get("fingerprint") != fingerprint:
        raise CheckpointError(f"{path}: belongs to a session of another model")
    found = stored.get(_TOKENS)
    if found is None or found.dtype != "I32" or len(found.shape) != 1 or not found.shape[0]:
        raise CheckpointError(f"{path}: has no tokens")
    try:
        prompt_tokens = int(metadata["prompt_tokens"])
        crcs = json.loads(metadata["crc32"])
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its metadata are damaged") from error
    if not 0 <= prompt_tokens <= found.shape[0] or not isinstance(crcs, dict):
        raise CheckpointError(f"{path}: its metadata are damaged")
    return found.shape[0], prompt_tokens, crcs
