"""The command line, in this process and as a program with pipes, signals and a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from lily.cli import main
from lily.cli.terminal import ProgressBar
from program import Terminal, start

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command and return its status, output and error output."""
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that sets standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_generate__prints_the_answer_only(
    capsys: pytest.CaptureFixture[str], stdin: Any, device: str
) -> None:
    options = ("--device", device, "--temperature", "0")
    assert run(capsys, "generate", QUESTION, *options) == (0, ANSWER + "\n", "")
    stdin(QUESTION)
    assert run(capsys, "generate", "--no-thinking", *options) == (0, ANSWER + "\n", "")
    stdin(QUESTION)
    assert run(capsys, "generate", "-", *options, "--stop", "Paris")[1] == "The capital of France is \n"


def test_generate__json(capsys: pytest.CaptureFixture[str], device: str) -> None:
    status, out, err = run(capsys, "generate", QUESTION, "--json", "--temp", "0", "--device", device)
    record = json.loads(out)
    assert (status, err) == (0, "")
    assert record["model"] == "demo"
    assert record["text"] == ANSWER
    assert record["reasoning"].startswith("The user asks")
    assert record["finish_reason"] == "stop"
    assert record["usage"]["completion_tokens"] == len(record["token_ids"]) == 27


def test_generate__raw_and_seed(capsys: pytest.CaptureFixture[str], device: str) -> None:
    options = ("--raw", "--max-tokens", "12", "--device", device)
    first = run(capsys, "generate", "Once upon a time", "--temperature", "0", *options)
    assert first[1].startswith(", there was")
    sampled = [run(capsys, "generate", "Once upon a time", "--seed", seed, *options)[1] for seed in "112"]
    assert sampled[0] == sampled[1] != sampled[2]


def test_generate__system(capsys: pytest.CaptureFixture[str], device: str) -> None:
    options = (QUESTION, "--json", "--max-tokens", "1", "--device", device)
    plain = json.loads(run(capsys, "generate", *options)[1])["usage"]["prompt_tokens"]
    system = json.loads(run(capsys, "generate", "--system", "Be brief.", *options)[1])["usage"][
        "prompt_tokens"
    ]
    assert system > plain


def test_generate__says_why_there_is_no_answer(capsys: pytest.CaptureFixture[str], device: str) -> None:
    status, out, err = run(capsys, "generate", QUESTION, "--max-tokens", "3", "--device", device)
    assert (status, out) == (1, "")
    assert "used up before the answer began: raise --max-tokens" in err
    status, _, err = run(capsys, "generate", QUESTION, "--context", "30", "--device", device)
    assert status == 1
    assert "used up before the answer began: raise --context" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "x", "--model", "/no/such/folder"], "/no/such/folder"),
        (["generate", "word " * 5000], "the context 4096"),
        (["score", "a"], "fewer than two tokens"),
    ],
)
def test_errors__are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    assert text in err
    assert err.startswith("lily: ")
    assert err.count("\n") == 1


def test_errors__empty_input(capsys: pytest.CaptureFixture[str], stdin: Any) -> None:
    stdin("  \n")
    assert run(capsys, "generate") == (1, "", "lily: standard input is empty\n")


