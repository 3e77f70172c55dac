"""Check the rules of CONTRIBUTING.md that no other tool checks; prints each breach as file:line and fails."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 600
FUNCTION_LINES = 80
ENCODE_LINES = 120  # the forward pass reads best in one piece
LINE_LENGTH = 120
PAGE_LINES = 120  # docs/ARCHITECTURE.md: two pages
CPP = {".cpp", ".h", ".mm", ".metal"}
PAGE = {".css", ".html", ".js"}
NOT_FUNCTIONS = re.compile(r"\b(namespace|struct|class|enum|union|if|for|while|switch|else|do)\b")
OPENING = re.compile(r"(^\{|\)( const| thread| noexcept| override)* \{)$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|#if 0\b")
ENVIRONMENT = re.compile(r"getenv\(\"([A-Z_]+)\"|environ(?:\.get\(|\[)\"(LILY_\w+)\"")
BACKEND = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|else)\b")

Breach = tuple[int, str]


def tracked() -> list[Path]:
    """Return the source files that belong to the project, tracked or new."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [ROOT / name for name in listing]
    kinds = {*CPP, *PAGE, ".py", ".sh"}
    return [f for f in files if f.is_file() and f.suffix in kinds and "tools/demo" not in f.as_posix()]


def limit_of(name: str) -> int:
    """Return how long a function may be."""
    return ENCODE_LINES if name.startswith("encode_") else FUNCTION_LINES


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, lines) of every function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1


def cpp_functions(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, lines) of functions; relies on the layout that clang-format enforces."""
    for first, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if indent not in (0, 4) or not OPENING.search(line):
            continue
        start = first
        while start > 0 and not lines[start].startswith("KERNEL(") and lines[first] == "{":
            start -= 1
        while "(" not in lines[start] and start > 0 and lines[start - 1].strip() not in ("", "}"):
            start -= 1
        head = lines[start].replace("KERNEL(", "")
        name = re.search(r"(~?\w+)\s*[(,]", head)
        if name is None or NOT_FUNCTIONS.search(head.split("(", 1)[0]):
            continue
        closing = " " * indent + "}"
        for last in range(first + 1, len(lines)):
            if lines[last].rstrip() in (closing, closing + ";"):
                yield name[1], start + 1, last - start + 1
                break


def breaches(path: Path) -> Iterator[Breach]:
    """Yield what is wrong with one file."""
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    if len(lines) - 1 > FILE_LINES:
        yield len(lines), f"file has {len(lines) - 1} lines, at most {FILE_LINES}"
    functions = python_functions(text) if path.suffix == ".py" else cpp_functions(lines)
    for name, first, count in functions if path.suffix in {*CPP, ".py"} else ():
        if count > limit_of(name):
            yield first, f"{name} has {count} lines, at most {limit_of(name)}"
    for number, line in enumerate(lines, 1):
        if path.suffix in {*CPP, *PAGE} and len(line) > LINE_LENGTH:
            yield number, f"line has {len(line)} characters, at most {LINE_LENGTH}"
        if path.name != Path(__file__).name and UNFINISHED.search(line):
            yield number, "unfinished work belongs in an issue"
        if path.suffix == ".metal" and BACKEND.match(line):
            yield number, "a .metal file knows no device: put the difference into lily.h or a shim"
        variable = ENVIRONMENT.search(line)
        if variable and path.parts[-2] == "lily_native" and variable[1] != "LILY_DEBUG":
            yield number, "LILY_DEBUG is the only environment variable"


def main() -> None:
    """Check everything."""
    found = [(path, *breach) for path in tracked() for breach in breaches(path)]
    page = ROOT / "docs" / "ARCHITECTURE.md"
    length = len(page.read_text(encoding="utf-8").splitlines())
    if length > PAGE_LINES:
        found.append((page, length, f"has {length} lines, at most {PAGE_LINES}"))
    for path, line, why in found:
        print(f"{path.relative_to(ROOT)}:{line}: {why}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
