"""What a pipeline family is to these tests: a tiny pipeline with random weights, and the call that is compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusion_backend.tasks import needs_image

Build = Callable[[], dict[str, Any]]

# Some families read a quoted text with an encoder of its own.
PROMPT = 'a red fox holds a sign that says "hi"'
NEGATIVE_PROMPT = "blurry"


@dataclass(frozen=True, eq=False)
class Family:
    """One family: ``build`` makes the components of ``pipeline``, ``call`` are its call arguments in this test.

    ``images`` is how many a request for ``task`` brings. ``relative`` is the class of diffusers that does the task, if
    it is another than the one that is on disk.
    """

    name: str
    pipeline: str
    task: str
    build: Build
    call: dict[str, Any] = field(default_factory=dict)
    init: dict[str, Any] = field(default_factory=dict)
    images: int = 0
    relative: str | None = None

    @property
    def model(self) -> str:
        """The name that it is served by."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())

    @property
    def takes_image(self) -> bool:
        return self.images > 0

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of a request's result."""
        return self.call.get("width", 32), self.call.get("height", 32)

    def doing(self, task: str, relative: str | None = None, *, images: int = 1, **call: Any) -> Family:
        """The same pipeline on disk with another of its tasks."""
        return replace(self, task=task, relative=relative, images=images, call={**self.call, **call})

    def save(self, folder: Path) -> None:
        """Write the tiny pipeline and its serving defaults, as an operator would have them on disk."""
        torch.manual_seed(0)
        components = {
            name: part.eval() if isinstance(part, torch.nn.Module) else part
            for name, part in self.build().items()
        }
        cls: type[DiffusionPipeline] = getattr(diffusers, self.pipeline)
        cls(**components, **self.init).save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps({"prompt": PROMPT, **self.call}))


def family(
    name: str, pipeline: str, task: str = "text-to-image", *, init: dict[str, Any] | None = None, **call: Any
) -> Callable[[Build], Family]:
    """Decorates the function that makes a family's components."""

    def declare(build: Build) -> Family:
        return Family(name, pipeline, task, build, call, init or {}, int(needs_image(task)))

    return declare
