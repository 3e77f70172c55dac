"""Lily, mlx-lm and llama.cpp behind one interface: hold a context, decode after it, read a prompt."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import lily
from lily.bench.machine import versions_of

Progress = Callable[[str, str, int, int], object]  # what is done, unit, done, total

_LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_LEAST_CONTEXT = 4096  # an engine with less room could have smaller chunks than usual
_WORDS = 4000  # prompts are made of the ids below: plain words of every vocabulary


class Runner(Protocol):
    """An engine that is measured. Only one call is under way at a time."""

    def facts(self) -> dict[str, Any]:
        """Return versions and settings, as JSON types."""

    def hold(self, count: int) -> None:
        """Bring the context to `count` tokens; cheap where the last decode() ended there."""

    def decode(self, tokens: int) -> list[float]:
        """Append tokens greedily and return the seconds each of them took."""

    def prefill(self, count: int) -> float:
        """Return the seconds that a prompt of `count` tokens takes, logits of the last one only."""

    def close(self) -> None:
        """Give everything back."""


def prompt(first: int, last: int, vocab: int) -> list[int]:
    """Return the tokens at positions `first` to `last` - 1 of a prompt that is the same in every run."""
    return [(i * 7919) % min(_WORDS, vocab) for i in range(first, last)]


class LilyRunner:
    """Lily on any of its devices."""

    def __init__(
        self,
        model: str,
        *,
        device: str,
        threads: int,
        context: int,
        progress: Progress | None = None,
    ) -> None:
        self._progress = progress

        def loaded(done: int, total: int) -> None:
            if progress is not None:
                progress(f"loading {Path(model).name}", "bytes", done, total)

        self.engine = lily.Engine(
            model,
            device=device,
            threads=threads,
            context=max(context, _LEAST_CONTEXT),
            max_sessions=2,
            progress=loaded,
        )
        self._vocab = int(self.engine.info()["vocab"])
        self._session = self.engine.session()

    def facts(self) -> dict[str, Any]:
        """Return versions and settings, as JSON types."""
        return {"versions": versions_of("lily", "numpy"), **self.engine.info()}

    def hold(self, count: int) -> None:
        """Prefill what is missing."""
        if self._session.position > count:
            self._session.reset()
        missing = prompt(self._session.position, count, self._vocab)
        for state in self._session.prefill(missing) if missing else ():
            if self._progress is not None:
                self._progress("prefill of lily", "tokens", state.processed, state.total)

    def decode(self, tokens: int) -> list[float]:
        """Step through the session."""
        seconds, last = [], time.perf_counter()
        for _ in self._session.step(max_tokens=tokens):
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        return seconds

    def prefill(self, count: int) -> float:
        """Prefill a session of its own."""
        with self.engine.session() as session:
            start = time.perf_counter()
            for _ in session.prefill(prompt(0, count, self._vocab)):
                pass
            return time.perf_counter() - start

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


class MlxRunner:
    """mlx-lm on the CPU with fp32 parameters, which is its fastest setting there.

    What a context holds does not change the time of a step, and its prefill takes minutes at full size:
    caches are filled with random numbers.
    """

    def __init__(
        self, model: str, *, threads: int, context: int, vocab: int, progress: Progress | None = None
    ) -> None:
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.utils import load_model

        mx.set_default_device(mx.cpu)
        self._mx: Any = mx
        self._model: Any = load_model(Path(model))[0]
        self._vocab = vocab

        def widen(value: Any) -> Any:
            return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value

        self._model.update(tree_map(widen, self._model.parameters()))
        self._token = mx.array([1])
        self._cache: list[Any] = self._model.make_cache()
        mx.eval(self._step(self._token))  # gives the caches their shapes
        for layer in self._cache:
            self._fill(layer, context)

    def _fill(self, layer: Any, context: int) -> None:
        random = self._mx.random.normal
        if hasattr(layer, "offset"):
            *outer, _, width = layer.keys.shape
            # In whole blocks, so that no step has to enlarge them.
            shape = (*outer, -(-context // layer.step) * layer.step, width)
            layer.keys, layer.values = (random(shape, dtype=layer.keys.dtype) for _ in range(2))
            self._mx.eval(layer.keys, layer.values)
        else:
            layer.cache = [random(part.shape, dtype=part.dtype) * 0.1 for part in layer.cache]
            self._mx.eval(layer.cache)

    def _step(self, token: Any) -> Any:
        return self._model(token[None], cache=self._cache)[:, -1].argmax(-1)

    def facts(self) -> dict[str, Any]:
        """Return versions and settings, as JSON types."""
        settings = {"device": "cpu", "parameters": "float32", "caches": "filled with random numbers"}
        return {"versions": versions_of("mlx", "mlx-lm"), **settings}

    def hold(self, count: int) -> None:
        """Say that so many of the cached tokens count."""
        for layer in self._cache:
            if hasattr(layer, "offset"):
                layer.offset = count

    def decode(self, tokens: int) -> list[float]:
        """Run steps, the next one prepared while one runs, as mlx_lm.generate does."""
        mx = self._mx
        seconds, last = [], time.perf_counter()
        following = self._step(self._token)
        mx.async_eval(following)
        for index in range(tokens):
            self._token = following
            if index + 1 < tokens:
                following = self._step(self._token)
                mx.async_eval(following)
            mx.eval(self._token)
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        return seconds

    def prefill(self, count: int) -> float:
        """Run the prompt but its last token, then that one for its logits."""
        cache = self._model.make_cache()
        ids = self._mx.array(prompt(0, count, self._vocab))[None]
        start = time.perf_counter()
        if count > 1:
            self._model(ids[:, :-1], cache=cache)
            self._mx.eval([layer.state for layer in cache])
        self._mx.eval(self._model(ids[:, -1:], cache=cache))
        return time.perf_counter() - start

    def close(self) -> None:
        """Drop model and caches."""
        self._model = self._cache = self._token = None  # type: ignore[assignment]


class LlamaRunner:
    """llama.cpp on the CPU, through the C API that llama-cpp-python binds."""

    _BATCH = 2048

    def __init__(
        self, model: str, *, threads: int, context: int, vocab: int, progress: Progress | None = None
    ) -> None:
        os.environ["GGML_NO_BACKTRACE"] = "1"  # or a failed assertion starts a debugger
        import llama_cpp

        self._api: Any = llama_cpp
        self._threads = threads
        self._errors: list[str] = []
        self._log = llama_cpp.llama_log_callback(self._keep_errors)  # the library has the pointer only
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._close = contextlib.ExitStack()
        settings = llama_cpp.llama_model_default_params()
        no_devices = (ctypes.c_void_p * 1)(None)  # of a build that has a GPU
        settings.n_gpu_layers, settings.devices = 0, ctypes.cast(no_devices, ctypes.c_void_p)
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), settings)
        if not self._model:
            raise self._failure(f"cannot load {model}")
        self._close.callback(llama_cpp.llama_model_free, self._model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context + 1
        options.n_batch = self._BATCH
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        options.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            self._close.close()
            raise self._failure("cannot make a context")
        self._close.callback(llama_cpp.llama_free, self._context)
        self._progress = progress
        self._position = 0
        self._token = 1

    def facts(self) -> dict[str, Any]:
        """Return versions and settings, as JSON types."""
        system = self._api.llama_print_system_info().decode(errors="replace").strip(" |")
        versions = {**versions_of("llama-cpp-python"), **_ggml_version()}
        settings = {"device": "cpu", "threads": self._threads, "flash_attention": True, "weights": "Q4_K"}
        return {"versions": versions, "system_info": system, **settings}

    def hold(self, count: int) -> None:
        """Decode what is missing as a prompt, in batches."""
        if self._position > count:
            self._clear()
        first = self._position
        while self._position < count:
            last = min(self._position + self._BATCH, count)
            self._run(prompt(self._position, last, self._vocab))
            self._token = self._likeliest()
            if self._progress is not None:
                self._progress("prefill of llama.cpp", "tokens", self._position - first, count - first)

    def decode(self, tokens: int) -> list[float]:
        """Decode one token at a time and take the likeliest."""
        seconds, last = [], time.perf_counter()
        for _ in range(tokens):
            self._run([self._token])
            self._token = self._likeliest()
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        return seconds

    def prefill(self, count: int) -> float:
        """Decode a prompt in batches; what the context held is forgotten."""
        self._clear()
        start = time.perf_counter()
        for first in range(0, count, self._BATCH):
            self._run(prompt(first, min(first + self._BATCH, count), self._vocab))
        self._likeliest()
        seconds = time.perf_counter() - start
        self._clear()
        return seconds

    def close(self) -> None:
        """Free context and model."""
        self._close.close()

    def _keep_errors(self, level: int, text: bytes, _: object) -> None:
        if level == _LOG_ERROR:
            self._errors.append(text.decode(errors="replace").strip())

    def _failure(self, what: str) -> RuntimeError:
        return RuntimeError(": ".join([what, *self._errors[:1]]))

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._position = 0

    def _run(self, ids: list[int]) -> None:
        tokens = (self._api.llama_token * len(ids))(*ids)
        status = self._api.llama_decode(self._context, self._api.llama_batch_get_one(tokens, len(ids)))
        if status:
            raise self._failure(f"llama_decode returned {status} at position {self._position}")
        self._position += len(ids)

    def _likeliest(self) -> int:
        logits = self._api.llama_get_logits_ith(self._context, -1)  # waits for the step
        if not logits:
            raise self._failure("there are no logits")
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab,))))


def _ggml_version() -> dict[str, str]:
    """Return the version of llama.cpp's tensor library; the binding tells no version of llama.cpp itself."""
    from llama_cpp import _ggml

    found = {}
    for name in ("ggml_version", "ggml_commit"):
        with contextlib.suppress(AttributeError):
            function = getattr(_ggml.libggml, name)
            function.restype = ctypes.c_char_p
            found[name.replace("_", " ")] = function().decode()
    return found
