"""lily info: what a checkpoint is and what it needs, without loading its weights."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import lily
from lily.cli.options import add_command, add_model_options, device_of
from lily.cli.terminal import wrapped
from lily.engine import Engine, machine_memory

_EXAMPLES = """  lily info
  lily info --model ./checkpoint --context 131072 --json
"""
_MIB = 1 << 20
_COLUMN = 19  # where values begin


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "info", "show facts about a model and the memory it needs", _EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    from lily.checkpoint import open_checkpoint, resolve

    checkpoint = open_checkpoint(resolve(args.model, args.revision))
    facts = {
        "lily": lily.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device_of(args.device, checkpoint.config),
        "model": checkpoint.name,
        "folder": str(checkpoint.folder),
        "max_position": checkpoint.max_position,
        "eos_token_ids": sorted(checkpoint.eos_token_ids),
        "generation_config": checkpoint.generation_config,
        "config": checkpoint.config,
        "tensors": len(checkpoint.tensors),
        "machine_memory": machine_memory(),
        "memory": Engine.plan_memory(
            args.model, device=args.device, context=args.context, revision=args.revision
        ),
    }
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    for name, value in facts.items():
        print(wrapped(f"{name:{_COLUMN - 1}} {_text(name, value)}", _COLUMN))
    return 0


def _text(name: str, value: Any) -> str:
    if name == "memory":
        return ", ".join(f"{part} {size / _MIB:.1f} MiB" for part, size in value.items())
    if name == "machine_memory":
        return "unknown" if value is None else f"{value / _MIB:.0f} MiB"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
