"""lily doctor: whether Lily computes what it should, on this machine and with this checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import lily
from lily.cli.options import add_command, add_model_options, device_of
from lily.cli.terminal import ProgressBar, dim, wrapped
from lily.engine import Engine
from lily.errors import UnsupportedError

if TYPE_CHECKING:
    from lily.checkpoint import Checkpoint
    from lily.doctor.checks import Check
    from lily.doctor.kernels import KernelResult

_EXAMPLES = """  lily doctor
  lily doctor --model mlx-community/Qwen3.6-35B-A3B-4bit
  lily doctor --device cpu32 --quick
  lily doctor --kernel qmv attention_decode --json
"""
_MIB = 1 << 20
_COLUMN = 19  # where results begin
_CONTEXT = 512  # of the engines that are opened: the longest text of a check has fewer tokens
_CHUNK = 256
_SLOW_DEVICES = ("cpu32",)  # kernels run on small sizes there


def add_parser(commands: Any) -> None:
    """Add the command."""
    text = "check every kernel, the demo model and a checkpoint on this machine"
    parser = add_command(commands, "doctor", text, _EXAMPLES)
    parser.add_argument(
        "--kernel", nargs="+", action="extend", metavar="NAME", help="check these kernels and nothing else"
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller kernels and shorter texts, for slow devices"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser, context=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    from lily.doctor.kernels import KERNELS

    for name in args.kernel or ():
        if name not in KERNELS:
            args.parser.error(
                f"argument --kernel: there is no kernel {name!r}; there are {', '.join(KERNELS)}"
            )
    if args.kernel and args.model != "demo":
        args.parser.error("--kernel checks kernels alone, so --model does not apply")
    report = _Report(args.json)
    demo = None
    try:
        demo = _open_demo(args, report)
        if report.absent:
            report.finish()
            return 1
        checkpoint = None if args.kernel else _find_checkpoint(args, report)
        _check_kernels(args, report)
        report.gap()
        if demo is not None and not args.kernel:
            _check_golden(args, report, demo)
        if checkpoint is not None:
            _check_checkpoint(args, report, checkpoint, demo)
            report.gap()
    finally:
        if demo is not None:
            demo.close()
    report.finish()
    return 0 if report.ok else 1


def _open_demo(args: argparse.Namespace, report: _Report) -> Engine | None:
    """Open the demo model, and with it the device. That it fails is a finding: the kernels may tell why."""
    from lily.checkpoint import DEMO, open_checkpoint

    report.device = args.device
    bar = _loading("demo")
    engines = []

    def open_device(check: Check) -> None:
        report.device = device_of(args.device, open_checkpoint(DEMO).config)
        try:
            engines.append(_open(args, "demo", bar))
        except UnsupportedError:
            report.absent = True
            raise
        info = engines[0].info()
        check.text = info["device"]
        report.device = args.device if args.device.startswith("cuda") else check.text
        check.data = info["device_info"]
        check.details = [f"{key}: {value}" for key, value in check.data.items() if value != check.text]

    report.check("device", open_device, bar)
    return engines[0] if engines else None


def _loading(model: str) -> ProgressBar:
    return ProgressBar(f"loading {model}", _MIB, " MiB")


def _open(args: argparse.Namespace, model: str, bar: ProgressBar) -> Engine:
    return Engine(
        model,
        device=args.device,
        context=_CONTEXT,
        prefill_chunk=_CHUNK,
        threads=args.threads,
        max_sessions=2,
        progress=bar,
    )


def _find_checkpoint(args: argparse.Namespace, report: _Report) -> Checkpoint | None:
    """Find the model's files, downloading them if need be, and check everything but the weights."""
    from lily.checkpoint import open_checkpoint, resolve

    bar = ProgressBar(f"downloading {args.model}", _MIB, " MiB")
    found = []

    def find(check: Check) -> None:
        checkpoint = open_checkpoint(resolve(args.model, args.revision, bar))
        check.text = f"{checkpoint.name}: {len(checkpoint.tensors)} tensors, in {checkpoint.folder}"
        check.data = {"model": checkpoint.name, "folder": str(checkpoint.folder), "config": checkpoint.config}
        found.append(checkpoint)

    report.check("checkpoint", find, bar)
    return found[0] if found else None


