"""Calls and control flow of shaders: barriers, and what lanes do together, are reached by all of them.

A textual rule: a value is thread-dependent when it is made from tid, lane or simd by assignments to plain
names. What passes through arrays, memory or reference parameters is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msl_tokens import Finding, Function, Source, finding

BARRIER = re.compile(r"threadgroup_barrier")
# What the lanes of a simdgroup do together, run() being that of a tensor operation.
TOGETHER = re.compile(r"(simd|quad)_\w+|simdgroup_(barrier|load|store|multiply\w*)|run")
SAME_IN_SIMDGROUP = re.compile(r"simd_(sum|product|min|max|broadcast\w*|all|any|ballot)")
NOTHING = re.compile(r"(?!)")
LANE_NAMES = frozenset(("tid", "lane"))
GROUP_NAMES = LANE_NAMES | {"simd"}
ASSIGNMENTS = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<="))

Callees = tuple[re.Pattern[str], set[str]]  # functions of the library by pattern, of the shaders by name


def is_one(name: str, callees: Callees) -> bool:
    """Whether a called name is among these functions."""
    return callees[0].fullmatch(name) is not None or name in callees[1]


def calls(source: Source, where: range) -> Iterator[tuple[int, int]]:
    """(index of the name, index of its bracket) of the calls in a range."""
    for index in where:
        if source.tokens[index].kind != "name":
            continue
        bracket = index + 1
        if bracket < where.stop and source.words[bracket] == "<":
            close = source.closing_angle(bracket)
            bracket = close + 1 if close < where.stop else bracket
        if bracket < where.stop and source.words[bracket] == "(":
            yield index, bracket


def callees(source: Source, function: Function) -> set[Function]:
    """The functions with bodies that a function may call, by name."""
    result: set[Function] = set()
    for index, _ in calls(source, function.body):
        member = source.words[index - 1] in (".", "->")
        for other in source.functions:
            if other.name == source.words[index] and (
                bool(other.owner) == member or other.owner == function.owner
            ):
                result.add(other)
    return result


def doing(source: Source, action: re.Pattern[str]) -> set[str]:
    """Names of the functions with bodies that call what the pattern names, directly or through others."""
    edges = {function: callees(source, function) for function in source.functions}
    found = {
        function
        for function in source.functions
        if any(action.fullmatch(source.words[index]) for index, _ in calls(source, function.body))
    }
    while True:
        more = {function for function in source.functions if edges[function] & found} - found
        if not more:
            return {function.name for function in found}
        found |= more


def check_uniform(source: Source) -> Iterator[Finding]:
    """Nothing that depends on the thread decides whether a barrier or a simdgroup function is reached."""
    with_barrier, with_lanes = doing(source, BARRIER), doing(source, TOGETHER)
    for function in source.functions:
        group = Flow(source, function, GROUP_NAMES, (BARRIER, with_barrier), (NOTHING, with_barrier))
        yield from group.findings("a barrier")
        lanes = Flow(source, function, LANE_NAMES, (TOGETHER, with_lanes), (SAME_IN_SIMDGROUP, with_barrier))
        yield from lanes.findings("a simdgroup function")


class Flow:
    """The statements of one function, in order, and which of them not all threads reach.

    `action` names what all must reach, `same` the calls whose result all threads share.
    """

    def __init__(
        self, source: Source, function: Function, seeds: frozenset[str], action: Callees, same: Callees
    ) -> None:
        self.source = source
        self.words = source.words
        self.body = function.body
        self.action = action
        self.same = same
        self.names = set(seeds)
        self.gone = False  # some threads have left the loop or the function
        self.found: list[int] = []

    def findings(self, what: str) -> Iterator[Finding]:
        """Every action that not all threads reach."""
        if not any(is_one(self.words[index], self.action) for index, _ in calls(self.source, self.body)):
            return
        self._follow_values()
        index = self.body.start
        while index < self.body.stop:
            index = self._statement(index, False)
        for place in sorted(set(self.found)):
            name = self.words[place]
            yield finding(
                self.source.tokens[place], f"{name}(): {what} where the thread's index decides who reaches it"
            )

    def _depends(self, where: range) -> bool:
        """Whether the expression differs between threads."""
        skipped: set[int] = set()
        for index, bracket in calls(self.source, where):
            if is_one(self.words[index], self.same):
                skipped.update(range(bracket, self.source.closing(bracket)))
        return any(
            self.words[index] in self.names
            and index not in skipped
            and self.words[index - 1] not in (".", "->")
            for index in where
        )

    def _follow_values(self) -> None:
        """Add the names that are assigned thread-dependent values."""
        known = -1
        while known != len(self.names):
            known = len(self.names)
            for index in self.body:
                if self.words[index] not in ASSIGNMENTS or self.source.tokens[index - 1].kind != "name":
                    continue
                end = index + 1
                while end < self.body.stop and self.words[end] not in (",", ";", ")"):
                    end = self.source.closing(end) + 1 if self.words[end] in ("(", "[", "{") else end + 1
                if self.words[index - 2] not in (".", "->") and self._depends(range(index + 1, end)):
                    self.names.add(self.words[index - 1])

    def _note(self, where: range, apart: bool) -> None:
        if apart or self.gone:
            self.found += [at for at, _ in calls(self.source, where) if is_one(self.words[at], self.action)]

    def _statement(self, index: int, apart: bool) -> int:
        """Walk through the statement at `index`; returns the index after it."""
        word = self.words[index]
        if word == "{":
            end = self.source.closing(index)
            index += 1
            while index < end:
                index = self._statement(index, apart)
            return end + 1
        if word in ("if", "for", "while", "switch"):
            return self._controlled(index, apart)
        if word == "do":
            end = self._loop(index + 1, apart)
            return self._statement(end + 1, apart)
        end = index
        while end < self.body.stop and self.words[end] != ";":
            end = self.source.closing(end) + 1 if self.words[end] in ("(", "[", "[[", "{") else end + 1
        self._note(range(index, end), apart)
        if apart and word in ("return", "break", "continue"):
            self.gone = True
        return end + 1

    def _controlled(self, index: int, apart: bool) -> int:
        word = self.words[index]
        opening = index + 1 + (self.words[index + 1] == "constexpr")
        close = self.source.closing(opening)
        condition = range(opening + 1, close)
        self._note(condition, apart)
        if word == "for":
            first = self._after(";", condition.start)
            condition = range(first, self._after(";", first) - 1)
        inside = apart or self._depends(condition)
        if word in ("for", "while", "switch"):
            return self._loop(close + 1, inside)
        end = self._statement(close + 1, inside)
        if end < self.body.stop and self.words[end] == "else":
            end = self._statement(end + 1, inside)
        return end

    def _loop(self, index: int, apart: bool) -> int:
        """A body that break and continue leave; what follows is reached again by all, unless they return."""
        before = self.gone
        end = self._statement(index, apart)
        if "return" not in self.words[index:end]:
            self.gone = before
        return end

    def _after(self, word: str, index: int) -> int:
        while self.words[index] != word:
            index = self.source.closing(index) + 1 if self.words[index] in ("(", "[", "{") else index + 1
        return index + 1
