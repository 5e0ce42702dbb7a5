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
    for request_id in ("../../etc/passwd", "x" * 10_000, "", "\0", "✓"):
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
    assert "old" in mine, "a sweep at every cancel would cost each of many cancels more"
    monkeypatch.setattr(tombstones, "_SWEEP_SECONDS", 0.0)
    mine.add("newer")
    assert "old" not in mine
    assert "new" in mine
