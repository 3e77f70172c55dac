"""Build Lily for a Mac on any machine, and look at what came out: `make check-metal` runs this.

CMakeLists.txt itself is cross-compiled for arm64 macOS 15, with warnings as errors, to linked modules; the
framework headers are those that objc_header.py generates. device_metal.mm is compiled with the headers of
macOS 26 and of macOS 15, so it uses nothing newer without asking. The result runs nowhere: no Apple library
was there to link with.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import check_headers
import evidence
import stub_libraries
import zig
from objc_metadata import Image

NEW, OLD = 26, 15  # generations of the headers
MODULES = {"_native.*.so": "_PyInit__native", "liblily_cpu*.so": "_lily_cpu_object"}  # and what each exports
JOBS = "2"
# Symbols that the modules find in the interpreter and in the C++ library, for which there is no stub.
ELSEWHERE = re.compile(
    r"_?_Py|__Z(N?K?St|NKSt|T[ISV](N10__cxxabiv1|N?St|[a-zP]+$)|n[wa]|d[la])|___cxa_|___gxx_|__Unwind_"
)

# Bundles are linked as libraries, which the linker of ziglang knows. Optimising would show nothing more. A
# program is only compiled, never linked: CMake makes one to identify the compiler, and the C++ library takes
# a minute to build.
COMPILER = """\
#!/bin/bash
export ZIG_GLOBAL_CACHE_DIR={cache} ZIG_LOCAL_CACHE_DIR={cache}
case " $* " in
    *" -c "* | *" -E "* | *" -bundle "*) ;;
    *) set -- "$@" -c ;;
esac
arguments=("${{@/#-bundle/-shared}}")
exec {python} -m ziglang c++ {target} -fno-sanitize=all "${{arguments[@]/#-O[123]/-O0}}"
"""
TOOL = """\
#!/bin/bash
exec {python} -m ziglang {tool} "$@"
"""
TOOLCHAIN = """\
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_OSX_SYSROOT "")
set(CMAKE_OSX_DEPLOYMENT_TARGET "")
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)
set(CMAKE_CXX_COMPILER {bin}/c++)
set(CMAKE_AR {bin}/ar)
set(CMAKE_RANLIB {bin}/ranlib)
set(CMAKE_INSTALL_NAME_TOOL {nothing})
set(CMAKE_STRIP {nothing})
set(CMAKE_CXX_FLAGS_INIT "-I{foundation} -I{metal}")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-F{stubs} -nostdlib++ -Wl,-undefined,dynamic_lookup")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
"""


def tool(name: str) -> str:
    """Return the path of a program of this Python's environment, or of the system."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which(name, path=places)
    if found is None:
        sys.exit(f"{name} is not installed")
    return found


def write_once(path: Path, text: str) -> bool:
    """Write a file; return whether that changed it."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


def write_toolchain(source: Path, build: Path) -> tuple[Path, bool]:
    """Write the compiler's wrappers and the toolchain file; return the file and whether anything changed."""
    programs = build / "bin"
    python, target = shlex.quote(sys.executable), shlex.join(zig.TARGET)
    cache = shlex.quote(str(zig.CACHE))
    texts = {"c++": COMPILER.format(cache=cache, python=python, target=target)}
    texts |= {name: TOOL.format(python=python, tool=name) for name in ("ar", "ranlib")}
    changed = [write_once(programs / name, text) for name, text in texts.items()]
    for name in texts:
        (programs / name).chmod(0o755)
    file = build / "toolchain.cmake"
    text = TOOLCHAIN.format(
        bin=programs,
        nothing=tool("true"),
        foundation=source / zig.FOUNDATION.relative_to(zig.ROOT),
        metal=zig.BUILD / f"include{NEW}",
        stubs=stub_libraries.STUBS,
    )
    return file, any([*changed, write_once(file, text)])


