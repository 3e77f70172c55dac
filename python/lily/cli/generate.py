"""lily generate: answer one prompt."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from lily.cli.options import (
    add_command,
    add_model_options,
    add_sampling_options,
    open_engine,
    read_text,
    sampling_of,
)
from lily.cli.reply import Reply, speed_line
from lily.cli.terminal import ProgressBar, dim, is_terminal

_EXAMPLES = """  lily generate "What is the capital of France?"
  lily generate --raw --max-tokens 64 --temperature 0 "Once upon a time"
  lily generate --no-thinking --json < question.txt
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "generate", "answer one prompt", _EXAMPLES)
    parser.add_argument("prompt", nargs="?", help="the prompt; without it, or as -, standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message in front of the prompt")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the chat template"
    )
    parser.add_argument("--no-thinking", action="store_true", help="answer without reasoning first")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with answer, ids and usage"
    )
    add_model_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    if args.raw and (args.system is not None or args.no_thinking):
        args.parser.error("--raw goes without the chat template, so --system and --no-thinking do not apply")
    options = sampling_of(args)
    text = read_text(args.prompt)
    prompt: Any = text
    if not args.raw:
        prompt = [{"role": "user", "content": text}]
        if args.system is not None:
            prompt.insert(0, {"role": "system", "content": args.system})
        if args.no_thinking:
            options["enable_thinking"] = False
    with open_engine(args, max_sessions=1) as engine:
        reply = Reply(quiet=args.json)
        bar = ProgressBar("reading prompt", unit=" tokens", least=64)
        try:
            options |= {"ignore_eos": args.ignore_eos, "on_context_full": "stop"}
            reply.read(engine.generate(prompt, progress=bar, **options))
        finally:
            bar.wipe()
            reply.end_line()
        if args.json:
            print(json.dumps({"model": engine.info()["model"], **_record(reply)}, ensure_ascii=False))
            return 0
    reply.explain_end(args.max_tokens)
    if reply.usage is not None and is_terminal(sys.stderr):
        print(dim(speed_line(reply.usage), sys.stderr), file=sys.stderr)
    return 1 if reply.unanswered else 0


def _record(reply: Reply) -> dict[str, Any]:
    return {
        "text": reply.text,
        "reasoning": reply.reasoning,
        "token_ids": reply.token_ids,
        "finish_reason": reply.finish_reason,
        "usage": dataclasses.asdict(reply.usage) if reply.usage is not None else None,
    }
