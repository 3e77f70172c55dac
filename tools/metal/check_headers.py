"""Compare the headers that stand in for Apple's SDK with what Apple's compiler left in public programs.

Protocols are compared selector by selector with the full encoding of all types; enumerators and exported
names with pyobjc's tables; classes with pyobjc's notes, and those of Foundation with metal-cpp's
declarations. Whatever cannot be read, or compares nothing, is an error: a check that lost its subject must
not pass.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

import metal_cpp
import objc_header
import pyobjc_tables
import wheels
import zig
from objc_metadata import Image, Protocol, merge
from pyobjc_tables import Tables

BUILD = zig.BUILD / "check"
# Images that tell about a generation. One built with an older SDK tells about a newer generation too, but not
# all.
IMAGES = {
    15: (wheels.PYOBJC_METAL_15, wheels.PYOBJC_COCOA_15, wheels.PYMETALLIC, wheels.METALCOMPUTE),
    26: (wheels.PYOBJC_METAL_26, wheels.PYOBJC_COCOA_26, wheels.ARROWMETAL),
}
TABLES = {
    15: (wheels.PYOBJC_METAL_15, wheels.PYOBJC_COCOA_15),
    26: (wheels.PYOBJC_METAL_26, wheels.PYOBJC_COCOA_26),
}
# What must at least be compared: below what is compared today, far above what a reader that fails quietly
# finds.
FEWEST = {
    "protocols": 35,
    "selectors": 500,
    "constants": 750,
    "exports": 25,
    "notes on classes": 80,
    "Foundation methods": 20,
}
CLASS = re.compile(r"^@interface (\w+)\b[^\n]*\n(?:    Class isa;\n\}\n)?(.*?)^@end$", re.S | re.M)
GENERIC = (("KeyType<NSCopying>", "id<NSCopying>"), ("KeyType", "id"), ("ObjectType", "id"))
ENUMERATOR = re.compile(r"^    (\w+)(?: = [^,\n]+)?,$", re.M)
EXPORT = re.compile(r"^FOUNDATION_EXPORT .*?(\w+)(?:\(|;)", re.M)
TYPE = re.compile(r'(@"[^"]*"|@\?|\^?\{[^}]*\}|[rnNoORV]*\^*[a-zA-Z@#:*?])\d+')
COPY = "Class_"  # prefix of a protocol that repeats a class
METAL_CPP = "MetalCpp_"  # prefix of a protocol that repeats a class of metal-cpp's Foundation


@dataclass
class Report:
    """Counts for the summary, and what is wrong."""

    counts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def header_text(generation: int) -> str:
    """Return the text of both headers."""
    metal = zig.BUILD / f"include{generation}" / "Metal" / "Metal.h"
    foundation = zig.FOUNDATION / "Foundation" / "Foundation.h"
    return metal.read_text(encoding="utf-8") + foundation.read_text(encoding="utf-8")


def normal(encoding: str) -> str:
    """Drop what differs by language: names of structs, and Swift's view of dispatch objects."""
    encoding = re.sub(r'"(?:NSObject<)?(OS_dispatch_\w+?)>?"', r'"\1"', encoding)
    return re.sub(r"\{\w+=", "{?=", encoding)


def classes_as_protocols(text: str) -> str:
    """Repeat the classes of a header as protocols, whose types the compiler writes down."""
    copies = []
    for name, body in CLASS.findall(text):
        for parameter, written in GENERIC:
            body = re.sub(rf"\b{re.escape(parameter)}(?!\w)", written, body)
        copies.append(f"@protocol {COPY}{name}\n{body}@end\n")
    return "\n".join(copies)


def compiled_protocols(
    generation: int, name: str, declarations: str, wanted: list[str]
) -> dict[str, Protocol]:
    """Compile declarations on top of our headers; read back the protocols wanted and those declared."""
    every = [*wanted, *re.findall(r"^@protocol (\w+)$", declarations, re.M)]
    cases = "".join(f"        case {i}: return @protocol({protocol});\n" for i, protocol in enumerate(every))
    source = BUILD / f"{name}{generation}.mm"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(
        f"#import <Metal/Metal.h>\nNS_ASSUME_NONNULL_BEGIN\n{declarations}\nNS_ASSUME_NONNULL_END\n"
        f"extern Protocol* lily_protocol(int index);\n"
        f"Protocol* lily_protocol(int index) {{\n    switch (index) {{\n{cases}    }}\n    return nil;\n}}\n",
        encoding="utf-8",
    )
    compiled = zig.compile_object(
        source, source.with_suffix(".o"), *zig.metal_includes(generation), "-Wno-objc-property-no-attribute"
    )
    library = source.with_suffix(".dylib")
    zig.run(
        "cc", *zig.TARGET, "-shared", "-nostdlib", "-Wl,-undefined,dynamic_lookup", compiled, "-o", library
    )
    return Image(library).protocols()


