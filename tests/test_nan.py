"""LILY_DEBUG=nan: the first launch that writes NaN or infinity is named, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import rebuild
from lily import DeviceError, Engine
from make_checkpoint import Shape, make_checkpoint

MODEL = "model.safetensors"
SHAPE = Shape(layers=4)  # layers 1 and 3 are attention
SMALL = Shape(layers=2, hidden=64, heads=2, kv_heads=1, experts=4, experts_used=2, shared_inner=64)
PROMPT = [(i * 7919) % 160 for i in range(12)]
HUGE = 0x7F00  # 2^127 as bf16
# Where values are huge, and what a launch makes of them: of a prompt, or of a single row only, whose weights
# are not rounded. On cpu32 a tile's weights are, to no more than 65504.
PLACES = [
    ("cpu", "layers.0.linear_attn.out_proj.scales", "prompt", "qmm_add, delta, layer 0", "y"),
    ("cpu", "layers.3.self_attn.o_proj.scales", "prompt", "qmm_add, attention, layer 3", "y"),
    ("cpu", "layers.1.mlp.shared_expert.down_proj.scales", "prompt", "moe_combine, moe, layer 1", "x"),
    ("cpu", "layers.2.linear_attn.conv1d.weight", "prompt", "conv_silu, delta, layer 2", "y"),
    ("cpu", "lm_head.scales", "prompt", "head_logits, head", "logits"),
    ("cpu32", "layers.2.linear_attn.conv1d.weight", "prompt", "conv_silu, delta, layer 2", "y"),
    ("cpu32", "lm_head.scales", "prompt", "head_logits, head", "logits"),
    ("cpu32", "layers.0.linear_attn.out_proj.scales", "step", "qmv_add, delta, layer 0", "y"),
    ("cpu32", "layers.1.mlp.switch_mlp.down_proj.scales", "step", "expert_mv_down, moe, layer 1", "x"),
]


@pytest.fixture(params=["cpu", "cpu32"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Overrides the command line's: this is about what the engine does around a device."""
    monkeypatch.setenv("LILY_DEBUG", "nan")
    return str(request.param)


def break_rows(folder: Path, tensor: str, first: int) -> None:
    """Make a tensor's values huge from a row on: finite, so that the checkpoint opens."""

    def change(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
        (name,) = (name for name in tensors if name.endswith(tensor))
        dtype, shape, raw = tensors[name]
        values = np.frombuffer(raw, np.uint16).reshape(shape).copy()
        values[first:] = HUGE
        tensors[name] = (dtype, shape, values.tobytes())

    rebuild(folder / MODEL, change)


def open_engine(folder: Path | str, device: str, **options: Any) -> Engine:
    return Engine(folder, **{"device": device, "context": 256, "prefill_chunk": 64, **options})


@pytest.mark.parametrize(("target", "tensor", "call", "launch", "slot"), PLACES)
def test_nan__names_the_launch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    tensor: str,
    call: str,
    launch: str,
    slot: str,
) -> None:
    monkeypatch.setenv("LILY_DEBUG", "nan")
    break_rows(make_checkpoint(tmp_path, SHAPE), tensor, 0)
    with open_engine(tmp_path, target) as engine, engine.session() as session:
        wanted = rf"^{target}: kernel {launch}: \d+ of \d+ values of {slot} are NaN or infinite$"
        if call == "step":
            list(session.prefill(PROMPT))
        position = session.position
        calls: list[Callable[[], Any]] = [
            lambda: session.step(1),
            lambda: session.generate(None, max_tokens=3),
        ]
        if call == "prompt":
            calls = [lambda: session.prefill(PROMPT), lambda: session.generate(PROMPT)]
        for again in calls * 2:  # what one leaves behind hides nothing
            with pytest.raises(DeviceError, match=wanted):
                list(again())
        if call == "prompt":
            with pytest.raises(
                DeviceError, match=wanted if launch[:4] != "head" else "qmm, score: |head_logits, head: "
            ):
                engine.score(PROMPT)
        assert session.position == position


@pytest.fixture
def half_broken(tmp_path: Path) -> Path:
    """Tokens from 160 on have embeddings beyond any float."""
    break_rows(make_checkpoint(tmp_path, SHAPE), "embed_tokens.scales", 160)
    return tmp_path


