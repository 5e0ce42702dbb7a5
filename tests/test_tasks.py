"""Which task a request is, of what size its result, and how much of an image may change."""

from __future__ import annotations

import pytest
from diffusion_backend import tasks
from diffusion_backend.errors import DiffusionError
from diffusion_backend.tasks import (
    IMAGE_EDIT,
    IMAGE_TO_IMAGE,
    IMAGE_TO_VIDEO,
    INPAINTING,
    TEXT_TO_IMAGE,
    TEXT_TO_VIDEO,
)

FLUX = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINTING)
KONTEXT = (TEXT_TO_IMAGE, IMAGE_EDIT)


@pytest.mark.parametrize(
    ("model", "images", "has_mask", "task"),
    [
        (FLUX, 0, False, TEXT_TO_IMAGE),
        (FLUX, 1, False, IMAGE_TO_IMAGE),
        (FLUX, 1, True, INPAINTING),
        (KONTEXT, 0, False, TEXT_TO_IMAGE),
        (KONTEXT, 1, False, IMAGE_EDIT),
        (KONTEXT, 1, True, IMAGE_EDIT),  # the mask is laid over its result
        ((IMAGE_EDIT, INPAINTING), 1, True, INPAINTING),
        ((IMAGE_EDIT, INPAINTING), 2, True, IMAGE_EDIT),
        ((IMAGE_EDIT, IMAGE_TO_IMAGE), 1, False, IMAGE_EDIT),
        ((TEXT_TO_VIDEO,), 0, False, TEXT_TO_VIDEO),
        ((IMAGE_TO_VIDEO,), 1, False, IMAGE_TO_VIDEO),
    ],
)
def test_the_task_is_told_by_what_a_request_brings(
    model: tuple[str, ...], images: int, has_mask: bool, task: str
) -> None:
    assert tasks.choose_task(model, images, has_mask=has_mask, max_images=2) == task


@pytest.mark.parametrize(
    ("model", "images", "has_mask", "param", "words"),
    [
        ((TEXT_TO_IMAGE,), 1, False, "image", "one for text-to-image; allowed: none"),
        (KONTEXT, 3, False, "image", "has 3 pictures, .* allowed: at most 2"),
        (FLUX, 0, True, "mask", "without 'image'"),
        ((IMAGE_EDIT,), 0, False, "image", "'image' is missing, and this model is one for image-edit"),
        ((INPAINTING,), 1, False, "mask", "'mask' is missing, and this model is one for inpainting"),
        ((IMAGE_TO_VIDEO,), 1, True, "mask", "allowed: none"),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_name(
    model: tuple[str, ...], images: int, has_mask: bool, param: str, words: str
) -> None:
    most = 0 if model == (TEXT_TO_IMAGE,) else 2
    with pytest.raises(DiffusionError, match=words) as caught:
        tasks.choose_task(model, images, has_mask=has_mask, max_images=most)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("image", "result"),
    [
        ((64, 64), (64, 64)),
        ((100, 60), (96, 64)),  # to the nearest
        ((3, 5), (16, 16)),
        ((256, 128), (128, 64)),  # in its proportions
        ((1, 10_000), (16, 128)),
        ((127, 129), (128, 128)),
    ],
)
def test_the_size_of_a_result_is_that_of_its_image(image: tuple[int, int], result: tuple[int, int]) -> None:
    assert tasks.size_of_image(image, 16, (128, 128)) == result


@pytest.mark.parametrize(
    ("steps", "strength", "run"), [(20, 0.6, 12), (20, 0.99, 19), (3, 1, 3), (7, None, 7)]
)
def test_a_strength_leaves_the_first_steps_out(steps: int, strength: float | None, run: int) -> None:
    assert tasks.steps_run(steps, strength) == run


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "numbers above 0, at most 1"),
        (1.1, "numbers above 0"),
        (float("nan"), "numbers above 0"),
        (True, "numbers above 0"),
        ("0.5", "numbers above 0"),
        (0.04, "of which that leaves none; allowed: at least 0.05"),
    ],
)
def test_strengths_that_are_refused(value: object, words: str) -> None:
    with pytest.raises(DiffusionError, match=words) as caught:
        tasks.check_strength(INPAINTING, value, 20, has_default=True)
    assert caught.value.param == "strength"


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 9, 20, 49, 200])
def test_the_least_strength_that_is_named_is_allowed(steps: int) -> None:
    with pytest.raises(DiffusionError) as caught:
        tasks.check_strength(INPAINTING, 0.0049, steps, has_default=True)
    least = float(str(caught.value).rpartition(" ")[2])
    assert tasks.check_strength(INPAINTING, least, steps, has_default=True) == least


def test_a_task_without_a_strength_takes_none() -> None:
    assert tasks.check_strength(TEXT_TO_IMAGE, None, 20, has_default=False) is None
    with pytest.raises(DiffusionError, match="allowed for text-to-image: none"):
        tasks.check_strength(TEXT_TO_IMAGE, 0.5, 20, has_default=False)
