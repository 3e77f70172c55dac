"""The native engine without the Python one."""

from __future__ import annotations

from collections.abc import Callable

from lily import _native
from lily.checkpoint import Checkpoint


def open_native(
    checkpoint: Checkpoint,
    progress: Callable[[int, int], object] | None = None,
    *,
    device: str = "cpu",
    **sizes: int,
) -> _native.Engine:
    """Open a checkpoint; sizes that are not given are small."""
    options = {"context": 64, "prefill_chunk": 64, "max_sessions": 1, "threads": 2, **sizes}
    config = _native.Config(**checkpoint.config)
    return _native.Engine(config, checkpoint.tensors, device=device, progress=progress, **options)
