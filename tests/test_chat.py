"""Chat template against transformers, and the splitting of replies."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lily import CheckpointError, Tokenizer, UnsupportedError
from lily.reply import Piece, ReplyStream

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <city> & more, caf\u00e9",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2, "more": {"a": [1, None]}}},
}
USER = {"role": "user", "content": "What's the weather in Paris?"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([USER], {}),
    "no thinking": ([USER], {"enable_thinking": False}),
    "thinking": ([USER], {"enable_thinking": True}),
    "system": ([{"role": "system", "content": "Be brief."}, USER], {}),
    "turns": (
        [
            USER,
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny."},
            {"role": "user", "content": "So?"},
        ],
        {},
    ),
    "reasoning": ([USER, {"role": "assistant", "content": "Sunny.", "reasoning_content": "Look up."}], {}),
    "reasoning alias": ([USER, {"role": "assistant", "content": "Sunny.", "reasoning": "Look up."}], {}),
    "tools": ([{"role": "system", "content": "Be brief."}, USER], {"tools": [WEATHER]}),
    "tool call": (
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "18 \u00b0C"},
            {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
        ],
        {"tools": [WEATHER]},
    ),
    "no generation prompt": ([USER], {"add_generation_prompt": False}),
    "continue": (
        [USER, {"role": "assistant", "content": "The weather is "}],
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
}


@pytest.fixture(scope="module")
def reference(demo_folder: Path) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast.from_pretrained(str(demo_folder))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_template__equals_transformers(tokenizer: Tokenizer, reference: Any, name: str) -> None:
    messages, options = CONVERSATIONS[name]
    expected = {"add_generation_prompt": True, **options}
    text = tokenizer.apply_chat_template(messages, **options)
    assert text == reference.apply_chat_template(copy.deepcopy(messages), tokenize=False, **expected)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, **options)
    assert ids == reference.apply_chat_template(copy.deepcopy(messages), return_dict=False, **expected)


def test_template__leaves_the_messages_alone(tokenizer: Tokenizer) -> None:
    messages, options = copy.deepcopy(CONVERSATIONS["tool call"])
    tokenizer.apply_chat_template(messages, **options)
    assert (messages, options) == CONVERSATIONS["tool call"]


def test_template__accepts_openai_forms(tokenizer: Tokenizer) -> None:
    messages, options = copy.deepcopy(CONVERSATIONS["tool call"])
    expected = tokenizer.apply_chat_template(messages, **options)
    messages[1]["tool_calls"][0]["function"]["arguments"] = (
        '{"city": "Paris", "days": 2, "more": {"a": [1, null]}}'
    )
    messages[0]["content"] = [
        {"type": "text", "text": "What's the weather"},
        {"type": "text", "text": " in Paris?"},
    ]
    assert tokenizer.apply_chat_template(messages, **options) == expected
    developer = [{"role": "developer", "content": "Be brief."}, USER]
    system = [{"role": "system", "content": "Be brief."}, USER]
    assert tokenizer.apply_chat_template(developer) == tokenizer.apply_chat_template(system)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "non-empty list"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([{"content": "hi"}], r"messages\[0\] has role None"),
        (
            [USER, {"role": "robot", "content": "hi"}],
            r"messages\[1\] has role 'robot'; the roles are system, user",
        ),
        ([USER, {"role": "system", "content": "hi"}], r"messages\[1\] .* only the first message"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content: a part"),
        ([{"role": "user", "content": object()}], "must consist of JSON types, object found"),
        ([{"role": "assistant", "tool_calls": "x"}], r"messages\[0\].tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], "must be a dict with function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments is not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "must be a JSON object, not list",
        ),
    ],
)
def test_messages__errors_say_which_and_why(tokenizer: Tokenizer, messages: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tokenizer.apply_chat_template(messages)


def test_messages__images_are_unsupported(tokenizer: Tokenizer) -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(UnsupportedError, match="image_url"):
        tokenizer.apply_chat_template([{"role": "user", "content": [part]}])


def test_tools__errors(tokenizer: Tokenizer) -> None:
    wrong: list[Any] = [[{}], [5], {"name": "f"}, "f"]
    for tools in wrong:
        with pytest.raises(ValueError, match="tools"):
            tokenizer.apply_chat_template([USER], tools=tools)


def test_continue__needs_content_and_excludes_a_new_turn(tokenizer: Tokenizer) -> None:
    assistant = {"role": "assistant", "content": "a"}
    with pytest.raises(ValueError, match="exclude each other"):
        tokenizer.apply_chat_template(
            [USER, assistant], continue_final_message=True, add_generation_prompt=True
        )
    with pytest.raises(ValueError, match="no content"):
        tokenizer.apply_chat_template(
            [USER, {"role": "assistant", "tool_calls": [CALL]}], continue_final_message=True
        )


@pytest.mark.parametrize(
    ("template", "result"),
    [
        (
            "{% for m in messages %}\n  {% if m.x %}{% continue %}{% endif %}\n{{ m.role }}\n{% endfor %}",
            None,
        ),
        ("{{ {'b': '<\u00e9>', 'a': 1} | tojson }}", '{"b": "<\u00e9>", "a": 1}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        (
            "a{% generation %}b{{ messages[0].content }}{% endgeneration %}c",
            "abWhat's the weather in Paris?c",
        ),
        ("{{ custom }}{{ eos_token }}", "value<|im_end|>"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
    ],
)
def test_template__conventions_of_transformers(
    demo_folder: Path, tmp_path: Path, reference: Any, template: str, result: str | None
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = Tokenizer(tmp_path).apply_chat_template([USER], custom="value")
    expected = reference.apply_chat_template(
        [USER], chat_template=template, tokenize=False, add_generation_prompt=True, custom="value"
    )
    assert text == expected
    assert result is None or text == result


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('No user query found.') }}", "No user query found"),
        ("{{ messages[0].content.__class__.__mro__ }}", "refuses|cannot"),
        ("{{ messages.append(1) }}", "refuses|cannot"),
        ("{{ messages[0].content + 1 }}", "cannot write"),
    ],
)
def test_template__errors_are_value_errors(
    demo_folder: Path, tmp_path: Path, template: str, error: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((demo_folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(ValueError, match=error):
        Tokenizer(tmp_path).apply_chat_template([USER])


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ [1e999, messages] }}", "NameError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{{ 'a' | tojson(indent=2**62) | indent(2**62) }}", "a text of more than 16000000 characters"),
        ("{{ 'a'.encode('nope') }}", "LookupError"),
        ("{{ 'é'.encode('ascii') }}", "UnicodeEncodeError"),
        ("{{ ('x' * 9) | truncate(-1) }}", "AssertionError"),
        ("{{ 10**9999 }}", "ValueError"),
        ("{{ 10**99999 }}", "a number of more than 65536 bits"),
        ("{% include 'x' %}", "no loader"),
        ("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", "more than 16000000 characters"),
        ("{{ raise_exception('x' * 100000) }}", r"refuses the messages: 'x+\.\.\.$"),
        ("{{ raise_exception(messages) }}", "refuses the messages: .*role"),
    ],
)
def test_template__whatever_it_raises_is_a_value_error(
    demo_folder: Path, tmp_path: Path, template: str, error: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((demo_folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(ValueError, match=error) as caught:
        Tokenizer(tmp_path).apply_chat_template([USER])
    assert caught.type is ValueError
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (b"\xff\xfe{{ 1 }}", "not UTF-8"),
        (b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}", "RecursionError"),
        (b"{% if a %}" * 2000 + b"{% endif %}" * 2000, "Error"),
        (b"{% break %}", "'break' outside loop"),
        (b"{{ '\\ud8zz' }}", "broken"),
        (b"a\n{% for %}", "broken at line 2"),
    ],
)
def test_template__that_cannot_be_compiled(
    demo_folder: Path, tmp_path: Path, template: bytes, error: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((demo_folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(template)
    with pytest.raises(CheckpointError, match=f"chat_template.jinja.*{error}"):
        Tokenizer(tmp_path).apply_chat_template([USER])


@pytest.mark.parametrize("name", [["x"], {}, 5, None])
def test_template__odd_names_in_a_list(demo_folder: Path, tmp_path: Path, name: object) -> None:
    (tmp_path / "tokenizer.json").write_bytes((demo_folder / "tokenizer.json").read_bytes())
    templates = [{"name": name, "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer(tmp_path).apply_chat_template([USER]) == "b"


def test_messages__too_deep_or_without_end(tokenizer: Tokenizer) -> None:
    endless: dict[str, Any] = {"role": "user", "content": "hi"}
    endless["more"] = [endless]
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for messages in ([endless], [{**USER, "more": deep}], deep):
        with pytest.raises(ValueError, match="messages is nested too deeply, or contains itself"):
            tokenizer.apply_chat_template(messages)
    with pytest.raises(ValueError, match="tools is nested too deeply, or contains itself"):
        tokenizer.apply_chat_template([USER], tools=[{**WEATHER, "more": deep}])


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": ' + "[" * 900 + "]" * 900 + "}"])
def test_messages__arguments_too_deep(tokenizer: Tokenizer, arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ValueError, match=r"tool_calls\[0\].function.arguments is"):
        tokenizer.apply_chat_template([USER, {"role": "assistant", "tool_calls": [call]}])


def run(stream: ReplyStream, ids: Iterable[int]) -> dict[str, str]:
    """Feed ids and join the pieces of each kind."""
    joined = {"text": "", "reasoning": ""}
    for index in ids:
        for kind, text, *_ in stream.add(index):
            assert text
            joined[kind] += text
        if stream.stopped:
            break
    for kind, text, *_ in stream.finish():
        joined[kind] += text
    return joined


STOPS = [
    ("one two three", ["two"], "one "),
    ("one two three", ["three", "o t"], "one tw"),
    ("one two three", ["twx", "four"], "one two three"),
    ("aab", ["ab"], "a"),
    ("ababac", ["abac"], "ab"),
    ("xabcdx", ["abcd", "bc"], "xa"),
    ("end.\n\nMore", ["\n\n"], "end."),
    ("h\u00e9llo \U0001f600 w\u00f6rld", ["\U0001f600 w"], "h\u00e9llo "),
    ("stop at the end", ["end"], "stop at the "),
    ("held to the en", ["end"], "held to the en"),
]


@pytest.mark.parametrize(("text", "stops", "expected"), STOPS)
def test_stop__every_split_gives_the_same_text(
    tokenizer: Tokenizer, text: str, stops: list[str], expected: str
) -> None:
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            parts = (text[:first], text[first:second], text[second:])
            ids = [index for part in parts for index in tokenizer.encode(part)]
            stream = ReplyStream(tokenizer, [], stops)
            assert run(stream, ids)["text"] == expected
            assert stream.stopped == (expected != text)


def test_stop__emits_what_is_certain_at_once(tokenizer: Tokenizer) -> None:
    stream = ReplyStream(tokenizer, [], ["zebra"])
    assert stream.add(tokenizer.encode("A")[0]) == [Piece("text", "A")]
    (z,) = tokenizer.encode("z")
    assert stream.add(z) == []
    assert stream.add(z) == [Piece("text", "z")]
    assert stream.finish() == [Piece("text", "z")]


def test_reasoning__is_split_at_the_markers(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    reply = tokenizer.encode("First.\n\nSecond.\n</think>\n\nAnswer.\n\nMore.")
    assert run(ReplyStream(tokenizer, prompt), reply) == {
        "reasoning": "First.\n\nSecond.",
        "text": "Answer.\n\nMore.",
    }
    reply = tokenizer.encode("Hi.<think>\nhm\n</think>\n\nYes <tool_call>")
    assert run(ReplyStream(tokenizer, []), reply) == {"reasoning": "hm", "text": "Hi.Yes <tool_call>"}


def test_reasoning__stops_are_for_the_answer(tokenizer: Tokenizer) -> None:
    reply = tokenizer.encode("hm Paris\n</think>\n\nIt is Paris.")
    stream = ReplyStream(tokenizer, tokenizer.encode("<think>\n"), ["Paris", "\n\n"])
    assert run(stream, reply) == {"reasoning": "hm Paris", "text": "It is "}


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("<think>\n", "reasoning"),
        ("<think>\nSome thought", "reasoning"),
        ("<think>\n\n</think>\n\n", "text"),
        ("What is <think>?<|im_end|>\n", "text"),
        ("plain", "text"),
        ("", "text"),
    ],
)
def test_reasoning__start_is_seen_in_the_prompt(tokenizer: Tokenizer, prompt: str, kind: str) -> None:
    assert ReplyStream(tokenizer, tokenizer.encode(prompt)).kind == kind


def test_reasoning__cut_short_keeps_its_line_breaks(tokenizer: Tokenizer) -> None:
    stream = ReplyStream(tokenizer, tokenizer.encode("<think>\n"))
    assert run(stream, tokenizer.encode("hm\n\n")) == {"reasoning": "hm\n\n", "text": ""}


def test_reply__incomplete_character_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f600")
    assert len(ids) > 1
    assert run(ReplyStream(tokenizer, []), ids[:-1])["text"] == "\ufffd"
    assert run(ReplyStream(tokenizer, []), [*ids[:-1], *tokenizer.encode("a")])["text"] == "\ufffda"
