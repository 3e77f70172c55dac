"""Tool calls: from what a model writes to typed calls, however tokens and bytes split it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from lily import Chunk, Engine, Session, Tokenizer
from lily.reply import Piece, ReplyStream
from lily.tokenizer import _BYTES
from lily.tools import Tool, choice_of, tools_of
from replies import FRANCE, ids_of, text_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F", 1]},
        "shared": {"$ref": "#/$defs/count"},
    },
    "$defs": {"count": {"type": "integer"}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = tools_of([WEATHER, PING])


def call(name: str, **values: str) -> str:
    """A call as the chat template writes it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


Told = list[tuple[str, Any]]

# What the model writes, and the pieces that are meant; None for a warning about all of the text.
TRANSCRIPTS: list[tuple[str, Told]] = [
    ("No call.", [("text", "No call.")]),
    (call("ping"), [("ping", {})]),
    (call("weather", city="Paris"), [("weather", {"city": "Paris"})]),
    (call("weather", city="\U0001f98a 東京 x\u0301"), [("weather", {"city": "\U0001f98a 東京 x\u0301"})]),
    (call("weather", city=""), [("weather", {"city": ""})]),
    (call("weather", city="two\nlines\n"), [("weather", {"city": "two\nlines\n"})]),
    (call("weather", city="7"), [("weather", {"city": "7"})]),
    (call("weather", city="a < b && <b>x</b>"), [("weather", {"city": "a < b && <b>x</b>"})]),
    (call("weather", city="say </parameter> twice"), [("weather", {"city": "say </parameter> twice"})]),
    (call("weather", days="3", share="0.5"), [("weather", {"days": 3, "share": 0.5})]),
    (call("weather", days="3.0", share="2"), [("weather", {"days": 3, "share": 2})]),
    (call("weather", days="many"), [("weather", {"days": "many"})]),
    (call("weather", deep="true"), [("weather", {"deep": True})]),
    (call("weather", deep="False"), [("weather", {"deep": False})]),
    (call("weather", places='["a", "b"]'), [("weather", {"places": ["a", "b"]})]),
    (call("weather", options='{"x": {"y": null}}'), [("weather", {"options": {"x": {"y": None}}})]),
    (call("weather", options="{broken"), [("weather", {"options": "{broken"})]),
    (call("weather", maybe="None"), [("weather", {"maybe": None})]),
    (call("weather", unit="C"), [("weather", {"unit": "C"})]),
    (call("weather", unit="1"), [("weather", {"unit": 1})]),
    (call("weather", shared="12"), [("weather", {"shared": 12})]),
    (call("weather", unknown="[1]"), [("weather", {"unknown": [1]})]),
    (call("weather", unknown="free text"), [("weather", {"unknown": "free text"})]),
    (call("weather", days="NaN"), [("weather", {"days": "NaN"})]),
    ("Wait.\n\n" + call("ping"), [("text", "Wait."), ("ping", {})]),
    (call("ping") + "\n" + call("weather", days="1"), [("ping", {}), ("weather", {"days": 1})]),
    (call("ping") + "\nDone \U0001f98a.", [("ping", {}), ("text", "Done \U0001f98a.")]),
    ("<tool_call><function=ping></function></tool_call>", [("ping", {})]),
    ("<tool_call>\n<function=ping>\n</tool_call>", [("ping", {})]),
    ("<tool_call>\n<function=ping>\n</function>", [("ping", {})]),
    (call("rain"), [("warning", call("rain"))]),
    ("<tool_call>\nping\n</tool_call>", [("warning", "<tool_call>"), ("text", "\nping\n</tool_call>")]),
    ("<tool_call>\n<function=weather>\n<parameter=city>\nPar", [("warning", None)]),
    ("a < b <tool", [("text", "a < b <tool")]),
]


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text with a token for each of its bytes."""
    letters = {byte: letter for letter, byte in _BYTES.items()}
    found = [tokenizer.token_id(letters[byte]) for byte in text.encode()]
    return [index for index in found if index is not None]


def told(pieces: Iterable[Piece], raw: str) -> Told:
    """Pieces in the form of the table; text that comes in several is one."""
    out: Told = []
    for piece in pieces:
        if piece.tool_call is not None:
            out.append((piece.tool_call.name, piece.tool_call.arguments))
        elif piece.warning is not None:
            out.append(("warning", piece.text if piece.text != raw else None))
        elif out and out[-1][0] == "text":
            out[-1] = ("text", out[-1][1] + piece.text)
        else:
            out.append(("text", piece.text))
    return out


def read(tokenizer: Tokenizer, ids: Sequence[int], tools: Sequence[Tool] = TOOLS) -> list[Piece]:
    """All pieces of a reply."""
    stream = ReplyStream(tokenizer, [], tools=tools)
    return [piece for index in ids for piece in stream.add(index)] + stream.finish()


@pytest.mark.parametrize(("text", "meant"), TRANSCRIPTS)
def test_calls__are_the_same_at_every_split(tokenizer: Tokenizer, text: str, meant: Told) -> None:
    wanted = [
        (kind, None if value == text else value) if kind == "warning" else (kind, value)
        for kind, value in meant
    ]
    whole = tokenizer.encode(text)
    assert told(read(tokenizer, whole), text) == wanted
    assert told(read(tokenizer, spelled(tokenizer, text)), text) == wanted
    data = text.encode()
    for at in range(len(data)):  # one byte alone, the rest in the tokens of the text on either side
        head, tail = data[:at].decode(errors="ignore"), data[at + 1 :].decode(errors="ignore")
        if head.encode() + data[at : at + 1] + tail.encode() == data:
            ids = [
                *tokenizer.encode(head),
                *spelled(tokenizer, data[at : at + 1].decode()),
                *tokenizer.encode(tail),
            ]
            assert told(read(tokenizer, ids), text) == wanted


@pytest.mark.parametrize(("text", "meant"), TRANSCRIPTS)
def test_calls__lose_nothing_but_line_breaks(tokenizer: Tokenizer, text: str, meant: Told) -> None:
    pieces = read(tokenizer, spelled(tokenizer, text))
    assert "".join(piece.text for piece in pieces).replace("\n", "") == text.replace("\n", "")
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_calls__in_reasoning_are_none(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"I might {call('ping')}.</think>\n\n{call('ping')}")
    stream = ReplyStream(tokenizer, tokenizer.encode("<think>\n"), tools=TOOLS)
    pieces = [piece for index in ids for piece in stream.add(index)] + stream.finish()
    assert "".join(piece.text for piece in pieces if piece.kind == "reasoning") == f"I might {call('ping')}."
    assert [piece.tool_call.name for piece in pieces if piece.tool_call is not None] == ["ping"]


def test_calls__without_tools_are_text(tokenizer: Tokenizer) -> None:
    pieces = read(tokenizer, tokenizer.encode(call("ping")), tools=())
    assert "".join(piece.text for piece in pieces) == call("ping")
    assert {piece.kind for piece in pieces} == {"text"}


def test_calls__a_stop_string_counts_outside_of_them_only(tokenizer: Tokenizer) -> None:
    stream = ReplyStream(tokenizer, [], ["Paris"], TOOLS)
    ids = tokenizer.encode(call("weather", city="Paris") + "\nThat is Paris, in France.")
    pieces = []
    while not stream.stopped:
        pieces += stream.add(ids.pop(0))
    assert told(pieces, "") == [("weather", {"city": "Paris"}), ("text", "That is ")]


def test_calls__read_back_what_the_template_writes(tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    letters = "ab <>/=\"'{}[]\n\t0.\u00e9\U0001f98a東"
    for _ in range(200):
        made = [
            {
                "city": "".join(rng.choices(letters, k=rng.randrange(12))),
                "days": rng.randrange(-9, 99),
                "deep": rng.random() < 0.5,
                "places": ["".join(rng.choices(letters, k=3)) for _ in range(rng.randrange(3))],
            }
            for _ in range(rng.randrange(1, 4))
        ]
        calls = [{"function": {"name": "weather", "arguments": arguments}} for arguments in made]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        prompt = tokenizer.apply_chat_template(FRANCE, [WEATHER])
        text = tokenizer.apply_chat_template([*FRANCE, answer], [WEATHER], add_generation_prompt=False)
        reply = text[len(prompt) :].removeprefix("\n</think>\n\n").removesuffix("<|im_end|>\n")
        pieces = read(tokenizer, tokenizer.encode(reply))
        assert [piece.tool_call.arguments for piece in pieces if piece.tool_call is not None] == made


class Scripted:
    """A native session whose model writes given tokens."""

    def __init__(self, native: Any, ids: Sequence[int]) -> None:
        self._native = native
        self._ids = iter(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def step(self, _ahead: int, flag: Any) -> tuple[int, float]:
        index = next(self._ids)
        self._native.prefill(np.array([index], np.int32), flag)
        return index, -0.5


def reply_of(session: Session, text: str, **options: Any) -> list[Chunk]:
    """The chunks of generate() when the model writes this, and its end token."""
    tokenizer = session._core.tokenizer
    ids = [*tokenizer.encode(text), min(session._core.eos_ids)]
    session._native = Scripted(session._native, ids)  # type: ignore[assignment]
    chunks = list(session.generate(FRANCE, tools=[WEATHER, PING], enable_thinking=False, **options))
    assert ids_of(chunks) == ids[: len(ids_of(chunks))]
    return chunks


def test_generate__hands_out_typed_calls(session: Session) -> None:
    text = f"Let me look.\n\n{call('weather', city='Paris', days='2')}\n{call('ping')}"
    chunks = reply_of(session, text, logprobs=True)
    calls = [chunk.tool_call for chunk in chunks if chunk.tool_call is not None]
    assert [(found.name, found.arguments) for found in calls] == [
        ("weather", {"city": "Paris", "days": 2}),
        ("ping", {}),
    ]
    assert len({found.id for found in calls}) == 2
    assert all(found.id.startswith("call_") for found in calls)
    assert text_of(chunks) == "Let me look."
    assert chunks[-1].finish_reason == "tool_calls"
    for chunk in chunks:
        assert chunk.logprobs is not None
        assert tuple(entry.id for entry in chunk.logprobs) == chunk.token_ids


def test_generate__a_call_that_is_cut_off_is_text(session: Session) -> None:
    chunks = reply_of(session, call("weather", city="Paris"), max_tokens=12)
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].kind == "text"
    assert chunks[-1].warning == "not a tool call: the reply ended before the call did"
    assert chunks[-1].text.startswith("<tool_call>")


def test_generate__tool_choice_none_forbids_calls(engine: Engine) -> None:
    begin = engine.tokenizer.token_id("<tool_call>")
    assert begin is not None
    options: dict[str, Any] = {"tools": [PING], "temperature": 0, "max_tokens": 1, "enable_thinking": False}
    pushed = list(engine.generate(FRANCE, logit_bias={begin: 100}, **options))
    assert ids_of(pushed) == [begin]
    assert begin not in ids_of(list(engine.generate(FRANCE, tool_choice="none", **options)))


@pytest.mark.parametrize(
    "choice", ["any", 1, {"type": "function"}, {"type": "tool", "function": {"name": "ping"}}]
)
def test_tool_choice__wrong_ones_are_refused(choice: object) -> None:
    with pytest.raises(ValueError, match="tool_choice must be 'auto', 'none', 'required' or"):
        choice_of(choice, TOOLS)


def test_tool_choice__names_a_tool() -> None:
    named = {"type": "function", "function": {"name": "ping"}}
    assert choice_of(named, TOOLS).name == "ping"
    with pytest.raises(ValueError, match="no tool is named 'rain'; the tools are weather, ping"):
        choice_of({"type": "function", "function": {"name": "rain"}}, TOOLS)


@pytest.mark.parametrize("name", ["", "a>b", " a", "a\nb"])
def test_tools__names_that_no_call_can_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a name is not empty and has no <, >"):
        tools_of([{"function": {"name": name}}])


@pytest.mark.parametrize("text", ["a\n\n<tool", "a\n\n<tool_call>\n<function=weather>"])
def test_stop__within_what_may_become_a_call_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    for split in range(len(text) + 1):
        ids = [index for part in (text[:split], text[split:]) for index in tokenizer.encode(part)]
        stream = ReplyStream(tokenizer, [], ["tool"], [Tool("weather", {})])
        pieces = []
        for index in ids:
            pieces += stream.add(index)
            if stream.stopped:
                break
        assert stream.stopped
        assert "".join(piece.text for piece in pieces + stream.finish()) == "a\n\n<"
