"""What the sessions of an engine share, and the checks of what they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from lily.admission import Admission
from lily.errors import ContextFullError, LilyError, UnsupportedError
from lily.sampling import SamplingOptions, SamplingParams, check_float, check_int
from lily.stream import ProcessLock

if TYPE_CHECKING:
    from lily import _native
    from lily.tokenizer import Tokenizer
    from lily.tools import Tool

Ids: TypeAlias = npt.NDArray[np.int32]
TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]]"
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
Progress: TypeAlias = Callable[[int, int], object]
ContextPolicy: TypeAlias = Literal["error", "stop"]

MAX_TIMEOUT = 1e9

_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize")


class GenerateOptions(SamplingOptions, total=False):
    """The keyword arguments of Session.generate()."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    enable_thinking: bool | None
    thinking_token_budget: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    progress: Progress | None
    timeout: float | None
    on_context_full: ContextPolicy


@dataclass(frozen=True)
class Request:
    """A checked call of generate(). ids None: go on from what the session holds."""

    ids: Ids | None
    params: SamplingParams
    progress: Progress | None
    timeout: float | None = None  # seconds, from the first chunk that is read
    on_context_full: ContextPolicy = "error"
    tools: tuple[Tool, ...] = ()  # whose calls are looked for in the reply
    thinking_token_budget: int | None = None


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
        fingerprint: str,
    ) -> None:
        self._native: _native.Engine | None = native
        self.admission = Admission()
        self.lock = ProcessLock()  # of the engine's own session
        self.tokenizer = tokenizer
        self.context = context
        self.vocab = vocab
        self.eos_ids = eos_ids
        self.generation_config = generation_config
        self.fingerprint = fingerprint  # of the model, for files

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._native is None

    def native(self) -> _native.Engine:
        """Return the native engine.

        Raises:
            LilyError: The engine is closed, or belongs to the parent process.
        """
        self.lock.check()
        if self._native is None:
            raise LilyError("the engine is closed")
        return self._native

    def new_native(self) -> _native.Session | None:
        """Return a new native session; None if all are in use."""
        return self.native().session_unless_full()

    def close(self) -> None:
        """Free the native engine; a second call does nothing."""
        native, self._native = self._native, None
        if native is not None:
            native.close()
        self.admission.end()

    def token_ids(self, prompt: str | TokenIds | Messages, room: int | None = None) -> Ids:
        """Turn a prompt into checked token ids.

        Raises:
            ValueError: It is empty, or not text or token ids of this model.
            ContextFullError: It has more tokens than there is room for (default: the context).
        """
        if isinstance(prompt, Mapping) or hasattr(prompt, "model_dump"):
            raise ValueError("the prompt is a single message: give a list of messages")
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
        timeout: float | None,
        on_context_full: ContextPolicy,
    ) -> Request:
        """Check the arguments of generate() and turn the prompt into token ids."""
        self.native()
        if response_format is not None:
            raise UnsupportedError("response_format is not implemented yet; leave it out")
        check_progress(progress)
        check_int("thinking_token_budget", thinking_token_budget, 0, None)
        check_float("timeout", timeout, 0.0, MAX_TIMEOUT)
        if on_context_full not in ("error", "stop"):
            raise ValueError(f"on_context_full must be 'error' or 'stop', not {on_context_full!r}")
        params = SamplingParams.make(sampling, options, "generate").with_defaults(self.generation_config)
        callable_tools, params = self._tools(tools, tool_choice, params)
        self.check_ids_of(params)
        template = template_variables(chat_template_kwargs, tools, enable_thinking)
        template = {name: value for name, value in template.items() if value is not None}
        if _is_messages(prompt):
            text = self.tokenizer.apply_chat_template(prompt, **template)
            ids: Ids | None = self.token_ids(text)
        elif template:
            raise ValueError(f"{next(iter(template))} goes with a prompt of messages only")
        else:
            ids = None if prompt is None else self.token_ids(prompt)
        request = Request(
            ids, params, progress, timeout, on_context_full, callable_tools, thinking_token_budget
        )
        if ids is not None:
            self.check_room(len(ids), request)
        return request

    def _tools(
        self, tools: Sequence[Mapping[str, Any]] | None, choice: object, params: SamplingParams
    ) -> tuple[tuple[Tool, ...], SamplingParams]:
        """Return the tools that may be called, and the parameters with which they are."""
        from lily.chat import checked_tools
        from lily.tools import choice_of, tools_of

        found = tools_of(checked_tools(tools) or ())
        chosen = choice_of(choice, found)
        if chosen.mode == "required":
            raise UnsupportedError(f"tool_choice={choice!r} is not implemented yet; 'auto' and 'none' are")
        if chosen.mode == "auto" or not found:
            return found, params
        # The prompt stays what it is with tools, so that what was read of it is still good.
        begin = self.tokenizer.token_id("<tool_call>")
        bias = {} if begin is None else {begin: -100.0}
        return (), dataclasses.replace(params, logit_bias={**(params.logit_bias or {}), **bias})

    def check_room(self, prompt: int, request: Request) -> None:
        """Raise ContextFullError if a reply may not fit behind a prompt of so many tokens."""
        wanted = request.params.max_tokens
        if request.on_context_full == "error" and wanted is not None and prompt + wanted > self.context:
            raise ContextFullError(
                f"the prompt has {prompt} tokens and max_tokens is {wanted}, the context {self.context}: "
                "lower max_tokens, or have the reply end there with on_context_full='stop'"
            )

    def check_ids_of(self, params: SamplingParams) -> None:
        """Raise ValueError if stop_token_ids or logit_bias name a token the model does not have."""
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for index in ids or ():
                if index >= self.vocab:
                    raise ValueError(f"{name}: token id {index} is not from 0 to {self.vocab - 1}")


def check_progress(progress: object) -> None:
    """Raise TypeError if a progress callback is none."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of (done, total), not {type(progress).__name__}")


def template_variables(
    further: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None, enable_thinking: bool | None
) -> dict[str, Any]:
    """Join the arguments of generate() that go to the chat template."""
    variables: dict[str, Any] = {"tools": tools, "enable_thinking": enable_thinking}
    if further is None:
        return variables
    if not isinstance(further, Mapping):
        raise TypeError(f"chat_template_kwargs must be a mapping, not {type(further).__name__}")
    for name in further:
        if not isinstance(name, str):
            raise TypeError(f"chat_template_kwargs: every name must be a string, not {name!r}")
        if name in _RESERVED:
            raise ValueError(f"chat_template_kwargs: {name!r} is set by generate() itself")
        if variables.get(name) is not None:
            raise ValueError(f"chat_template_kwargs: {name!r} is given as an argument as well")
    return {**variables, **further}


def _is_messages(prompt: str | TokenIds | Messages | None) -> TypeGuard[Messages]:
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return isinstance(prompt[0], Mapping) or hasattr(prompt[0], "model_dump")
