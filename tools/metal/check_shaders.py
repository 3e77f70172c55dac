#!/usr/bin/env python3
"""Check shaders/*.metal as Apple's compiler would, without a Mac and without a build.

Each file is put together as a Metal device gets it (includes resolved, one instantiation for each variant of
consts.txt, both forms of what uses matrix tiles), preprocessed, put to the rules of msl_rules.py, and
compiled by clang in its C++ for OpenCL mode, which has Metal's address spaces. msl/ declares the part of
Metal's library that the shaders use; nothing else exists. What this cannot see: Apple's optimiser, the exact
overloads of its library, and whatever only a GPU shows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]

import embed_shaders  # noqa: E402
import kernel_parse  # noqa: E402
import kernel_shape  # noqa: E402
import kernel_table  # noqa: E402
import msl_rules  # noqa: E402
from msl_tokens import Finding, Function, Source  # noqa: E402

CLANG = "clang-19"
LIBRARY = HERE / "msl"
MAX_SHARED = 32768  # bytes of threadgroup memory
WORKERS = 2
LANGUAGE = ("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "spir64-unknown-unknown")
WITHOUT = "-__opencl_c_pipes,-__opencl_c_device_enqueue,-cl_khr_fp64,-__opencl_c_fp64"
CHECK = ("-fsyntax-only", "-ferror-limit=0", "-fno-caret-diagnostics", "-Werror", "-Wno-unknown-attributes")
LINE = re.compile(r'^#line \d+ "([^"]+)"', re.M)
DIAGNOSTIC = re.compile(r"(.+?):(\d+):(?:\d+:)? (fatal error|error|note): (.*)$")
INSTANCE = re.compile(r"in instantiation of .* specialization '([^']*)'")


@dataclasses.dataclass(frozen=True)
class Text:
    """A source as a device compiles it."""

    name: str
    source: str
    tensor_ops: bool

    @property
    def files(self) -> frozenset[str]:
        """The names that its #line lines give to what is the project's own."""
        return frozenset(LINE.findall(self.source))


def find_clang() -> str:
    """The compiler, or a message that says which one is missing."""
    path = shutil.which(CLANG)
    if path is None:
        raise FileNotFoundError(f"{CLANG} is not installed; on Debian: apt-get install {CLANG}")
    return path


# The sources


def texts_of(folder: pathlib.Path, families: Sequence[str] = ()) -> list[Text]:
    """Every .metal file of a folder and its bench/ (or those named), those with tiles in both forms."""
    folders = (folder, folder / "bench")
    _, kernels = kernel_parse.parse_folder(*folders)
    tuples = kernel_table.read_tuples(kernels, HERE / "consts.txt")
    texts: list[Text] = []
    for path in (path for each in folders for path in sorted(each.glob("*.metal"))):
        if families and path.stem not in families:
            continue
        seen: set[str] = set()
        body = "\n".join(embed_shaders.resolved(path, seen)) + f'\n#line 1 "variants of {path.stem}"\n'
        for kernel in kernels:
            if kernel.place.path == path and kernel.consts:
                body += "".join(instance(kernel.name, values) for values in tuples[kernel.name])
        texts.append(Text(path.stem, body, False))
        if embed_shaders.TILE_HEADER in seen:
            texts.append(Text(path.stem, "#define LILY_TENSOR_OPS 1\n" + body, True))
    return texts


def instance(name: str, consts: Iterable[int]) -> str:
    """The line that instantiates a variant under its function name."""
    values = [str(value) for value in consts]
    call, function = f"{name}<{', '.join(values)}>", "_".join([name, *values])
    return f'template [[host_name("{function}")]] [[kernel]] decltype({call}) {call};\n'


# One source


class RefusedError(Exception):
    """The preprocessor refused a source."""


