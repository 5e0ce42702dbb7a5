"""Cancelled requests as files: seen by all who look, and gone in the end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from diffusion_backend import tombstones
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
