"""Lily runs Qwen3.6-35B-A3B (4-bit MLX format) and models of the same architecture in your process.

>>> from lily import Engine
>>> with Engine("demo") as engine:
...     for chunk in engine.generate([{"role": "user", "content": "Hi"}], temperature=0):
...         print(chunk.text, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lily.engine import Engine, Score
from lily.errors import (
    CheckpointError,
    ContextFullError,
    DeviceError,
    DownloadError,
    LilyError,
    OutOfMemoryError,
    TimeLimitError,
    UnsupportedError,
)
from lily.prefill import Prefill
from lily.results import Chunk, PrefillProgress, Token, TokenLogprob, ToolCall, Usage
from lily.sampling import SamplingParams
from lily.session import Session
from lily.stream import Stream

if TYPE_CHECKING:
    from lily.asynchronous import AsyncStream
    from lily.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "AsyncStream",
    "CheckpointError",
    "Chunk",
    "ContextFullError",
    "Detokenizer",
    "DeviceError",
    "DownloadError",
    "Engine",
    "LilyError",
    "OutOfMemoryError",
    "Prefill",
    "PrefillProgress",
    "SamplingParams",
    "Score",
    "Session",
    "Stream",
    "TimeLimitError",
    "Token",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
    "UnsupportedError",
    "Usage",
]


def __getattr__(name: str) -> Any:
    """Import what `import lily` should not wait for."""
    if name == "AsyncStream":
        from lily.asynchronous import AsyncStream

        return AsyncStream
    if name in ("Detokenizer", "Tokenizer"):
        from lily import tokenizer

        return getattr(tokenizer, name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("lily")
        except PackageNotFoundError:  # a source folder that was never installed
            return "unknown"
    raise AttributeError(f"module 'lily' has no attribute {name!r}")