@pytest.mark.filterwarnings("default")
def test_warnings__are_one_line(capsys: pytest.CaptureFixture[str], device: str) -> None:
    options = ("--raw", "--max-tokens", "1", "--context", "5000", "--device", device)
    status, _, err = run(capsys, "generate", "Once", *options)
    assert status == 0
    assert err.startswith("lily: warning: context 5000 exceeds")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [[], ["generate"], ["chat"], ["info"], ["score"], ["bench"], ["bench", "decode"], ["bench", "peers"]],
)
def test_help__has_examples(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert "examples:\n  lily " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "usage: lily "),
        (["dance"], "invalid choice: 'dance'"),
        (["generate", "--no-such-option"], "usage: lily generate "),
        (["generate", "x", "y"], "usage: lily generate "),
        (["generate", "x", "y"], "lily generate: error: unrecognized arguments: y"),
        (["info", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["info", "--context", "0"], "argument --context: must be an integer from 1 to 16777216, not '0'"),
        (["info", "--context", "many"], "argument --context: must be an integer from 1"),
        (["chat", "--threads", "-1"], "argument --threads: must be an integer from 0 to 1024, not '-1'"),
        (["generate", "x", "--threads", "-1"], "argument --threads: must be"),
        (["score", "x", "--top", "129"], "argument --top: must be an integer from 0 to 128"),
        (["score", "x", "--top", "2"], "--top needs --json"),
        (["generate", "x", "--temperature", "-1"], "argument --temperature: temperature must be a number at"),
        (["generate", "x", "--temp", "nan"], "argument --temperature: temperature must be"),
        (["chat", "--top-k", str(2**70)], "argument --top-k: top_k must be an integer from -1"),
        (["chat", "--stop", ""], "argument --stop: stop must be"),
        (["generate", "x", "--max-tokens", "0"], "argument --max-tokens: max_tokens must be"),
        (["generate", "x", "--raw", "--no-thinking"], "--raw goes without the chat template"),
    ],
)
def test_usage__errors_are_two(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("lily ")


def test_info(capsys: pytest.CaptureFixture[str], device: str) -> None:
    status, out, _ = run(capsys, "info", "--json", "--device", device)
    record = json.loads(out)
    assert status == 0
    assert (record["model"], record["max_position"], record["config"]["experts"]) == ("demo", 4096, 16)
    assert record["memory"]["weights"] > 10_000_000
    status, out, _ = run(capsys, "info", "--device", device)
    assert status == 0
    assert "max_position       4096\n" in out
    assert f"device             {device}\n" in out
    order = [out.index(f"{part} ") for part in ("weights", "kv", "state", "logits", "scratch", "total")]
    assert order == sorted(order)


@pytest.mark.filterwarnings("default")
def test_info__device_of_auto_and_its_warning(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "info", "--json", "--context", "5000")
    assert status == 0
    assert json.loads(out)["device"] in ("metal", "cuda", "cpu")
    assert err.startswith("lily: warning: context 5000 exceeds")


def test_score(capsys: pytest.CaptureFixture[str], stdin: Any, device: str) -> None:
    text = "Once upon a time, there was a fox."
    stdin(text)
    status, out, _ = run(capsys, "score", "--device", device)
    assert status == 0
    perplexity = float(out.split()[1])
    assert 1 < perplexity < 20
    status, out, _ = run(capsys, "score", text, "--json", "--top", "2", "--device", device)
    record = json.loads(out)
    assert status == 0
    assert record["perplexity"] == pytest.approx(perplexity, abs=1e-3)
    assert len(record["logprobs"]) == len(record["token_ids"]) - 1 == len(record["top_ids"]) - 1
    assert len(record["top_ids"][0]) == 2


def test_chat__keeps_the_conversation(capsys: pytest.CaptureFixture[str], stdin: Any, device: str) -> None:
    stdin(f"{QUESTION}\n\n/nonsense\n{QUESTION}\n/reset\n{QUESTION}\n/quit\nnot read\n")
    status, out, err = run(capsys, "chat", "--temperature", "0", "--no-thinking", "--device", device)
    lines = out.splitlines()
    assert status == 0
    assert lines[0] == lines[-1] == ANSWER
    assert len(lines) >= 3
    assert "/reset forgets" in err


def test_chat__full_context_is_not_the_end(
    capsys: pytest.CaptureFixture[str], stdin: Any, device: str
) -> None:
    stdin("word " * 300 + f"\n{QUESTION}\n")
    status, out, err = run(capsys, "chat", "--temperature", "0", "--context", "100", "--device", device)
    assert status == 0
    assert "context 100; /reset" in err
    assert out == ANSWER + "\n"


def test_program__ctrl_c_is_130(device: str) -> None:
    arguments = ["generate", "--raw", "Once upon a time", "--ignore-eos", "--device", device]
    with start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert b"Traceback" not in process.stderr.read()


def test_program__closed_pipe_is_quiet(device: str) -> None:
    arguments = [
        "generate",
        "--raw",
        "Once upon a time",
        "--ignore-eos",
        "--max-tokens",
        "600",
        "--device",
        device,
    ]
    with start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(120) == 1
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("info >&-", 1, "lily: standard output is closed\n"),
        ("generate --raw hi --max-tokens 2 >&-", 1, "lily: standard output is closed\n"),
        ("generate <&-", 1, "lily: standard input is closed: give the text as an argument\n"),
        ("score <&-", 1, "lily: standard input is closed: give the text as an argument\n"),
        ("chat <&-", 1, "lily: standard input is closed\n"),
        ("generate --raw hi --max-tokens 2 <&-", 0, ""),
        ("info 2>&-", 0, ""),
        ("generate --threads -1 2>&-", 2, ""),
        ("generate < /dev/null 2>&-", 1, ""),
        ("info >&- 2>&-", 1, ""),
        ("info > /dev/full", 1, "lily: [Errno 28] No space left on device\n"),
    ],
)
def test_program__closed_streams(command: str, status: int, text: str) -> None:
    if "/dev/full" in command and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    shell = ["sh", "-c", f'"$0" -m lily {command}', sys.executable]
    result = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (status, text)


