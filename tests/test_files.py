"""Files that are none: whatever lies under a checkpoint's file names ends in an error that names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from damage import edit_json
from lily import Tokenizer
from lily.checkpoint import open_checkpoint, resolve
from lily.errors import CheckpointError
from lily.files import MAX_SHOWN, shown
from make_checkpoint import INDEX, Shape, make_checkpoint, tensor_specs

SMALL = Shape(
    vocab=320, hidden=64, layers=2, heads=2, kv_heads=1, delta_key_heads=1, delta_value_heads=2, experts=4,
    experts_used=2, inner=64, shared_inner=64,
)  # fmt: skip
MODEL = "model.safetensors"
JSON = ("config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json")
FILES = (*JSON, "chat_template.jinja", MODEL)
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "is not a regular file"),
    "folder": (Path.mkdir, "directory"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "a link to a file that does not exist"),
    "link to itself": (lambda path: path.symlink_to(path), "cannot be read"),
    "link to a long name": (lambda path: path.symlink_to("x" * 300), "cannot be read"),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("files") / "one", SMALL)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "one")


def open_all(folder: Path) -> None:
    open_checkpoint(folder, tensor_specs=tensor_specs)
    Tokenizer(folder, SMALL.vocab).apply_chat_template([{"role": "user", "content": "hi"}])


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_all(folder)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_no_regular_file(folder: Path, name: str, damage: str) -> None:
    change, word = DAMAGE[damage]
    (folder / name).unlink()
    change(folder / name)
    if damage in ("dangling link", "link to a long name", "link to itself") and name == MODEL:
        word = "incomplete"  # the index names it, and there is nothing to open
    refused(folder, name, word)


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_regular_weights_without_index(folder: Path, damage: str) -> None:
    change, word = DAMAGE[damage]
    (folder / INDEX).unlink()
    (folder / MODEL).unlink()
    change(folder / MODEL)
    refused(folder, MODEL, word)


@pytest.mark.parametrize("name", [*JSON, "chat_template.jinja"])
def test_too_large(folder: Path, name: str) -> None:
    os.truncate(folder / name, 3 << 30)
    refused(folder, name, "larger than", "bytes")


def test_template_in_the_config_is_bounded_too(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(chat_template="x" * 1_000_001))
    refused(folder, "tokenizer_config.json", "larger than 100000")


@pytest.mark.parametrize("name", [INDEX, MODEL])
def test_unreadable_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Root may read everything, so the system's answers are imitated."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (folder / INDEX).unlink()
    if name == INDEX:
        (folder / MODEL).unlink()
        monkeypatch.setattr(Path, "iterdir", refuse)
        monkeypatch.setattr(os, "listdir", refuse)
        monkeypatch.setattr(os, "scandir", refuse)
        refused(folder, str(folder), "cannot be read (Permission denied)")
    else:
        monkeypatch.setattr(os, "lstat", refuse)
        monkeypatch.setattr(os, "open", refuse)
        refused(folder, "config.json", "cannot be read (Permission denied)")


def test_shard_names(folder: Path) -> None:
    for name, word in (("x" * 5000, "incomplete"), ("a\n.safetensors", "bad shard"), ("\ud800", "bad shard")):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match=word) as caught:
            open_all(folder)
        assert len(str(caught.value)) < 1000
        assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize("name", ["A" * 5000, "x/" + "y" * 5000, "a\0b", "\ud800"])
def test_names_of_models_that_no_system_has(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve(name)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", [5, None, b"demo", [], 1.5])
def test_models_that_are_no_names(name: object) -> None:
    with pytest.raises(ValueError, match="model must be"):
        resolve(name)  # type: ignore[arg-type]


def test_shown() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown("plain name") == "'plain name'"
    assert shown("\x1b[31m\n") == r"'\x1b[31m\n'"
    assert shown(deep) == "list"
    assert len(shown("x" * 10_000)) == MAX_SHOWN
    assert shown("x" * 10_000).endswith("...")