def compare_protocols(
    report: Report, ours: dict[str, Protocol], theirs: dict[str, Protocol], complete: set[str]
) -> None:
    """Every selector has the same types; protocols in `complete` have no selector that Apple's lacks."""
    names = sorted(name for name in theirs if name in ours and name != "NSObject")
    same = 0
    for name in names:
        apple, own = theirs[name], ours[name]
        methods, expected = ({**p.instance, **p.static} for p in (own, apple))
        for selector in sorted(methods.keys() & expected.keys()):
            same += 1
            if normal(methods[selector]) != normal(expected[selector]):
                report.faults.append(
                    f"{name} {selector}: {methods[selector]}, Apple's is {expected[selector]}"
                )
        if name in complete:
            extra = sorted(methods.keys() - expected.keys())
            report.faults += [f"{name} {selector}: not in Apple's protocol" for selector in extra]
        adopted, expected_adopted = ({a for a in p.adopts if a.startswith("MTL")} for p in (own, apple))
        if adopted != expected_adopted:
            report.faults.append(f"{name}: adopts {adopted}, Apple's adopts {expected_adopted}")
    report.counts["protocols"] = sum(name.startswith("MTL") for name in names)
    report.counts["selectors"] = same


def struct_asserts(generation: int, text: str) -> str:
    """Return assertions that structs of Foundation.h have the fields of metal-cpp's."""
    declarations = metal_cpp.read(wheels.metal_cpp(objc_header.GENERATIONS[generation]) / "Foundation")
    types = objc_header.Writer(declarations).types
    lines = []
    for struct in declarations.structs.values():
        if re.search(rf"^struct _?{struct.name} {{", text, re.M):
            fields = [(types.translate(written, struct.space), name) for written, name in struct.fields]
            lines += [f"__is_same(decltype({struct.name}::{name}), {written})" for written, name in fields]
            lines.append(
                f"sizeof({struct.name}) == {' + '.join(f'sizeof({written})' for written, _ in fields)}"
            )
    return "".join(f"static_assert({line});\n" for line in lines)


def compare_values(report: Report, generation: int, text: str, tables: list[Tables]) -> None:
    """Every enumerator that pyobjc knows has the same value; exported names exist."""
    values = {name: value for table in tables for name, value in table.values.items()}
    shared = sorted(set(ENUMERATOR.findall(text)) & values.keys())
    asserts = "".join(
        f"static_assert(static_cast<unsigned long>({name}) == {values[name] % 2**64}UL);\n" for name in shared
    )
    source = BUILD / f"constants{generation}.mm"
    asserts += struct_asserts(generation, text)
    source.write_text(f"#import <Metal/Metal.h>\n{asserts}", encoding="utf-8")
    try:
        flags = (*zig.metal_includes(generation), "-ferror-limit=0")
        zig.compile_object(source, source.with_suffix(".o"), *flags)
    except zig.CompileError as reason:
        report.faults += re.findall(r"static assertion failed.*", str(reason)) or [str(reason)]
    known = {name for table in tables for name in table.constants | table.functions.keys()}
    exported = set(EXPORT.findall(text))
    report.faults += [f"{name}: pyobjc knows no such export" for name in sorted(exported - known)]
    report.counts["constants"] = len(shared)
    report.counts["exports"] = len(exported)


def noted_types(notes: dict[str, object]) -> dict[int, str]:
    """Return the plain types that pyobjc notes: position (0: result, 2: first argument): type."""
    arguments = notes.get("arguments")
    positions = {0: notes.get("retval"), **(arguments if isinstance(arguments, dict) else {})}
    found = {}
    for position, note in positions.items():
        written = note.get("type") if isinstance(note, dict) else None
        if isinstance(written, bytes) and len(written) == 1:
            found[position] = "B" if written == b"Z" else written.decode()
    return found


