"""Mistakes that a person could make in the Metal host code, as edits of its text.

A rule replaces every match of its pattern, one at a time; each match is a site. The rules came before the
checks were tuned, and mutants.txt is a fixed choice among their sites.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator

DEVICE = "src/lily_native/device_metal.mm"
SUPPORT = "src/lily_native/metal_support.h"
FLIGHTS = "src/lily_native/submissions.cpp"
PLAN = "src/lily_native/plan.cpp"


@dataclasses.dataclass(frozen=True)
class Rule:
    """An edit: `pattern` (of re, whole text) becomes `replacement` in one file."""

    name: str
    file: str
    pattern: str
    replacement: str


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One site of a rule; `line` is where its match begins."""

    rule: Rule
    site: int
    line: int

    @property
    def key(self) -> str:
        """How mutants.txt names it."""
        return f"{self.rule.name}:{self.site}"


RULES = (
    # What a dispatch binds and launches.
    Rule("wrong_first_index", DEVICE, r"NSMakeRange\(0, dispatch\.count\)", "NSMakeRange(1, dispatch.count)"),
    Rule("unbound_args", DEVICE, r"kernel\.slot_count \+ 1,", "kernel.slot_count,"),
    Rule("slot_offset_lost", DEVICE, r"push_back\(slot\.offset\)", "push_back(0)"),
    Rule("args_offset_lost", DEVICE, r"push_back\(arg_offset\)", "push_back(0)"),
    Rule("args_overwrite_each_other", DEVICE, r"arg_offset \+= kArgStride;", "arg_offset += 0;"),
    Rule("grid_one_short", DEVICE, r"MTLSizeMake\(grid\[0\],", "MTLSizeMake(grid[0] - 1,"),
    Rule("grid_one_long", DEVICE, r"MTLSizeMake\(grid\[0\],", "MTLSizeMake(grid[0] + 1,"),
    Rule("grid_axes_swapped", DEVICE, r"grid\[0\], grid\[1\], grid\[2\]", "grid[1], grid[0], grid[2]"),
    Rule("threads_of_one_simdgroup", DEVICE, r"kernel\.simds \* kSimdWidth, 1, 1", "kSimdWidth, 1, 1"),
    Rule(
        "threads_as_simdgroups",
        DEVICE,
        r"MTLSizeMake\(kernel\.simds \* kSimdWidth,",
        "MTLSizeMake(kernel.simds,",
    ),
    Rule(
        "pipeline_of_fewer_threads",
        DEVICE,
        r"variant\.kernel->simds \* kSimdWidth",
        "variant.kernel->simds * 16",
    ),
    Rule(
        "sizes_exchanged",
        DEVICE,
        r"dispatch\.groups threadsPerThreadgroup:dispatch\.threads",
        "dispatch.threads threadsPerThreadgroup:dispatch.groups",
    ),
    Rule(
        "wrong_pipeline",
        DEVICE,
        r"\.pipeline = pipelines_\.at\([^\n]*\)\),",
        ".pipeline = pipelines_.begin()->second,",
    ),
    # Order.
    Rule("stage_barrier_dropped", DEVICE, r"else if \(first \|\| dispatch\.new_stage\)", "else if (first)"),
    Rule(
        "program_barrier_dropped",
        DEVICE,
        r"else if \(first \|\| dispatch\.new_stage\)",
        "else if (dispatch.new_stage)",
    ),
    Rule("barrier_of_other_scope", DEVICE, r"MTLBarrierScopeBuffers", "MTLBarrierScopeTextures"),
    Rule("stage_of_wrong_launch", DEVICE, r"before->stage != launch\.stage", "before->layer != launch.layer"),
    Rule(
        "write_after_read_ignored", PLAN, r"if \(write\) latest = std::max\(latest, it->second\.read\);", ""
    ),
    Rule("read_after_write_ignored", PLAN, r"latest = std::max\(latest, it->second\.written\);", ""),
    Rule(
        "half_of_a_slot_tracked",
        PLAN,
        r"slot\.offset, slot\.offset \+ slot\.bytes,",
        "slot.offset, slot.offset + slot.bytes / 2,",
    ),
    Rule(
        "reads_recorded_as_writes_only",
        PLAN,
        r"for \(const bool write : \{false, true\}\)",
        "for (const bool write : {true})",
    ),
    Rule("launches_not_sorted", PLAN, r"return a\.stage < b\.stage;", "return a.stage > b.stage;"),
    # Compiling.
    Rule("older_language", DEVICE, r"MTLLanguageVersion3_2", "MTLLanguageVersion3_0"),
    Rule("language_not_set", DEVICE, r"options\.languageVersion = [^;]*;", ""),
    Rule("wrong_number_of_language", DEVICE, r"4 << 16", "4 << 8"),
    Rule("fast_math", DEVICE, r"MTLMathModeSafe", "MTLMathModeFast"),
    Rule("math_mode_not_set", DEVICE, r"options\.mathMode = MTLMathModeSafe;", ""),
    Rule(
        "tensor_form_everywhere",
        DEVICE,
        r"else if \(!\[device_ supportsFamily:kApple10\]\)",
        "else if (![device_ supportsFamily:MTLGPUFamilyApple7])",
    ),
    Rule(
        "tensor_form_on_old_system",
        DEVICE,
        r"if \(!system_is_at_least\(kTensorSystem\)\)",
        "if (!system_is_at_least(kOldestSystem))",
    ),
    Rule("no_fallback", DEVICE, r"\|\| !tensor_ops_\) continue;", "|| tensor_ops_) continue;"),
    Rule("old_tiles_kept_after_fallback", DEVICE, r"std::erase_if\(pipelines_, [^;]*;", ""),
    Rule(
        "old_gpu_accepted",
        DEVICE,
        r"!\[device supportsFamily:MTLGPUFamilyApple5\]",
        "![device supportsFamily:MTLGPUFamilyMac2]",
    ),
    Rule("library_error_ignored", DEVICE, r"if \(library == nil\) fail\([^;]*;", ""),
    Rule("missing_function_ignored", DEVICE, r"if \(function == nil\)[^;]*;", ""),
    Rule("pipeline_error_ignored", DEVICE, r"if \(made == nil\) fail\(name[^;]*;", ""),
    Rule(
        "pipeline_limits_ignored",
        DEVICE,
        r"made\.maxTotalThreadsPerThreadgroup < threads",
        "made.maxTotalThreadsPerThreadgroup < 1",
    ),
    Rule(
        "threadgroup_memory_ignored", DEVICE, r"made\.staticThreadgroupMemoryLength > device_", "0 > device_"
    ),
    # Memory and lifetime.
    Rule(
        "args_not_retained", DEVICE, r"    id<MTLBuffer> args;", "    __unsafe_unretained id<MTLBuffer> args;"
    ),
    Rule(
        "pipelines_not_retained",
        DEVICE,
        r"    std::map<VariantKey, id<MTLComputePipelineState>> pipelines_;",
        "    std::map<VariantKey, __unsafe_unretained id<MTLComputePipelineState>> pipelines_;",
    ),
    Rule("pool_leaves_with_exception", SUPPORT, r"error = current_failure\(\);", "throw;"),
    Rule("no_pool", SUPPORT, r"@autoreleasepool \{", "{"),
    Rule("private_memory", DEVICE, r"MTLResourceStorageModeShared", "MTLResourceStorageModePrivate"),
    Rule(
        "untracked_memory",
        DEVICE,
        r"options:MTLResourceStorageModeShared\]",
        "options:MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked]",
    ),
    Rule(
        "flag_of_other_family",
        DEVICE,
        r"options:MTLResourceStorageModeShared\]",
        "options:MTLResourceUsageRead]",
    ),
    Rule("buffer_limit_ignored", DEVICE, r"if \(bytes <= device_\.maxBufferLength\)", "if (true)"),
    Rule(
        "no_memory_ignored", DEVICE, r"if \(made == nil\)\n\s+throw Error\(ErrorKind::kOutOfMemory,[^;]*;", ""
    ),
    Rule("buffer_kept_after_release", DEVICE, r"buffers_\[buffer\.index\] = nil;", ""),
    Rule("left_in_residency_set", DEVICE, r"\[resident_ removeAllocation:[^;]*;", ""),
    Rule("never_in_residency_set", DEVICE, r"\[resident_ addAllocation:made\];", ""),
    Rule(
        "residency_not_committed",
        DEVICE,
        r"\[resident_ addAllocation:made\];\n\s+\[resident_ commit\];",
        "[resident_ addAllocation:made];",
    ),
    Rule("residency_set_not_attached", DEVICE, r"\[queue_ addResidencySet:resident_\];", ""),
    Rule("wrong_memory_limit", DEVICE, r"recommended == 0 \? UINT64_MAX : recommended", "UINT64_MAX"),
    # Command buffers.
    Rule(
        "pass_not_ended",
        DEVICE,
        r"\[std::exchange\(pass_, nil\) endEncoding\];",
        "std::exchange(pass_, nil);",
    ),
    Rule("open_pass_dropped_on_error", DEVICE, r"if \(pass_ != nil\) \[pass_ endEncoding\];[^\n]*", ""),
    Rule("not_committed", DEVICE, r"\[buffer commit\];", ""),
    Rule(
        "committed_before_handler",
        DEVICE,
        r"(\[buffer addCompletedHandler:.*?\}\];\n)(.*?)(\n\s+\[buffer commit\];)",
        r"\3\n\1\2",
    ),
    Rule("handler_not_counted", DEVICE, r"flights->add\(ticket\);", ""),
    Rule(
        "failure_ignored",
        DEVICE,
        r"done\.status == MTLCommandBufferStatusCompleted",
        "done.status >= MTLCommandBufferStatusCompleted",
    ),
    Rule(
        "failure_of_other_kind", DEVICE, r"MTLCommandBufferErrorOutOfMemory", "MTLCommandBufferErrorTimeout"
    ),
    Rule("no_command_buffer_ignored", DEVICE, r"if \(buffer_ == nil\) throw[^;]*;", ""),
    Rule("no_pass_ignored", DEVICE, r"if \(pass_ == nil\) throw[^;]*;", ""),
    Rule("no_queue_ignored", DEVICE, r"if \(queue_ == nil\) throw[^;]*;", ""),
    Rule("nobody_waits", DEVICE, r"\{ flights_->wait\(ticket\); \}", "{ static_cast<void>(ticket); }"),
    Rule(
        "waits_for_the_one_before",
        FLIGHTS,
        r"flights_\.front\(\)\.ticket > ticket",
        "flights_.front().ticket >= ticket",
    ),
    Rule(
        "failure_thrown_while_running",
        FLIGHTS,
        r"changed_\.wait\(guard, \[&\] \{ return flights_\.empty\(\); \}\);\n    const Failure",
        "const Failure",
    ),
    Rule("failure_stays", FLIGHTS, r"\*std::exchange\(failure_, std::nullopt\)", "*failure_"),
    Rule("destroyed_while_running", DEVICE, r"    flights_->wait_idle\(\);\n    pooled", "    pooled"),
    Rule(
        "one_step_too_many",
        DEVICE,
        r"return trace_ \? 1 : 2;",
        "return 3;",
    ),
    Rule("all_in_one_buffer", DEVICE, r"seconds_ > kBufferSeconds", "seconds_ > 1e9"),
    Rule("work_never_forgotten", DEVICE, r"\n\s+seconds_ = 0;\n", "\n"),
    # The pipeline cache.
    Rule("archive_never_saved", SUPPORT, r"changed = true;", ""),
    Rule("archive_not_asked_first", SUPPORT, r"wanted\.binaryArchives = @\[ ?archive_ ?\];", ""),
    Rule("archive_written_in_place", SUPPORT, r'path_ \+ "\." \+ std::to_string\(getpid\(\)\)[^;]*', "path_"),
    Rule("archive_of_any_shaders", SUPPORT, r"static_cast<unsigned long long>\(kShaderHash\)", "0ull"),
    Rule(
        "corrupt_archive_is_fatal",
        SUPPORT,
        r"if \(archive_ == nil\) problem_ = message_of\(error\);",
        "if (archive_ == nil || !problem_.empty()) fail(path_, error);",
    ),
)


def sites(root: pathlib.Path) -> Iterator[Mutant]:
    """Yield every mutant of the sources under `root`; a rule without a site is a ValueError."""
    for rule in RULES:
        text = (root / rule.file).read_text(encoding="utf-8")
        matches = list(re.finditer(rule.pattern, text, re.S))
        if not matches:
            raise ValueError(f"rule {rule.name} matches nothing in {rule.file}")
        for site, match in enumerate(matches):
            yield Mutant(rule, site, text.count("\n", 0, match.start()) + 1)


def mutated(root: pathlib.Path, mutant: Mutant) -> str:
    """Return the text of the mutant's file with the mistake in it."""
    text = (root / mutant.rule.file).read_text(encoding="utf-8")
    match = list(re.finditer(mutant.rule.pattern, text, re.S))[mutant.site]
    return text[: match.start()] + match.expand(mutant.rule.replacement) + text[match.end() :]
