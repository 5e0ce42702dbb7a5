"""How glibc's malloc treats memory that is freed: a stage keeps what its tensors free, an adapter nothing of a picture.

In a stage, by default malloc maps each buffer above 32 MiB from the kernel and unmaps it when it is freed, so that a
page fault clears each of its pages again, decode after decode, step after step. A turn of filling tensors of 100 and
50 MiB took 38400 page faults, and 2.5 times the processor time that it takes without. Three options together end that:

- no mapping (M_MMAP_MAX; M_MMAP_THRESHOLD is of no use, as it cannot be more than 32 MiB);
- nothing goes back to the kernel from the top of the heap (M_TRIM_THRESHOLD);
- one arena (M_ARENA_MAX): those of other threads than the main one, such as the step engine's, have no place for a
  buffer above 64 MiB, and malloc maps it all the same.

In an adapter: once a large buffer was freed, malloc maps no more that are as large (M_MMAP_THRESHOLD grows), and what
threads free then stays in their arenas. Where the threshold is set, it does not (``tests/test_malloc.py``).

https://sourceware.org/glibc/manual/latest/html_node/Malloc-Tunable-Parameters.html
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Option:
    """``number`` is mallopt's, from glibc's malloc.h; the variable is read when a process starts."""

    variable: str
    number: int
    value: int


_KEEP = (
    _Option("MALLOC_MMAP_MAX_", -4, 0),
    _Option("MALLOC_TRIM_THRESHOLD_", -1, -1),  # as size_t: never
    _Option("MALLOC_ARENA_MAX", -8, 1),
)


def keep_freed_memory() -> bool:
    """Set a stage's options in this process.

    Returns whether they are set: not where the operator has set malloc's, nor on musl.

    Threads that have allocated before keep their arenas: call it early.
    """
    return _set(*_KEEP)


def return_freed_memory() -> bool:
    """The same, of the one option that gives every large buffer back to the kernel when it is freed."""
    return _set(_Option("MALLOC_MMAP_THRESHOLD_", -3, 2**20))


def _set(*options: _Option) -> bool:
    own = any(name.startswith("MALLOC_") for name in os.environ)
    if own or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option.number, option.value) == 1 for option in options)


def environment() -> dict[str, str]:
    """What ``keep_freed_memory`` sets, for a process that does not call it, to compare with."""
    return {option.variable: str(option.value) for option in _KEEP}


def is_wanted() -> bool:
    """Not for a GPU: weights pass through the host's heap on their way there, and would stay in it."""
    return os.environ.get("TRITON_DIFFUSION_DEVICE") == "cpu" or not Path("/dev/nvidiactl").exists()
