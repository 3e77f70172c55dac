"""What lily generate hands to the engine, and how it shows what comes back."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lily import Chunk, Engine, TokenLogprob, ToolCall, Usage
from lily.cli import main
from lily.cli.reply import Reply
from program import Terminal

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "object", "properties": {"rivers": {"type": "array"}}}
USAGE = Usage(10, 5, 2, 0, None, 100.0, 50.0, 0.1)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of Engine.generate(), which calls a tool instead of the model."""
    arguments: dict[str, Any] = {}

    def generate(self: Engine, prompt: Any, **options: Any) -> list[Chunk]:
        arguments.update(options, prompt=prompt)
        call = ToolCall("call_1", "weather", {"city": "Köln", "days": 2})
        return [
            Chunk("It may", "text", (1,), logprobs=(TokenLogprob(1, -0.5, ((1, -0.5),)),)),
            Chunk("<tool_call>...", "tool_call", (2,), tool_call=call),
            Chunk("<tool_call>x", "text", (3,), warning="the call has no name"),
            Chunk("", "text", (), "tool_calls", USAGE),
        ]

    monkeypatch.setattr(Engine, "generate", generate)
    return arguments


def test_tools__from_a_file_or_as_they_are(given: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    assert main(["generate", "x", "--tools", str(path), "--tool-choice", "required"]) == 0
    assert (given["tools"], given["tool_choice"]) == (TOOLS, "required")
    assert main(["generate", "x", "--tools", json.dumps(TOOLS), "--tool-choice", "weather"]) == 0
    assert given["tools"] == TOOLS
    assert given["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


def test_response_format__of_every_form(given: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    wrapped = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    for text, expected in (
        (str(path), wrapped),
        (json.dumps(SCHEMA), wrapped),
        (json.dumps(wrapped), wrapped),
        ("json_object", {"type": "json_object"}),
    ):
        assert main(["generate", "x", "--response-format", text]) == 0
        assert given["response_format"] == expected


def test_thinking_and_logprobs(given: dict[str, Any]) -> None:
    options = ["--thinking-budget", "100", "--logprobs", "3", "--json", "--seed", "7"]
    assert main(["generate", "x", *options]) == 0
    assert (given["thinking_token_budget"], given["logprobs"], given["top_logprobs"]) == (100, True, 3)
    assert given["seed"] == 7
    assert "enable_thinking" not in given
    assert "tools" not in given
    assert main(["generate", "x", "--no-thinking"]) == 0
    assert given["enable_thinking"] is False


def test_json__calls_and_logprobs(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--json", "--logprobs", "1"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["tool_calls"] == [
        {"id": "call_1", "name": "weather", "arguments": {"city": "Köln", "days": 2}}
    ]
    assert record["text"] == "It may<tool_call>x"
    assert record["finish_reason"] == "tool_calls"
    assert record["logprobs"] == [{"id": 1, "logprob": -0.5, "top": [[1, -0.5]]}]
    assert captured.err == "lily: warning: the call has no name\n"


def test_text__calls_are_lines(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x"]) == 0
    captured = capsys.readouterr()
    assert captured.out == 'It may\nweather({"city": "Köln", "days": 2})\n<tool_call>x\n'
    assert captured.err == "lily: warning: the call has no name\n"


def test_reply__reasoning_and_a_call_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    reply = Reply()
    call = Chunk("", "tool_call", (2,), "length", USAGE, tool_call=ToolCall("1", "f", {}))
    reply.read([Chunk("Well", "reasoning", (1,)), call])
    reply.end_line()
    assert capsys.readouterr().out == "f({})\n"
    assert not reply.unanswered
    assert not reply.empty


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tools", "no/such.json"], "argument --tools: no/such.json: no such file"),
        (["--tools", "[1"], "argument --tools: bad JSON"),
        (["--tools", "{}"], "argument --tools: tools must be a list"),
        (["--tools", "[1]"], "argument --tools: tools[0] must be a dict"),
        (["--tool-choice", "auto"], "--tool-choice needs --tools"),
        (["--response-format", "[]"], "argument --response-format: must be a JSON object, not list"),
        (["--response-format", "{"], "argument --response-format: bad JSON"),
        (["--logprobs", "1"], "--logprobs needs --json"),
        (["--logprobs", "21", "--json"], "argument --logprobs: must be an integer from 0 to 20"),
        (["--thinking-budget", "-1"], "argument --thinking-budget: must be an integer from 0"),
        (["--raw", "--tools", "[]"], "--raw goes without the chat template, so --tools does not apply"),
    ],
)
def test_usage__errors_are_two(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "x", *arguments])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_tools__reach_the_prompt(capsys: pytest.CaptureFixture[str], device: str) -> None:
    options = ["generate", "x", "--json", "--max-tokens", "1", "--device", device]
    counts = []
    for more in ([], ["--tools", json.dumps(TOOLS)]):
        assert main([*options, *more]) == 0
        counts.append(json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"])
    assert counts[1] > counts[0] + 20


def test_program__alone_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    captured = capsys.readouterr()
    assert (caught.value.code, captured.out) == (2, "")
    for command in ("generate", "chat", "pull", "info", "score", "doctor", "bench"):
        assert f"\n    {command} " in captured.err


@pytest.mark.parametrize("command", ["generate", "chat", "pull", "info", "score", "doctor"])
def test_json__every_command_has_it(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert "--json" in text
    assert f"examples:\n  lily {command}" in text


@pytest.mark.filterwarnings("default")
def test_pipe__warnings_do_not_reach_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert main(["chat", "--json", "--context", "5000", "--max-tokens", "1", "--device", device]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["usage"]["completion_tokens"] == 1
    assert captured.err.startswith("lily: warning: context 5000 exceeds")


def test_terminal__plain_errors() -> None:
    with Terminal("generate", "x", "--model", "/no/such") as terminal:
        assert terminal.finish() == 1
    assert terminal.shown.startswith("lily: '/no/such': no such folder")
    assert terminal.shown.count("\n") == 1
