"""Read the tables in pyobjc's _metadata.py: values of constants, exported names, and notes on methods.

The tables were generated from Apple's SDK. The file is parsed, never run.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

VALUE = re.compile(r"\$?([A-Za-z_]\w*)@(-?\d+)")
NAME = re.compile(r"\$([A-Za-z_]\w*)")


@dataclass
class Tables:
    """What pyobjc knows about one framework."""

    values: dict[str, int] = field(default_factory=dict)  # enumerators
    constants: set[str] = field(default_factory=set)  # exported variables
    functions: dict[str, str] = field(default_factory=dict)  # name: encoding
    methods: dict[tuple[str, str], dict[str, object]] = field(
        default_factory=dict
    )  # (class, selector): notes


def literal(node: ast.AST) -> object:
    """Return the value of a literal, or None."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def read_call(node: ast.Call, tables: Tables) -> None:
    """Read r(class, selector, notes)."""
    if not (isinstance(node.func, ast.Name) and node.func.id == "r" and len(node.args) == 3):
        return
    owner, selector, notes = (literal(argument) for argument in node.args)
    if isinstance(owner, bytes) and isinstance(selector, bytes) and isinstance(notes, dict):
        tables.methods[owner.decode(), selector.decode()] = notes


def read_functions(node: ast.Dict, tables: Tables) -> None:
    """Read the table of functions: name: (encoding, ...)."""
    for key, value in zip(node.keys, node.values, strict=True):
        name = literal(key) if key is not None else None
        if isinstance(name, str) and isinstance(value, ast.Tuple) and value.elts:
            encoding = literal(value.elts[0])
            tables.functions[name] = encoding.decode() if isinstance(encoding, bytes) else ""


def read(path: Path) -> Tables:
    """Read one file."""
    tables = Tables()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            read_call(node, tables)
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        target = node.targets[0].id
        if target == "functions" and isinstance(node.value, ast.Dict):
            read_functions(node.value, tables)
        texts = (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))
        for text in texts:
            if target == "enums" and isinstance(text, str):
                tables.values.update((name, int(value)) for name, value in VALUE.findall(text))
            if target == "constants" and isinstance(text, str):
                tables.constants.update(NAME.findall(text))
    if not (tables.values and tables.constants and tables.functions and tables.methods):
        raise SystemExit(f"{path}: a table of pyobjc is empty; its form has changed")
    return tables
