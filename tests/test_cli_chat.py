"""lily chat through a pipe: its commands, and conversations in files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from program import PROGRAM

PARIS = "The capital of France is Paris."
QUESTION = "What is the capital of France?"


def chat(*lines: str, options: tuple[str, ...] = ()) -> tuple[str, str]:
    """What lily chat writes to standard output and standard error for these lines."""
    command = [*PROGRAM, "chat", "--temperature", "0", "--max-tokens", "60", *options]
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, done.stderr


def test_chat__goes_on_with_a_saved_conversation(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    out, _ = chat(QUESTION, f"/save {path}", "/reset", f"/load {path}", "/retry")
    assert out == f"{PARIS}\n{PARIS}\n"
    messages = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["content"] == PARIS
    out, _ = chat(f"/load {path}", "/retry", options=("--json",))
    assert json.loads(out)["text"] == PARIS


def test_chat__thinks_or_not() -> None:
    out, _ = chat("/think off", QUESTION, "/think on", "/retry", options=("--json",))
    without, thinking = map(json.loads, out.splitlines())
    assert not without["reasoning"]
    assert thinking["reasoning"]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"format": "lily-chat", "messages": [{"role": "robot"}]}', "\0"]
)
def test_chat__a_wrong_file_loses_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    out, problems = chat(QUESTION, f"/load {path}", "/retry")
    assert out == f"{PARIS}\n{PARIS}\n"
    assert "the conversation is as it was" in problems


def test_chat__names_its_commands() -> None:
    out, problems = chat("/bogus")
    assert not out
    assert "there is no command /bogus" in problems
    assert "/save FILE" in problems


def test_chat__does_not_write_where_it_cannot(tmp_path: Path) -> None:
    out, problems = chat(QUESTION, f"/save {tmp_path}/none/talk.json", "/retry")
    assert out == f"{PARIS}\n{PARIS}\n"
    assert "No such file" in problems