def source_of(text: Text) -> Source:
    """Preprocess a source and read it.

    Raises:
        RefusedError: it cannot be preprocessed.
    """
    version = "400" if text.tensor_ops else "320"
    command = [find_clang(), "-E", *LANGUAGE, f"-D__METAL_VERSION__={version}", f"-I{LIBRARY}", "-"]
    result = subprocess.run(command, input=text.source, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RefusedError(result.stderr)
    return Source(result.stdout, text.files)


def check_text(text: Text) -> list[Finding]:
    """Everything that is wrong with one source, by file and line."""
    try:
        source = source_of(text)
    except RefusedError as error:
        return list(diagnostics(str(error), text.files))
    findings = list(msl_rules.check(source))
    command = [find_clang(), *LANGUAGE, *CHECK, "-Xclang", f"-cl-ext={WITHOUT}"]
    command += ["-include", str(LIBRARY / "language.h"), "-"]
    result = subprocess.run(command, input=as_opencl(source), capture_output=True, text=True, check=False)
    findings += diagnostics(result.stderr, text.files)
    if result.returncode != 0 and not findings:
        findings.append(Finding(text.name, 1, f"the compiler failed: {result.stderr.strip()}"))
    return findings


def as_opencl(source: Source) -> str:
    """The preprocessed text with what clang writes otherwise replaced; no line moves.

    Arrays in threadgroup memory become references, because clang has no kernel templates; the last one of a
    kernel is followed by a check of their size. Attributes of explicit instantiations go.
    """
    edits: list[tuple[int, int, str]] = []
    sizes: dict[Function, list[str]] = {}
    ends: dict[Function, int] = {}
    tokens, words = source.tokens, source.words
    for index, name, end in msl_rules.shared_arrays(source):
        kernel = msl_rules.kernel_around(source, index)
        if kernel is None:
            continue  # clang refuses it
        first = index - 4 if words[index - 4] == "alignas" else index
        kind, size = " ".join(words[index + 1 : name]), " ".join(words[name + 1 : end])
        declared = f"threadgroup {kind} (&{words[name]}){size} = ::metal_check::shared<{kind} {size}>()"
        edits.append((tokens[first].at, tokens[end].at, declared))
        sizes.setdefault(kernel, []).append(f"::metal_check::padded(sizeof({words[name]}))")
        ends[kernel] = tokens[end].at + 1
    for kernel, end in ends.items():
        message = f'"threadgroup memory of {kernel.name}, at most {MAX_SHARED} bytes"'
        edits.append((end, end, f" static_assert({' + '.join(sizes[kernel])} <= {MAX_SHARED}, {message});"))
    for index, word in enumerate(words[:-1]):
        if word == "template" and words[index + 1] == "[[":
            edits.append((tokens[index + 1].at, tokens[words.index("decltype", index)].at, ""))
    text = source.text
    for start, stop, new in sorted(edits, reverse=True):
        text = text[:start] + new + "\n" * text.count("\n", start, stop) + text[stop:]
    return text


def diagnostics(output: str, files: frozenset[str]) -> Iterator[Finding]:
    """What the compiler says, each at the first place in the shaders that its message or its notes name."""
    groups: list[list[re.Match[str]]] = []
    for line in output.split("\n"):
        match = DIAGNOSTIC.match(line)
        if match and match[3] != "note":
            groups.append([match])
        elif match and groups:
            groups[-1].append(match)
    for group in groups:
        places = [match for match in group if match[1] in files]
        shaders = [match for match in places if not match[1].startswith("variants of")]
        place = (shaders or places or group)[0]
        message = re.sub(r" \[-W[^]]*\]$", "", group[0][4])
        details = [match[4] for match in group if match[4].startswith("expression evaluates to")]
        instances = [found[1] for match in group if (found := INSTANCE.search(match[4]))]
        details += [f"in {instances[-1]}"] if instances else []
        yield Finding(place[1], int(place[2]), f"{message} ({'; '.join(details)})" if details else message)


# Command line


def check_folder(folder: pathlib.Path, families: Sequence[str] = ()) -> list[Finding]:
    """Everything that is wrong with the shaders of a folder, sorted, each thing once.

    Raises:
        FileNotFoundError: there is no compiler.
    """
    find_clang()
    try:
        texts = texts_of(folder, families)
    except kernel_shape.TableError as error:
        path, line, message = str(error).split(":", 2)
        return [Finding(pathlib.Path(path).name, int(line), message.strip())]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        found = pool.map(check_text, texts)
        return sorted({finding for findings in found for finding in findings})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "families", nargs="*", help="names of .metal files without their ending; default: all"
    )
    parser.add_argument(
        "--shaders", type=pathlib.Path, default=ROOT / "shaders", help="folder of *.metal and *.h"
    )
    options = parser.parse_args(arguments)
    folder: pathlib.Path = options.shaders
    try:
        findings = check_folder(folder, options.families)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    for finding in findings:
        print(f"{folder}/{finding}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