def _check_kernels(args: argparse.Namespace, report: _Report) -> None:
    from lily import _native
    from lily.doctor.kernels import KERNELS, check_kernel

    names = args.kernel or KERNELS
    small = args.quick or report.device in _SLOW_DEVICES
    variants: list[tuple[str, dict[str, int]]] = []

    def list_variants(check: Check) -> None:
        variants.extend(_native.variants(report.device))
        check.text = f"{len(variants)} variants on {report.device}"

    report.check("kernels", list_variants)
    if not variants:
        return
    report.unused = sorted(set(names) - {name for name, _ in variants})
    wanted = [(name, consts) for name, consts in variants if name in names]
    bar = ProgressBar("kernels")
    report.kernel_title()
    try:
        for done, (name, consts) in enumerate(wanted):
            bar(done, len(wanted))
            result = check_kernel(report.device, name, consts, small=small)
            bar.wipe()
            report.kernel(result)
    finally:
        bar.wipe()
    report.kernel_end()


def _check_golden(args: argparse.Namespace, report: _Report, demo: Engine) -> None:
    from lily.doctor.golden import compare_texts, decoded, golden_texts, prefilled

    for name, predict in (("demo prefill", prefilled), ("demo decode", decoded)):
        bar = ProgressBar(name, unit=" tokens")

        def compare(check: Check, predict: Any = predict, bar: ProgressBar = bar) -> None:
            compare_texts(check, golden_texts(args.quick), predict, demo, bar)

        report.check(name, compare, bar)


def _check_checkpoint(
    args: argparse.Namespace, report: _Report, checkpoint: Checkpoint, demo: Engine | None
) -> None:
    """Check what a checkpoint makes of text, its numbers, then the model they make."""
    from lily.doctor.texts import check_chat_template, check_tokenizer
    from lily.doctor.weights import check_weights
    from lily.tokenizer import Tokenizer

    @cache  # both checks look at it
    def tokenizer() -> Tokenizer:
        return Tokenizer(checkpoint.folder, int(checkpoint.config["vocab"]))

    for name, what in (("tokenizer", check_tokenizer), ("chat template", check_chat_template)):

        def check_text(check: Check, what: Any = what) -> None:
            what(check, tokenizer())

        report.check(name, check_text)
    bar = ProgressBar("weights", _MIB, " MiB")
    report.check("weights", partial(check_weights, checkpoint=checkpoint, progress=bar), bar)
    if checkpoint.name == "demo":
        if demo is not None:
            _check_model(args, report, demo)
        return
    if demo is not None:
        demo.close()  # its memory may be needed
    bar = _loading(checkpoint.name)
    engines: list[Engine] = []

    def load(check: Check) -> None:
        engines.append(_open(args, str(checkpoint.folder), bar))

    report.check("load", load, bar)
    for engine in engines:
        with engine:
            _check_model(args, report, engine)


def _check_model(args: argparse.Namespace, report: _Report, engine: Engine) -> None:
    from lily.doctor import passes

    ids = passes.sample_ids(engine, args.quick)
    steps = passes.QUICK_STEPS if args.quick else passes.STEPS
    report.check("activations", partial(passes.check_activations, engine=engine, ids=ids))
    report.check("consistency", partial(passes.check_consistency, engine=engine, ids=ids, steps=steps))
    report.check("log probabilities", partial(passes.check_logprobs, engine=engine))


