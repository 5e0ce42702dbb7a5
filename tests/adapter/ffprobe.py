"""What Debian's ffprobe says of a file: a reader of video that shares no code with PyAV's bundled FFmpeg."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from diffusion_backend.processes import LaunchError

from tests.debian_packages import library_path, unpack
from tests.running_server import ROOT

_UNPACKED = ROOT / ".venv" / "ffmpeg"


def probe(file: Path) -> dict[str, Any]:
    """The format and the one stream of a video file, whose frames were decoded and counted."""
    program, environment = _find()
    arguments = ("-v", "error", "-count_frames", "-show_format", "-show_streams", "-of", "json", str(file))
    done = subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    (stream,) = answer["streams"]
    return {"format": answer["format"], **stream}


def _find() -> tuple[str, dict[str, str]]:
    if program := shutil.which("ffprobe"):
        return program, dict(os.environ)
    if not _UNPACKED.exists():
        try:
            unpack("ffmpeg", _UNPACKED)
        except LaunchError as error:
            pytest.fail(f"there is no ffprobe, and none can be had: install ffmpeg; {error}", pytrace=False)
    return str(_UNPACKED / "usr/bin/ffprobe"), {**os.environ, "LD_LIBRARY_PATH": library_path(_UNPACKED)}
