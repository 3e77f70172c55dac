"""What Apple's compiler refuses and clang's OpenCL mode takes, as rules over the tokens of a shader."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msl_flow import callees, check_uniform
from msl_names import FORBIDDEN, LIBRARY_NAMES, RESERVED
from msl_tokens import QUALIFIERS, SPACES, SPECIFIERS, Finding, Function, Source, Token, finding

MAX_BUFFERS = 31
UINT = ("uint", "ushort")
UINT3 = ("uint3", "ushort3", "uint2", "ushort2", "uint", "ushort")
# Attributes of a kernel's parameters, with the types that they can have; None: any buffer.
PARAMETER_ATTRIBUTES: dict[str, tuple[str, ...] | None] = {
    "buffer": None,
    "thread_position_in_grid": UINT3,
    "thread_position_in_threadgroup": UINT3,
    "threadgroup_position_in_grid": UINT3,
    "threads_per_grid": UINT3,
    "threads_per_threadgroup": UINT3,
    "threadgroups_per_grid": UINT3,
    "thread_index_in_threadgroup": UINT,
    "thread_index_in_simdgroup": UINT,
    "simdgroup_index_in_threadgroup": UINT,
    "simdgroups_per_threadgroup": UINT,
    "threads_per_simdgroup": UINT,
}
FUNCTION_ATTRIBUTES = frozenset(("kernel", "max_total_threads_per_threadgroup", "host_name"))


def check(source: Source) -> Iterator[Finding]:
    """Apply every rule."""
    yield from check_words(source)
    yield from check_pointers(source)
    yield from check_attributes(source)
    yield from check_members(source)
    yield from check_static(source)
    yield from check_recursion(source)
    yield from check_shared(source)
    for function in source.functions:
        if function.kernel:
            yield from check_kernel(source, function)
    yield from check_uniform(source)


def check_words(source: Source) -> Iterator[Finding]:
    """Words that Metal lacks or keeps to itself, and global names that its library has."""
    for token, after in zip(source.tokens, [*source.tokens[1:], None], strict=True):
        if token.kind == "number" and re.fullmatch(r"(\d+\.\d*|\.?\d+)([eE][+-]?\d+)?", token.text):
            if not token.text.isdigit():
                yield finding(
                    token, f"{token.text} is a double where it is compiled as C++; write {token.text}f"
                )
        elif token.text == "double":
            yield finding(token, "Metal has no double")
        elif token.text in FORBIDDEN:
            yield finding(token, f"Metal has no '{token.text}'")
        elif token.text in RESERVED and after is not None and after.text not in ("(", "::"):
            yield finding(token, f"'{token.text}' is a word of Metal")
        elif token.text == "this" and lambda_captures(source, token):
            yield finding(token, "a lambda cannot capture this")
    for token in source.globals:
        if token.text in LIBRARY_NAMES:
            yield finding(
                token, f"'{token.text}' is a name of Metal's library, which the shaders use unqualified"
            )


def lambda_captures(source: Source, token: Token) -> bool:
    """Whether the token stands in the capture list of a lambda."""
    index = source.tokens.index(token)
    while index > 0 and source.words[index - 1] in (",", "=", "&", "*", "this"):
        index -= 1
    return index > 0 and source.words[index - 1] == "["


def check_pointers(source: Source) -> Iterator[Finding]:
    """Every pointer and reference says in which address space its object is."""
    for index, token in enumerate(source.tokens):
        if token.text not in ("*", "&", "&&") or index == 0:
            continue
        before = index - 1
        while before > 0 and source.words[before] in SPACES | QUALIFIERS:
            before -= 1
        spaced = any(word in SPACES for word in source.words[before + 1 : index])
        if source.words[before] in ("*", "&") and before != index - 1:
            if not spaced and source.words[index - 1] in QUALIFIERS:
                yield finding(token, "a pointer to a pointer without an address space between them")
            continue
        if source.words[before] == "(" and before == index - 1:  # float (&name)[4]
            close = source.closing(before)
            if close + 1 >= len(source.words) or source.words[close + 1] != "[":
                continue
            before -= 1
        first = source.is_type_at(before)
        if first is None or spaced:
            continue
        while first > 0 and source.words[first - 1] in SPACES | QUALIFIERS | SPECIFIERS:
            first -= 1
            spaced = spaced or source.words[first] in SPACES
        if not spaced:
            what = "pointer" if token.text == "*" else "reference"
            yield finding(
                token, f"a {what} without an address space (device, threadgroup, constant or thread)"
            )


def check_attributes(source: Source) -> Iterator[Finding]:
    """Only attributes that are known here: clang ignores the ones that it does not know."""
    for index, word in enumerate(source.words):
        if word != "[[":
            continue
        for place in range(index + 1, source.closing(index)):
            known = source.words[place] in FUNCTION_ATTRIBUTES or source.words[place] in PARAMETER_ATTRIBUTES
            if source.words[place - 1] in ("[[", ",") and not known:
                yield finding(source.tokens[place], f"unknown attribute '{source.words[place]}'")


def parameters_of(source: Source, function: Function) -> Iterator[range]:
    """The parameters of a function, each as a range of tokens."""
    first = index = function.parameters.start
    while index < function.parameters.stop:
        word = source.words[index]
        if word in ("(", "[", "[["):
            index = source.closing(index)
        elif word == "<":
            index = source.closing_angle(index)
        elif word == ",":
            yield range(first, index)
            first = index + 1
        index += 1
    if first < function.parameters.stop:
        yield range(first, function.parameters.stop)


def check_kernel(source: Source, function: Function) -> Iterator[Finding]:
    """Each parameter has one attribute of its type, and the buffers count from 0."""
    buffers = 0
    for parameter in parameters_of(source, function):
        words = source.words[parameter.start : parameter.stop]
        token = source.tokens[parameter.start]
        if words.count("[[") != 1:
            yield finding(token, f"{function.name}: a parameter has one [[attribute]]: {' '.join(words)}")
            continue
        at = words.index("[[")
        attribute, declared = words[at + 1], words[:at]
        types = PARAMETER_ATTRIBUTES.get(attribute)
        if attribute == "buffer":
            if words[at + 3 : at + 4] != [str(buffers)]:
                yield finding(token, f"{function.name}: expected [[buffer({buffers})]]")
            buffers += 1
            space = next((word for word in declared if word in SPACES), None)
            if space not in ("device", "constant") or not ("*" in declared or "&" in declared):
                yield finding(
                    token, f"{function.name}: a buffer is a pointer or reference to device or constant"
                )
        elif types is not None and declared[0] not in types:
            yield finding(token, f"{function.name}: {attribute} is no {declared[0]}")
    if buffers > MAX_BUFFERS:
        yield finding(
            source.tokens[function.name_at], f"{buffers} buffers, at most {MAX_BUFFERS} are possible"
        )


def check_members(source: Source) -> Iterator[Finding]:
    """A member function says in which address space its object is."""
    for function in source.functions:
        head = source.words[function.head.start : function.name_at]
        trailer = source.words[function.trailer.start : function.trailer.stop]
        if function.owner and "static" not in head and not SPACES.intersection(trailer):
            yield finding(
                source.tokens[function.name_at],
                f"member function {function.name}() needs a trailing 'thread'",
            )


def check_static(source: Source) -> Iterator[Finding]:
    """What outlives a function lies in constant memory."""
    for variable in source.variables:
        words = source.words[variable.start : variable.stop]
        if "constant" not in words and "(" not in words:  # else it declares a function
            yield finding(source.tokens[variable.start], "a variable outside of functions is 'constant'")
    for function in source.functions:
        for index in function.body:
            if source.words[index] == "static" and "constant" not in source.words[index - 2 : index + 3]:
                yield finding(source.tokens[index], "a static variable is 'constant'")


def check_recursion(source: Source) -> Iterator[Finding]:
    """No function calls itself, not even through others."""
    edges = {function: callees(source, function) for function in source.functions}
    for function in source.functions:
        reached, pending = set[Function](), list(edges[function])
        while pending:
            other = pending.pop()
            if other not in reached:
                reached.add(other)
                pending += edges[other]
        if function in reached:
            yield finding(
                source.tokens[function.name_at], f"{function.name}() calls itself; Metal has no recursion"
            )


# Threadgroup memory


def shared_arrays(source: Source) -> Iterator[tuple[int, int, int]]:
    """(index of 'threadgroup', index of the name, index of ;) of variables in threadgroup memory."""
    for index, word in enumerate(source.words[:-2]):
        if word != "threadgroup":
            continue
        name = index + 1
        while source.words[name] in QUALIFIERS | SPECIFIERS or source.words[name + 1] in ("::", "<"):
            name = source.closing_angle(name + 1) if source.words[name + 1] == "<" else name + 1
        name += 1
        if source.tokens[name].kind == "name" and source.words[name + 1] in ("[", ";", "=", "{"):
            end = name + 1
            while source.words[end] not in (";", "}"):
                end = source.closing(end) + 1 if source.words[end] in ("[", "{", "(") else end + 1
            yield index, name, end


def check_shared(source: Source) -> Iterator[Finding]:
    """Threadgroup variables belong to the top level of a kernel's body, and have no initialiser."""
    for index, name, end in shared_arrays(source):
        token = source.tokens[index]
        kernel = kernel_around(source, index)
        if kernel is None or depth_at(source, kernel, index) != 0:
            yield finding(
                token, f"{source.words[name]}: threadgroup memory is declared at the top level of a kernel"
            )
        if "=" in source.words[name:end] or "{" in source.words[name:end]:
            yield finding(token, f"{source.words[name]}: threadgroup memory has no initialiser")


def kernel_around(source: Source, index: int) -> Function | None:
    """The kernel whose body has the token."""
    return next((f for f in source.functions if f.kernel and index in f.body), None)


def depth_at(source: Source, function: Function, index: int) -> int:
    """How many braces are open around a token, inside a function's body."""
    words = source.words[function.body.start : index]
    return words.count("{") - words.count("}")
