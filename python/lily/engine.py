"""The engine: a loaded model, and the calls applications make on it."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lily.core import (
    ContextPolicy,
    Core,
    GenerateOptions,
    Ids,
    Messages,
    Progress,
    Request,
    TokenIds,
    check_progress,
)
from lily.errors import CheckpointError, OutOfMemoryError, TimeLimitError
from lily.files import named
from lily.prefill import Prefill
from lily.results import Chunk, Token
from lily.sampling import SamplingOptions, SamplingParams, StepOptions, check_int
from lily.session import Session
from lily.stream import Stream, Unique, new_flag

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lily import _native
    from lily._native import Flag
    from lily.asynchronous import AsyncStream
    from lily.checkpoint import Checkpoint
    from lily.tokenizer import Tokenizer

DEVICES = ("auto", "metal", "cuda", "cpu", "cpu32")
CUDA_DEVICE = re.compile("cuda:[0-9]{1,3}")  # one of several
DEFAULT_CONTEXT = 32768
MAX_SCORE_TOP = 128
MAX_CONTEXT = 1 << 24
MAX_CHUNK = 1 << 16
MAX_SESSIONS = 1 << 12
MAX_THREADS = 1 << 10
MAX_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Score:
    """Log probabilities of given tokens.

    Attributes:
        token_ids: The tokens, int32 [T].
        logprobs: Log probability of token 1 ... T-1, each after those before it, float32 [T-1].
        top_ids: Most likely tokens after each position, most likely first, int32 [T, k].
        top_logprobs: Their log probabilities, float32 [T, k].
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log probability; NaN for a single token."""
        if not self.logprobs.size:
            return float("nan")
        return float(np.exp(-self.logprobs.mean(dtype=np.float64)))


class Engine(Unique):
    """A loaded model on a device.

    prefill(), step() and logits act on the engine's own session, which is made when first needed; generate()
    uses it too, or a temporary one while another generation is under way in it. Calls may come from any
    thread. Use it as a context manager, or call close(), to give the memory back at a known time. After
    fork() it belongs to the parent process; a child has to open its own. But for agenerate() calls wait for
    the device: in an event loop, use asyncio.to_thread.

    Args:
        model: "demo" (a small model that comes with Lily), a folder, or a Hugging Face hub id.
        device: "auto", "metal", "cuda" ("cuda:1" is the second GPU), "cpu", or "cpu32" (slow; behaves like a
            GPU, for tests).
        context: Most tokens a session can hold. Default: 32768, or the model's own maximum if that is less.
        prefill_chunk: Tokens of a prompt that are processed at once; a multiple of 64, at most 65536.
            Temporary memory grows with it. Default: what suits the device, 8192 or less. It is never more
            than the context needs; info() tells.
        memory_limit: Most bytes for weights, cache, state and snapshots, whatever is done with the engine;
            the Python process itself comes on top. The cache holds at least one session at full context, and
            as many as max_sessions if the limit has room. Default: the machine's memory.
        revision: Revision on the hub.
        progress: Called with (done, total) bytes while files are downloaded and weights are loaded.
        threads: Threads of the cpu device; 0 is one for each physical core.
        max_sessions: Most sessions at the same time. The engine's own counts from its first use on, and
            so does the one that a score() or an overlapping generate() takes for a while.
        snapshot_memory: Most bytes for snapshots of recurrent state, on which the reuse of prompts and
            rewind() rest. Default: those of 16 snapshots (62.8 MiB each for the full-size model), or what
            memory_limit leaves. 0: none.

    Raises:
        CheckpointError: The model was not found, or its files are damaged.
        UnsupportedError: It is not a model Lily runs.
        OutOfMemoryError: It needs more than memory_limit or the machine's memory; nothing was loaded.
        DeviceError: The device is missing or failed.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "demo",
        *,
        device: str = "auto",
        context: int | None = None,
        prefill_chunk: int | None = None,
        memory_limit: int | None = None,
        revision: str | None = None,
        progress: Progress | None = None,
        threads: int = 0,
        max_sessions: int = 4,
        snapshot_memory: int | None = None,
    ) -> None:
        import logging  # slow to import, like what follows

        from lily import _native
        from lily.tokenizer import Tokenizer

        _check_settings(device, context, prefill_chunk, max_sessions, threads, memory_limit, snapshot_memory)
        check_progress(progress)
        self._checkpoint = checkpoint = _open(model, revision, progress)
        context = _context_of(checkpoint, context)
        settings: dict[str, Any] = {
            "context": context,
            "prefill_chunk": prefill_chunk or 0,
            "max_sessions": max_sessions,
            "device": device,
            "snapshot_memory": snapshot_memory,
        }
        plan = _memory_plan(checkpoint, settings)
        limit, source = _memory_limit(memory_limit, device)
        if snapshot_memory is None and limit is not None:
            excess = max(plan["total"] - limit, 0)
            settings["snapshot_memory"] = max(plan["snapshots"] - excess, 0)
            plan = _memory_plan(checkpoint, settings)
        _check_memory(checkpoint.name, plan, limit, source)
        _warn_beyond_training(checkpoint, context)
        vocab = int(checkpoint.config["vocab"])
        tokenizer = Tokenizer(checkpoint.folder, vocab)
        fingerprint = checkpoint.fingerprint()
        checkpoint.check_unchanged()
        if device.startswith("cuda"):
            from lily import cuda

            cuda.prepare()
        native = _native.Engine(
            _native.Config(**checkpoint.config),
            checkpoint.tensors,
            **settings,
            memory_limit=limit,
            threads=threads,
            progress=progress,
        )
        checkpoint.check_unchanged()
        self._core = Core(
            native,
            tokenizer,
            context=context,
            vocab=vocab,
            eos_ids=checkpoint.eos_token_ids,
            generation_config=checkpoint.generation_config,
            fingerprint=fingerprint,
        )
        self._device = str(native.info()["device"])
        self._session: Session | None = None
        logging.getLogger("lily").info("loaded %s: %s", checkpoint.name, plan)

    @staticmethod
    def plan_memory(
        model: str | os.PathLike[str] = "demo",
        *,
        device: str = "auto",
        context: int | None = None,
        prefill_chunk: int | None = None,
        max_sessions: int = 4,
        snapshot_memory: int | None = None,
        revision: str | None = None,
    ) -> dict[str, int]:
        """Return the bytes an engine would take, by purpose and in total, without loading weights.

        "kv" is the key-value cache of one session at full context. Each session takes its cache as it grows,
        so with all of them full the engine takes up to max_sessions times "kv", or what memory_limit allows.
        "snapshots" are taken as they are made.

        A model that is not on this machine yet is downloaded. Arguments and errors as for Engine.
        """
        _check_settings(device, context, prefill_chunk, max_sessions, 0, None, snapshot_memory)
        checkpoint = _open(model, revision, None)
        settings = {"prefill_chunk": prefill_chunk or 0, "max_sessions": max_sessions, "device": device}
        context = _context_of(checkpoint, context)
        plan = _memory_plan(checkpoint, {**settings, "context": context, "snapshot_memory": snapshot_memory})
        _warn_beyond_training(checkpoint, context)
        return plan

    def __enter__(self) -> Engine:
        self._core.native()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back, sessions included; a second call does nothing."""
        self._core.close()

    def __repr__(self) -> str:
        state = "closed" if self._core.closed else "open"
        name = self._checkpoint.name
        return f"<lily.Engine {name} on {self._device}, context {self._core.context}, {state}>"

    @property
    def context(self) -> int:
        """Most tokens a session can hold."""
        return self._core.context

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer and chat template."""
        return self._core.tokenizer

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Logits after the last token handed out by the engine's own session, float32 [vocab].

        Raises:
            LilyError: There is no token yet.
        """
        return self._default_session().logits

    def info(self) -> dict[str, Any]:
        """Return facts about the model, the device and the memory, as JSON types."""
        engine = self._core.native()
        native, cached = engine.info(), engine.cached()
        return {
            **native,
            "cache": {
                "sessions": native["max_sessions"] - engine.free_sessions(),
                **{name: cached[name] for name in ("snapshots", "snapshot_bytes", "kv_bytes")},
            },
            "model": self._checkpoint.name,
            "folder": str(self._checkpoint.folder),
            "max_position": self._checkpoint.max_position,
            "vocab": self._core.vocab,
            "eos_token_ids": sorted(self._core.eos_ids),
        }

    def session(self) -> Session:
        """Return a new session with an empty context.

        Raises:
            LilyError: max_sessions are open already; reset() gives back the place of the engine's own.
        """
        return Session(self._core)

    def prefill(self, prompt: str | TokenIds) -> Prefill:
        """Append a prompt to the context of the engine's own session. See Session.prefill()."""
        return self._default_session().prefill(prompt)

    def step(
        self,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[Token]:
        """Choose and append tokens in the engine's own session. See Session.step()."""
        return self._default_session().step(max_tokens, sampling, **options)

    def reset(self) -> None:
        """Forget all tokens of the engine's own session, and give its place back if nothing uses it."""
        with self._core.lock():
            session = self._session
            if session is None:
                self._core.native()
                return
            session.reset()
            if session._is_idle():
                self._session = None
                session.close()

    def generate(
        self,
        prompt: str | TokenIds | Messages | None = None,
        sampling: SamplingParams | None = None,
        *,
        session: Session | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        thinking_token_budget: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
        on_context_full: ContextPolicy = "error",
        **options: Unpack[SamplingOptions],
    ) -> Stream[Chunk]:
        """Answer a prompt, as an iterator of Chunk; the last one has finish_reason and usage.

        Arguments are checked at the call, work begins with the first chunk that is read. What the prompt has
        in common with the session, or with snapshots of earlier prompts and replies, is not read again;
        usage.cached_tokens says how much that was, and usage.cache_miss_reason why not more. The iterator's
        close(), from any thread, and Ctrl-C take effect within one step, or one chunk of a prompt
        (prefill_chunk tokens), and leave the session usable; a loop over a closed iterator simply ends. While
        all sessions are in use by other replies, a request waits for its turn, first come, first served.

        Args:
            prompt: The whole context, as messages (dicts with role and content, written with the checkpoint's
                chat template), text (taken as it is), or token ids. Special tokens written in text, that of
                messages included, are recognised as such: text from strangers can end a turn. What else was
                in the session before is forgotten.
                None: go on from what the session holds, for instance after prefill().
            sampling: Sampling parameters; what it leaves out comes from the checkpoint's
                generation_config.json.
            session: Session to use. Default: the engine's own, or a temporary one while that is generating.
            tools: Functions the model may call (messages only); calls are chunks of kind "tool_call".
            tool_choice: "auto", the default, or "none": the tools stay in the prompt, but are not called.
            response_format: Not implemented yet.
            enable_thinking: False asks for an answer without reasoning (messages only).
            thinking_token_budget: Most tokens of reasoning; after these it is closed, as if by the model.
            chat_template_kwargs: Further variables of the chat template (messages only).
            progress: Called with (done, total) tokens of the prompt, before its first chunk and after each.
            timeout: Most seconds from the first chunk that is read to the last.
            on_context_full: What to do when prompt and max_tokens are more than the context: "error", or
                "stop" where it ends, with finish_reason "length". Without max_tokens it is always the latter.
            **options: Fields of SamplingParams, which win over sampling: max_tokens, temperature, top_p,
                top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty, logit_bias, seed, stop,
                stop_token_ids, ignore_eos, logprobs, top_logprobs. stop does not apply inside reasoning.

        Raises:
            ValueError: An argument or message is wrong.
            TypeError: An argument is unknown, or not the kind of object it has to be.
            ContextFullError: The prompt does not fit in the context, or max_tokens behind it.
            OutOfMemoryError: memory_limit leaves too few pages of the cache for all replies; by the iterator.
            TimeLimitError: The timeout is over; raised by the iterator.
            LilyError: All sessions are in use, and not by replies of other threads; raised by the iterator.
            UnsupportedError: An argument is not implemented yet.
        """
        if session is not None and not isinstance(session, Session):
            raise TypeError(f"session must be a Session, not {type(session).__name__}")
        request = self._core.request(
            prompt,
            sampling,
            options,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            enable_thinking=enable_thinking,
            thinking_token_budget=thinking_token_budget,
            chat_template_kwargs=chat_template_kwargs,
            progress=progress,
            timeout=timeout,
            on_context_full=on_context_full,
        )
        if session is None:
            flag = new_flag()
            return Stream(self._run(request, flag), flag, self._core.admission)
        if session._core is not self._core:
            raise ValueError("session belongs to another engine")
        return session._stream(request)

    def agenerate(
        self,
        prompt: str | TokenIds | Messages | None = None,
        sampling: SamplingParams | None = None,
        *,
        session: Session | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Answer a prompt, for asyncio: `async for chunk in engine.agenerate(...)`.

        Arguments and chunks are those of generate(); errors come with the first chunk. A thread does the
        work, and the event loop never waits for it. The end of the task that reads it, aclose(), `async with`
        and letting go of it stop within one step, or one chunk of a prompt.
        """
        from lily.asynchronous import AsyncStream

        return AsyncStream(lambda: self.generate(prompt, sampling, session=session, **options))

    def load_session(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Session:
        """Return a new session with what Session.save() wrote.

        Args:
            path: The file; it may come from another device, but not from another model.
            progress: Called with (done, total) bytes.

        Raises:
            CheckpointError: The file is missing, incomplete, damaged, or belongs to another model.
            ContextFullError: It has more tokens than the context.
            LilyError: max_sessions are open already.
        """
        from lily.session_file import load

        check_progress(progress)
        session = Session(self._core)
        try:
            session._load(lambda native: load(native, self._core.fingerprint, self.context, path, progress))
        except BaseException:
            session.close()
            raise
        return session

    def score(self, tokens: str | TokenIds, *, top_logprobs: int = 0) -> Score:
        """Return the log probability of each given token after those before it.

        Args:
            tokens: Token ids, or text (special tokens in it are recognised); at most context tokens.
            top_logprobs: Also return this many most likely tokens at each position; 0 to 128.

        Raises:
            ValueError: No token is given, or one the model does not have.
            ContextFullError: There are more tokens than the context holds.
            LilyError: All sessions are in use; it needs one of its own while it works.
        """
        check_int("top_logprobs", top_logprobs, 0, MAX_SCORE_TOP, optional=False)
        ids = self._core.token_ids(tokens)
        # The last position has no next token: its log probability is computed for token 0 and dropped.
        targets = np.append(ids[1:], np.int32(0)).astype(np.int32)
        flag = new_flag()
        try:
            native = self._core.admission.wait(flag, self._core.new_native)
            assert native is not None
            parts = self._scores(native, ids, targets, top_logprobs)
        finally:
            self._core.admission.end(flag)
        logprobs, top_ids, top = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Score(ids, logprobs[:-1], top_ids, top)

    def _scores(self, native: _native.Session, ids: Ids, targets: Ids, top_logprobs: int) -> list[list[Any]]:
        parts = []
        done = 0
        try:
            while done < len(ids):
                taken, *part = native.score(ids[done:], targets[done:], top_logprobs)
                parts.append(part)
                done += taken
        finally:
            if not self._core.closed:
                native.close()
        return parts

    def _default_session(self) -> Session:
        with self._core.lock():
            if self._own_session() is None:
                self._session = Session(self._core)  # says why there is no room
            assert self._session is not None
            return self._session

    def _own_session(self) -> Session | None:
        """As _default_session(), but None if it is not there and there is no room for it."""
        with self._core.lock():
            if self._session is None:
                native = self._core.new_native()
                self._session = None if native is None else Session(self._core, native)
            return self._session

    def _run(self, request: Request, flag: Flag) -> Generator[Chunk, None, None]:
        if request.timeout is not None:
            flag.expire_after(request.timeout)
        try:
            place = self._core.admission.wait(flag, lambda: self._place(request, flag))
            if place is None:
                if not flag.raised:
                    raise TimeLimitError("the timeout was over before it was the request's turn")
            elif place is self._session:
                yield from place._run(request, flag)
            else:
                with place:
                    try:
                        yield from place._run(request, flag)
                    finally:
                        place._stow()
        finally:
            flag.set()
            self._core.admission.end(flag)

    def _place(self, request: Request, flag: Flag) -> Session | None:
        """Return the engine's own session if it is idle, else a temporary one; None if all are in use."""
        self._core.native()
        own = self._own_session()
        if own is not None and (own._claim(flag) or request.ids is None):
            return own
        native = self._core.new_native()
        return None if native is None else Session(self._core, native)


def _check_settings(
    device: str,
    context: int | None,
    prefill_chunk: int | None,
    max_sessions: int,
    threads: int,
    memory_limit: int | None,
    snapshot_memory: int | None,
) -> None:
    if device not in DEVICES and not (isinstance(device, str) and CUDA_DEVICE.fullmatch(device)):
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, not {device!r}")
    check_int("context", context, 1, MAX_CONTEXT)
    check_int("prefill_chunk", prefill_chunk, 64, MAX_CHUNK)
    if prefill_chunk is not None and prefill_chunk % 64:
        raise ValueError(f"prefill_chunk must be a multiple of 64, not {prefill_chunk}")
    check_int("max_sessions", max_sessions, 1, MAX_SESSIONS, optional=False)
    check_int("threads", threads, 0, MAX_THREADS, optional=False)
    check_int("memory_limit", memory_limit, 1, MAX_BYTES)
    check_int("snapshot_memory", snapshot_memory, 0, MAX_BYTES)


def _open(model: str | os.PathLike[str], revision: str | None, progress: Progress | None) -> Checkpoint:
    from lily.checkpoint import open_checkpoint, resolve

    checkpoint = open_checkpoint(resolve(model, revision, progress))
    try:
        SamplingParams().with_defaults(checkpoint.generation_config)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = named(str(error))
        raise CheckpointError(f"{checkpoint.folder}/generation_config.json: {reason}") from error
    return checkpoint


def _context_of(checkpoint: Checkpoint, context: int | None) -> int:
    return min(DEFAULT_CONTEXT, checkpoint.max_position) if context is None else context


def _warn_beyond_training(checkpoint: Checkpoint, context: int) -> None:
    if context > checkpoint.max_position:
        trained = f"the {checkpoint.max_position} positions {checkpoint.name} was trained for"
        warnings.warn(f"context {context} exceeds {trained}", stacklevel=3)


def _memory_plan(checkpoint: Checkpoint, settings: dict[str, Any]) -> dict[str, int]:
    from lily import _native

    plan = _native.memory_plan(_native.Config(**checkpoint.config), **settings)
    parts = ("weights", "kv", "state", "logits", "scratch", "snapshots", "total")
    return {part: plan[part] for part in parts}


def _memory_limit(limit: int | None, device: str) -> tuple[int | None, str]:
    """Return how much memory there is and where that is from; a CUDA device has its own and knows it."""
    if limit is not None:
        return limit, "memory_limit"
    return None if device.startswith("cuda") else machine_memory(), "this machine's memory"


def _check_memory(name: str, plan: Mapping[str, int], limit: int | None, source: str) -> None:
    if limit is None or plan["total"] <= limit:
        return
    sizes = sorted(((size, part) for part, size in plan.items() if part != "total"), reverse=True)
    parts = ", ".join(f"{part} {_size_text(size)}" for size, part in sizes)
    needed, most = _size_text(plan["total"]), _size_text(limit)
    if needed == most or most == "0.0 MiB":
        needed, most = f"{plan['total']} bytes", f"{limit} bytes"
    raise OutOfMemoryError(
        f"{name} needs {needed} ({parts}), {source} is {most}; a smaller context or max_sessions needs less"
    )


def _size_text(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def machine_memory() -> int | None:
    """Return the bytes of memory this process may use at most, or None if the system does not say."""
    found = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = "/sys/fs/cgroup/memory.max"  # of a container
    with contextlib.suppress(OSError, ValueError), open(limit, encoding="ascii") as file:
        found.append(int(file.read()))
    return min(found, default=None)
