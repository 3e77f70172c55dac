"""The exceptions Lily raises. Wrong arguments raise ValueError; everything else derives from LilyError."""

from __future__ import annotations


class LilyError(RuntimeError):
    """Base of all errors of the engine; raised itself for misuse, such as a call after close()."""


class CheckpointError(LilyError):
    """The checkpoint is missing, incomplete or damaged."""


class DownloadError(CheckpointError):
    """A checkpoint could not be fetched from the hub.

    Attributes:
        reason: "offline" (offline mode is on), "no_connection", "no_access" (private, or its conditions are
            not accepted yet), "not_found" (no such repository or revision), "disk_full", "cache" (the cache
            cannot be written), "damaged" (what came is not what was announced), or "server" (any other
            answer of the hub).
    """

    def __init__(self, text: str, reason: str = "server") -> None:
        super().__init__(text)
        self.reason = reason


class DeviceError(LilyError):
    """The device is absent, or it reported a failure."""


class OutOfMemoryError(LilyError):
    """The model, or what a call needs, does not fit in memory."""


class ContextFullError(LilyError):
    """The tokens do not fit in the context that the engine was opened with."""


class TimeLimitError(LilyError, TimeoutError):
    """A call took longer than its timeout; what it handed out before is good, and the session usable."""


class UnsupportedError(LilyError):
    """The request is understood, but this version of Lily does not do it."""
