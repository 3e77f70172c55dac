"""lily generate: answer one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from lily.cli.options import (
    add_command,
    add_model_options,
    add_sampling_options,
    add_thinking_options,
    open_engine,
    read_text,
    sampling_of,
    thinking_of,
    whole,
)
from lily.cli.reply import Reply, speed_line
from lily.cli.terminal import ProgressBar, dim, is_terminal
from lily.cli.tool_options import add_tool_options, tool_options_of
from lily.sampling import MAX_TOP_LOGPROBS

_EXAMPLES = """  lily generate "What is the capital of France?"
  lily generate --raw --max-tokens 64 --temperature 0 "Once upon a time"
  lily generate --no-thinking --json < question.txt
  lily generate --tools tools.json --json "How warm is it in Paris?"
  lily generate --response-format schema.json "Name three rivers."
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "generate", "answer one prompt", _EXAMPLES)
    parser.add_argument("prompt", nargs="?", help="the prompt; without it, or as -, standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message in front of the prompt")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the chat template"
    )
    add_thinking_options(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with answer, ids and usage"
    )
    parser.add_argument(
        "--logprobs",
        type=whole(0, MAX_TOP_LOGPROBS),
        metavar="K",
        help="with --json, also the log probability of every token, and of the K likeliest in its place",
    )
    add_tool_options(parser)
    add_model_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    options = _options_of(args)
    text = read_text(args.prompt)
    prompt: Any = text
    if not args.raw:
        prompt = [{"role": "user", "content": text}]
        if args.system is not None:
            prompt.insert(0, {"role": "system", "content": args.system})
    with open_engine(args, max_sessions=1) as engine:
        reply = Reply(quiet=args.json)
        bar = ProgressBar("reading prompt", unit=" tokens", least=64)
        try:
            reply.read(engine.generate(prompt, progress=bar, **options))
        finally:
            bar.wipe()
            reply.end_line()
        if args.json:
            print(json.dumps({"model": engine.info()["model"], **reply.record()}, ensure_ascii=False))
            return 0
    reply.explain_end(args.max_tokens)
    if reply.usage is not None and is_terminal(sys.stderr):
        print(dim(speed_line(reply.usage), sys.stderr), file=sys.stderr)
    return 1 if reply.unanswered else 0


def _options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of Engine.generate(), but for the prompt."""
    if args.raw and (args.system is not None or args.no_thinking):
        args.parser.error("--raw goes without the chat template, so --system and --no-thinking do not apply")
    if args.raw and args.tools is not None:
        args.parser.error("--raw goes without the chat template, so --tools does not apply")
    if args.logprobs is not None and not args.json:
        args.parser.error("--logprobs needs --json")
    options = sampling_of(args) | thinking_of(args) | tool_options_of(args)
    options |= {"ignore_eos": args.ignore_eos, "on_context_full": "stop"}
    if args.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": args.logprobs}
    return options