def test_terminal__chat_survives_ctrl_c(device: str) -> None:
    with Terminal("chat", "--no-thinking", "--device", device, "--temperature", "0") as terminal:
        terminal.read_until("> ")
        terminal.write("Tell me a story about a fox named Tim.\n")
        terminal.read_until("Once")
        terminal.interrupt()
        terminal.read_until("\r\n> ")
        time.sleep(0.2)  # input() of Python misses a signal between writing the prompt and waiting
        terminal.interrupt()
        terminal.read_until("Ctrl-D ends")
        terminal.write(QUESTION + "\n")
        terminal.read_until("Paris")
        terminal.read_until("> ")
        terminal.write("/quit\n")
        assert terminal.finish() == 0
        assert "Traceback" not in terminal.shown


class Screen(io.StringIO):
    """A terminal that remembers what was written."""

    def isatty(self) -> bool:
        return True


def test_bar__not_for_what_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    bar = ProgressBar("reading", unit=" tokens", least=64)
    bar(0, 63)
    assert screen.getvalue() == ""
    bar(0, 64)
    assert screen.getvalue().endswith("0/64 tokens\x1b[K")


def test_bar__is_drawn_on_a_terminal_and_wiped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    bar = ProgressBar("loading", 1000, " kB")
    bar(250, 1000)
    assert screen.getvalue().startswith("\rloading [##########------------------------------] 0.2/1.0 kB")
    bar(1000, 1000)
    drawn = screen.getvalue()
    assert drawn.endswith("\r\x1b[K")
    bar.wipe()
    bar(1000, 1000)
    assert screen.getvalue() == drawn
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    bar = ProgressBar("loading")
    bar(1, 2)
    bar.wipe()
    assert plain.getvalue() == ""


def test_terminal__dim_reasoning_and_speed(device: str) -> None:
    arguments = ("generate", QUESTION, "--temperature", "0", "--device", device)
    with Terminal(*arguments, NO_COLOR="") as terminal:
        assert terminal.finish() == 0
        assert "\x1b[2mThe\x1b[22m" in terminal.shown
        assert f"\r\n\r\n{ANSWER}\r\n" in terminal.shown
        assert "tok/s" in terminal.shown


def test_terminal__says_why_an_answer_ends(device: str) -> None:
    arguments = ("generate", "--raw", "Once upon a time", "--ignore-eos", "--device", device)
    with Terminal(*arguments, "--max-tokens", "5", NO_COLOR="") as terminal:
        assert terminal.finish() == 0
        assert "\x1b[2m(stopped at --max-tokens)\x1b[22m\r\n" in terminal.shown
    with Terminal(*arguments, "--context", "30") as terminal:
        assert terminal.finish() == 0
        assert "(context full)" in terminal.shown
    with Terminal("chat", "--no-thinking", "--max-tokens", "2", "--device", device) as terminal:
        terminal.read_until("> ")
        terminal.write(QUESTION + "\n")
        terminal.read_until("(stopped at --max-tokens)")
        terminal.write("/quit\n")
        assert terminal.finish() == 0


def test_terminal__bar_for_a_prompt_below_one_chunk(device: str) -> None:
    arguments = ("generate", "--raw", "word " * 200, "--max-tokens", "1", "--device", device)
    with Terminal(*arguments) as terminal:
        assert terminal.finish() == 0
        assert "reading prompt [-" in terminal.shown


def test_terminal__info_breaks_between_words(device: str) -> None:
    with Terminal("info", "--device", device) as terminal:
        assert terminal.finish() == 0
    lines = terminal.shown.splitlines()
    assert all(len(line) <= 80 for line in lines if "/" not in line)
    assert any(line.startswith(" " * 19) for line in lines)


def test_terminal__no_color(device: str) -> None:
    arguments = ("generate", QUESTION, "--temperature", "0", "--device", device)
    with Terminal(*arguments, NO_COLOR="1") as terminal:
        assert terminal.finish() == 0
        assert "\x1b[2m" not in terminal.shown
        assert "(thinking) The user" in terminal.shown
