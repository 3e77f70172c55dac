"""Write docs/API.md from the docstrings of what `import lily` offers, or check that it is up to date.

It reads the sources and imports nothing, so that it needs no built package.
"""

from __future__ import annotations

import argparse
import ast
import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "lily"
HEAD = """# API

Everything that `import lily` offers. `make format` writes this page from the docstrings in `python/lily`.
"""
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
ENTRY = re.compile(r"^([\w.*]+(?: \([^)]*\))?): (.*)$")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def exported() -> list[str]:
    """Return the names in lily.__all__."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    sys.exit("lily/__init__.py has no __all__")


def definitions() -> dict[str, Definition]:
    """Return the classes and functions at the top of every module, by name."""
    found: dict[str, Definition] = {}
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found[node.name] = node
    return found


def signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> str:
    """Return a call as it is written, one argument a line if it is long."""
    arguments = copy.copy(node.args)
    if bound and (arguments.posonlyargs or arguments.args):
        arguments.args = arguments.args[1:]
    result = "" if node.returns is None or name[0].isupper() else f" -> {ast.unparse(node.returns)}"
    line = f"{name}({ast.unparse(arguments)}){result}"
    if len(line) <= 100:
        return line
    parts = ",\n    ".join(pieces(arguments))
    return f"{name}(\n    {parts},\n){result}"


def pieces(arguments: ast.arguments) -> Iterator[str]:
    """Yield each argument with its type and default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    for argument, default in zip(plain, [*defaults, *arguments.defaults], strict=True):
        yield written(argument, default)
    if arguments.vararg is not None or arguments.kwonlyargs:
        yield "*" + (ast.unparse(arguments.vararg) if arguments.vararg is not None else "")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield written(argument, default)
    if arguments.kwarg is not None:
        yield "**" + ast.unparse(arguments.kwarg)


def written(argument: ast.arg, default: ast.expr | None) -> str:
    """Return one argument with its default."""
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def code(head: str) -> str:
    """Return a block of code, with the project's quotes."""
    return "```python\n" + head.replace("'", '"') + "\n```\n"


def markdown(docstring: str) -> str:
    """Turn a docstring with Google's sections into Markdown."""
    lines: list[str] = []
    section = ""
    for line in docstring.split("\n"):
        title = SECTION.match(line)
        entry = ENTRY.match(line[4:]) if section and line.startswith("    ") else None
        if title:
            section = title[1]
            lines += [f"**{section}**", ""]
        elif entry and not line[4:].startswith(" "):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line.startswith("        "):
            lines.append("  " + line.strip())
        else:
            section = section if line.startswith("    ") or not line else ""
            lines.append(line.strip() if section else line)
    return "\n".join(lines)


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of a function's decorators."""
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def fields(node: ast.ClassDef) -> str:
    """Return how a class is made, or the bases of an error; "" if callers do not make one."""
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        found = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        parts = [ast.unparse(item) for item in found]
        line = f"{node.name}({', '.join(parts)})"
        return line if len(line) <= 100 else f"{node.name}(\n    " + ",\n    ".join(parts) + ",\n)"
    for item in node.body:
        # What only Lily itself makes does not document its arguments.
        documented = "Args:" in (ast.get_docstring(node) or "")
        if isinstance(item, ast.FunctionDef) and item.name == "__init__" and documented:
            return signature(node.name, item, bound=True)
    bases = ", ".join(map(ast.unparse, node.bases))
    return f"class {node.name}({bases})" if node.name.endswith("Error") else ""


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the sections of public methods and properties, in the order of the source."""
    for item in node.body:
        if not isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) or item.name.startswith("_"):
            continue
        names, docstring = decorators(item), ast.get_docstring(item)
        if "overload" in names or docstring is None:
            continue
        if "property" in names:
            kind = "" if item.returns is None else f": {ast.unparse(item.returns)}"
            head = f"{item.name}{kind}"
        else:
            head = signature(item.name, item, bound="staticmethod" not in names)
            head = ("async " if isinstance(item, ast.AsyncFunctionDef) else "") + head
        yield f"### {node.name}.{item.name}\n\n{code(head)}\n{markdown(docstring)}\n"


def page() -> str:
    """Return the text of docs/API.md."""
    found = definitions()
    parts = [HEAD]
    names = exported()
    parts.append("\n".join(f"- [{name}](#{name.lower()})" for name in names) + "\n")
    for name in names:
        node = found[name]
        parts.append(f"## {name}\n")
        docstring = ast.get_docstring(node)
        if docstring is None:
            sys.exit(f"{name} has no docstring")
        head = fields(node) if isinstance(node, ast.ClassDef) else signature(name, node, bound=False)
        if head:
            parts.append(code(head))
        parts.append(markdown(docstring) + "\n")
        if isinstance(node, ast.ClassDef):
            parts += members(node)
    return "\n".join(parts)


def main() -> None:
    """Write the page, or fail if it differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    args = parser.parse_args()
    path = ROOT / "docs" / "API.md"
    text = page()
    if not args.check:
        path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        sys.exit("docs/API.md is out of date: run make format")


if __name__ == "__main__":
    main()
