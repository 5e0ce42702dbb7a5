"""Processors of a pipeline (a tokenizer, and what makes numbers of images) where torchvision is not installed.

transformers makes videos ready with torchvision, and some of its processors do not load without it, though no pipeline
here gives them a video. They are then built of their other parts, from the same files.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import ProcessorMixin
from transformers.utils import is_torchvision_available

_VIDEO_PART = "video_processor"


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
    """The tokenizer and the chat template of transformers' class of this name, which cannot even be imported.

    FLUX.2 gives it no images.
    """

    def __init__(
        self, tokenizer: Any = None, chat_template: str | None = None, image_token: str = "[IMG]"
    ) -> None:
        super().__init__(tokenizer, chat_template=chat_template)
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)


# diffusers saves it as a class of this module's.
PixtralProcessor.__module__ = ProcessorMixin.__module__
TEXT_ONLY = {PixtralProcessor.__name__: PixtralProcessor}


def without_torchvision(cls: Any) -> type[ProcessorMixin] | None:
    """The class that does the work of a transformers class without torchvision; None where that itself does it.

    ``cls`` may be what transformers has in the place of a class that it cannot import.
    """
    if not isinstance(cls, type):
        return None
    if cls.__name__ in TEXT_ONLY:
        return TEXT_ONLY[cls.__name__]
    if issubclass(cls, ProcessorMixin) and _VIDEO_PART in inspect.signature(cls).parameters:
        return _without_video(cls)
    return None


def stand_in(cls: Any) -> type[ProcessorMixin] | None:
    """What a component of class ``cls`` is to be loaded as, if as something else."""
    return None if is_torchvision_available() else without_torchvision(cls)


def _without_video(cls: Any) -> type[ProcessorMixin]:
    """``cls`` with no video processor. A processor's parts are the arguments that its constructor names."""

    class WithoutVideo(cls):  # type: ignore[misc]
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
        ) -> None:
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

    # Files and libraries know it by these.
    WithoutVideo.__name__, WithoutVideo.__module__ = cls.__name__, cls.__module__
    return WithoutVideo
