"""Every task that takes images, through OpenAI's own client, against a running server.

A model's three processes take 1.2 GB and some six seconds of two cores to start. All models at once would need 16 GB,
and a server for each would start one after the other what Triton starts side by side: so a few share one, which ends
before the next begins. The first has one model of each kind; those of the others are for ``./test --long``: their
pipelines differ, which ``test_image_tasks.py`` compares without a server.
"""

from __future__ import annotations

import base64
import io
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from diffusion_backend import seams
from diffusion_backend.repository import read_model
from diffusion_backend.settings import ModelLimits, resolve
from diffusion_backend.tasks import IMAGE_EDIT, INPAINTING
from openai.types import ImagesResponse
from PIL import Image, ImageOps

from tests.families.catalogue import FAMILIES, IMAGE_TASKS
from tests.families.conftest import Added
from tests.families.family import PROMPT, Family
from tests.families.flux import chroma, fill, klein, kontext
from tests.families.stable_diffusion import sd15
from tests.families.three_stages import images_of, plain_pipeline
from tests.running_server import running_server

MODELS_AT_ONCE = 5
SEED = 7
PICTURES_ONLY = chroma
ON_DISK = {family.build for family in (*IMAGE_TASKS, PICTURES_ONLY)}
FIRST = (sd15, kontext, fill, klein, PICTURES_ONLY)
MODELS = [*FIRST, *(family for family in FAMILIES if family.build in ON_DISK and family not in FIRST)]
EDITS = [family for family in IMAGE_TASKS if family.task == IMAGE_EDIT]

Pixels = npt.NDArray[np.int16]
Saved = Callable[[Family], Path]


@dataclass(frozen=True)
class Serving:
    """A running server of some of the models."""

    client: openai.OpenAI
    repository: Path

    def limits(self, family: Family) -> ModelLimits:
        return read_model(self.repository / family.model)


