"""Processors without torchvision: loaded from folders as they are on the hub, they make what was saved makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusion_backend import loading, processors
from PIL import Image

from tests.families import parts
from tests.families.dit import qwen_edit
from tests.families.family import PROMPT, Family
from tests.families.flux import flux2_dev

pytestmark = pytest.mark.parallel

Saved = Callable[[Family], Path]
VIDEO_PART = {"video_processor_type": "Qwen2VLVideoProcessor", "processor_class": "Qwen2VLProcessor"}


def written(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(saved: Saved, tmp_path: Path) -> Callable[[Family], Path]:
    """A copy of a family's folder, to be changed."""
    return lambda family: Path(shutil.copytree(saved(family), tmp_path / "pipeline"))


@pytest.mark.parametrize("image_part", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
def test_a_folder_with_a_video_part_of_its_own(folder: Callable[[Family], Path], image_part: str) -> None:
    """As older versions of transformers wrote it: a file for each part, and the text's template."""
    pipeline = folder(qwen_edit)
    path = pipeline / "processor/processor_config.json"
    images = json.loads(path.read_text())["image_processor"]
    path.unlink()
    written(path.parent, "preprocessor_config.json", {**images, "image_processor_type": image_part})
    written(path.parent, "video_preprocessor_config.json", {**images, **VIDEO_PART})

    loaded = loading.load_processors(loading.open_pipeline(str(pipeline)))["processor"]
    assert isinstance(loaded, transformers.Qwen2VLProcessor)
    asked = {
        "text": ["<|vision_start|><|image_pad|><|vision_end|>a fox"],
        "images": [Image.linear_gradient("L").convert("RGB").resize((90, 60))],
        "return_tensors": "pt",
    }
    made, expected = loaded(**asked), parts.qwen_vl_processor()(**asked)
    assert made.keys() == expected.keys() >= {"input_ids", "pixel_values", "image_grid_thw"}
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    assert made["pixel_values"].std() > 0.1


def test_the_text_of_a_folder_with_an_image_part(folder: Callable[[Family], Path]) -> None:
    pipeline = folder(flux2_dev)
    path = pipeline / "tokenizer/processor_config.json"
    written(
        path.parent,
        path.name,
        {
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "image_token": "[IMG]",
            "patch_size": 14,
            "processor_class": "PixtralProcessor",
            "spatial_merge_size": 2,
        },
    )
    written(path.parent, "preprocessor_config.json", {"image_processor_type": "PixtralImageProcessor"})

    loaded = loading.load_processors(loading.open_pipeline(str(pipeline)))["tokenizer"]
    messages = [[{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]]
    made = loaded.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", padding="max_length", max_length=64
    )
    text = f"[user]{PROMPT}"
    assert made["input_ids"].shape == (1, 64)
    assert int(made["attention_mask"].sum()) == len(text) + 1
    assert loaded.tokenizer.decode(made["input_ids"][0]).endswith(f"<bos>{text}")


def test_with_torchvision_they_are_transformers_own(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(loading.open_pipeline(str(saved(qwen_edit))).processors) == {"processor"}
    assert set(loading.open_pipeline(str(saved(flux2_dev))).processors) == {"tokenizer"}
    monkeypatch.setattr(processors, "is_torchvision_available", lambda: True)
    assert loading.open_pipeline(str(saved(qwen_edit))).processors == {}
    assert loading.open_pipeline(str(saved(flux2_dev))).processors == {}


@pytest.mark.parametrize("cls", [transformers.CLIPTokenizer, transformers.CLIPProcessor, dict, len])
def test_all_others_load_as_they_are(cls: Any) -> None:
    assert processors.without_torchvision(cls) is None
