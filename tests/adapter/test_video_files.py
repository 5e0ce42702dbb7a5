"""The files of a video, as Debian's ffprobe and Pillow read them."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from ffprobe import probe
from openai_adapter.video_files import MEDIA_TYPES, Frames, VideoEncoder, VideoFiles
from PIL import Image


def clip(num_frames: int, height: int = 64, width: int = 96) -> Frames:
    """Coloured waves that move, with a grey square that moves across them, uint8 [F, H, W, 3]."""
    y, x = np.mgrid[:height, :width]
    frames = np.empty((num_frames, height, width, 3), np.uint8)
    for number, frame in enumerate(frames):
        frame[..., 0] = 127 + 110 * np.sin(x / 20 + number / 5)
        frame[..., 1] = 127 + 110 * np.sin(y / 15 - number / 5)
        frame[..., 2] = 127 + 110 * np.sin((x + y) / 25)
        frame[8:24, 2 * number % width : 2 * number % width + 16] = 128
    return frames


def slices(frames: Frames, size: int) -> Iterator[Frames]:
    return (frames[start : start + size] for start in range(0, len(frames), size))


def make_files(frames: Frames, fps: float | Fraction = 16, slice_size: int = 4) -> dict[str, bytes]:
    num_frames, height, width, _ = frames.shape
    with VideoFiles(num_frames, fps, width, height) as files:
        for part in slices(frames, slice_size):
            files.add(part)
        return files.finish()


def make_video(path: Path, frames: Frames, fps: float | Fraction = 16) -> Path:
    path.write_bytes(make_files(frames, fps)["video.mp4"])
    return path


def decode(file: bytes) -> Frames:
    with av.open(io.BytesIO(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def psnr(a: Frames, b: Frames) -> float:
    return float(10 * np.log10(255**2 / np.mean((a.astype(np.float64) - b) ** 2)))


def read_webp(file: bytes) -> Frames:
    with Image.open(io.BytesIO(file)) as image:
        assert (image.format, image.mode) == ("WEBP", "RGB")
        return np.asarray(image)


@pytest.mark.parametrize(
    ("num_frames", "fps", "rate"),
    [
        (1, 24, "24/1"),
        (2, 1, "1/1"),
        (17, 16, "16/1"),
        (25, 24, "24/1"),
        (49, 30.0, "30/1"),
        (81, 60, "60/1"),
        (9, 12.5, "25/2"),
        (9, 0.5, "1/2"),
        (33, Fraction(24000, 1001), "24000/1001"),
        (33, 30000 / 1001, "30000/1001"),
        (10, 23.976, "2997/125"),
    ],
)
def test_video(num_frames: int, fps: float | Fraction, rate: str, tmp_path: Path) -> None:
    facts = probe(make_video(tmp_path / "video.mp4", clip(num_frames), fps))
    assert (facts["codec_name"], facts["codec_tag_string"]) == ("h264", "avc1")
    assert (facts["width"], facts["height"], facts["pix_fmt"]) == (96, 64, "yuv420p")
    assert facts["r_frame_rate"] == facts["avg_frame_rate"] == rate
    assert int(facts["nb_frames"]) == int(facts["nb_read_frames"]) == num_frames
    assert float(facts["duration"]) == pytest.approx(num_frames / Fraction(rate), abs=1e-6)
    # The format's duration is in the file's own milliseconds.
    assert float(facts["format"]["duration"]) == pytest.approx(num_frames / Fraction(rate), abs=1.1e-3)
    assert float(facts["start_time"]) == 0
    assert facts["color_range"] == "tv"
    assert {facts[f"color_{what}"] for what in ("space", "primaries", "transfer")} == {"bt709"}
    assert "mp42" not in facts["format"].get("tags", {})
    assert not {"creation_time", "encoder"} & {*facts["format"]["tags"], *facts["tags"]}


@pytest.mark.parametrize(
    ("width", "height"), [(97, 64), (96, 65), (97, 65), (1, 1), (2, 2), (16, 16), (1280, 704)]
)
def test_sizes(width: int, height: int, tmp_path: Path) -> None:
    """An odd side gets one more row or column, which repeats the last; the pictures keep theirs."""
    frames = clip(3, height, width)
    files = make_files(frames)
    path = tmp_path / "video.mp4"
    path.write_bytes(files["video.mp4"])
    facts = probe(path)
    even = (width + width % 2, height + height % 2)
    assert (facts["width"], facts["height"]) == even
    decoded = decode(files["video.mp4"])
    padded = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    assert decoded.shape == padded.shape
    if width * height > 1000:
        assert psnr(decoded[:, -2:], padded[:, -2:]) > 30
        assert psnr(decoded[:, :, -2:], padded[:, :, -2:]) > 30
        assert read_webp(files["thumbnail.webp"]).shape[1::-1] in ((width, height), (512, 282))


def test_quality() -> None:
    frames = clip(33, 256, 384)
    decoded = decode(make_files(frames)["video.mp4"])
    assert psnr(decoded, frames) > 36
    assert min(psnr(a, b) for a, b in zip(decoded, frames, strict=True)) > 35


def test_colours_are_those_of_the_frames() -> None:
    """A wrong matrix or range would shift a plain colour by far more."""
    colours = np.array([[200, 30, 40], [20, 180, 60], [30, 60, 210], [255, 255, 255], [0, 0, 0]], np.uint8)
    frames = np.repeat(colours[None, :, None], 8, axis=0).repeat(32, axis=1).repeat(64, axis=2)
    decoded = decode(make_files(np.ascontiguousarray(frames))["video.mp4"])
    for number, colour in enumerate(colours):
        middle = decoded[:, 32 * number + 8 : 32 * number + 24].astype(int)
        assert np.abs(middle - colour).max() <= 4


def test_the_index_is_in_front() -> None:
    file = make_files(clip(5))["video.mp4"]
    boxes, position = [], 0
    while position < len(file):
        size, name = struct.unpack_from(">I4s", file, position)
        boxes.append(name.decode())
        position += size
    assert position == len(file)
    assert boxes.index("moov") < boxes.index("mdat")


def test_the_same_frames_give_the_same_bytes() -> None:
    frames = clip(21, 65, 97)
    files = make_files(frames)
    for slice_size in (1, 7, 21, 4) * 8:
        # What the memory held before must not matter, as it once did to x264.
        junk = [np.full(3_000_000 + slice_size, slice_size, np.uint8) for _ in range(3)]
        del junk
        assert make_files(frames.copy(), slice_size=slice_size) == files
    assert make_files(np.asfortranarray(frames)) == files
    assert make_files(frames[:, ::-1]) != files


def test_parts_and_their_types() -> None:
    assert make_files(clip(2)).keys() == MEDIA_TYPES.keys()
    assert MEDIA_TYPES["video.mp4"] == "video/mp4"
    assert MEDIA_TYPES["thumbnail.webp"] == MEDIA_TYPES["spritesheet.webp"] == "image/webp"


@pytest.mark.parametrize(
    ("width", "height", "size"), [(96, 64, (96, 64)), (1280, 704, (512, 282)), (704, 1280, (282, 512))]
)
def test_the_thumbnail_is_the_first_frame(width: int, height: int, size: tuple[int, int]) -> None:
    frames = clip(3, height, width)
    thumbnail = read_webp(make_files(frames)["thumbnail.webp"])
    expected = Image.fromarray(frames[0]).resize(size, Image.Resampling.LANCZOS)
    assert psnr(thumbnail, np.asarray(expected)) > 30


@pytest.mark.parametrize(
    ("num_frames", "columns", "rows", "shown"),
    [
        (1, 1, 1, [0]),
        (2, 2, 1, [0, 1]),
        (5, 4, 2, [0, 1, 2, 3, 4]),
        (16, 4, 4, [*range(16)]),
        (17, 4, 4, [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16]),
        (121, 4, 4, [*range(0, 121, 8)]),
    ],
)
def test_spritesheet(num_frames: int, columns: int, rows: int, shown: list[int]) -> None:
    """Evenly spaced frames in rows, the first and the last among them."""
    grey = np.arange(num_frames) * min(16, 255 // num_frames)
    frames = np.empty((num_frames, 32, 48, 3), np.uint8)
    frames[:] = grey[:, None, None, None]
    sheet = read_webp(make_files(frames)["spritesheet.webp"])
    assert sheet.shape == (rows * 32, columns * 48, 3)
    tiles = sheet.reshape(rows, 32, columns, 48, 3).swapaxes(1, 2).reshape(rows * columns, 32, 48, 3)
    means = tiles[:, 8:24, 8:40].mean(axis=(1, 2, 3))
    assert np.abs(means[: len(shown)] - grey[shown]).max() <= 1
    assert (means[len(shown) :] < 1).all()


def test_tiles_are_small() -> None:
    sheet = read_webp(make_files(clip(4, 704, 1280))["spritesheet.webp"])
    assert sheet.shape == (141, 4 * 256, 3)


@pytest.mark.parametrize("fps", [0, -1, float("inf"), float("nan")])
def test_impossible_rates(fps: float) -> None:
    with pytest.raises(ValueError, match="fps"):
        VideoFiles(1, fps, 64, 64)


@pytest.mark.parametrize(("num_frames", "width"), [(0, 64), (-1, 64), (1, 0)])
def test_impossible_sizes(num_frames: int, width: int) -> None:
    with pytest.raises(ValueError, match="allowed"):
        VideoFiles(num_frames, 24, width, 64)


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((1, 64, 96, 4), np.uint8),
        np.zeros((1, 96, 64, 3), np.uint8),
        np.zeros((64, 96, 3), np.uint8),
        np.zeros((1, 64, 96, 3), np.float32),
    ],
)
def test_frames_of_another_kind(frames: Frames) -> None:
    with VideoEncoder(24, 96, 64) as video, pytest.raises(ValueError, match="not uint8"):
        video.add(frames)


def test_too_many_and_too_few_frames() -> None:
    with VideoFiles(3, 24, 96, 64) as files:
        files.add(clip(2))
        with pytest.raises(ValueError, match="2 frames of a clip of 3"):
            files.finish()
        with pytest.raises(ValueError, match="4 frames of a clip of 3"):
            files.add(clip(2))
        files.add(clip(1))
        assert len(decode(files.finish()["video.mp4"])) == 3
    with VideoEncoder(24, 96, 64) as video, pytest.raises(ValueError, match="a video needs a frame"):
        video.finish()


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a video ends: no open file, and nothing in the folder of temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def open_files() -> set[str]:
        return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()} - {
            f"/proc/{os.getpid()}/fd"
        }

    make_files(clip(2))  # what is only loaded once
    before = open_files()
    make_files(clip(2))
    for added in (0, 1, 20):
        video = VideoFiles(21, 24, 96, 64)
        video.add(clip(added))
        assert not [*tmp_path.iterdir()]
        assert open_files() > before
        video.close()
        video.close()
        assert open_files() == before
    with VideoFiles(2, 24, 96, 64) as video, pytest.raises(ValueError):
        video.add(clip(3))
    assert open_files() == before
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """Of the one video, and of this process."""
    script = """if True:
        import resource, signal
        import numpy as np
        from openai_adapter.video_files import VideoFiles
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        frames = np.random.default_rng(0).integers(0, 256, (20, 64, 96, 3), np.uint8)
        try:
            with VideoFiles(20, 24, 96, 64) as files:
                files.add(frames)
                files.finish()
        except OSError as error:
            print("refused", error.errno)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"refused \d+\n", done.stdout)


def test_memory_does_not_grow_with_the_clip() -> None:
    """300 frames of 640x352 are 203 MB; slices of 4 are 3 MB."""
    script = """if True:
        from peak_memory import peak_memory
        from openai_adapter.video_files import VideoFiles
        from test_video_files import clip
        part = clip(4, 352, 640)
        peaks = []
        for num_frames in (40, 300):
            with VideoFiles(num_frames, 24, 640, 352) as files:
                start = peak_memory()
                for _ in range(num_frames // 4):
                    files.add(part)
                files.finish()
            peaks.append(peak_memory() - start)
        print(*peaks)
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    short, growth = map(int, done.stdout.split())
    assert short < 64 * 2**20
    assert growth < 8 * 2**20
