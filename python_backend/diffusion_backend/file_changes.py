"""Files of a folder written and removed all together, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """What was done to one file: ``created``, ``updated``, ``removed`` or ``unchanged``; ``path`` is in the folder."""

    path: Path
    what: str


def change_files(folder: Path, contents: Mapping[str, bytes], removed: Iterable[str]) -> list[Change]:
    """Write ``contents`` and remove ``removed``, by their paths in ``folder``.

    Raises:
        OSError: something could not be done, and the folder is as it was.
    """
    # In the folder itself: what is moved from there stays on one file system.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".changes-") as aside, ExitStack() as undo:
        transaction = _Transaction(folder, Path(aside), undo)
        changes = [Change(Path(path), transaction.write(path, contents[path])) for path in sorted(contents)]
        for path in removed:
            transaction.remove(path)
            changes.append(Change(Path(path), "removed"))
        undo.pop_all()
    return changes


class _Transaction:
    """Each step leaves behind, in ``undo``, how it is taken back."""

    def __init__(self, folder: Path, aside: Path, undo: ExitStack) -> None:
        self._folder = folder
        self._new = aside / "new"
        self._old = aside / "old"
        self._undo = undo

    def write(self, path: str, content: bytes) -> str:
        target = self._folder / path
        exists = target.exists()
        if exists and target.read_bytes() == content:
            return "unchanged"
        new = self._new / path
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(content)
        self._make_folder(target.parent)
        if exists:
            # A copy, so that the file is never missing for who reads it meanwhile.
            old = self._make_room(path)
            shutil.copy2(target, old)
            new.replace(target)
            self._undo.callback(old.replace, target)
            return "updated"
        new.replace(target)
        self._undo.callback(target.unlink)
        return "created"

    def remove(self, path: str) -> None:
        target, old = self._folder / path, self._make_room(path)
        target.replace(old)
        self._undo.callback(old.replace, target)

    def _make_room(self, path: str) -> Path:
        old = self._old / path
        old.parent.mkdir(parents=True, exist_ok=True)
        return old

    def _make_folder(self, folder: Path) -> None:
        if not folder.exists():
            self._make_folder(folder.parent)
            folder.mkdir()
            self._undo.callback(folder.rmdir)
