#!/usr/bin/env python3
"""Derive everything the host knows about kernels from shaders/*.metal.

The shader is the only place where a kernel's interface is written. This script reads each
declaration (kernel_shape.py, kernel_parse.py) and writes (kernel_emit.py)

    kernels.gen.h        a struct per kernel with named, typed slots
    kernels.gen.cpp      the type-erased kernel table
    cpu_launch.gen.inc   launchers for the CPU objects, for the variants of host/cpu_consts.txt
    grids.gen.inc        threadgroups of each launch, for the host of a GPU
    docs/KERNELS.md      the table for people

and stops with file:line at whatever is not in the accepted form.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

import kernel_emit
from kernel_parse import Kernel, parse_folder
from kernel_shape import Place, TableError, strip_comments

# cpu_consts.txt


def read_tuples(kernels: Sequence[Kernel], *paths: pathlib.Path) -> dict[str, list[tuple[int, ...]]]:
    """Const tuples to compile for the CPU, by kernel name, from files that add to each other.

    A line `qmv BITS=4,8 K=0,2048` is the product of its lists. Mirrored consts default to 0, the
    form that reads args; a kernel without chosen consts needs no line.
    """
    known = {kernel.name: kernel for kernel in kernels}
    tuples: dict[str, list[tuple[int, ...]]] = {name: [] for name in known}
    for place, words in const_lines(paths):
        if words[0] not in known:
            raise place.error(f"unknown kernel {words[0]}")
        for values in itertools.product(*line_values(place, known[words[0]], words[1:])):
            if values in tuples[words[0]]:
                raise place.error(f"{words[0]}: {values} is listed twice")
            tuples[words[0]].append(values)
    for kernel in kernels:
        check_tuples(paths[-1], kernel, tuples[kernel.name])
    return tuples


def const_lines(paths: Sequence[pathlib.Path]) -> Iterator[tuple[Place, list[str]]]:
    """The words of each line that has any."""
    for path in paths:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for number, line in enumerate(text.split("\n"), 1):
            if words := line.partition("#")[0].split():
                yield Place(path, number), words


def line_values(place: Place, kernel: Kernel, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The values of each const of one line, in declaration order."""
    given: dict[str, tuple[int, ...]] = {}
    for word in words:
        match = re.fullmatch(r"(\w+)=(\d+(?:,\d+)*)", word)
        if not match or match[1] not in {const.name for const in kernel.consts} or match[1] in given:
            names = ", ".join(const.name for const in kernel.consts) or "none"
            raise place.error(
                f"{kernel.name}: expected CONST=value,value once for each of its consts ({names}): {word}"
            )
        given[match[1]] = tuple(map(int, match[2].split(",")))
    for const in kernel.consts:
        if const.mirrors:
            given.setdefault(const.name, (0,))
        elif const.name not in given:
            raise place.error(f"{kernel.name}: {const.name} has no values")
        for value in given[const.name]:
            if value > const.max or (value == 0 and not const.mirrors):
                raise place.error(f"{kernel.name}: {const.name} = {value}, expected 1 to {const.max}")
    return [given[const.name] for const in kernel.consts]


def check_tuples(path: pathlib.Path, kernel: Kernel, tuples: list[tuple[int, ...]]) -> None:
    """Every choice needs its generic form, because any args must be able to run."""
    if not tuples and all(const.mirrors for const in kernel.consts):
        tuples.append((0,) * len(kernel.consts))
    if not tuples:
        raise Place(path, 1).error(
            f"{kernel.name} ({kernel.where}) has no line, but has consts that the plan chooses"
        )
    for values in tuples:
        generic = tuple(0 if const.mirrors else v for v, const in zip(values, kernel.consts, strict=True))
        if generic not in tuples:
            raise Place(path, 1).error(
                f"{kernel.name}: {values} is listed without its generic form {generic}"
            )


# used: against the host's sources


def launches(path: pathlib.Path) -> Iterator[tuple[Place, str, str | None]]:
    """Every `k::name{` of a host source with the name of the function it is in, None outside of all.

    Follows braces; namespaces and classes do not count as functions.
    """
    text = "\n".join(strip_comments(path.read_text(encoding="utf-8")))
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'', lambda m: " " * len(m[0]), text)
    text = re.sub(r"^#.*", "", text, flags=re.M)
    depth_of_function, depth, function, head = -1, 0, None, 0
    for match in re.finditer(r"\bk::(\w+)\s*\{|[{};]", text):
        token = match[0]
        if match[1]:
            yield Place(path, text.count("\n", 0, match.start()) + 1), match[1], function
        if token.endswith("{"):
            if function is None:
                function = function_name(text[head : match.start()])
                depth_of_function = depth
            depth += 1
        elif token == "}":
            depth -= 1
            if function is not None and depth == depth_of_function:
                function = None
        head = match.end()


