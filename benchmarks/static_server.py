"""Static batching, as one would add it to naive_server.py: whole requests share one call of the pipeline.

As soon as the pipeline is free, all that wait (up to a cap) are drawn in one call. It has one number of steps, so it
takes that of the request that asks for most, and all wait for it.

python benchmarks/static_server.py PORT CAP
"""

from __future__ import annotations

import asyncio
import base64
import io
import queue
import sys
import threading
from concurrent.futures import Future

import naive_server
import torch
import uvicorn
from diffusers import FluxPipeline
from fastapi import FastAPI
from PIL import Image


def draw(pipe: FluxPipeline, requests: list[naive_server.ImageRequest]) -> list[Image.Image]:
    """A picture for each request; all are of the first one's size."""
    images: list[Image.Image] = pipe(
        [request.prompt for request in requests],
        negative_prompt=[""] * len(requests),
        true_cfg_scale=2.0,
        max_sequence_length=16,
        width=requests[0].width,
        height=requests[0].height,
        num_inference_steps=max(request.steps for request in requests),
        generator=[torch.Generator("cpu").manual_seed(request.seed) for request in requests],
    ).images
    return images


def to_png(image: Image.Image) -> str:
    """A PNG file in base64."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class Batcher:
    """One thread that draws for all."""

    def __init__(self, pipe: FluxPipeline, cap: int) -> None:
        self._pipe = pipe
        self._cap = cap
        self._waiting: queue.Queue[tuple[naive_server.ImageRequest, Future[Image.Image]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: naive_server.ImageRequest) -> Future[Image.Image]:
        """The request's picture, once its batch is done."""
        future: Future[Image.Image] = Future()
        self._waiting.put((request, future))
        return future

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < self._cap and not self._waiting.empty():
                batch.append(self._waiting.get())
            try:
                images = draw(self._pipe, [request for request, _ in batch])
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
            else:
                for (_, future), image in zip(batch, images, strict=True):
                    future.set_result(image)


def create_app(cap: int) -> FastAPI:
    """naive_server's route, without a limit of requests that wait; files are made while the next batch is drawn."""
    app = FastAPI()
    batcher = Batcher(naive_server.load(), cap)

    @app.post("/generate")
    async def generate(request: naive_server.ImageRequest) -> dict[str, str]:
        image = await asyncio.wrap_future(batcher.submit(request))
        return {"b64_json": await asyncio.to_thread(to_png, image)}

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(int(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
