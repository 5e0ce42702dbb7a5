"""Encodes clips side by side, as the adapter does, and prints what that took: for video_encoding.py.

Apart from the benchmark, so that this process holds what an adapter does, and no torch.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from openai_adapter.video_files import Frames, VideoFiles

from openai_adapter import Settings, create_app

SLICE = 4  # frames, as one latent frame of Wan gives
FPS = 24


def make_slices(seed: int, num_frames: int, height: int, width: int) -> Iterator[Frames]:
    """A textured picture that moves, ``SLICE`` frames at a time."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 16, width // 16, 3))
    picture = coarse.repeat(16, axis=0).repeat(16, axis=1).astype(np.uint8)
    picture[::2] //= 2
    for start in range(0, num_frames, SLICE):
        shifts = range(start, min(start + SLICE, num_frames))
        yield np.stack([np.roll(picture, 3 * shift, axis=1) for shift in shifts])


def encode(seed: int, num_frames: int, height: int, width: int) -> None:
    with VideoFiles(num_frames, FPS, width, height) as files:
        for frames in make_slices(seed, num_frames, height, width):
            files.add(frames)
        files.finish()


def memory(name: str) -> float:
    """MiB of this process in memory: VmRSS now, VmHWM at most."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def main() -> None:
    """Encode ``clips`` clips of ``num_frames`` frames of ``height`` x ``width`` at the same time."""
    clips, num_frames, height, width = map(int, sys.argv[1:])
    create_app(Settings())
    before = memory("VmRSS")
    started = time.perf_counter()
    threads = [
        threading.Thread(target=encode, args=(seed, num_frames, height, width)) for seed in range(clips)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    print(json.dumps({"before_mib": before, "peak_mib": memory("VmHWM"), "seconds": seconds}))


if __name__ == "__main__":
    main()