def call(*command: str | Path) -> None:
    """Run a step of the build; end with its output when it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(map(str, command))} failed:\n{done.stdout[-20000:]}{done.stderr[-5000:]}")


def cross_build(source: Path) -> Path:
    """Build everything with CMake and return the build folder."""
    build = source / "build" / "metal" / "mac"
    toolchain, is_new = write_toolchain(source, build)
    folder = build / "build"
    if is_new:
        shutil.rmtree(folder, ignore_errors=True)
    if not (folder / "build.ninja").exists():
        import pybind11

        options = {
            "CMAKE_TOOLCHAIN_FILE": toolchain,
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "LILY_WERROR": "ON",
        }
        defines = [f"-D{name}={value}" for name, value in options.items()]
        call(tool("cmake"), "-S", source, "-B", folder, "-G", "Ninja", *defines)
    call(tool("ninja"), "-C", folder, "-j", JOBS)
    return folder


def check_modules(folder: Path) -> tuple[str, list[str]]:
    """Look at the linked modules: oldest system, entry point, and where their imports come from."""
    faults = [f"no {pattern} was built" for pattern in MODULES if not list(folder.glob(pattern))]
    modules = [(path, entry) for pattern, entry in MODULES.items() for path in sorted(folder.glob(pattern))]
    for path, entry in modules:
        name, image = path.name.partition(".")[0], Image(path)
        if image.oldest_system != (OLD, 0):
            faults.append(f"{name}: for macOS {image.oldest_system}, not {OLD}.0")
        if entry not in image.exported():
            faults.append(f"{name}: does not export {entry}")
        # What is neither Python's nor the C++ library's, and in no stub, would fail when a Mac loads the
        # module.
        lost = sorted(symbol for symbol, has_library in image.imported().items() if not has_library)
        faults += [f"{name}: no Mac exports {symbol}" for symbol in lost if not ELSEWHERE.match(symbol)]
    names = ", ".join(path.name.partition(".")[0] for path, _ in modules)
    return f"{names} link for arm64, macOS {OLD}", faults


def compile_device(folder: Path) -> Path:
    """Compile device_metal.mm with the older headers too, and return the object made with the newer ones."""
    commands = json.loads((folder / "compile_commands.json").read_text(encoding="utf-8"))
    found = [entry for entry in commands if entry["file"].endswith("device_metal.mm")]
    if len(found) != 1:
        sys.exit(f"device_metal.mm is compiled {len(found)} times for a Mac, once is expected")
    arguments = shlex.split(found[0]["command"])
    built = arguments[arguments.index("-o") + 1]
    older = folder / f"device_metal{OLD}.o"
    wanted = f"-I{zig.BUILD}/include{NEW}"
    if wanted not in arguments:
        sys.exit(f"{wanted} is missing from the command that compiles device_metal.mm")
    swapped = [
        f"-I{zig.BUILD}/include{OLD}" if a == wanted else str(older) if a == built else a for a in arguments
    ]
    done = subprocess.run(swapped, cwd=found[0]["directory"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"device_metal.mm does not compile with the headers of macOS {OLD}:\n{done.stderr}")
    return Path(found[0]["directory"]) / built


def check(source: Path) -> bool:
    """Run all checks on a source tree; each prints a line. Return whether all is well."""
    if not check_headers.check_all():
        return False
    stub_libraries.generate()
    folder = cross_build(source)
    summary, faults = check_modules(folder)
    print(f"Cross build: {summary}")
    device = Image(compile_device(folder))
    summary, more = evidence.judge(device.selectors())
    print(f"device_metal.mm compiles with the headers of macOS {NEW} and {OLD}; its selectors: {summary}")
    for fault in (*faults, *more):
        print(f"  {fault}", file=sys.stderr)
    return not faults and not more


def main() -> None:
    """Check this tree, or another."""
    parser = argparse.ArgumentParser(description="Build Lily for a Mac and look at what came out.")
    parser.add_argument("--source", type=Path, default=zig.ROOT, help="tree to build (default: this one)")
    sys.exit(0 if check(parser.parse_args().source.resolve()) else 1)


if __name__ == "__main__":
    main()
