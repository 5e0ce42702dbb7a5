"""Cancelled requests as files: seen by all who look, and gone in the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from diffusion_backend import tombstones
from diffusion_backend.errors import DiffusionError
from diffusion_backend.tombstones import Tombstones


def test_one_that_another_process_wrote_is_seen(tmp_path: Path) -> None:
    mine, others = Tombstones(tmp_path), Tombstones(tmp_path)
    assert "a" not in mine
    others.add("a")
    assert mine.has_news()
    assert "a" in mine
    assert "b" not in mine
    assert 0 <= mine.age("a") < 5
    assert mine.age("b") == 0


def test_two_within_one_tick_of_the_clock_are_both_news(tmp_path: Path) -> None:
    mine = Tombstones(tmp_path)
    for number in range(20):
        mine.add(str(number))
        assert mine.has_news()
    time.sleep(0.1)
    mine.has_news()
    assert not mine.has_news()


def test_any_id_makes_a_file_name(tmp_path: Path) -> None:
    mine = Tombstones(tmp_path)
    for request_id in ("../../etc/passwd", "x" * 10_000, "\0", "✓"):
        mine.add(request_id)
        assert request_id in mine
    assert all(path.parent == tmp_path for path in tmp_path.rglob("*"))


def test_old_ones_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Tombstones(tmp_path)
    mine.add("old")
    (path,) = tmp_path.iterdir()
    long_ago = time.time() - tombstones.KEPT_SECONDS - 1
    os.utime(path, (long_ago, long_ago))
    mine.add("new")
    assert path.exists(), "a sweep at every cancel would cost each of many cancels more"
    monkeypatch.setattr(tombstones, "_SWEEP_SECONDS", 0.0)
    mine.add("newer")
    assert not path.exists()
    assert "new" in mine


def test_a_folder_that_a_cleaner_removed_is_made_again(tmp_path: Path) -> None:
    mine = Tombstones(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    assert not mine.has_news()
    assert "a" not in mine
    mine.add("a")
    assert mine.has_news()
    assert "a" in mine


def test_each_server_has_a_folder_of_its_own_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    servers = tmp_path / f"triton_diffusion_{os.getuid()}"
    (servers / "1_0").mkdir(parents=True)  # an earlier process 1
    Tombstones().add("a")
    (folder,) = servers.iterdir()
    assert folder.name.startswith(f"{os.getppid()}_")
    assert "a" in Tombstones()
    assert {path.stat().st_mode & 0o777 for path in (servers, folder)} == {0o700}


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def of_another_user(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    folder.mkdir()
    os.chown(folder, 12345, -1)


def a_link(folder: Path) -> None:
    target = folder.with_name("elsewhere")
    target.mkdir(mode=0o700)
    folder.symlink_to(target)


@pytest.mark.parametrize(
    ("occupy", "problem"),
    [
        (open_to_all, "other users may write to it"),
        (of_another_user, "it belongs to user 12345, not to 0"),
        (a_link, "it is no folder"),
    ],
)
def test_a_folder_that_others_made_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, occupy: Callable[[Path], None], problem: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    servers = tmp_path / f"triton_diffusion_{os.getuid()}"
    occupy(servers)
    theirs = servers / "1_0"  # named as that of a server which is gone
    theirs.mkdir()
    with pytest.raises(DiffusionError, match=f"{servers.name} cannot hold .*: {problem}"):
        Tombstones()
    assert theirs.is_dir()


def test_one_that_an_earlier_version_made_readable_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    servers = tmp_path / f"triton_diffusion_{os.getuid()}"
    servers.mkdir(mode=0o755)
    Tombstones()
    assert servers.stat().st_mode & 0o777 == 0o700


def test_no_id_is_never_cancelled(tmp_path: Path) -> None:
    """Requests without one are many: warmup's, and those of plain clients."""
    mine = Tombstones(tmp_path)
    mine.add("")
    assert "" not in mine


def test_one_is_forgotten_in_the_end_and_counts_again_when_it_is_written_again(tmp_path: Path) -> None:
    mine = Tombstones(tmp_path)
    mine.add("again")
    (path,) = tmp_path.iterdir()
    long_ago = time.time() - tombstones.KEPT_SECONDS - 1
    os.utime(path, (long_ago, long_ago))
    assert "again" not in mine
    time.sleep(0.1)
    mine.has_news()
    assert not mine.has_news()
    mine.add("again")
    assert mine.has_news()
    assert "again" in mine


def test_one_that_comes_with_the_time_stamp_of_the_last_is_news(tmp_path: Path) -> None:
    """As where a file system's clock ticks slowly; the next look comes a while later."""
    tombstones = Tombstones(tmp_path)
    tombstones.add("first")
    stamp = tmp_path.stat().st_mtime_ns
    assert tombstones.has_news()
    tombstones.add("second")
    os.utime(tmp_path, ns=(stamp, stamp))
    time.sleep(0.1)
    assert tombstones.has_news()
    assert not tombstones.has_news()
