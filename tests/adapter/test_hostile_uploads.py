"""Hostile files and names as images and masks of edits: each is refused by name, or a right picture comes of it."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from adapter_process import AdapterProcess
from hostile_files import ALLOWED, NAMES, REFUSED, WHOLE_PNG, picture, save
from PIL import Image
from test_image_streams import flags_for
from video_server import refusal

from tests.running_server import RunningServer

EDITS = "/v1/images/edits"
LONGEST = 4096  # of a name, in what a form may say of a file
# 1001x1000 is no more than these tests' adapter allows.
HOSTILE = {name: file for name, (file, _) in REFUSED.items() if name != "png above our limit, below Pillow's"}
CANARY = f"canary-{os.getpid()}"
MASK = save(Image.new("RGBA", (48, 32)), "PNG")
# Runs in the adapter's process before anything else: notes what is opened for writing.
WATCH = """
import os, sys
log = open(os.environ["WRITES"], "a", buffering=1)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        log.write(f"{arguments[0]!r}\\n")
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "subprocess.Popen", "os.exec"):
        log.write(f"{event} {arguments!r}\\n")

sys.addaudithook(watch)
"""


@dataclass(frozen=True)
class Watched:
    """An adapter whose writes are noted."""

    adapter: AdapterProcess
    folder: Path
    writes: Path

    def post(self, files: list[tuple[str, Any]], **data: str) -> httpx.Response:
        data = {"prompt": "a fox", "num_inference_steps": "2", "seed": "1", **data}
        return httpx.post(self.adapter.url + EDITS, data=data, files=files, timeout=60)

    def memory(self) -> int:
        """The most bytes that the process ever had."""
        status = Path(f"/proc/{self.adapter.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@pytest.fixture(scope="module")
def watched(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "code").mkdir()
    (folder / "data").mkdir()
    (folder / "code/sitecustomize.py").write_text(WATCH)
    environment = {
        "PYTHONPATH": str(folder / "code"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "WRITES": str(folder / "writes"),
    }
    adapter = AdapterProcess(folder / "data", *flags_for(server), **environment)
    try:
        adapter.wait("/health")
        yield Watched(adapter, folder, folder / "writes")
    finally:
        adapter.end()


def expected_size(width: int, height: int) -> tuple[int, int]:
    """Of an image without a size, on emoji-flux: multiples of 8, at most 128."""
    scale = min(1, 128 / width, 128 / height)
    return max(8, round(width * scale / 8) * 8), max(8, round(height * scale / 8) * 8)


def upright_size(file: bytes) -> tuple[int, int]:
    image = Image.open(io.BytesIO(file))
    turned = image.getexif().get(0x0112, 1) in range(5, 9)
    return image.size[::-1] if turned else image.size


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("field", ["image", "image[]", "mask"])
def test_a_hostile_file_is_refused(watched: Watched, name: str, field: str) -> None:
    files = [(field, ("a.png", HOSTILE[name], "image/png"))]
    if field == "mask":
        files.insert(0, ("image", ("a.png", WHOLE_PNG, "image/png")))
    answer = watched.post(files)
    param = {"image[]": "image[0]"}.get(field, field)
    assert refusal(answer) == (400, param, REFUSED[name][1])
    assert answer.json()["error"]["message"].startswith(f"the file in '{param}' ")


@pytest.mark.parametrize("name", ALLOWED)
def test_an_odd_file_is_edited(watched: Watched, name: str) -> None:
    file = ALLOWED[name]
    answer = watched.post([("image", ("a.png", file, "text/html"))], response_format="url")
    assert answer.status_code == 200, answer.text
    width, height = expected_size(*upright_size(file))
    assert answer.json()["size"] == f"{width}x{height}"
    made = Image.open(io.BytesIO(httpx.get(answer.json()["data"][0]["url"]).content))
    assert (made.format, made.mode, made.size) == ("PNG", "RGB", (width, height))


@pytest.mark.parametrize("name", [name for name in ALLOWED if name != "png of alpha 0"])
def test_an_odd_file_is_no_mask(watched: Watched, name: str) -> None:
    image = save(Image.new("RGB", upright_size(ALLOWED[name])), "PNG")
    is_mask = name in ("png of a palette with a transparent colour", "png of grey with a transparent level")
    answer = watched.post([("image", image), ("mask", ALLOWED[name])])
    if is_mask:
        assert answer.status_code == 200, answer.text
        kept = np.asarray(Image.open(io.BytesIO(ALLOWED[name])).convert("RGBA"))[..., 3] != 0
        made = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
        assert 0 < kept.mean() < 1
        assert made.size == kept.shape[::-1]
        assert (np.asarray(made)[kept] == 0).all()
        assert (np.asarray(made)[~kept] != 0).any()
    else:
        assert refusal(answer) == (400, "mask", "invalid_mask")


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        (picture(), Image.new("RGBA", (32, 48))),
        (picture(), Image.new("RGBA", (1, 1))),
        (picture(), Image.new("RGBA", (47, 32))),
        (picture(), Image.new("RGBA", (4000, 3000))),
        (Image.new("RGB", (1, 1)), Image.new("RGBA", (48, 32))),
    ],
)
def test_a_mask_of_another_size(watched: Watched, image: Image.Image, mask: Image.Image) -> None:
    answer = watched.post([("image", save(image, "PNG")), ("mask", save(mask, "PNG"))])
    assert refusal(answer) == (400, "mask", "invalid_mask")
    for size in (f"{image.width}x{image.height}", f"{mask.width}x{mask.height}"):
        assert size in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_s_name_means_nothing(watched: Watched, name: str) -> None:
    filename = NAMES[name].replace("CANARY", CANARY)
    answers = [
        watched.post([("image", (each, WHOLE_PNG)), ("mask", (each, MASK))]) for each in (filename, "a.png")
    ]
    if not filename or len(filename) > LONGEST:  # a part without a name is no file
        assert [answer.status_code for answer in answers] == [400, 200]
        assert answers[0].json()["error"]["code"] in ("invalid_form", "invalid_unicode")
    else:
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[0].json()["data"][0]["b64_json"] == answers[1].json()["data"][0]["b64_json"]


def test_nothing_was_written_and_memory_is_bounded(watched: Watched) -> None:
    """After all of the above, in one process: only the data folder has changed."""
    data = watched.folder / "data"
    lines = watched.writes.read_text().splitlines()
    assert any(str(data) in line for line in lines)
    outside = [line for line in lines if str(data) not in line and "/dev/null" not in line]
    assert outside == []
    assert [path for path in watched.folder.rglob("*") if CANARY in path.name] == []
    assert not list(Path("/tmp").glob(f"{CANARY}*"))
    # The largest picture above has 12 million pixels, and decoding takes some 12 bytes for each.
    assert watched.memory() < 500 * 2**20


@pytest.mark.parametrize(("megabytes", "code"), [(60, "too_many_images"), (100, "content_too_large")])
def test_a_flood_of_images_is_bounded(watched: Watched, megabytes: int, code: str) -> None:
    """More than the model takes are refused undecoded, and what is more than the body may have is not kept."""
    before = watched.memory()
    file = WHOLE_PNG + bytes((megabytes << 20) // 16)
    answer = watched.post([("image[]", (f"{index}.png", file)) for index in range(16)])
    assert refusal(answer)[0::2] == (413 if code == "content_too_large" else 400, code)
    assert watched.memory() - before < 400 * 2**20
