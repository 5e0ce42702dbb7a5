"""Files on any fsspec file system that are there as a whole, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

UNFINISHED = ".tmp"  # ends the name of a file that is being written


class StoreError(Exception):
    """A store of files cannot be read now, whatever is in it."""


def put_whole(
    fs: Any, path: str, data: bytes, *, before_rename: Callable[[str], None] = lambda _: None
) -> None:
    """Write ``data`` beside ``path``, and rename it when it is all there; ``before_rename`` is given that other path.

    Raises:
        OSError: the store takes no more. Then nothing of it is left, as far as it can be removed.
    """
    unfinished = path + UNFINISHED
    try:
        fs.pipe_file(unfinished, data)
        before_rename(unfinished)
        fs.mv(unfinished, path)
    except BaseException:  # the disk is full: what was written would keep it so
        with contextlib.suppress(OSError):
            fs.rm_file(unfinished)
        raise
