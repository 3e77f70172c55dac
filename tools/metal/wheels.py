"""Public macOS wheels that stand in for Apple's SDK: metal-cpp, and images that Apple's compiler built.

A wheel is fetched once with pip and checked against its hash; the members that the checks read are unpacked
into build/metal/wheels. None of it is committed or shipped.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "metal" / "wheels"


@dataclass(frozen=True)
class Wheel:
    """A file of the package index, pinned by its hash, and a pattern of the members that are read."""

    package: str
    version: str
    members: str
    sha256: str

    @property
    def folder(self) -> Path:
        """Where it is unpacked."""
        return CACHE / f"{self.package}-{self.version}"


METAL_CPP_15 = Wheel(
    "mlx-metal",
    "0.28.0",
    r"metal_cpp/(Foundation|Metal)/\w+\.hpp$",
    "214ece3781d44f57eb9686561594b28915ec5568df4a5a73da59c66880b204ed",
)
METAL_CPP_26 = Wheel(
    "mlx-metal",
    "0.32.4",
    r"metal_cpp/(Foundation|Metal)/\w+\.hpp$",
    "9f0a3cc26d89724434d9684932fc6f3e4e83669d2a895d858ed2c8a55eb84e8b",
)
# Built with the SDKs of macOS 15.5 and 26.5: protocols with full type encodings, and tables of constants.
PYOBJC_METAL_15 = Wheel(
    "pyobjc-framework-Metal",
    "11.1",
    r"^Metal/(_metadata\.py|_Metal\..*so)$",
    "1f3aae0f9a4192a7f4f158dbee126ab5ef63a81bf9165ec63bc50c353c8d0e6f",
)
PYOBJC_METAL_26 = Wheel(
    "pyobjc-framework-Metal",
    "12.2.2",
    r"^Metal/(_metadata\.py|_Metal\..*so)$",
    "fb0421195ded2a02a83c94dbc1bf815b4a879c51804c43bcaf4680a6dc1b4aa2",
)
PYOBJC_COCOA_15 = Wheel(
    "pyobjc-framework-Cocoa",
    "11.1",
    r"^Foundation/(_metadata\.py|_Foundation\..*so)$",
    "806de56f06dfba8f301a244cce289d54877c36b4b19818e3b53150eb7c2424d0",
)
PYOBJC_COCOA_26 = Wheel(
    "pyobjc-framework-Cocoa",
    "12.2.2",
    r"^Foundation/(_metadata\.py|_Foundation\..*so)$",
    "e106f395531e67694376b0f1184612cbeea3ec8b9bf56b55ef41d026171d2a2d",
)
# Programs that use Metal themselves, built with the SDKs of macOS 26.5, 15.5, 15.0, 14.5 and 14.5. The
# protocols in them are those that pyobjc does not mention; all of them name the selectors they send and the
# symbols they import.
ARROWMETAL = Wheel(
    "arrowmetal",
    "0.5.0",
    r"/libArrowMetalC\.dylib$",
    "331e0231dd581621446d6ab383f9171536bd299fbedea38845b11fb0d2f5e5af",
)
PYMETALLIC = Wheel(
    "pymetallic",
    "0.3.1",
    r"/libpymetallic\.dylib$",
    "7f9b13dd595a731e7ca688d0a67951097c2ab1f214b900600b38d4efa519996e",
)
QT = Wheel(
    "pyqt6-qt6",
    "6.11.2",
    r"/Versions/A/QtGui$",
    "4f21ff2ffaacfb8a8df6ab1d619d0da7aa4e808e86f41b6daa1a7bff9c0d6eab",
)
WHISPER = Wheel(
    "pywhispercpp",
    "1.5.1",
    r"^libggml-metal\.dylib$",
    "d929d69b9c9b960114eee2d7ee4a5ec4a3553bcace173c155d951f94f5c835c8",
)
METALCOMPUTE = Wheel(
    "metalcompute",
    "0.2.9",
    r"^metalcompute\..*so$",
    "cc6efde5c5368871fbb2dad08ca7c7a57a7ad831c364630beed1ac5632ae332a",
)
PROGRAMS = (PYMETALLIC, QT, WHISPER, METALCOMPUTE)  # of an SDK up to macOS 15
ALL = (
    METAL_CPP_15,
    METAL_CPP_26,
    PYOBJC_METAL_15,
    PYOBJC_METAL_26,
    PYOBJC_COCOA_15,
    PYOBJC_COCOA_26,
    ARROWMETAL,
    *PROGRAMS,
)


def download(wheel: Wheel, folder: Path) -> Path:
    """Fetch a wheel into a folder with pip; refuse any other file than the pinned one."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    target = ["--only-binary=:all:", "--platform", "macosx_15_0_arm64", "--python-version", "3.12"]
    command = [*pip, *target, "--dest", str(folder), f"{wheel.package}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{wheel.package} {wheel.version} cannot be downloaded:\n{done.stderr}")
    (file,) = folder.glob("*.whl")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise SystemExit(f"{file.name}: not the pinned file (sha256 {digest})")
    return file


def unpack(wheel: Wheel) -> Path:
    """Return the folder with the members of the wheel that are read here; fetch it when that is missing."""
    done = wheel.folder / ".complete"
    if done.exists() and done.read_text() == wheel.sha256 + wheel.members:
        return wheel.folder
    shutil.rmtree(wheel.folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(download(wheel, Path(folder))) as archive:
        members = [name for name in archive.namelist() if re.search(wheel.members, name)]
        archive.extractall(wheel.folder, members)
    if not members:
        raise SystemExit(f"{wheel.package} {wheel.version}: nothing in it that is wanted here")
    done.write_text(wheel.sha256 + wheel.members)
    return wheel.folder


def images(wheel: Wheel) -> list[Path]:
    """Return the Mach-O files of the wheel."""
    known = (".py", ".hpp", ".complete")
    found = [p for p in sorted(unpack(wheel).rglob("*")) if p.is_file() and not p.name.endswith(known)]
    if not found:
        raise SystemExit(f"{wheel.package} {wheel.version}: no Mach-O file in it")
    return found


def metal_cpp(wheel: Wheel) -> Path:
    """Return the folder of the metal-cpp headers in the wheel."""
    (folder,) = {p.parent.parent for p in unpack(wheel).rglob("metal_cpp/Metal/MTLDevice.hpp")}
    return folder


def main() -> None:
    """Fetch everything."""
    for wheel in ALL:
        folder = unpack(wheel)
        files = sum(1 for p in folder.rglob("*") if p.is_file())
        print(f"{wheel.package} {wheel.version}: {files} files")


if __name__ == "__main__":
    main()
