from __future__ import annotations

from dataclasses import replace

import pytest
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.settings import ModelLimits
from diffusion_backend.tasks import IMAGE_EDIT, IMAGE_TO_IMAGE, INPAINTING, TEXT_TO_IMAGE, TEXT_TO_VIDEO
from openai_adapter.errors import ApiError
from openai_adapter.models import build_model_card
from openai_adapter.registry import Model, Registry

LIMITS = ModelLimits(
    source="org/one",
    pipeline_class="FluxPipeline",
    tasks=("text-to-image",),
    created=1,
    default_prompt="a fox",
    default_width=64,
    default_height=64,
    size_multiple=8,
    max_width=128,
    max_height=128,
    default_num_inference_steps=20,
    max_num_inference_steps=100,
)


def registry(*models: Model, default: str | None = None) -> Registry:
    result = Registry(default)
    result.models = {model.name: model for model in models}
    result.contacted = True
    return result


def error_of(registry: Registry, name: str | None) -> tuple[int, str | None]:
    with pytest.raises(ApiError) as caught:
        registry.require_ready(name, TEXT_TO_IMAGE)
    return caught.value.status, caught.value.code


ONE = Model("one", LIMITS, ready=True)
TWIN = Model("twin", LIMITS, ready=True)
TWO = Model("two", LIMITS.model_copy(update={"source": "org/two"}), ready=False)
UNSEEN = Model("unseen", None)
CLIPS = Model(
    "clips",
    LIMITS.model_copy(
        update={
            "source": "org/clips",
            "tasks": ("text-to-video",),
            "default_num_frames": 5,
            "min_num_frames": 1,
            "max_num_frames": 17,
            "num_frames_step": 4,
            "default_fps": 8,
        }
    ),
    ready=True,
)


def test_by_name_or_source() -> None:
    for name in ("one", "org/one", None):
        assert registry(ONE).require_ready(name, TEXT_TO_IMAGE) == ("one", LIMITS)


def test_which_default() -> None:
    assert registry(ONE, TWO, default="one").require_ready(None, TEXT_TO_IMAGE)[0] == "one"
    assert registry(ONE, TWO, default="org/one").require_ready(None, TEXT_TO_IMAGE)[0] == "one"
    assert error_of(registry(ONE, TWO), None) == (400, "model_required")
    assert error_of(registry(ONE, default="gone"), None) == (404, "model_not_found")
    assert error_of(registry(), None) == (503, "not_ready")


def test_the_default_makes_what_is_asked_for() -> None:
    both = registry(ONE, CLIPS)
    assert both.require_ready(None, TEXT_TO_IMAGE)[0] == "one"
    assert both.require_ready(None, TEXT_TO_VIDEO)[0] == "clips"
    assert registry(ONE, CLIPS, default="one").require_ready(None, TEXT_TO_VIDEO)[0] == "clips"
    assert registry(ONE, TWO, CLIPS, default="one").require_ready(None, TEXT_TO_IMAGE)[0] == "one"
    with pytest.raises(ApiError, match="none, as no model here is for text-to-video"):
        registry(ONE).require_ready(None, TEXT_TO_VIDEO)
    assert error_of(registry(ONE, UNSEEN), None) == (400, "model_required")


def able(name: str, *tasks: str) -> Model:
    return replace(ONE, name=name, limits=LIMITS.model_copy(update={"tasks": tasks}))


def test_the_default_is_the_only_one_that_does_it_best() -> None:
    edits = (IMAGE_EDIT, IMAGE_TO_IMAGE)
    both = registry(able("flux", TEXT_TO_IMAGE, IMAGE_TO_IMAGE), able("kontext", TEXT_TO_IMAGE, IMAGE_EDIT))
    assert both.require_ready(None, *edits)[0] == "kontext"
    assert both.require_ready(None, *reversed(edits))[0] == "flux"
    assert registry(ONE, able("flux", IMAGE_TO_IMAGE)).require_ready(None, *edits)[0] == "flux"


def test_a_model_of_other_tasks_is_refused_with_those_that_have_them() -> None:
    models = registry(ONE, CLIPS, able("flux", TEXT_TO_IMAGE, INPAINTING), able("sd", INPAINTING))
    with pytest.raises(ApiError, match="'one', which is for text-to-image; allowed: flux, sd") as caught:
        models.require_ready("one", INPAINTING, IMAGE_EDIT)
    assert (caught.value.status, caught.value.param, caught.value.code) == (
        400,
        "model",
        "task_not_supported",
    )
    with pytest.raises(ApiError, match="allowed: none, as no model here is for inpainting"):
        registry(ONE).require_ready("one", INPAINTING)


def test_unknown_and_ambiguous() -> None:
    assert error_of(registry(ONE), "three") == (404, "model_not_found")
    assert error_of(registry(ONE, TWIN), "org/one") == (400, "ambiguous_model")


def test_not_ready() -> None:
    assert error_of(registry(ONE, TWO), "two") == (503, "model_not_ready")
    assert error_of(registry(UNSEEN), "unseen") == (503, "model_not_ready")
    assert error_of(Registry(), "one") == (503, "not_ready")


def with_denoise(facts: dict[str, str | None] | None) -> Model:
    return replace(ONE, stages={"one_denoise": facts})


@pytest.mark.parametrize("facts", [None, {}, {"no_previews": None}])
def test_previews_may_be_asked_for(facts: dict[str, str | None] | None) -> None:
    registry(with_denoise(facts)).check_previews("one", 3)


def test_previews_are_refused_where_the_stage_has_none() -> None:
    reason = "this model answers once a request"
    model = with_denoise({"no_previews": reason})
    registry(model).check_previews("one", 0)
    with pytest.raises(DiffusionError, match=reason) as caught:
        registry(model).check_previews("one", 2)
    assert (caught.value.status, caught.value.param) == (Status.INVALID_ARG, "partial_images")
    assert build_model_card(model)["previews"] == {"max_partial_images": 0, "reason": reason}
    assert build_model_card(with_denoise(None))["previews"] is None


def test_a_card_says_whether_requests_share_the_denoiser() -> None:
    found = {"enabled": False, "joined": True, "difference": 0.5, "tolerance": 0.001}
    card = build_model_card(replace(ONE, stages={"one_denoise": {"batching": {**found, "more": 1}}}))
    assert card["batching"] == found
    assert build_model_card(with_denoise({}))["batching"] is None  # a stage of an earlier version
    assert build_model_card(with_denoise(None))["batching"] is None


def test_a_card_has_the_commit_of_a_hub_model() -> None:
    limits = LIMITS.model_copy(update={"source_revision": "1" * 40})
    card = build_model_card(replace(ONE, limits=limits))
    assert (card["root"], card["source_revision"]) == ("org/one", "1" * 40)


def test_described_are_known_models_by_name() -> None:
    assert [model.name for model in registry(TWO, UNSEEN, ONE).described()] == ["one", "two"]
    with pytest.raises(ApiError):
        Registry().described()
