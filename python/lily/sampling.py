"""How the next token is chosen: validated parameters and their defaults."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_STOPS = 64
MAX_BIAS = 1024
MAX_TOP_LOGPROBS = 20


class StepOptions(TypedDict, total=False):
    """The fields of SamplingParams that step() takes as keyword arguments."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None


class SamplingOptions(StepOptions, total=False):
    """The fields of SamplingParams, as keyword arguments of generate()."""

    max_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one generation; None means "the model's default".

    generate() takes defaults from the checkpoint's generation_config.json; step() is greedy unless sampling
    is given.

    Attributes:
        max_tokens: Most tokens to produce, at least 1. None: as many as the context has room for.
        temperature: At least 0; 0 is greedy and ignores top_p, top_k and min_p.
        top_p: Keep the most likely tokens whose probabilities add up to this; above 0, at most 1.
        top_k: Keep this many most likely tokens; 0 or -1 keeps all; at most 2**31 - 1.
        min_p: Drop tokens less likely than this share of the most likely one; 0 to 1.
        presence_penalty: Subtracted from the logit of every token already produced; -2 to 2.
        frequency_penalty: The same, times the number of occurrences; -2 to 2.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen; 0.01 to 100, 1 is
            none.
        logit_bias: Added to the logits of these token ids, at most 1024; -100 to 100 each.
        seed: 0 to 2**64 - 1; the same seed gives the same tokens. None draws one at random.
        stop: Text, or several, that ends the answer; it is not part of the answer. Not looked for in
            reasoning.
        stop_token_ids: Token ids that end the answer, besides the model's own end tokens.
        ignore_eos: Go on after the model's end tokens.
        logprobs: Report the log probability of every token (of the unmodified distribution).
        top_logprobs: Also report this many most likely tokens at each position; 0 to 20, needs logprobs.

    Raises:
        ValueError: A value is of the wrong type or outside its range; the message names the field and the
            range.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1, None)
        check_float("temperature", self.temperature, 0.0, None)
        check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_int("top_k", self.top_k, -1, MAX_TOP_K)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_int("seed", self.seed, 0, MAX_SEED)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_bool("logprobs", self.logprobs)
        check_int("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS, optional=False)
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=True")
        # Frozen copies, so that a list or dict the caller changes later cannot change the parameters.
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @classmethod
    def make(cls, base: SamplingParams | None, options: SamplingOptions, caller: str) -> SamplingParams:
        """Combine an optional SamplingParams with keyword arguments, which win.

        Raises:
            TypeError: A keyword argument is unknown, or base is not a SamplingParams.
        """
        unknown = [name for name in options if name not in cls.__dataclass_fields__]
        if unknown:
            raise TypeError(f"{caller}() got an unexpected keyword argument {unknown[0]!r}")
        if base is None:
            return cls(**options)
        if not isinstance(base, cls):
            raise TypeError(f"{caller}(): sampling must be a SamplingParams, not {type(base).__name__}")
        return dataclasses.replace(base, **options) if options else base

    def with_defaults(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """Fill what is None from a checkpoint's generation_config."""
        sampled = bool(generation_config.get("do_sample", "temperature" in generation_config))
        found: dict[str, Any] = {"temperature": 0.0}
        if sampled:
            names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            found = {
                name: generation_config[name] for name in names if generation_config.get(name) is not None
            }
            found.setdefault("temperature", 1.0)
        missing = {name: value for name, value in found.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)

    def native(self) -> dict[str, Any]:
        """Return the arguments of the native set_sampling(), with neutral values for what is None."""
        sampling = (self.top_k, self.top_p, self.min_p, self.seed)
        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if all(value is None for value in sampling) else 1.0
        return {
            "temperature": float(temperature),
            "top_k": max(self.top_k or 0, 0),
            "top_p": 1.0 if self.top_p is None else float(self.top_p),
            "min_p": float(self.min_p or 0.0),
            "presence_penalty": float(self.presence_penalty or 0.0),
            "frequency_penalty": float(self.frequency_penalty or 0.0),
            "repetition_penalty": 1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            "seed": int.from_bytes(os.urandom(8), "little") if self.seed is None else self.seed,
            "logit_bias": dict(self.logit_bias or {}),
        }


def _range_text(low: float | None, high: float | None, low_open: bool = False) -> str:
    if high is None:
        return f"{'above' if low_open else 'at least'} {low:g}"
    return f"above {low:g} and at most {high:g}" if low_open else f"from {low:g} to {high:g}"


def check_int(name: str, value: object, low: int, high: int | None, optional: bool = True) -> None:
    """Raise ValueError unless a value is an integer in a range, or None where that is allowed."""
    if value is None and optional:
        return
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {bounds}, not {value!r}")


def check_float(name: str, value: object, low: float, high: float | None, low_open: bool = False) -> None:
    """Raise ValueError unless a value is a number in a range, or None."""
    if value is None:
        return
    number = not isinstance(value, (bool, str)) and hasattr(value, "__float__")
    try:
        x = float(value) if number else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):  # an array, or an integer beyond any float
        x = math.nan
    if not math.isfinite(x) or x < low or (low_open and x == low) or (high is not None and x > high):
        raise ValueError(f"{name} must be a number {_range_text(low, high, low_open)}, not {value!r}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def _checked_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if len(stops) > MAX_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop must be a non-empty string or up to {MAX_STOPS} of them, not {stop!r}")
    return stops


def _checked_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, (str, bytes)):
        raise ValueError(f"stop_token_ids must be a sequence of token ids, not {ids!r}")
    ids = tuple(ids)
    for token in ids:
        check_int("stop_token_ids: every id", token, 0, None)
    return tuple(int(token) for token in ids)


def _checked_bias(bias: Mapping[int, float] | None) -> Mapping[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r}")
    if len(bias) > MAX_BIAS:
        raise ValueError(f"logit_bias must have at most {MAX_BIAS} entries, not {len(bias)}")
    for token, value in bias.items():
        check_int("logit_bias: every token id", token, 0, None)
        if value is None:
            raise ValueError(f"logit_bias[{token}] must be a number from -100 to 100, not None")
        check_float(f"logit_bias[{token}]", value, -100.0, 100.0)
    return {int(token): float(value) for token, value in bias.items()}