def function_name(head: str) -> str | None:
    """The function that `head {` begins, None for a namespace, class or initialiser."""
    head = re.sub(r"\btemplate\s*<[^{}]*?>\s*(?=[\w\[])|\[\[.*?\]\]", " ", head.strip(), flags=re.S).strip()
    if re.match(r"(inline\s+)?namespace\b|(struct|class|union|enum)\b|extern\b", head):
        return None
    match = re.match(r"[^=()]*?([A-Za-z_]\w*)\s*\(", head)
    return match[1] if match else None


def check_used(kernels: Sequence[Kernel], sources: Sequence[pathlib.Path]) -> None:
    """Raises TableError unless each kernel is launched in exactly the functions its used: line names."""
    found: dict[str, dict[str, Place]] = {kernel.name: {} for kernel in kernels}
    for path in sources:
        for place, name, function in launches(path):
            if name not in found:
                if not name.endswith("_args"):
                    raise place.error(f"k::{name}: no shader declares this kernel")
                continue
            if function is None:
                raise place.error(f"k::{name} is launched outside of every function")
            found[name].setdefault(function, place)
    for kernel in kernels:
        for function, place in found[kernel.name].items():
            if function not in kernel.used or not kernel.launched:
                says = ", ".join(kernel.used)
                raise place.error(
                    f"{function} launches {kernel.name}, but its used: line says {says} ({kernel.where})"
                )
    for kernel in filter(lambda kernel: kernel.launched, kernels):
        for function in kernel.used:
            if function not in found[kernel.name]:
                raise kernel.place.error(f"used: names {function}, which does not launch {kernel.name}")


# Command line


def write(path: pathlib.Path, text: str) -> None:
    """Writes only what changed, so that nothing is rebuilt for nothing."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def run(options: argparse.Namespace) -> None:
    """Does what the command line says; TableError on the first thing that is wrong."""
    folder: pathlib.Path = options.shaders
    bench: list[pathlib.Path] = [options.bench] if options.bench else []
    shape, kernels = parse_folder(folder, *bench)
    shape_text = (folder / "shape.h").read_text(encoding="utf-8")
    consts = [folder / "host" / "cpu_consts.txt", *(path / "cpu_consts.txt" for path in bench)]
    tuples = read_tuples(kernels, *consts)
    check_sources: list[pathlib.Path] = options.check
    if check_sources:
        check_used(kernels, check_sources)
    if options.check_docs:
        path: pathlib.Path = options.check_docs
        if not path.exists() or path.read_text(encoding="utf-8") != kernel_emit.docs(shape, kernels):
            raise TableError(path, 1, f"stale; write it again with --docs {path}")
    if options.docs:
        write(options.docs, kernel_emit.docs(shape, kernels))
    if options.out_dir:
        write(options.out_dir / "kernels.gen.h", kernel_emit.host_header(kernels))
        source = kernel_emit.host_source(shape, shape_text, kernels, tuples)
        write(options.out_dir / "kernels.gen.cpp", source)
        write(options.out_dir / "grids.gen.inc", kernel_emit.grid_functions(kernels))
        launchers = kernel_emit.cpu_launchers(shape_text, kernels, tuples, bool(bench))
        write(options.out_dir / "cpu_launch.gen.inc", launchers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shaders", type=pathlib.Path, required=True, help="folder of shape.h and *.metal")
    parser.add_argument("--out-dir", type=pathlib.Path, help="where the generated sources go")
    parser.add_argument("--docs", type=pathlib.Path, help="write this Markdown file")
    parser.add_argument("--check-docs", type=pathlib.Path, help="fail when this Markdown file is stale")
    parser.add_argument(
        "--check", type=pathlib.Path, nargs="+", default=[], help="sources that launch kernels"
    )
    parser.add_argument(
        "--bench",
        type=pathlib.Path,
        help="a folder of more *.metal, and CPU launchers for kernels of theirs and those used as reference",
    )
    try:
        run(parser.parse_args(arguments))
    except TableError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
