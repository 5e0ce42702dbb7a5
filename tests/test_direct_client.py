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
    with pytest.raises(DiffusionError, match="without a picture") as caught:
        generate(*answers)
    assert caught.value.status is Status.UNAVAILABLE
