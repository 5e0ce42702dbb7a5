"""Families on a real server: added to a repository, loaded by Triton in three processes each, called by a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusion_backend import seams
from diffusion_backend.client import DiffusionClient
from diffusion_backend.repository import add
from diffusion_backend.settings import resolve
from diffusion_backend.tritonserver import TritonServer
from PIL import Image

from tests.families.dit import qwen_image, z_image
from tests.families.family import PROMPT, Family
from tests.families.stable_diffusion import sd3, sdxl

MODELS = {"sdxl": sdxl, "z-image": z_image, "sd3": sd3, "qwen-image": qwen_image}
SHORT, LONG = ("sdxl", "z-image"), ("sd3", "qwen-image")  # a server each
# Two sizes, a guided and an unguided request, and one that gives nothing but a seed.
REQUESTS = [
    {"seed": 1},
    {"seed": 2, "width": 64, "height": 48, "num_inference_steps": 2, "guidance_scale": 5.0},
    {"seed": 3, "num_inference_steps": 4, "guidance_scale": 1.0},
]


@pytest.fixture(scope="module")
def client(
    request: pytest.FixtureRequest, saved: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DiffusionClient]:
    """A client of a server with the models of these names."""
    repository = tmp_path_factory.mktemp("repository")
    for name in request.param:
        add(str(saved(MODELS[name])), name, repository)
    with (
        TritonServer(repository, data_dir=tmp_path_factory.mktemp("data")) as triton,
        DiffusionClient(triton.grpc_url) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("client", "name"),
    [
        *((SHORT, name) for name in SHORT),
        *(pytest.param(LONG, name, marks=pytest.mark.long) for name in LONG),
    ],
    indirect=["client"],
    scope="module",
)
def test_the_servers_pictures_equal_unsplit_diffusers(
    name: str, client: DiffusionClient, saved: Callable[[Family], Path]
) -> None:
    limits = client.limits(name)
    pipe = DiffusionPipeline.from_pretrained(saved(MODELS[name]), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    for parameters in REQUESTS:
        guided = parameters.get("guidance_scale", limits.default_guidance_scale) > 1
        negative_prompt = "blurry" if guided else None
        generation = client.generate(name, PROMPT, negative_prompt=negative_prompt, **parameters)
        settings = resolve(limits, PROMPT, negative_prompt, parameters)
        torch.manual_seed(settings.seed)
        arguments = {**seams.call_arguments(pipe, limits, settings), "output_type": "pil"}
        picture: Image.Image = pipe(**arguments).images[0]
        assert picture.size == (settings.width, settings.height)
        np.testing.assert_array_equal(generation.images, np.asarray(picture))
