"""The native engine. Raises the exceptions of lily.errors, and ValueError for wrong arguments."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

class Config:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    delta_key_heads: int
    delta_value_heads: int
    experts: int
    experts_used: int
    inner: int
    shared_inner: int
    attention_interval: int
    rms_eps: float
    rope_theta: float
    def __init__(self, **counts: int | float) -> None: ...  # every field above

class TensorSpec:
    @property
    def name(self) -> str: ...
    @property
    def dtypes(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

def tensor_specs(config: Config) -> list[TensorSpec]: ...
def memory_plan(
    config: Config, *, context: int, prefill_chunk: int, max_sessions: int, device: str
) -> dict[str, int]: ...

class Engine:
    def __init__(
        self,
        config: Config,
        tensors: list[tuple[str, str, str, int, int]],
        *,
        device: str,
        context: int,
        prefill_chunk: int,
        threads: int,
        max_sessions: int,
        progress: Callable[[int, int], object] | None,
        shuffle: int = 0,
        tile: int = 0,
    ) -> None: ...
    def info(self) -> dict[str, Any]: ...
    def close(self) -> None: ...
    def session(self) -> Session: ...

class Session:
    @property
    def position(self) -> int: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
    def prefill(self, ids: npt.NDArray[np.int32]) -> int: ...
    def set_sampling(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        presence_penalty: float,
        frequency_penalty: float,
        repetition_penalty: float,
        seed: int,
        logit_bias: dict[int, float],
    ) -> None: ...
    def step(self, ahead: int = 0) -> tuple[int, float]: ...
    def last_token(self) -> int: ...
    def logits(self) -> npt.NDArray[np.float32]: ...
    def top_logprobs(self, k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]: ...
    def score(
        self, ids: npt.NDArray[np.int32], targets: npt.NDArray[np.int32], top: int
    ) -> tuple[int, npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]: ...

def plan(
    config: Config, name: str, *, context: int, prefill_chunk: int, max_sessions: int
) -> tuple[str, list[dict[str, Any]]]: ...
def metal_sources(
    config: Config, *, context: int, prefill_chunk: int, max_sessions: int, tensor_ops: bool
) -> dict[str, str]: ...
def devices() -> list[str]: ...
def cuda_problem() -> str | None: ...
def set_cuda_cache(folder: str) -> None: ...
def cuda_compile(name: str, consts: dict[str, int], architecture: str) -> tuple[bytes, str]: ...
def kernels() -> list[dict[str, Any]]: ...
def run_kernel(
    name: str,
    args: dict[str, int | float],
    consts: dict[str, int],
    slots: dict[str, npt.NDArray[Any]],
    device: str,
    threads: int = 1,
    repeats: int = 1,
) -> list[float]: ...
def slot_counts(name: str, args: dict[str, int | float], consts: dict[str, int]) -> list[int]: ...
def slot_traffic(
    name: str, args: dict[str, int | float], consts: dict[str, int]
) -> list[tuple[int, int]]: ...
def variants(device: str) -> list[tuple[str, dict[str, int]]]: ...
def shape_constants() -> dict[str, int]: ...
def act_type() -> str: ...  # "half" or "bfloat"
def audit(session: Session, ids: npt.NDArray[np.int32]) -> list[dict[str, Any]]: ...
