from __future__ import annotations

import os
import re
import time
import uuid
from pathlib import Path

import pytest
from fastapi import FastAPI
from in_process import send
from openai_adapter.media import MediaStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "media"


@pytest.fixture
def store(folder: Path) -> MediaStore:
    return MediaStore(folder.as_uri(), ttl=60)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_put_and_get(store: MediaStore, folder: Path) -> None:
    name = store.put(b"picture", "png")
    assert re.fullmatch(r"[\w-]{32}\.png", name)
    assert [path.name for path in folder.iterdir()] == [name]
    file = store.get(name)
    assert file is not None
    assert (file.data, file.content_type) == (b"picture", "image/png")
    assert 50 < file.remaining <= 60


def test_names_differ(store: MediaStore) -> None:
    assert store.put(b"same", "png") != store.put(b"same", "png")


@pytest.mark.parametrize("url", ["memory://{}", "memory://{}/deeper/"])
def test_other_file_systems(url: str) -> None:
    store = MediaStore(url.format(uuid.uuid4()), ttl=60)
    assert store.sweep() == 0
    name = store.put(b"picture", "webp")
    file = store.get(name)
    assert file is not None
    assert (file.data, file.content_type) == (b"picture", "image/webp")
    store.ttl = 0
    assert store.get(name) is None
    assert store.sweep() == 1


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../secret", "a" * 32, "a" * 32 + ".tmp", "a" * 32 + ".png\n"]
)
def test_only_own_names_are_looked_up(store: MediaStore, name: str) -> None:
    store.put(b"", "png")
    assert store.get(name) is None


def test_expired_files_are_gone_at_once_and_swept_later(store: MediaStore, folder: Path) -> None:
    old, new = store.put(b"old", "png"), store.put(b"new", "png")
    age(folder / old, 61)
    (folder / f"{'u' * 32}.png.tmp").write_bytes(b"unfinished")
    age(folder / f"{'u' * 32}.png.tmp", 61)
    (folder / "not-ours").write_bytes(b"")
    age(folder / "not-ours", 1000)
    assert store.get(old) is None
    assert store.sweep() == 2
    assert sorted(path.name for path in folder.iterdir()) == sorted([new, "not-ours"])


def test_sweep_without_a_folder(store: MediaStore) -> None:
    assert store.sweep() == 0


def test_route(app: FastAPI, tmp_path: Path) -> None:
    store = MediaStore((tmp_path / "media").as_uri(), ttl=3600)
    name = store.put(b"picture", "jpg")
    answer = send(app, "GET", f"/v1/media/{name}")
    assert answer.content == b"picture"
    assert answer.headers["content-type"] == "image/jpeg"
    assert answer.headers["content-length"] == "7"
    assert answer.headers["x-content-type-options"] == "nosniff"
    etag = answer.headers["etag"]
    assert send(app, "GET", f"/v1/media/{name}", headers={"if-none-match": etag}).status_code == 304
    head = send(app, "HEAD", f"/v1/media/{name}")
    assert (head.content, head.headers["content-length"]) == (b"", "7")
    age(tmp_path / "media" / name, 3601)
    for path in (f"/v1/media/{name}", f"/v1/media/{'x' * 32}.png", "/v1/media/..%2f..%2fetc%2fpasswd"):
        expired = send(app, "GET", path)
        assert expired.status_code == 404
        assert expired.json()["error"]["code"] == "not_found"


def test_a_full_store_does_not_leave_a_part_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MediaStore(folder.as_uri(), ttl=60)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(store._fs, "mv", fail)
    with pytest.raises(OSError, match="no space left"):
        store.put(b"picture", "png")
    assert list(folder.iterdir()) == []
