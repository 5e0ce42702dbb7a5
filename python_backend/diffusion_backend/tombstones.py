"""Cancelled requests, as files in a folder that all stage processes of one tritonserver share.

A cancel reaches any one instance of the denoise stage, which need not be the one that runs the request; and it may
come before the request does. So it is written down where every stage looks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
import uuid
from pathlib import Path

from diffusion_backend.errors import DiffusionError
from diffusion_backend.process_identity import start_time

# A request that comes later than this after its cancel is run.
KEPT_SECONDS = 600.0
_SWEEP_SECONDS = 60.0
# Two changes of a folder within one tick of the file system's clock have one time stamp.
_CLOCK_TICK_SECONDS = 0.05


class Tombstones:
    """The cancelled requests of one tritonserver."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder`` None: that of the tritonserver whose stub this process is.

        Raises:
            DiffusionError: the folder belongs to another user, or others may write to it.
        """
        self._given = folder
        self._folder = self._make_folder()
        self._seen: int | None = None
        self._swept = time.monotonic()

    def add(self, request_id: str) -> None:
        """``request_id`` is cancelled, wherever it is."""
        if not self._folder.is_dir():  # a cleaner of temporary files has been here
            self._folder = self._make_folder()
        self._remove_old()
        # Moved here, not touched: a file that is there already would leave the folder's time stamp as it is.
        new = self._folder / f".{uuid.uuid4().hex}"
        new.touch()
        new.replace(self._path(request_id))

    def __contains__(self, request_id: str) -> bool:
        try:
            written = self._path(request_id).stat().st_mtime
        except OSError:
            return False
        return bool(request_id) and time.time() - written < KEPT_SECONDS

    def age(self, request_id: str) -> float:
        """The seconds since ``request_id`` was cancelled; 0 if it was not."""
        try:
            return max(0.0, time.time() - self._path(request_id).stat().st_mtime)
        except FileNotFoundError:
            return 0.0

    def has_news(self) -> bool:
        """Whether one may have been added since this was last asked."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError:
            return False
        news = changed != self._seen
        # A file system's clock ticks: another one may come yet with the time stamp of the last one.
        is_settled = time.time() - changed / 1e9 > _CLOCK_TICK_SECONDS
        self._seen = changed if is_settled else None
        return news

    def _make_folder(self) -> Path:
        return _require_private(self._given) if self._given else _server_folder(os.getppid())

    def _path(self, request_id: str) -> Path:
        return self._folder / hashlib.sha256(request_id.encode()).hexdigest()

    def _remove_old(self) -> None:
        if time.monotonic() - self._swept < _SWEEP_SECONDS:
            return
        self._swept = time.monotonic()
        oldest = time.time() - KEPT_SECONDS
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another instance was faster
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _server_folder(tritonserver: int) -> Path:
    """A folder of its own for each tritonserver; those of servers that are gone are removed."""
    servers = _require_private(Path(tempfile.gettempdir()) / f"triton_diffusion_{os.getuid()}")
    for folder in servers.glob("*_*"):
        process, _, started = folder.name.partition("_")
        if process.isdecimal() and str(start_time(int(process))) != started:
            shutil.rmtree(folder, ignore_errors=True)
    return _require_private(servers / f"{tritonserver}_{start_time(tritonserver)}")


def _require_private(folder: Path) -> Path:
    """Make ``folder``, or see that the one that is there is ours alone: its name can be guessed.

    Raises:
        DiffusionError: it belongs to another user, others may write to it, or it is no folder.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        problem = "it is no folder"
    elif found.st_uid != os.getuid():
        problem = f"it belongs to user {found.st_uid}, not to {os.getuid()}, who runs this"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "other users may write to it"
    else:
        folder.chmod(0o700)
        return folder
    raise DiffusionError(f"{folder} cannot hold the cancels of requests: {problem}; remove it")
