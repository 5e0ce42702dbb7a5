"""Our client, where no server is needed to tell what it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from diffusion_backend.client import AsyncDiffusionClient, Generation
from diffusion_backend.errors import DiffusionError, Status


def generation(step: int, *, is_final: bool) -> Generation:
    return Generation(np.zeros((1, 1, 3), np.uint8), {"step": step, "is_final": is_final})


PREVIEW, PICTURE = generation(1, is_final=False), generation(3, is_final=True)


def generate(*answers: Generation) -> Generation:
    """What ``generate`` returns of these answers of a server."""

    class Client(AsyncDiffusionClient):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Generation, None]:  # type: ignore[override]
            for answer in answers:
                yield answer

    async def run() -> Generation:
        async with Client("127.0.0.1:1") as client:
            return await client.generate("model", "a fox")

    return asyncio.run(run())


def test_the_picture_is_told_by_is_final_not_by_its_place() -> None:
    assert generate(PREVIEW, PICTURE) is PICTURE
    assert generate(PICTURE, PREVIEW) is PICTURE


@pytest.mark.parametrize("answers", [(), (PREVIEW,)])
def test_a_stream_without_a_picture(answers: tuple[Generation, ...]) -> None:
    with pytest.raises(DiffusionError, match="was cancelled") as caught:
        generate(*answers)
    assert caught.value.status is Status.CANCELLED


def part(start: int, count: int, *, is_final: bool) -> Generation:
    """Frames of a clip of five, each of the level that is its number."""
    frames = np.arange(start, start + count, dtype=np.uint8)[:, None, None, None].repeat(3, axis=-1)
    info = {"frame_index": start, "num_frames": 5, "is_final": is_final}
    return Generation(np.zeros((0, 0, 3), np.uint8), info, frames)


def test_a_clip_is_put_together() -> None:
    progress = Generation(np.zeros((0, 0, 3), np.uint8), {"step": 1, "is_final": False})
    assert progress.is_progress
    clip = generate(
        progress, part(0, 2, is_final=False), part(2, 2, is_final=False), part(4, 1, is_final=True)
    )
    assert clip.frames[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert clip.info == {"frame_index": 0, "num_frames": 5, "is_final": True}
    assert not clip.is_progress


@pytest.mark.parametrize(
    "answers",
    [
        (part(0, 2, is_final=False), part(4, 1, is_final=True)),
        (part(2, 2, is_final=False),),
        (part(0, 2, is_final=True),),
        (part(0, 5, is_final=False),),
        (part(0, 6, is_final=True),),
    ],
)
def test_slices_that_make_no_clip(answers: tuple[Generation, ...]) -> None:
    with pytest.raises(DiffusionError) as caught:
        generate(*answers)
    assert caught.value.code == "slices_out_of_order"


def test_a_clip_that_is_cancelled_between_two_slices() -> None:
    with pytest.raises(DiffusionError, match="was cancelled"):
        generate(part(0, 2, is_final=False))
