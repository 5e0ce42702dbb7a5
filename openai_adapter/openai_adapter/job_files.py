"""The files of jobs, on any fsspec file system.

A file is named by its job, the attempt that made it and what it is. So attempts never touch each other's files, and a
file whose attempt never published is known as one.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from openai_adapter.job_queue import Claim
from openai_adapter.job_table import FileEntry
from openai_adapter.whole_files import StoreError, put_whole

logger = logging.getLogger(__name__)

_PART = re.compile(r"[a-z]+[0-9]*\.[a-z0-9]+")
_NAME = re.compile(rf"(?P<job>[a-z]+_[0-9a-f]{{32}})\.(?P<token>[0-9]{{1,18}})\.{_PART.pattern}(\.tmp)?")


@dataclass(frozen=True)
class StoredFile:
    """A file that lies in the store, published or not."""

    name: str
    job_id: str
    token: int


class JobFiles:
    """Files under ``url``. All methods block: call them in a worker thread."""

    def __init__(self, url: str) -> None:
        self._fs, self._root = fsspec.url_to_fs(url)

    def put(self, claim: Claim, part: str, data: bytes) -> FileEntry:
        """Store a file, all of it or nothing; ``part`` is such as ``video.mp4``, and never a client's word.

        It is on the disk when this returns: a job that is completed afterwards has it also after a power cut.
        """
        if not _PART.fullmatch(part):
            raise ValueError(f"{part!r} is no name of a part")
        name = _name(claim, part)
        self._fs.makedirs(self._root, exist_ok=True)
        put_whole(self._fs, self._path(name), data, before_rename=self._sync)
        self._sync(self._root)
        return {"name": name, "bytes": len(data)}

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes | None:
        """The bytes from ``start`` until before ``end``, or None where there is no such file (any more).

        Raises:
            StoreError: the store cannot be read.
        """
        if not _NAME.fullmatch(name):
            return None
        try:
            data: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{name} cannot be read") from error
        return data

    def remove(self, names: Iterable[str]) -> int:
        """Remove these where they still are; returns how many were.

        What cannot be removed now is left to the next sweep, which removes the files that no job has.
        """
        return sum(self._remove(name) for name in names if _NAME.fullmatch(name))

    def discard(self, claim: Claim, parts: Iterable[str]) -> int:
        """Remove what an attempt has stored, or some of it; returns how many files that were."""
        return self.remove(_name(claim, part) for part in parts)

    def find_all(self) -> Sequence[StoredFile]:
        """Every file, unfinished ones included; what is not of a job is passed over."""
        self._fs.invalidate_cache()
        matches = (_NAME.fullmatch(path.rpartition("/")[2]) for path in self._fs.find(self._root))
        return [StoredFile(match[0], match["job"], int(match["token"])) for match in matches if match]

    def modified_at(self, name: str) -> float | None:
        """When it was written, by the store's clock; None where there is no such file (any more)."""
        try:
            return float(self._fs.modified(self._path(name)).timestamp())
        except FileNotFoundError:
            return None

    def _remove(self, name: str) -> bool:
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:  # another adapter was faster
            return False
        except OSError as error:
            logger.warning("%s cannot be removed: %s", name, error)
            return False
        return True

    def _sync(self, path: str) -> None:
        """Wait until the disk has it; stores beyond this machine have what they have said they have."""
        if not isinstance(self._fs, LocalFileSystem):
            return
        descriptor = os.open(Path(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def _name(claim: Claim, part: str) -> str:
    return f"{claim.job.id}.{claim.token}.{part}"