@pytest.fixture
def expected(half_broken: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The same model without the search."""
    with monkeypatch.context() as patch:
        patch.delenv("LILY_DEBUG")
        engine = open_engine(half_broken, device)
    with engine:
        yield engine


def test_nan__leaves_the_session_usable(half_broken: Path, expected: Engine, device: str) -> None:
    """A call that fails can be repeated, and rows that another call has filled with NaN are no finding."""
    embed = rf"kernel embed_gather, embed: \d+ of {SHAPE.hidden} values of x are"
    only_broken = {"logit_bias": dict.fromkeys(range(160), -100.0)}
    only_whole = {"logit_bias": dict.fromkeys(range(160, SHAPE.vocab), -100.0)}
    with open_engine(half_broken, device) as engine, engine.session() as session:
        with pytest.raises(DeviceError, match=r"embed_gather, embed: .* values of x are"):
            list(session.prefill([200] * 64))
        list(session.prefill(PROMPT))
        list(expected.prefill(PROMPT))
        for _ in range(2):
            with pytest.raises(DeviceError, match=embed):
                list(session.step(3, **only_broken))  # type: ignore[arg-type]
        assert session.position == len(PROMPT)
        np.testing.assert_array_equal(session.logits, expected.logits)
        with engine.session() as other, pytest.raises(DeviceError, match=embed):
            list(other.prefill([250]))
        found = [token.id for token in session.step(8, **only_whole)]  # type: ignore[arg-type]
        assert found == [token.id for token in expected.step(8, **only_whole)]  # type: ignore[arg-type]
        np.testing.assert_array_equal(session.logits, expected.logits)


def run_all(engine: Engine, lengths: list[int], tokens: int) -> list[Any]:
    """Prompts of several lengths, all ways to choose a token, sessions in turn, scores, an answer."""
    found: list[Any] = []
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {7: -100.0, 9: 50.0}},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.05, "presence_penalty": 1.0, "seed": 4},
    ]
    with engine.session() as one, engine.session() as other:
        for length in lengths:
            other.reset()
            for session in (one, other):
                list(session.prefill([(i * 7919) % 320 for i in range(length)]))
            for kind in options:
                found += [token.id for session in (one, other) for token in session.step(tokens, **kind)]
        one._native.set_sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 1, dict.fromkeys(range(300), -np.inf))
        found += [one._native.step(0)[0] for _ in range(tokens)]
        found.append(one._native.top_logprobs(100)[0].tolist())
    found.append(engine.score([(i * 31) % 320 for i in range(lengths[-1])], top_logprobs=3).logprobs.tolist())
    chunks = engine.generate([5, 6, 7], max_tokens=4 * tokens, ignore_eos=True, seed=5)
    return [*found, "".join(chunk.text for chunk in chunks)]


def test_nan__no_false_alarm(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor another token than without the search. The demo model takes cpu32 too long."""
    lengths, tokens = ([1, 7, 64, 65, 200], 8) if device == "cpu" else ([1, 9, 66], 2)
    model = "demo" if device == "cpu" else make_checkpoint(tmp_path, SMALL)
    found = []
    for debug in ("nan", ""):
        monkeypatch.setenv("LILY_DEBUG", debug)
        with open_engine(model, device, context=1024) as engine:
            found.append(run_all(engine, lengths, tokens))
    assert found[0] == found[1]


def test_nan__no_false_alarm_with_blocks_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LILY_DEBUG", "nan")
    with open_engine("demo", "cpu", context=2304, prefill_chunk=2048, max_sessions=1) as engine:
        list(engine.prefill([(i * 7919) % 4000 for i in range(2050)]))
        assert len(list(engine.step(2, temperature=1.0, seed=0))) == 2


def test_nan__is_off_unless_asked_for(half_broken: Path, expected: Engine) -> None:
    list(expected.prefill([200]))
    assert not np.isfinite(expected.logits).all()


def test_nan__what_is_known_to_be_infinite_is_in_the_kernel_table() -> None:
    source = (Path(__file__).parents[1] / "src/lily_native/nan_device.cpp").read_text(encoding="utf-8")
    pairs = re.findall(r'\{"(\w+)", "(\w+)"\}', source)
    kernels = (Path(__file__).parents[1] / "docs/KERNELS.md").read_text(encoding="utf-8")
    assert len(pairs) == 3
    for kernel, slot in pairs:
        section = kernels.split(f"### {kernel}\n")[1].split("###")[0]
        assert f"| {slot} | float | write |" in section
