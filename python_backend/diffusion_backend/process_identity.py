"""What tells a process from a later one that was given the same id."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was (proc(5)); None for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