class _Report:
    """Collects what was found, and prints it as it comes unless all of it is to be one JSON object."""

    def __init__(self, as_json: bool) -> None:
        self.device = ""
        self.absent = False  # there is no such device here
        self.unused: list[str] = []
        self._json = as_json
        self._kernels: list[KernelResult] = []
        self._checks: list[Check] = []
        self._began = time.perf_counter()
        self._facts = {
            "lily": lily.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
        }
        self._print(f"Lily {lily.__version__}, Python {self._facts['python']}, {self._facts['machine']}")

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self._failed()

    def _failed(self) -> list[str]:
        kernels = [f"{k.kernel} {_variant(k.variant)}".strip() for k in self._kernels if not k.ok]
        return kernels + [check.name for check in self._checks if not check.ok]

    def check(self, name: str, what: Callable[[Check], object], bar: ProgressBar | None = None) -> None:
        """Carry out a check and show its result; exceptions fail it."""
        from lily.doctor.checks import attempt

        try:
            check = attempt(name, what)
        finally:
            if bar is not None:
                bar.wipe()
        self._checks.append(check)
        status = "ok  " if check.ok else "FAIL"
        self._print(wrapped(f"{name:{_COLUMN - 1}} {status} {check.text}".rstrip(), _COLUMN + 5))
        self._explain(check.reason)
        for warning in check.warnings:
            self._explain(f"warning: {warning}")
        for line in check.details:
            self._explain(line)

    def kernel_title(self) -> None:
        """Begin the table of kernels."""
        line = _line("kernel", "variant", "NMSE", "error", "limit", "memory", "time")
        self._print("\n" + dim(line, sys.stdout))

    def kernel(self, result: KernelResult) -> None:
        """Add a row to the table of kernels."""
        self._kernels.append(result)
        row = _line(
            result.kernel,
            _variant(result.variant) or "-",
            _small(result.nmse),
            _small(result.error),
            f"{100 * result.allowed:.0f} %" if math.isfinite(result.allowed) else "-",
            "intact" if result.memory else "BROKEN",
            f"{1e3 * result.seconds:.1f} ms",
        )
        self._print(f"{row} {'ok' if result.ok else 'FAIL'}")
        self._explain(result.reason)

    def kernel_end(self) -> None:
        """Say what the columns mean."""
        legend = (
            "NMSE: mean square error over mean square. error: the largest, relative to the terms of a value. "
            "limit: the largest, in percent of what rounding can cause; a kernel fails above 100 %."
        )
        self._print(dim(wrapped(legend, 0), sys.stdout))
        if self.unused:
            self._print(wrapped(f"not used on {self.device}: {', '.join(self.unused)}", 4))

    def gap(self) -> None:
        """Leave a line empty."""
        self._print("")

    def finish(self) -> None:
        """Print the sum, or everything as JSON."""
        seconds = time.perf_counter() - self._began
        failed = self._failed()
        if self._json:
            record = {
                **self._facts,
                "device": self.device,
                "ok": self.ok,
                "failed": failed,
                "seconds": seconds,
                "kernels": [{**dataclasses.asdict(k), "ok": k.ok} for k in self._kernels],
                "unused_kernels": self.unused,
                "checks": [_record(check) for check in self._checks],
            }
            print(json.dumps(_plain(record), ensure_ascii=False))
            return
        done = f"kernel variants {len(self._kernels)}, checks {len(self._checks)}, {seconds:.1f} s"
        verdict = f"{len(failed)} FAILED: {', '.join(failed)}" if failed else "all is well"
        self._print(wrapped(f"{done}: {verdict}", 4))

    def _print(self, text: str) -> None:
        if not self._json:
            print(text, flush=True)

    def _explain(self, text: str) -> None:
        for line in text.splitlines():
            self._print(wrapped(f"    {line.rstrip()}", 6))


def _record(check: Check) -> dict[str, Any]:
    record = {**dataclasses.asdict(check), "ok": check.ok}
    del record["details"]  # the data in words
    return record


def _line(kernel: str, variant: str, *cells: str) -> str:
    widths = (8, 8, 6, 7, 10)
    numbers = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{kernel:{_COLUMN - 1}} {variant:14} {numbers}"


def _variant(consts: dict[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in consts.items())


def _small(number: float) -> str:
    return "0" if number == 0 else f"{number:.1e}"


def _plain(value: Any) -> Any:
    """A value without numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
