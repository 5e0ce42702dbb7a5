from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from openai_adapter.job_files import JobFiles
from openai_adapter.job_queue import Claim
from openai_adapter.job_table import Job

JOB_ID = f"video_{'0' * 31}a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, folder: Path) -> JobFiles:
    return JobFiles(f"file://{folder}" if request.param == "local" else f"memory://{uuid.uuid4()}/jobs")


def attempt(token: int = 1) -> Claim:
    return Claim(Job(id=JOB_ID), token, lease_seconds=1)


def test_put_and_read(files: JobFiles) -> None:
    entry = files.put(attempt(), "video.mp4", b"0123456789")
    assert entry == {"name": f"{JOB_ID}.1.video.mp4", "bytes": 10}
    assert files.read(entry["name"]) == b"0123456789"
    assert files.read(entry["name"], 2, 5) == b"234"
    assert files.read(entry["name"], 8, 100) == b"89"
    assert [file.name for file in files.find_all()] == [entry["name"]]


def test_attempts_do_not_touch_each_others_files(files: JobFiles) -> None:
    first = files.put(attempt(1), "video.mp4", b"first")
    second = files.put(attempt(2), "video.mp4", b"second")
    assert files.remove([first["name"]]) == 1
    assert files.read(first["name"]) is None
    assert files.read(second["name"]) == b"second"


def test_remove_twice(files: JobFiles) -> None:
    name = files.put(attempt(), "video.mp4", b"")["name"]
    assert [files.remove([name]), files.remove([name])] == [1, 0]
    assert files.find_all() == []


@pytest.mark.parametrize(
    "name", ["", "..", "../secret", f"{JOB_ID}.1.video.mp4\n", f"{JOB_ID}/1.video.mp4", "x"]
)
def test_only_own_names_are_looked_up(files: JobFiles, folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder.parent / "secret").write_text("secret")
    assert files.read(name) is None
    assert files.remove([name]) == 0
    assert (folder.parent / "secret").exists()


@pytest.mark.parametrize("part", ["", "../x.mp4", "a/b.mp4", "Video.mp4", "video", "video.mp4.tmp"])
def test_names_of_clients_are_none(files: JobFiles, part: str) -> None:
    with pytest.raises(ValueError, match="no name of a part"):
        files.put(attempt(), part, b"")


def test_what_is_not_of_a_job_is_passed_over(folder: Path) -> None:
    files = JobFiles(f"file://{folder}")
    assert files.find_all() == []
    name = files.put(attempt(), "video.mp4", b"")["name"]
    (folder / "notes.txt").write_text("an operator's")
    (folder / f"{JOB_ID}.2.video.mp4.tmp").write_text("unfinished")
    assert sorted(file.name for file in files.find_all()) == [name, f"{JOB_ID}.2.video.mp4.tmp"]


def test_a_full_disk_leaves_no_half_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = JobFiles(f"file://{folder}")

    def fail(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        files.put(attempt(), "video.mp4", b"0123456789")
    assert files.read(f"{JOB_ID}.1.video.mp4") is None


def test_a_file_is_on_the_disk_before_its_name_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        synced.append((path.name, sorted(each.name for each in folder.iterdir())))

    monkeypatch.setattr(os, "fsync", note)
    JobFiles(f"file://{folder}").put(attempt(), "video.mp4", b"0123456789")
    name = f"{JOB_ID}.1.video.mp4"
    assert synced == [(f"{name}.tmp", [f"{name}.tmp"]), ("jobs", [name])]


def test_discard(files: JobFiles) -> None:
    for token in (1, 2):
        files.put(attempt(token), "video.mp4", b"v")
    assert files.discard(attempt(2), ["video.mp4", "thumbnail.webp"]) == 1
    assert [file.token for file in files.find_all()] == [1]


def test_what_cannot_be_removed_is_left_to_the_sweep(folder: Path) -> None:
    """A delete or the end of an attempt does not fail by it."""
    files = JobFiles(f"file://{folder}")
    entry = files.put(attempt(), "video.mp4", b"video")
    kept = folder.rename(folder.with_name("elsewhere"))
    folder.write_bytes(b"no folder")
    assert files.remove([entry["name"]]) == files.discard(attempt(), ["video.mp4"]) == 0
    folder.unlink()
    kept.rename(folder)
    assert files.remove([entry["name"]]) == 1


def test_a_full_disk_is_not_filled_further(folder: Path) -> None:
    """What there was room for is removed again: a real limit of the system, in a process of its own."""
    script = f"""if True:
        import resource, signal
        from openai_adapter.job_files import JobFiles
        from openai_adapter.job_queue import Claim
        from openai_adapter.job_table import Job
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            JobFiles("file://{folder}").put(Claim(Job(id="{JOB_ID}"), 1, 1.0), "video.mp4", b"v" * 5000)
        except OSError as error:
            print(error.errno == 27)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
    assert list(folder.iterdir()) == []
