"""Images that a pipeline itself can do nothing with: the client is told so by name, and nothing else has failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusion_backend import loading, seams
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.loading import Stage
from diffusion_backend.task_pipelines import pipelines_by_task
from diffusion_backend.tasks import IMAGE_EDIT
from PIL import Image

from tests.families.catalogue import IMAGE_TASKS
from tests.families.dit import qwen_edit_plus
from tests.families.family import Family
from tests.families.flux import flux2_dev, klein
from tests.families.three_stages import CPU, limits_of, settings_of

pytestmark = pytest.mark.parallel

ODD = [(16, 16), (32, 32), (48, 64), (16, 1024), (1024, 16)]  # as the first image is when they are asked for
EDITS = {family.name: family for family in IMAGE_TASKS if family.task == IMAGE_EDIT and family.images == 1}


def record(family: Family, folder: Path, images: list[Image.Image]) -> None:
    limits = limits_of(family, folder)
    settings = settings_of(limits)
    pipe, _ = loading.load_stage(
        loading.open_pipeline(str(folder)),
        Stage.ENCODE,
        device=CPU,
        dtype=torch.float32,
        methods=seams.STAND_IN_METHODS,
        takes_image=True,
    )
    pipe = pipelines_by_task(pipe)[family.task]
    given: seams.Images = {seams.IMAGE: images if len(images) > 1 else images[0]}
    seams.record(pipe, seams.call_arguments(pipe, limits, settings, given))


def error_of(call: Callable[..., None], *arguments: object) -> DiffusionError | None:
    try:
        call(*arguments)
    except DiffusionError as error:
        return error
    return None


@pytest.mark.parametrize("name", EDITS)
def test_odd_images_are_edited_or_blamed(name: str, saved: Callable[[Family], Path]) -> None:
    """Never an error of ours, whatever the sizes of the one image are."""
    family = EDITS[name]
    for size in ODD:
        error = error_of(record, family, saved(family), [Image.new("RGB", size, "red")])
        assert error is None or (error.param, error.status) == ("image", Status.INVALID_ARG), (size, error)


@pytest.mark.parametrize(
    ("family", "size", "words"),
    [
        (klein, (63, 64), "at least 64px"),
        (klein, (40, 300), "at least 64px"),
        (klein, (64, 600), "Aspect ratio too extreme"),
        (flux2_dev, (1, 1), "at least 64px"),
        (qwen_edit_plus, (1, 4000), "must be > 0"),
        (qwen_edit_plus, (10, 3000), "aspect ratio"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_reference_that_the_pipeline_refuses(
    family: Family, size: tuple[int, int], words: str, saved: Callable[[Family], Path]
) -> None:
    edit = family.doing(IMAGE_EDIT, images=2)
    images = [Image.new("RGB", edit.size, "red"), Image.new("RGB", size, "red")]
    with pytest.raises(DiffusionError, match=f"can do nothing with 'image': .*{words}") as caught:
        record(edit, saved(edit), images)
    assert (caught.value.param, caught.value.status) == ("image", Status.INVALID_ARG)
