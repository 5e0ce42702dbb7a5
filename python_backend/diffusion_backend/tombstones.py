"""Cancelled requests, as files in a folder that all stage processes of one tritonserver share.

A cancel reaches any one instance of the denoise stage, which need not be the one that runs the request; and it may
come before the request does. So it is written down where every stage looks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path

# A request that comes later than this after its cancel is run.
KEPT_SECONDS = 600.0
_SWEEP_SECONDS = 60.0
# Two changes of a folder within one tick of the file system's clock have one time stamp.
_CLOCK_TICK_SECONDS = 0.05


class Tombstones:
    """The cancelled requests of one tritonserver."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder`` None: that of the tritonserver whose stub this process is."""
        self._folder = folder or _server_folder(os.getppid())
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._seen = 0
        self._swept = time.monotonic()

    def add(self, request_id: str) -> None:
        """``request_id`` is cancelled, wherever it is."""
        self._folder.mkdir(
            mode=0o700, parents=True, exist_ok=True
        )  # a cleaner of temporary files may have been here
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
        news = changed != self._seen or time.time() - changed / 1e9 < _CLOCK_TICK_SECONDS
        self._seen = changed
        return news

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
    servers = Path(tempfile.gettempdir()) / f"triton_diffusion_{os.getuid()}"
    for folder in servers.glob("*_*"):
        process, _, started = folder.name.partition("_")
        if process.isdecimal() and _start_time(int(process)) != started:
            shutil.rmtree(folder, ignore_errors=True)
    return servers / f"{tritonserver}_{_start_time(tritonserver)}"


def _start_time(process: int) -> str | None:
    """It tells a process from a later one with the same id; None for one that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
