"""lily chat: conversations, their files, and the keys of a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lily.cli import main
from lily.cli.conversation import Conversation
from lily.cli.line_input import LineInput, completions
from lily.errors import CheckpointError
from program import Terminal, start

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, device: str) -> Any:
    """Function that says lines to lily chat, and returns status, output and error output."""

    def run(*lines: str, options: tuple[str, ...] = ("--no-thinking",)) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", "--temperature", "0", "--device", device, *options])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def answers(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_json__one_object_for_each_answer_and_prompts_are_reused(chat: Any) -> None:
    options = ("--json", "--system", "Answer briefly. " * 20)
    status, out, err = chat(QUESTION, "Who are you?", options=options)
    first, second = answers(out)
    assert (status, err) == (0, "")
    assert first["text"]
    assert first["reasoning"]
    assert first["finish_reason"] == "stop"
    assert second["usage"]["cached_tokens"] > 60
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]


def test_retry__takes_the_answer_back(chat: Any) -> None:
    _, out, err = chat("/retry", QUESTION, "/retry", options=("--json", "--no-thinking"))
    first, second = answers(out)
    assert first["text"] == second["text"] == ANSWER
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert err == "lily: there is no question yet\n"


def test_retry__asks_what_did_not_fit(chat: Any) -> None:
    status, out, err = chat("word " * 300, "/retry", QUESTION, options=("--context", "100", "--no-thinking"))
    assert (status, out) == (0, ANSWER + "\n")
    assert err.count("context 100; /reset starts a new conversation") == 2


def test_system_and_reset(chat: Any) -> None:
    options = ("--json", "--max-tokens", "1")
    lines = ("Hi", "/reset", "/system Be brief.", "Hi", "/reset", "Hi", "/reset", "/system", "Hi")
    plain, brief, again, without = (
        answer["usage"]["prompt_tokens"] for answer in answers(chat(*lines, options=options)[1])
    )
    assert plain == without < brief == again


def test_think(chat: Any) -> None:
    lines = (QUESTION, "/reset", "/think off", QUESTION, "/reset", "/think on", QUESTION, "/think maybe")
    _, out, err = chat(*lines, options=("--json",))
    thought = [bool(answer["reasoning"]) for answer in answers(out)]
    assert thought == [True, False, True]
    assert err == "lily: /think takes on or off\n"


def test_commands__unknown_and_wrong(chat: Any) -> None:
    status, _, err = chat("/nope", "/reset now", "/save", "/load", "//help")
    lines = err.splitlines()
    assert status == 0
    assert lines[0].startswith("lily: there is no command /nope: /reset forgets the conversation, /retry")
    assert lines[1:4] == [
        "lily: /reset takes nothing behind it",
        "lily: /save takes the name of a file",
        "lily: /load takes the name of a file",
    ]
    assert len(lines) == 4  # //help is a question, and no help was shown


def test_help__names_every_command(chat: Any) -> None:
    _, out, err = chat("/help")
    assert out == ""
    assert all(len(line) <= 80 for line in err.splitlines())
    for name in ("/reset", "/retry", "/system TEXT", "/think on|off", "/save FILE", "/load FILE", "/quit"):
        assert f"  {name} " in err


def test_save_and_load__go_on_in_another_program(chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "with blank.json"
    _, out, err = chat("/system Hi.", QUESTION, f"/save {path}", "Who are you?", options=("--json",))
    whole = answers(out)[1]
    assert err == ""
    record = json.loads(path.read_text())
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant"]
    assert record["messages"][2]["content"] == ANSWER
    assert record["messages"][2]["reasoning_content"].startswith("The user asks")
    _, out, err = chat(f"/load {path}", "Who are you?", options=("--json",))
    (loaded,) = answers(out)
    assert err == ""
    assert loaded["text"] == whole["text"]
    assert loaded["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_save_and_load__text_of_any_kind(chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    chat("Grüße 世界 🦊", f"/save {path}", options=("--max-tokens", "1"))
    assert json.loads(path.read_text())["messages"][0]["content"] == "Grüße 世界 🦊"
    chat(f"/save {path}")
    assert json.loads(path.read_text())["messages"] == []
    assert chat(f"/load {path}", QUESTION)[1:] == (ANSWER + "\n", "")


def test_load__list_of_messages_and_open_question(chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "messages.json"
    path.write_text(
        json.dumps([{"role": "developer", "content": "Hi."}, {"role": "user", "content": QUESTION}])
    )
    assert chat(f"/load {path}", "/retry")[1] == ANSWER + "\n"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "is no conversation, bad JSON"),
        ("[" * 100_000, "is no conversation, bad JSON"),
        ("7", "is no conversation of lily chat"),
        ('{"a": 1}', "is no conversation of lily chat"),
        ('{"format": "lily-chat"}', "messages must be"),
        ('[{"role": "cat", "content": "x"}]', "has role 'cat'"),
        ('[{"role": "user"}]', "has no content"),
        ('{"format": "lily-chat", "messages": [], "thinking": 3}', "thinking must be true or false"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "Lily reads text only"),
        ('[{"role": "user", "content": "\\ud800"}]', "has a lone surrogate"),
    ],
)
def test_load__wrong_files_lose_nothing(chat: Any, tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    _, out, err = chat(QUESTION, f"/load {path}", "/retry")
    assert out == f"{ANSWER}\n{ANSWER}\n"
    assert text in err
    assert err.endswith("; the conversation is as it was\n")
    assert err.count("\n") == 1


def test_save__what_cannot_be_written_stays(chat: Any, tmp_path: Path) -> None:
    _, out, err = chat(QUESTION, f"/save {tmp_path}", f"/save {tmp_path}/no/such/file", "/load /no/such")
    assert out == ANSWER + "\n"
    assert [line.split(":")[1].strip() for line in err.splitlines()] == [
        f"{tmp_path} was not written", f"{tmp_path}/no/such/file was not written", "/no/such"
    ]  # fmt: skip
    assert os.listdir(tmp_path) == []


def test_conversation__save_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.json"
    conversation = Conversation("demo", None, None)
    conversation.save(path)
    before = path.read_bytes()
    conversation.answer(conversation.ask("Hi"), {"role": "assistant", "content": "Ho"})

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="No space"):
            conversation.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["chat.json"]
    with pytest.raises(CheckpointError, match="regular"):
        conversation.load(Path("/dev/null"), lambda _: None)


def lines_of(monkeypatch: pytest.MonkeyPatch, text: str) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    source = LineInput((), quiet=False)
    return list(iter(source.read, None))


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("a\n b \n", ["a", "b"]),
        ("a", ["a"]),
        ("one\\\ntwo\\\nthree\nfour\n", ["one\ntwo\nthree", "four"]),
        ("one\\\n", ["one\n".strip()]),
        ('"""one\n\n  two\n"""\nthree\n', ["one\n\n  two", "three"]),
        ('"""one"""\n', ["one"]),
        ('"""\none\n', ["one"]),
        ('"""\n/quit\n"""\n', ["\n/quit"]),
    ],
)
def test_input__messages_of_several_lines(
    monkeypatch: pytest.MonkeyPatch, text: str, messages: list[str]
) -> None:
    assert lines_of(monkeypatch, text) == messages


