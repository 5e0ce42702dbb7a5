"""The thing to compare with: FastAPI around a diffusers pipeline, as one would write it in an hour.

python benchmarks/naive_server.py PORT
curl -d '{"prompt": "a fox"}' -H 'content-type: application/json' http://127.0.0.1:PORT/generate
"""

from __future__ import annotations

import base64
import io
import sys
import threading
from pathlib import Path

import torch
import uvicorn
from diffusers import FluxPipeline
from fastapi import FastAPI
from pydantic import BaseModel

PIPELINE = Path(__file__).resolve().parents[1] / "model_repository/emoji-flux/pipeline"


class ImageRequest(BaseModel):
    """The body of a request."""

    prompt: str
    seed: int = 0
    width: int = 64
    height: int = 64
    steps: int = 20


def load() -> FluxPipeline:
    """The whole pipeline, in float32."""
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: FluxPipeline, request: ImageRequest) -> bytes:
    """A PNG file."""
    image = pipe(
        request.prompt,
        negative_prompt="",
        true_cfg_scale=2.0,
        max_sequence_length=16,
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        generator=torch.Generator("cpu").manual_seed(request.seed),
    ).images[0]
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def create_app() -> FastAPI:
    """One route, one picture at a time: a pipeline object keeps the state of its call."""
    app = FastAPI()
    pipe = load()
    lock = threading.Lock()

    @app.post("/generate")
    def generate(request: ImageRequest) -> dict[str, str]:
        with lock:
            file = draw(pipe, request)
        return {"b64_json": base64.b64encode(file).decode()}

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
