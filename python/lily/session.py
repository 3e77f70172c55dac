"""One timeline of tokens: prefill, step, generate, and the results they hand out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
from lily.errors import ContextFullError, LilyError, TimeLimitError
from lily.prefill import Prefill, Prompt
from lily.results import Chunk, Finish, Meter, Token, TokenLogprob
from lily.reuse import LEAST_KEPT, Reuse, marks_of, miss_reason
from lily.sampling import SamplingOptions, SamplingParams, StepOptions, check_int
from lily.stream import ProcessLock, Stream, Unique, new_flag

if TYPE_CHECKING:
    import os

    from typing_extensions import Unpack

    from lily import _native
    from lily._native import Flag
    from lily.asynchronous import AsyncStream
    from lily.reply import Piece
    from lily.tokenizer import Detokenizer

_CERTAIN = 1e9  # a bias beyond all logits
_OUT_OF_DATE = "this iterator is out of date: another call on its session has started since"


class Session(Unique):
    """One timeline of tokens with its own state. Made by Engine.session().

    Calls may come from any thread; calls on one session run one after the other. Starting a call makes older
    iterators of step() and generate() on the same session raise LilyError, because the state has moved on.
    But for agenerate() they wait for the device: in an event loop, use asyncio.to_thread.
    """

    def __init__(self, core: Core, native: _native.Session | None = None) -> None:
        self._core = core
        self._native = core.native().session() if native is None else native
        self._lock = ProcessLock()
        self._closed = False
        self._epoch = 0
        self._saving = False  # by the thread that has the lock
        self._pending: Prompt | None = None
        self._failure: BaseException | None = None
        self._detokenizer: Detokenizer = core.tokenizer.detokenizer()
        self._claims = ProcessLock()  # one of its own, so that claiming never waits for a step
        self._owner: Flag | None = None

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = self._closed or self._core.closed
        return f"<lily.Session {'closed' if closed else f'at position {self._native.position}'}>"

    @property
    def position(self) -> int:
        """Number of tokens processed so far."""
        self._check_open()
        self._raise_parked()
        return self._native.position

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Logits after the last token handed out, float32 [vocab]; an unread prefill() is completed first.

        Raises:
            LilyError: There is no token yet.
        """
        with self._lock():
            self._settle()
            return self._native.logits()

    def close(self) -> None:
        """Give the session's memory back; a second call, or one in a forked child, does nothing."""
        if self._lock.foreign:
            return
        with self._lock():
            self._check_free()
            if not self._closed:
                self._closed = True
                self._pending = None
                if not self._core.closed:
                    self._native.close()
                self._core.admission.end()

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The tokens processed so far, int32 [position]; a copy."""
        with self._lock():
            self._check_open()
            return self._native.tokens()

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Positions that rewind() can go back to, ascending; 0 is always one of them.

        They are those of snapshot(), and of snapshots that generate() made at the ends of messages, as long
        as there is room for these.
        """
        with self._lock():
            self._check_open()
            return tuple(self._native.checkpoints())

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the session's cache: "own", and "shared" with forks and snapshots."""
        with self._lock():
            self._check_open()
            page_bytes = self._core.native().cached()["page_bytes"]
            own, shared = self._native.pages()
            return {"own": own * page_bytes, "shared": shared * page_bytes}

    def fork(self) -> Session:
        """Return a new session that goes on from here on its own, with the same tokens, state and logits.

        The cache is shared page by page (256 tokens) until one of the two writes to a page; recurrent state
        is copied. An unread prefill() is completed first.

        Raises:
            LilyError: max_sessions are open already.
        """
        with self._lock():
            self._settle()
            return Session(self._core, self._native.fork())

    def snapshot(self) -> int:
        """Make the present position one that rewind() can go back to, and return it.

        It keeps its memory (snapshot_memory) until the session is rewound to before it, given another prompt
        by generate(), reset or closed.

        Raises:
            OutOfMemoryError: snapshot_memory has no room, even without the snapshots of generate().
        """
        with self._lock():
            self._settle()
            self._native.snapshot(True)
            return self._native.position

    def rewind(self, position: int) -> None:
        """Go back to a checkpoint: forget the tokens behind it. Logits are bit-equal to those of that time.

        Raises:
            ValueError: It is not one of `checkpoints`, nor the present position; nothing was changed.
        """
        check_int("position", position, 0, self._core.context, optional=False)
        with self._lock():
            self._settle()
            self._epoch += 1
            self._detokenizer.flush()
            self._native.rewind(position)

    def save(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        """Write the session to a file, from which Engine.load_session() goes on with bit-equal logits.

        The file is in safetensors format and has a fingerprint of the model. It is complete or not there: an
        older file of that name stays until the new one is on the disk. Checkpoints and sampling parameters
        are not part of it.

        Args:
            path: The file.
            progress: Called with (done, total) bytes.

        Raises:
            LilyError: The session has no token yet.
            OSError: The file cannot be written, for instance because the disk is full.
        """
        from lily.session_file import save

        check_progress(progress)
        with self._lock():
            self._settle()
            self._saving = True
            try:
                save(self._native, self._core.fingerprint, path, progress)
            finally:
                self._saving = False

    def reset(self) -> None:
        """Forget all tokens."""
        with self._lock():
            self._check_open()
            self._check_free()
            self._pending = None
            self._detokenizer.flush()
            self._native.reset()
            self._epoch += 1
            self._raise_parked()

    def prefill(self, prompt: str | TokenIds) -> Prefill:
        """Append a prompt to the context, in chunks.

        The work is done while the iterator is read. Dropped unread, it runs to completion, and the next call
        on the session completes one that is still held. Leaving a loop over it early, or its close() from any
        thread, cancels the rest; so does Ctrl-C. Both take effect within one chunk, and tokens already
        processed stay. After reset() or generate() what is left of a held one is out of date. Where Ctrl-C
        has to be caught around the prompt alone, read the iterator: one that is dropped unread works in its
        finaliser, and KeyboardInterrupt comes with the next call or turn of a loop behind it.

        Args:
            prompt: Text, taken as it is (special tokens in it are recognised), or token ids.

        Raises:
            ValueError: The prompt is empty or has token ids the model does not have.
            ContextFullError: It does not fit; nothing was done.
        """
        with self._lock():
            self._settle()
            ids = self._core.token_ids(prompt, self._core.context - self._native.position)
            self._epoch += 1
            self._detokenizer.flush()
            self._pending = Prompt(ids)
            return Prefill(self, self._pending)

    def step(
        self,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[StepOptions],
    ) -> Stream[Token]:
        """Choose and append tokens one by one; greedy by default, does not stop at end tokens.

        The iterator's close(), from any thread, ends a loop over it within one step.

        Args:
            max_tokens: Number of tokens; None goes on until the context is full.
            sampling: Sampling parameters; those left out are neutral, and temperature is 1 if another one is
                given.
            **options: The same as keyword arguments, which win.

        Raises:
            ContextFullError: The context has no room for another token.
            LilyError: There is no prompt yet.
        """
        params = SamplingParams.make(sampling, options, "step")  # type: ignore[arg-type]
        if max_tokens is not None:
            params = dataclasses.replace(params, max_tokens=max_tokens)
        for name in ("stop", "stop_token_ids", "top_logprobs"):
            if getattr(params, name):
                raise ValueError(f"step() does not use {name}; generate() does")
        self._core.check_ids_of(params)
        self._check_open()
        flag = new_flag()
        return Stream(self._steps(params, flag), flag)

    def generate(
        self,
        prompt: str | TokenIds | Messages | None = None,
        sampling: SamplingParams | None = None,
        *,
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
        """Answer a prompt. Like Engine.generate(), in this session.

        The prompt is the whole context: what the session held is forgotten, as far as the prompt does not
        begin with it. None goes on from what it holds, which joins prefill() and generate().
        """
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
        return self._stream(request)

    def agenerate(
        self,
        prompt: str | TokenIds | Messages | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Answer a prompt, for asyncio: generate() as an asynchronous iterator. See Engine.agenerate()."""
        from lily.asynchronous import AsyncStream

        return AsyncStream(lambda: self.generate(prompt, sampling, **options))

    def _stream(self, request: Request) -> Stream[Chunk]:
        self._check_open()
        flag = new_flag()
        return Stream(self._timed(request, flag), flag)

    def _timed(self, request: Request, flag: Flag) -> Generator[Chunk, None, None]:
        if request.timeout is not None:
            flag.expire_after(request.timeout)
        yield from self._run(request, flag)

    def _claim(self, flag: Flag) -> bool:
        """Reserve an idle session for a generation; False if another one is under way."""
        with self._claims():
            if self._is_idle():
                self._owner = flag
            return self._owner is flag

    def _is_idle(self) -> bool:
        """Whether no generation is under way."""
        with self._claims():
            return self._owner is None or self._owner.raised

    def _is_over(self, flag: Flag) -> bool:
        """Whether a loop has to end; an error if its time is up."""
        self._core.admission.read(flag)
        if flag.expired and not flag.raised:
            raise TimeLimitError("the reply took longer than its timeout")
        return flag.raised

    def _run(self, request: Request, flag: Flag) -> Generator[Chunk, None, None]:
        """Carry out a checked request; generate() without the checks."""
        with self._claims():
            if flag.raised:
                return
            self._owner = flag
        try:
            yield from self._reply(request, flag)
        finally:
            flag.set()

    def _load(self, load: Callable[[_native.Session], None]) -> None:
        with self._lock():
            load(self._native)

    def _stow(self) -> None:
        """Leave what a session that is to be closed has read to later prompts, if there is room."""
        with contextlib.suppress(LilyError), self._lock():
            if not self._closed and self._native.position >= LEAST_KEPT:
                self._native.snapshot(False)

    def _steps(self, params: SamplingParams, flag: Flag) -> Generator[Token, None, None]:
        epoch, _ = self._begin(params, flag, None)
        produced = 0
        while params.max_tokens is None or produced < params.max_tokens:
            with self._lock():
                if flag.raised:
                    return
                self._check_current(epoch)
                if self._native.position >= self._core.context:
                    if params.max_tokens is None and produced:
                        return
                    raise ContextFullError(f"the context of {self._core.context} tokens is full")
                step = self._native.step((params.max_tokens or self._core.context) - produced - 1, flag)
                if step is None:  # over before its turn came
                    continue
                index, logprob = step
                text = self._detokenizer.add(index)
            produced += 1
            yield Token(index, logprob, text)

    def _reply(self, request: Request, flag: Flag) -> Iterator[Chunk]:
        from lily.reply import Piece, ReplyStream, ThinkingBudget  # slow to import

        meter = Meter()
        epoch, reuse = self._begin(request.params, flag, request.ids)
        if self._is_over(flag):
            return
        if request.ids is None:
            meter.prompt = meter.cached = self.position
            if not meter.prompt:
                raise LilyError("there is nothing to go on from: give a prompt, or call prefill() first")
            self._core.check_room(meter.prompt, request)
        else:
            meter.prompt, meter.cached = len(request.ids), reuse.tokens
            meter.miss_reason = miss_reason(request.ids, reuse, self._core.tokenizer)
            self._feed_all(request.ids, reuse.tokens, request.progress, epoch, flag)
        if self._is_over(flag):
            return
        meter.prefilled()

        params = request.params
        context = self._native.tokens().tolist()
        reply = ReplyStream(self._core.tokenizer, context, params.stop or (), request.tools)
        budget = ThinkingBudget(self._core.tokenizer, request.thinking_token_budget)
        ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else self._core.eos_ids)
        limit = min(params.max_tokens or self._core.context, self._core.context - self.position)
        unread: list[TokenLogprob] = []
        finish: Finish | None = None if limit else "length"
        pieces: list[Piece] = []
        while finish is None:
            with self._lock():
                if self._is_over(flag):
                    return
                self._check_current(epoch)
                meter.start()
                top = self._top(params.top_logprobs)
                forced = budget.forced(reply, meter.reasoning)
                if forced is None:
                    step = self._native.step(limit - meter.completion - 1, flag)
                else:
                    step = self._force(forced, params, flag)
                if step is None:  # over before its turn came
                    continue
                index, logprob = step
                meter.token(reply.kind)
            unread.append(TokenLogprob(index, logprob, top))
            if index in ends:
                finish = "stop"
            else:
                pieces = reply.add(index)
                finish = "stop" if reply.stopped else "length" if meter.completion == limit else None
            if finish is None:
                for piece in pieces:
                    yield _chunk(piece, unread, params)
                    unread = []
                pieces = []
        pieces += reply.finish(complete=finish == "stop")
        if finish == "stop" and reply.calls:
            finish = "tool_calls"
        final = pieces.pop() if pieces else Piece(reply.kind, "")
        for piece in pieces:
            yield _chunk(piece, unread, params)
            unread = []
        last = _chunk(final, unread, params)
        yield dataclasses.replace(last, finish_reason=finish, usage=meter.usage())

    def _force(self, index: int, params: SamplingParams, flag: Flag) -> tuple[int, float] | None:
        """Have a step choose this token; its log probability is the true one, and penalties count it."""
        greedy = SamplingParams(temperature=0).native()
        self._native.set_sampling(**{**greedy, "logit_bias": {index: _CERTAIN}})
        try:
            return self._native.step(0, flag)
        finally:
            self._native.set_sampling(**params.native())

    def _begin(self, params: SamplingParams, flag: Flag, ids: Ids | None) -> tuple[int, Reuse]:
        """Make this call the session's current one and return its epoch; one that is over changes nothing.

        With a prompt, the session then holds what is known of it.
        """
        with self._lock():
            if flag.raised:
                return self._epoch, Reuse()
            self._check_open()
            self._check_free()
            reuse = Reuse()
            if ids is not None:
                self._raise_parked()
                self._pending = None
                self._detokenizer.flush()
                found = self._native.restart(ids, flag)
                if found is None:  # over before its turn came
                    return self._epoch, reuse
                reuse = Reuse(*found)
            else:
                self._settle(flag)
            self._epoch += 1
            self._native.set_sampling(**params.native())
            return self._epoch, reuse

    def _feed_all(self, ids: Ids, done: int, progress: Progress | None, epoch: int, flag: Flag) -> None:
        """Read what is left of a prompt, with snapshots on the way."""
        if progress is not None:
            progress(done, len(ids))
        marks = marks_of(ids, self._core.tokenizer, done)
        while done < len(ids):
            with self._lock():
                if self._is_over(flag):
                    return
                self._check_current(epoch)
                done += self._native.prefill(ids[done : marks[0] if marks else len(ids)], flag)
                if marks and done == marks[0]:
                    self._native.snapshot(False)
                    del marks[0]
            if progress is not None:
                progress(done, len(ids))

    def _top(self, count: int) -> tuple[tuple[int, float], ...]:
        if not count:
            return ()
        ids, logprobs = self._native.top_logprobs(count)
        return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))

    def _continue(self, prompt: Prompt) -> bool:
        """Process one chunk of a prompt; False if nothing of it is left to do."""
        with self._lock():
            if prompt.cancelled or prompt.done == len(prompt.ids):
                if prompt is self._pending:
                    self._pending = None
                return False
            self._check_open()
            if prompt is not self._pending:
                raise LilyError(_OUT_OF_DATE)
            try:
                prompt.done += self._native.prefill(prompt.ids[prompt.done :], None)
            except BaseException:
                self._pending = None
                raise
            if prompt.done == len(prompt.ids):
                self._pending = None
            return True

    def _finish_dropped(self, prompt: Prompt) -> bool:
        """Complete a prompt nobody holds; True if Ctrl-C stopped it.

        Another error is kept for the next call, as a finaliser cannot raise.
        """
        try:
            while prompt is self._pending and not (self._lock.foreign or self._closed or self._core.closed):
                self._continue(prompt)
        except KeyboardInterrupt:
            prompt.cancelled = True
            return True
        except BaseException as error:
            prompt.cancelled = True
            self._failure = error
        return False

    def _check_free(self) -> None:
        """Raise LilyError in the progress callback of save()."""
        if self._saving:
            raise LilyError("the session is being saved")

    def _settle(self, flag: Flag | None = None) -> None:
        """Complete a prompt that was not read, and raise what went wrong with one that was dropped."""
        self._check_open()
        self._check_free()
        self._raise_parked()
        while self._pending is not None and not (flag is not None and flag.raised):
            self._continue(self._pending)

    def _raise_parked(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _check_open(self) -> None:
        self._core.native()
        if self._closed:
            raise LilyError("the session is closed")

    def _check_current(self, epoch: int) -> None:
        self._check_open()
        self._check_free()
        if epoch != self._epoch:
            raise LilyError(_OUT_OF_DATE)


def _chunk(piece: Piece, tokens: list[TokenLogprob], params: SamplingParams) -> Chunk:
    ids = tuple(token.id for token in tokens)
    logprobs = tuple(tokens) if params.logprobs else None
    return Chunk(
        piece.text,
        piece.kind,
        ids,
        logprobs=logprobs,
        tool_call=piece.tool_call,
        warning=piece.warning,
    )