def compare_notes(report: Report, ours: dict[str, Protocol], tables: list[Tables]) -> None:
    """Methods of classes have the types that pyobjc notes for them, mostly where they are BOOL."""
    compared = 0
    for (owner, selector), notes in (item for table in tables for item in table.methods.items()):
        own = ours.get(COPY + owner, Protocol(owner))
        encoding = own.instance.get(selector) or own.static.get(selector)
        for position, expected in noted_types(notes).items() if encoding else ():
            types = TYPE.findall(encoding or "")
            compared += 1
            at = position + 1 if position else 0  # of the encoding, 1 and 2 are self and the selector
            if types[at : at + 1] != [expected]:
                report.faults.append(f"{owner} {selector}: {encoding}, pyobjc notes {expected} at {position}")
    report.counts["notes on classes"] = compared


def compare_foundation(report: Report, generation: int, ours: dict[str, Protocol]) -> None:
    """Classes of Foundation.h agree with metal-cpp's where both declare a method; all objects are alike."""
    declarations = metal_cpp.read(wheels.metal_cpp(objc_header.GENERATIONS[generation]) / "Foundation")
    writer = objc_header.Writer(declarations)
    copies = []
    for interface in declarations.interfaces.values():
        own = ours.get(COPY + interface.name, Protocol(interface.name))
        lines = [
            writer.method(interface.name, method)
            for method in interface.methods
            if method.selector in (own.static if method.is_static else own.instance)
        ]
        if lines:
            copies.append("\n".join([f"@protocol {METAL_CPP}{interface.name}", *lines, "@end"]))
    theirs = compiled_protocols(generation, "foundation", "\n".join(copies), [])
    compared = 0
    for name, protocol in theirs.items():
        own = ours.get(COPY + name.removeprefix(METAL_CPP), Protocol(name))
        for selector, expected in {**protocol.instance, **protocol.static}.items():
            compared += 1
            encoding = {**own.instance, **own.static}[selector]
            if re.sub(r'@"[^"]*"', "@", encoding) != re.sub(r'@"[^"]*"', "@", expected):
                report.faults.append(f"{own.name} {selector}: {encoding}, metal-cpp's is {expected}")
    report.counts["Foundation methods"] = compared


def check(generation: int) -> Report:
    """Check the headers of one generation."""
    report = Report()
    objc_header.generate(generation)
    text = header_text(generation)
    images = [Image(path) for wheel in IMAGES[generation] for path in wheels.images(wheel)]
    theirs = merge(images)
    complete = merge([image for image in images if image.sdk[0] == generation]).keys()
    declared = set(re.findall(r"^@protocol (\w+) ?<", text, re.M)) | {"NSCopying"}
    wanted = sorted(declared & theirs.keys())
    ours = compiled_protocols(generation, "protocols", classes_as_protocols(text), wanted)
    tables = [
        pyobjc_tables.read(path)
        for wheel in TABLES[generation]
        for path in wheels.unpack(wheel).rglob("_metadata.py")
    ]
    compare_protocols(report, ours, theirs, set(complete))
    compare_values(report, generation, text, tables)
    compare_notes(report, ours, tables)
    compare_foundation(report, generation, ours)
    report.faults += [
        f"only {report.counts.get(what, 0)} {what} were compared, {fewest} are expected: a reader failed"
        for what, fewest in FEWEST.items()
        if report.counts.get(what, 0) < fewest
    ]
    return report


def check_all() -> bool:
    """Check both generations, print one line for each, and return whether all is well."""
    good = True
    for generation in objc_header.GENERATIONS:
        try:
            report = check(generation)
        except zig.CompileError as reason:
            print(f"headers of macOS {generation} do not compile:\n{reason}", file=sys.stderr)
            return False
        counts = ", ".join(f"{count} {what}" for what, count in report.counts.items())
        print(f"Metal headers of macOS {generation} and Apple's metadata: {counts} compared")
        for fault in report.faults:
            print(f"  {fault}", file=sys.stderr)
        good = good and not report.faults
    return good


if __name__ == "__main__":
    sys.exit(0 if check_all() else 1)
