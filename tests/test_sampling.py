"""SamplingParams: ranges, defaults, and what reaches the native engine."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from lily import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "range_text"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", 1.5, "at least 1"),
        ("max_tokens", True, "at least 1"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "at least 0"),
        ("temperature", math.inf, "at least 0"),
        ("temperature", "0.5", "at least 0"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_k", -2, "from -1 to 2147483647"),
        ("top_k", 2**70, "from -1 to 2147483647"),
        ("temperature", 10**400, "at least 0"),
        ("max_tokens", np.array([1, 2]), "at least 1"),
        ("temperature", np.array([1.0, 2.0]), "at least 0"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("repetition_penalty", 0, "from 0.01 to 100"),
        ("seed", -1, "from 0 to 18446744073709551615"),
        ("seed", 2**64, "from 0 to 18446744073709551615"),
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", [1], "non-empty"),
        ("stop", 5, "non-empty"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", "12", "sequence of token ids"),
        ("logit_bias", {-1: 1.0}, "at least 0"),
        ("logit_bias", {1: 101.0}, "from -100 to 100"),
        ("logit_bias", {1: None}, "from -100 to 100"),
        ("logit_bias", [1], "map token ids"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024 entries"),
        ("ignore_eos", 1, "True or False"),
        ("logprobs", 5, "True or False"),
        ("top_logprobs", 21, "from 0 to 20"),
        ("top_logprobs", None, "from 0 to 20"),
        ("top_logprobs", 3, "needs logprobs"),
    ],
)
def test_range__names_field_and_range(name: str, value: Any, range_text: str) -> None:
    with pytest.raises(ValueError, match=range_text) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)


def test_params__are_frozen_copies() -> None:
    bias = {5: 1.0}
    stop = ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[6] = 2.0
    stop.append("b")
    assert params.logit_bias == {5: 1.0}
    assert params.stop == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3  # type: ignore[misc]


def test_make__keywords_win_and_unknown_ones_are_refused() -> None:
    base = SamplingParams(temperature=0.5, seed=1)
    assert SamplingParams.make(base, {"seed": 2}, "generate") == SamplingParams(temperature=0.5, seed=2)
    assert SamplingParams.make(base, {}, "generate") is base
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'temp'"):
        SamplingParams.make(None, {"temp": 0.5}, "generate")  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="must be a SamplingParams"):
        SamplingParams.make({"seed": 1}, {}, "step")  # type: ignore[arg-type]


def test_defaults__come_from_generation_config() -> None:
    config = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95, "eos_token_id": 3}
    params = SamplingParams(top_k=5).with_defaults(config)
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 5, 0.95)
    assert SamplingParams().with_defaults({**config, "do_sample": False}).temperature == 0
    assert SamplingParams().with_defaults({}).temperature == 0
    assert SamplingParams(temperature=0).with_defaults(config).temperature == 0


def test_native__is_neutral_for_what_is_not_given() -> None:
    native = SamplingParams(seed=7, top_k=-1, temperature=0).native()
    assert native == {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 7,
        "logit_bias": {},
    }


def test_native__samples_as_soon_as_a_sampling_field_is_given() -> None:
    assert SamplingParams().native()["temperature"] == 0
    assert SamplingParams(presence_penalty=1).native()["temperature"] == 0
    assert SamplingParams(top_p=0.9).native()["temperature"] == 1
    assert SamplingParams().native()["seed"] != SamplingParams().native()["seed"]


def test_bias_limit__is_the_native_one() -> None:
    from lily import _native
    from lily.sampling import MAX_BIAS

    assert _native.shape_constants()["MAX_BIAS"] == MAX_BIAS
