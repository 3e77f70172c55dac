"""One timeline of tokens: prefill, step, generate, and the results they hand out."""

from __future__ import annotations

import dataclasses
import sys
import threading
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from lily.chat import Kind, ReplyStream
from lily.errors import ContextFullError, LilyError, UnsupportedError
from lily.results import Chunk, Finish, Meter, PrefillProgress, Token, TokenLogprob
from lily.sampling import SamplingOptions, SamplingParams, StepOptions
from lily.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lily import _native

Ids: TypeAlias = npt.NDArray[np.int32]
TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]]"
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
Progress: TypeAlias = Callable[[int, int], object]


@dataclass(frozen=True)
class Request:
    """A checked call of generate(). ids None: go on from what the session holds."""

    ids: Ids | None
    params: SamplingParams
    progress: Progress | None


class Core:
    """What an engine and its sessions share: the native engine and facts of the checkpoint.

    Sessions hold the core and not the engine, so that an engine nobody refers to is freed at once.
    """

    def __init__(
        self,
        native: _native.Engine,
        tokenizer: Tokenizer,
        *,
        context: int,
        vocab: int,
        eos_ids: frozenset[int],
        generation_config: Mapping[str, Any],
    ) -> None:
        self._native: _native.Engine | None = native
        self.tokenizer = tokenizer
        self.context = context
        self.vocab = vocab
        self.eos_ids = eos_ids
        self.generation_config = generation_config

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._native is None

    def native(self) -> _native.Engine:
        """Return the native engine.

        Raises:
            LilyError: The engine is closed.
        """
        if self._native is None:
            raise LilyError("the engine is closed")
        return self._native

    def close(self) -> None:
        """Free the native engine; a second call does nothing."""
        native, self._native = self._native, None
        if native is not None:
            native.close()

    def token_ids(self, prompt: str | TokenIds | Messages, room: int | None = None) -> Ids:
        """Turn a prompt into checked token ids.

        Raises:
            ValueError: It is empty, or not text or token ids of this model.
            ContextFullError: It has more tokens than there is room for (default: the context).
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        try:
            found = np.asarray(ids)
        except ValueError:
            found = np.empty((0, 0))
        if found.size == 0 and found.ndim == 1:
            raise ValueError("the prompt is empty")
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ValueError("the prompt must be text or a flat sequence of token ids")
        if found.min() < 0 or found.max() >= self.vocab:
            wrong = found[(found < 0) | (found >= self.vocab)][0]
            raise ValueError(f"token id {wrong} is not from 0 to {self.vocab - 1}")
        room = self.context if room is None else room
        if found.size > room:
            rest = "" if room == self.context else f", of which {self.context - room} are in use"
            raise ContextFullError(f"the prompt has {found.size} tokens, the context {self.context}{rest}")
        return np.array(found, dtype=np.int32)  # a copy: the caller's array may change

    def request(
        self,
        prompt: str | TokenIds | Messages | None,
        sampling: SamplingParams | None,
        options: SamplingOptions,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: object,
        response_format: object,
        enable_thinking: bool | None,
        thinking_token_budget: int | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        progress: Progress | None,
    ) -> Request:
        """Check the arguments of generate() and turn the prompt into token ids."""
        self.native()
        refused = {
            "tool_choice": tool_choice,
            "response_format": response_format,
            "thinking_token_budget": thinking_token_budget,
        }
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedError(f"{name} is not implemented yet; leave it out")
        params = SamplingParams.make(sampling, options, "generate").with_defaults(self.generation_config)
        self.check_ids_of(params)
        template = {"tools": tools, "enable_thinking": enable_thinking, **(chat_template_kwargs or {})}
        template = {name: value for name, value in template.items() if value is not None}
        if _is_messages(prompt):
            text = self.tokenizer.apply_chat_template(prompt, **template)
            return Request(self.token_ids(text), params, progress)
        if template:
            raise ValueError(f"{next(iter(template))} goes with a prompt of messages only")
        return Request(None if prompt is None else self.token_ids(prompt), params, progress)

    def check_ids_of(self, params: SamplingParams) -> None:
        """Raise ValueError if stop_token_ids or logit_bias name a token the model does not have."""
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for index in ids or ():
                if index >= self.vocab:
                    raise ValueError(f"{name}: token id {index} is not from 0 to {self.vocab - 1}")


class Session:
    """One timeline of tokens with its own state. Made by Engine.session().

    Calls may come from any thread; calls on one session run one after the other. Starting a call makes older
    iterators of step() and generate() on the same session raise LilyError, because the state has moved on.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._native = core.native().session()
        self._lock = threading.RLock()
        self._closed = False
        self._epoch = 0
        self._pending: _Prompt | None = None
        self._failure: BaseException | None = None
        self._tokens = array("i")  # the context, to see whether it ends inside reasoning
        self._detokenizer: Detokenizer = core.tokenizer.detokenizer()
        self._owner: Request | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> int:
        """Number of tokens processed so far."""
        self._check_open()
        return self._native.position

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Logits after the last token handed out, float32 [vocab]; an unread prefill() is completed first.

        Raises:
            LilyError: There is no token yet.
        """
        with self._lock:
            self._settle()
            return self._native.logits()

    def close(self) -> None:
        """Give the session's memory back; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pending = None
                if not self._core.closed:
                    self._native.close()

    def reset(self) -> None:
        """Forget all tokens."""
        with self._lock:
            self._check_open()
            self._restart()
            self._epoch += 1

    def prefill(self, prompt: str | TokenIds) -> Prefill:
        """Append a prompt to the context, in chunks.

        The work is done while the iterator is read. Dropped unread, it runs to completion, and the next call
        on the session completes one that is still held. Leaving a loop over it early, or its close(), cancels
        the rest; tokens already processed stay.

        Args:
            prompt: Text, taken as it is (special tokens in it are recognised), or token ids.

        Raises:
            ValueError: The prompt is empty or has token ids the model does not have.
            ContextFullError: It does not fit; nothing was done.
        """
        with self._lock:
            self._settle()
            ids = self._core.token_ids(prompt, self._core.context - self._native.position)
            self._epoch += 1
            self._detokenizer.flush()
            self._pending = _Prompt(ids)
            return Prefill(self, self._pending)

    def step(
        self,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        **options: Unpack[StepOptions],
    ) -> Iterator[Token]:
        """Choose and append tokens one by one; greedy by default, does not stop at end tokens.

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
        return self._steps(params)

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
        **options: Unpack[SamplingOptions],
    ) -> Generator[Chunk, None, None]:
        """Answer a prompt. Like Engine.generate(), in this session.

        The prompt is the whole context: what the session held is forgotten. None goes on from what it holds,
        which joins prefill() and generate().
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
        )
        self._check_open()
        return self.run(request)

    def claim(self, request: Request) -> bool:
        """Reserve an idle session for a request; False if a generation is under way."""
        with self._lock:
            if self._owner is None:
                self._owner = request
            return self._owner is request

    def run(self, request: Request) -> Generator[Chunk, None, None]:
        """Carry out a checked request; generate() without the checks."""
        with self._lock:
            self._owner = request
        try:
            yield from self._reply(request)
        finally:
            with self._lock:
                if self._owner is request:
                    self._owner = None

    def _steps(self, params: SamplingParams) -> Iterator[Token]:
        epoch = self._begin(params, restart=False)
        produced = 0
        while params.max_tokens is None or produced < params.max_tokens:
            with self._lock:
                self._check_current(epoch)
                if self._native.position >= self._core.context:
                    if params.max_tokens is None and produced:
                        return
                    raise ContextFullError(f"the context of {self._core.context} tokens is full")
                index, logprob = self._advance()
                text = self._detokenizer.add(index)
            produced += 1
            yield Token(index, logprob, text)

    def _reply(self, request: Request) -> Iterator[Chunk]:
        meter = Meter()
        epoch = self._begin(request.params, restart=request.ids is not None)
        if request.ids is None:
            meter.prompt = meter.cached = self.position
            if not meter.prompt:
                raise LilyError("there is nothing to go on from: give a prompt, or call prefill() first")
        else:
            meter.prompt = len(request.ids)
            self._feed_all(request.ids, request.progress, epoch)
        meter.prefilled()

        params = request.params
        reply = ReplyStream(self._core.tokenizer, self._tokens, params.stop or ())
        ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else self._core.eos_ids)
        limit = min(params.max_tokens or self._core.context, self._core.context - self.position)
        unread: list[TokenLogprob] = []
        finish: Finish | None = None if limit else "length"
        pieces: list[tuple[Kind, str]] = []
        while finish is None:
            with self._lock:
                self._check_current(epoch)
                meter.start()
                top = self._top(params.top_logprobs)
                index, logprob = self._advance()
                meter.token(reply.kind)
            unread.append(TokenLogprob(index, logprob, top))
            if index in ends:
                finish = "stop"
            else:
                pieces = reply.add(index)
                finish = "stop" if reply.stopped else "length" if meter.completion == limit else None
            if finish is None:
                for kind, text in pieces:
                    yield _chunk(text, kind, unread, params)
                    unread = []
                pieces = []
        pieces += reply.finish()
        last_kind, last_text = pieces.pop() if pieces else (reply.kind, "")
        for kind, text in pieces:
            yield _chunk(text, kind, unread, params)
            unread = []
        last = _chunk(last_text, last_kind, unread, params)
        yield dataclasses.replace(last, finish_reason=finish, usage=meter.usage())

    def _begin(self, params: SamplingParams, restart: bool) -> int:
        """Make this call the session's current one and return its epoch."""
        with self._lock:
            self._check_open()
            if restart:
                self._restart()
            else:
                self._settle()
            self._epoch += 1
            self._native.set_sampling(**params.native())
            return self._epoch

    def _restart(self) -> None:
        self._pending = None
        self._failure = None
        self._native.reset()
        del self._tokens[:]
        self._detokenizer.flush()

    def _feed_all(self, ids: Ids, progress: Progress | None, epoch: int) -> None:
        done = 0
        while done < len(ids):
            with self._lock:
                self._check_current(epoch)
                done += self._feed(ids[done:])
            if progress is not None:
                progress(done, len(ids))

    def _feed(self, ids: Ids) -> int:
        taken = self._native.prefill(ids)
        self._tokens.extend(ids[:taken].tolist())
        return taken

    def _advance(self) -> tuple[int, float]:
        index, logprob = self._native.step()
        self._tokens.append(index)
        return index, logprob

    def _top(self, count: int) -> tuple[tuple[int, float], ...]:
        if not count:
            return ()
        ids, logprobs = self._native.top_logprobs(count)
        return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))

    def _continue(self, prompt: _Prompt) -> bool:
        """Process one chunk of a prompt; False if nothing of it is left to do."""
        with self._lock:
            if prompt is not self._pending:
                return False
            self._check_open()
            try:
                prompt.done += self._feed(prompt.ids[prompt.done :])
            except BaseException:
                self._pending = None
                raise
            if prompt.done == len(prompt.ids):
                self._pending = None
            return True

    def _cancel(self, prompt: _Prompt) -> None:
        with self._lock:
            if prompt is self._pending:
                self._pending = None

    def _finish_dropped(self, prompt: _Prompt) -> None:
        """Complete a prompt nobody holds; an error is kept for the next call, as a finaliser cannot raise."""
        try:
            while not self._closed and not self._core.closed and self._continue(prompt):
                pass
        except BaseException as error:  # Ctrl-C too
            self._failure = error

    def _settle(self) -> None:
        """Complete a prompt that was not read, and raise what went wrong with one that was dropped."""
        self._check_open()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        while self._pending is not None and self._continue(self._pending):
            pass

    def _check_open(self) -> None:
        self._core.native()
        if self._closed:
            raise LilyError("the session is closed")

    def _check_current(self, epoch: int) -> None:
        self._check_open()
        if epoch != self._epoch:
            raise LilyError("this iterator is out of date: another call on its session has started since")


class Prefill(Iterator[PrefillProgress]):
    """Iterator of prefill(): each item is the progress after one more chunk."""

    def __init__(self, session: Session, prompt: _Prompt) -> None:
        self._session = session
        self._prompt = prompt
        self._read = False

    def __next__(self) -> PrefillProgress:
        self._read = True
        if not self._session._continue(self._prompt):
            raise StopIteration
        return PrefillProgress(self._prompt.done, len(self._prompt.ids))

    def close(self) -> None:
        """Cancel what is left; tokens already processed stay in the context."""
        self._session._cancel(self._prompt)

    def __del__(self) -> None:
        if self._read:
            self.close()
        elif not sys.is_finalizing():
            self._session._finish_dropped(self._prompt)


class _Prompt:
    """Token ids on their way into a session."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self.done = 0


def _chunk(text: str, kind: Kind, tokens: list[TokenLogprob], params: SamplingParams) -> Chunk:
    ids = tuple(token.id for token in tokens)
    return Chunk(text, kind, ids, logprobs=tuple(tokens) if params.logprobs else None)


def _is_messages(prompt: str | TokenIds | Messages | None) -> TypeGuard[Messages]:
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return isinstance(prompt[0], Mapping) or hasattr(prompt[0], "model_dump")
