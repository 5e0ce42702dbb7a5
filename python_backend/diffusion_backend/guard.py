"""Ends a child's process group when the process that started it is gone.

A launcher that is killed can't stop its children, and tritonserver's Python stubs outlive even tritonserver.
So each child has a guard: a small process that reads from a pipe until its other end closes. It is told the
group's id, and ``done`` once the group is gone; an end without ``done`` means that the launcher died.

Run as a script (``python -I -S guard.py REGIONS PATIENCE``), so it needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
DONE = "done"
KILL_SECONDS = 10.0


def group_members(group: int) -> list[int]:
    """The processes of a process group, without those that ended and wait to be reaped."""
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked
            state, _, process_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                members.append(int(folder.name))
    return members


def kill_group(group: int) -> None:
    """Kill what is left of a process group, and wait until it is gone, or until waiting is no use.

    A process that hangs in the kernel (a stuck driver) does not go, whatever it is sent.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while group_members(group) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        time.sleep(0.02)


def remove_regions(prefix: str) -> None:
    """Remove the shared memory regions of this name prefix."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def _end(group: int, patience: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(group, signal.SIGTERM)  # its leader alone: tritonserver stops its stubs in order
    deadline = time.monotonic() + patience
    while group in group_members(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill_group(group)


def main() -> None:
    """Wait for the launcher's end; clean up unless it said that it did."""
    regions, patience = sys.argv[1], float(sys.argv[2])
    words = sys.stdin.read().split()
    if words and words[-1] != DONE:
        _end(int(words[0]), patience)
    if regions:
        remove_regions(regions)


if __name__ == "__main__":
    main()
