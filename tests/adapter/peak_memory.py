"""What a process held at most."""

from __future__ import annotations

import re
from pathlib import Path


def peak_memory() -> int:
    """The most bytes that this process had in memory. (``getrusage`` counts those of whoever started it, too.)"""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