def test_input__completions(tmp_path: Path) -> None:
    commands = ("/save ", "/system", "/load ")
    (tmp_path / "a.json").touch()
    (tmp_path / "folder").mkdir()
    assert completions(commands, "/s", "/s") == ["/save ", "/system"]
    assert completions(commands, "say /s", "/s") == []
    assert completions(commands, "hello", "hello") == []
    assert completions(commands, f"/load {tmp_path}/", f"{tmp_path}/") == [
        f"{tmp_path}/a.json", f"{tmp_path}/folder/"
    ]  # fmt: skip


def test_program__pipe_answers_each_line(device: str) -> None:
    options = ["chat", "--no-thinking", "--temperature", "0", "--device", device]
    with start(options, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(f"{QUESTION}\n\\\n/reset\n{QUESTION}".encode(), timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.startswith(ANSWER.encode())
    assert out.endswith(f"{ANSWER}\n".encode())
    assert b"\x1b" not in out
    assert b"> " not in out


def test_program__bytes_that_are_no_text(device: str) -> None:
    options = ["chat", "--no-thinking", "--max-tokens", "1", "--device", device]
    with start(options, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(b"a\xff\xfeb\n", timeout=60)
    assert (process.returncode, err) == (0, b"")


def test_program__ctrl_c_ends_a_pipe(device: str) -> None:
    options = ["chat", "--no-thinking", "--temperature", "0", "--device", device]
    with start(options, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Tell me a story about a fox named Tim.\n")
        process.stdin.flush()
        assert process.stdout.read(4) == b"Once"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_terminal__keys(device: str, tmp_path: Path) -> None:
    with Terminal("chat", "--no-thinking", "--temperature", "0", "--device", device) as terminal:
        terminal.read_until("> ")
        terminal.write("What is the capital of Franc?\x1b[De\x1b[C\n")  # left, right
        terminal.read_until(ANSWER)
        terminal.read_until("> ")
        terminal.write("\x1b[A\n")  # up
        terminal.read_until("of France?")
        terminal.read_until("tokens read")
        terminal.read_until("> ")
        terminal.write("/sa\t")
        terminal.read_until("/save ")
        terminal.write(f"{tmp_path}/chat.json\n")
        terminal.read_until("(4 messages are in")
        terminal.read_until("> ")
        terminal.write("\x1b[200~/quit\nand more\x1b[201~\n")  # pasted
        terminal.read_until("and more")
        terminal.read_until("> ")
        terminal.write("\x04")
        assert terminal.finish() == 0
    assert "Traceback" not in terminal.shown


def test_terminal__ctrl_c_twice_ends(device: str) -> None:
    with Terminal("chat", "--device", device) as terminal:
        terminal.read_until("> ")
        time.sleep(0.2)  # input() of Python misses a signal between writing the prompt and waiting
        terminal.interrupt()
        terminal.read_until("Ctrl-C again")
        terminal.read_until("> ")
        time.sleep(0.2)
        terminal.interrupt()
        assert terminal.finish() == 130
    assert "Traceback" not in terminal.shown


def test_terminal__stopped_answer_counts_as_far_as_it_went(device: str, tmp_path: Path) -> None:
    with Terminal("chat", "--no-thinking", "--temperature", "0", "--device", device) as terminal:
        terminal.read_until("> ")
        terminal.write("Tell me a story about a fox named Tim.\n")
        terminal.read_until("Once")
        terminal.interrupt()
        terminal.read_until("(stopped)")
        terminal.read_until("> ")
        terminal.write(f"/save {tmp_path}/chat.json\n")
        terminal.read_until("(2 messages")
        terminal.write("/quit\n")
        assert terminal.finish() == 0
    answer = json.loads((tmp_path / "chat.json").read_text())["messages"][1]
    assert answer["content"].startswith("Once")


def test_terminal__dumb_has_no_bars_or_colours(device: str) -> None:
    arguments = ("generate", "word " * 200, "--max-tokens", "1", "--device", device)
    with Terminal(*arguments, TERM="dumb", NO_COLOR="") as terminal:
        terminal.finish()
    assert "\x1b" not in terminal.shown
    assert "[-" not in terminal.shown
