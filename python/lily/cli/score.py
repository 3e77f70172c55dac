"""lily score: how well the model predicts a text."""

from __future__ import annotations

import argparse
import json
from typing import Any

from lily.cli.options import add_command, add_model_options, open_engine, read_text, whole
from lily.engine import MAX_SCORE_TOP

_EXAMPLES = """  lily score "The capital of France is Paris."
  lily score --json --top 5 < page.txt
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands, "score", "print the perplexity of a text that fits in the context", _EXAMPLES
    )
    parser.add_argument("text", nargs="?", help="the text; without it, or as -, standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every token")
    parser.add_argument(
        "--top",
        type=whole(0, MAX_SCORE_TOP),
        default=0,
        metavar="K",
        help="with --json, also the K likeliest tokens",
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    if args.top and not args.json:
        args.parser.error("--top needs --json")
    text = read_text(args.text)
    with open_engine(args, max_sessions=1) as engine:
        ids = engine.tokenizer.encode(text)
        if len(ids) < 2:
            raise ValueError("the text has fewer than two tokens: there is nothing to predict")
        score = engine.score(ids, top_logprobs=args.top)
    mean = -float(score.logprobs.mean(dtype="float64"))
    if not args.json:
        print(
            f"perplexity {score.perplexity:.4f} (mean negative log probability {mean:.4f}, {len(ids)} tokens)"
        )
        return 0
    record: dict[str, Any] = {
        "perplexity": score.perplexity,
        "mean_nll": mean,
        "token_ids": score.token_ids.tolist(),
        "logprobs": score.logprobs.tolist(),
    }
    if args.top:
        record["top_ids"] = score.top_ids.tolist()
        record["top_logprobs"] = score.top_logprobs.tolist()
    print(json.dumps(record))
    return 0
