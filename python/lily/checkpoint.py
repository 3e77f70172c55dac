"""Open a checkpoint folder: configuration, tensor table, and every check that needs no weights.

The format is MLX 4-bit affine safetensors of Qwen3.5-MoE, as `mlx_lm.convert -q` writes them. Everything is
checked on headers, before anything is allocated; NaN and infinity are looked for while the weights are read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lily.errors import CheckpointError, UnsupportedError
from lily.files import FileIdentity, identity, named, open_regular
from lily.hub import DEMO, resolve
from lily.model_config import CONVERT, listed, load_config
from lily.tensor_files import StoredTensor, read_tensor_table

__all__ = ["DEMO", "Checkpoint", "TensorSpec", "open_checkpoint", "resolve"]


class TensorSpec(Protocol):
    """One tensor the model needs; `dtypes` are the safetensors names that are accepted."""

    @property
    def name(self) -> str:
        """Canonical tensor name, as in an MLX checkpoint."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Accepted safetensors dtypes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Exact shape."""


_SAMPLE = 256  # bytes in the middle of a tensor

TensorSpecs = Callable[[dict[str, int | float]], Sequence[TensorSpec]]


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint; no weight has been read yet.

    Attributes:
        folder: where the files are.
        name: "demo", the hub id if the folder is a hub snapshot, else the folder's name.
        config: keyword arguments of `lily._native.Config`.
        tensors: (name, dtype, path, byte offset, bytes) of every tensor the model needs.
        files: the files of those tensors, as they were when their headers were read.
        max_position: positions the model was trained for, in tokens.
        eos_token_ids: every id that ends a sequence.
        generation_config: `generation_config.json`, `{}` if there is none.
    """

    folder: Path
    name: str
    config: dict[str, int | float]
    tensors: list[tuple[str, str, str, int, int]]
    files: dict[str, FileIdentity]
    max_position: int
    eos_token_ids: frozenset[int]
    generation_config: dict[str, Any]

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file of weights is no longer the one whose header was read."""
        for path, file in self.files.items():
            try:
                same = identity(os.stat(path)) == file
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
            if not same:
                raise CheckpointError(f"{path}: was changed while the model was opened")

    def fingerprint(self) -> str:
        """Return what tells this model from others: a digest of its counts and of a sample of every tensor.

        Raises:
            CheckpointError: A file cannot be read.
        """
        import hashlib

        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        with contextlib.ExitStack() as stack:
            files = {path: stack.enter_context(open_regular(Path(path))) for path in self.files}
            for name, dtype, path, offset, nbytes in sorted(self.tensors):
                count = min(nbytes, _SAMPLE)
                files[path].seek(offset + (nbytes - count) // 2)
                sample = files[path].read(count)
                digest.update(f"{name} {dtype} {nbytes} {len(sample)}\n".encode() + sample)
        return digest.hexdigest()


def open_checkpoint(folder: Path, *, tensor_specs: TensorSpecs | None = None) -> Checkpoint:
    """Check the files of `folder` and say where each tensor lies.

    Args:
        folder: a checkpoint folder, for instance from `resolve`.
        tensor_specs: gives the needed tensors of a configuration; None asks the native module.

    Raises:
        CheckpointError: files are missing or damaged, or tensors do not fit the configuration.
        UnsupportedError: another model, geometry, quantisation or weight layout.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{named(str(folder))}: a folder whose name is not UTF-8 cannot be read"
        ) from None
    config = load_config(folder)
    table = read_tensor_table(folder)
    _check_converted(folder, table)
    specs = (tensor_specs or _native_specs)(config.counts)
    _check_tensors(folder, table, specs)
    tensors = []
    for spec in specs:
        stored = table[spec.name]
        tensors.append((spec.name, stored.dtype, stored.path, stored.offset, stored.nbytes))
    return Checkpoint(
        folder=folder,
        name=_name(folder),
        config=config.counts,
        tensors=tensors,
        files={stored.path: stored.file for stored in table.values()},
        max_position=config.max_position,
        eos_token_ids=config.eos_token_ids,
        generation_config=config.generation_config,
    )


def _native_specs(counts: dict[str, int | float]) -> Sequence[TensorSpec]:
    from lily import _native

    return _native.tensor_specs(_native.Config(**counts))


def _check_converted(folder: Path, table: dict[str, StoredTensor]) -> None:
    # The convolution's shape is the one safe sign of an original checkpoint, whose norms lack the 1 of 1 + w.
    for name, stored in table.items():
        if name.endswith(".conv1d.weight") and stored.shape and stored.shape[-1] != 1:
            shape = list(stored.shape)
            raise UnsupportedError(
                f"{folder}: {named(name)} has the unconverted layout, shape {shape}; {CONVERT}"
            )
    if not any(name.endswith(".scales") for name in table):
        raise UnsupportedError(f"{folder}: unquantised weights (no tensor ends in .scales); {CONVERT}")


def _check_tensors(folder: Path, table: dict[str, StoredTensor], specs: Sequence[TensorSpec]) -> None:
    problems = []
    for spec in specs:
        stored = table.get(spec.name)
        dtypes = " or ".join(spec.dtypes)
        if stored is None:
            problems.append(f"missing {spec.name}: expected {dtypes} {list(spec.shape)}")
        elif stored.dtype not in spec.dtypes:
            problems.append(f"dtype of {spec.name}: found {stored.dtype}, expected {dtypes}")
        elif stored.shape != tuple(spec.shape):
            problems.append(f"shape of {spec.name}: found {list(stored.shape)}, expected {list(spec.shape)}")
    needed = {spec.name for spec in specs}
    problems += [
        f"unexpected {named(name)}: found {table[name].dtype} {list(table[name].shape)}, "
        "expected no such tensor"
        for name in sorted(table.keys() - needed)
    ]
    if problems:
        raise CheckpointError(f"{folder}: tensors do not fit config.json{listed(problems)}")


def _name(folder: Path) -> str:
    if folder == DEMO:
        return "demo"
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.resolve().name
