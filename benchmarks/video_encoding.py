"""What the adapter holds while it encodes one clip, and eight at the same time.

Frames arrive in slices, and each clip's MP4, thumbnail and spritesheet are made from them while they pass by. A clip of
twice as many frames should need no more memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import measure

CLIPS = 8
SIZE = (704, 1280)
NUM_FRAMES = 121
QUICK_SIZE = (256, 384)
QUICK_NUM_FRAMES = 33


def encode(clips: int, num_frames: int, height: int, width: int) -> dict[str, float]:
    """What a process of its own measured."""
    script = str(Path(__file__).with_name("video_encoder.py"))
    arguments = map(str, (clips, num_frames, height, width))
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Measure and report."""
    options = measure.parse_options("Memory of the adapter while it encodes clips.")
    height, width = QUICK_SIZE if options.quick else SIZE
    num_frames = QUICK_NUM_FRAMES if options.quick else NUM_FRAMES
    cases = {
        "one": (1, num_frames),
        "one_twice_as_long": (1, 2 * num_frames),
        "all": (CLIPS, num_frames),
    }
    figures: dict[str, float] = {"clips": CLIPS}
    rows: list[list[str | float]] = []
    for name, (clips, frames) in cases.items():
        measured = encode(clips, frames, height, width)
        raw = clips * frames * height * width * 3 / 2**20
        more = (measured["peak_mib"] - measured["before_mib"]) / clips
        case = {
            **measured,
            "more_a_clip_mib": more,
            "frames_per_second": clips * frames / measured["seconds"],
        }
        figures |= {f"{name}_{what}": value for what, value in case.items()}
        title = f"{clips} clip{'s' if clips > 1 else ''} of {frames} frames"
        rows.append([title, raw, case["before_mib"], case["peak_mib"], more, case["frames_per_second"]])
    measure.report(
        f"Clips of {width}x{height}, in slices of 4 frames, encoded at the same time",
        ["", "frames MiB", "before MiB", "peak MiB", "more a clip", "frames/s"],
        rows,
    )
    measure.write_json(options.json, figures)


if __name__ == "__main__":
    main()