@pytest.fixture(scope="module")
def serving(
    request: pytest.FixtureRequest,
    added: Callable[[Family], Added],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    repository = tmp_path_factory.mktemp("repository")
    for family in MODELS[request.param : request.param + MODELS_AT_ONCE]:
        assert added(family).refusal is None
        shutil.copytree(added(family).repository, repository, dirs_exist_ok=True)
    with running_server(repository, tmp_path_factory.mktemp("data")) as running:
        client = openai.OpenAI(base_url=f"{running.adapter_url}/v1", api_key="none", max_retries=0)
        yield Serving(client, repository)


def served(families: Sequence[Family]) -> pytest.MarkDecorator:
    """A test of each of these, with the server that has its model."""
    builds = [family.build for family in MODELS]
    first = [builds.index(family.build) // MODELS_AT_ONCE * MODELS_AT_ONCE for family in families]
    return pytest.mark.parametrize(
        ("serving", "family"),
        [
            pytest.param(
                number,
                family,
                id=f"{family.name}, {family.task}, {family.images}",
                marks=pytest.mark.long if number else (),
            )
            for number, family in zip(first, families, strict=True)
        ],
        indirect=["serving"],
        scope="module",  # that of the fixture, so that tests are ordered by it
    )


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def mask_of(part: Image.Image) -> bytes:
    """Transparent where ``part`` is white."""
    grey = part.convert("L")
    return png(Image.merge("LA", (grey, ImageOps.invert(grey))))


def upper_half(size: tuple[int, int]) -> Image.Image:
    part = Image.new("L", size)
    part.paste(255, (0, 0, size[0], size[1] // 2))
    return part


def edit(
    serving: Serving,
    family: Family,
    images: seams.Images,
    *,
    as_list: bool = False,
    seed: int = SEED,
    size: str | None = None,
    **fields: Any,
) -> ImagesResponse:
    """Pictures of these, of the family's size."""
    first, *others = (png(image) for image in seams.images_of(images))
    part = images.get(seams.MASK)
    if isinstance(part, Image.Image):
        fields["mask"] = mask_of(part)
    width, height = family.size
    answer = serving.client.images.edit(
        model=family.model,
        image=[first, *others] if others or as_list else first,
        prompt=PROMPT,
        size=size or f"{width}x{height}",  # type: ignore[arg-type]
        extra_body={"seed": seed, "num_inference_steps": family.call["num_inference_steps"]},
        **fields,
    )
    assert isinstance(answer, ImagesResponse)
    return answer


def pixels_of(answer: ImagesResponse) -> list[Pixels]:
    files = [base64.b64decode(image.b64_json or "") for image in answer.data or []]
    return [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(np.int16) for file in files]


def seeds_of(answer: ImagesResponse) -> list[int]:
    return [(image.model_extra or {})["seed"] for image in answer.data or []]


def only(answer: ImagesResponse) -> Pixels:
    (picture,) = pixels_of(answer)
    return picture


def kept(images: seams.Images) -> npt.NDArray[np.bool_]:
    """Where a mask says that nothing changes: [H, W, 1]."""
    part = images[seams.MASK]
    assert isinstance(part, Image.Image)
    return np.asarray(part.convert("L"))[..., None] == 0


def lay_over(picture: Pixels, images: seams.Images) -> Pixels:
    """With what the mask keeps of the first image."""
    return np.where(kept(images), np.asarray(seams.images_of(images)[0]), picture)


@served(IMAGE_TASKS)
def test_three_pictures_are_those_of_the_following_seeds(
    serving: Serving, family: Family, saved: Saved
) -> None:
    """Sent as a list; each is what it is alone, but for what batches round differently. Those equal diffusers'."""
    images = images_of(family)
    answer = edit(serving, family, images, n=3, as_list=True)
    assert seeds_of(answer) == [SEED, SEED + 1, SEED + 2]
    together = pixels_of(answer)
    alone = [only(edit(serving, family, images, seed=seed)) for seed in seeds_of(answer)]
    differences = [np.abs(one - other).max() for one, other in zip(together, alone, strict=True)]
    print(f"{family.name}, {family.task}, {family.images}: {differences}")
    assert max(differences) <= 1
    for one, other in itertools.combinations(together, 2):
        assert np.abs(one - other).max() > 10
    pipe = plain_pipeline(family, saved(family))
    for seed, picture in zip(seeds_of(answer), alone, strict=True):
        np.testing.assert_array_equal(picture, plain(pipe, family, serving.limits(family), images, seed))
    if family.task == INPAINTING:
        change = np.abs(alone[0] - np.asarray(seams.images_of(images)[0]))
        assert change.mean(where=~kept(images)) > 10


def plain(pipe: Any, family: Family, limits: ModelLimits, images: seams.Images, seed: int) -> Pixels:
    """Plain diffusers' picture; what a mask keeps is laid over it."""
    width, height = family.size
    parameters = {
        "seed": seed,
        "width": width,
        "height": height,
        "num_inference_steps": family.call["num_inference_steps"],
    }
    masked = family.task == INPAINTING
    settings = resolve(limits, PROMPT, None, parameters, images=family.images, has_mask=masked)
    assert settings.task == family.task
    torch.manual_seed(seed)
    arguments = {**seams.call_arguments(pipe, limits, settings, images), "output_type": "pil"}
    picture = np.asarray(pipe(**arguments).images[0]).astype(np.int16)
    return lay_over(picture, images) if masked else picture


@served(EDITS)
def test_an_edit_looks_at_its_last_image(serving: Serving, family: Family) -> None:
    images = images_of(family)
    *others, last = seams.images_of(images)
    inverted = {seams.IMAGE: [*others, ImageOps.invert(last)]}
    difference = np.abs(only(edit(serving, family, images)) - only(edit(serving, family, inverted)))
    print(f"{family.name}, {family.images}: {difference.max()}, {difference.mean():.1e}")
    assert difference.max() > 0


@served(EDITS)
def test_a_mask_is_laid_over_the_result_of_an_edit(serving: Serving, family: Family) -> None:
    images = images_of(family)
    whole = only(edit(serving, family, images))
    masked = {**images, seams.MASK: upper_half(family.size)}
    made = only(edit(serving, family, masked))
    np.testing.assert_array_equal(made, lay_over(whole, masked))
    assert np.abs(made - np.asarray(seams.images_of(images)[0])).mean(where=~kept(masked)) > 10


@served([family for family in IMAGE_TASKS if family.images == 1])
def test_the_size_is_the_image_s_as_near_as_the_model_can(serving: Serving, family: Family) -> None:
    limits = serving.limits(family)
    width, height, step = limits.default_width, limits.default_height, limits.size_multiple
    off = step // 4
    for given, made in (
        ((width + step + off, height - off), (width + step, height)),
        ((4 * width, 2 * height), (2 * width, height)),  # twice as large as it may be
    ):
        images: dict[str, Image.Image] = {seams.IMAGE: Image.effect_noise(given, 80).convert("RGB")}
        if family.task == INPAINTING:
            images[seams.MASK] = upper_half(given)
        answer = edit(serving, family, images, size="auto")
        assert answer.size == "{}x{}".format(*made)
        assert only(answer).shape[:2] == made[::-1]


@served([PICTURES_ONLY])
def test_a_model_without_edits_is_refused_with_those_that_have_them(serving: Serving, family: Family) -> None:
    others = sorted(path.name for path in serving.repository.iterdir() if "_" not in path.name)
    others.remove(family.model)
    image = {seams.IMAGE: Image.new("RGB", family.size)}
    for given in (image, {**image, seams.MASK: upper_half(family.size)}):
        with pytest.raises(
            openai.BadRequestError, match=f"text-to-image; allowed: {', '.join(others)}"
        ) as caught:
            edit(serving, family, given)
        assert (caught.value.param, caught.value.code) == ("model", "task_not_supported")
