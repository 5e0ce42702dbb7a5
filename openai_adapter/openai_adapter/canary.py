"""Whether the processes behind the models live: every stage is asked to describe itself, again and again.

Triton's own readiness does not say: tritonserver 2.51 calls a model ready whose process has died, and an ensemble's
readiness knows nothing of its steps' processes in newer ones either. A stage that is busy answers when it is done,
so no answer is no news; a dead one is an error, a second after the question.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_backend.client import AsyncDiffusionClient, to_error
from diffusion_backend.errors import DiffusionError, Status
from tritonclient.utils import InferenceServerException

logger = logging.getLogger(__name__)

_QUESTION_SECONDS = 5.0
_ANSWER_SECONDS = 30.0  # a stage answers after the batch that it is at


@dataclass
class _Stage:
    batched: bool
    problem: str | None = "it has not answered yet"
    proven_at: float = 0.0  # when the last question was asked that it answered
    description: Mapping[str, Any] | None = None
    question: asyncio.Task[None] | None = None


class Canary:
    """Asks the stages and remembers the answers."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        """``on_change`` is told the stage whose ``problem`` has come or gone."""
        self._on_change = on_change
        self._stages: dict[str, _Stage] = {}

    def watch(self, stages: Mapping[str, bool]) -> None:
        """From now on ask these; by name, whether the model has a batch axis."""
        self._stages = {
            name: self._stages.get(name) or _Stage(batched) for name, batched in sorted(stages.items())
        }
        for name, batched in stages.items():
            self._stages[name].batched = batched

    def ask(self, client: AsyncDiffusionClient) -> None:
        """Ask every stage that does not owe an answer."""
        for name, stage in self._stages.items():
            if stage.question is None or stage.question.done():
                stage.question = asyncio.create_task(self._ask(client, name, stage))

    def doubt(self, name: str) -> None:
        """Count for nothing what a stage has answered until now, and is about to."""
        if stage := self._stages.get(name):
            if stage.question:
                stage.question.cancel()
            self._stages[name] = _Stage(stage.batched, description=stage.description)

    def problem(self, name: str) -> str | None:
        """What is wrong with a stage; None when its last answer was a good one."""
        return self._stages[name].problem if name in self._stages else "it is not known"

    def description(self, name: str) -> Mapping[str, Any] | None:
        """The last one that the stage gave."""
        return self._stages[name].description if name in self._stages else None

    def proven_since(self, name: str, moment: float) -> bool:
        """Whether the stage has answered a question that was asked after ``moment`` (of ``time.monotonic``)."""
        return name in self._stages and self._stages[name].proven_at > moment

    async def close(self) -> None:
        questions = [stage.question for stage in self._stages.values() if stage.question]
        for question in questions:
            question.cancel()
        await asyncio.gather(*questions, return_exceptions=True)

    async def _ask(self, client: AsyncDiffusionClient, name: str, stage: _Stage) -> None:
        asked_at = time.monotonic()
        before = stage.problem
        try:
            # Newer servers know that one of several instances is dead, also when another one answers.
            if not await client.triton.is_model_ready(name, client_timeout=_QUESTION_SECONDS):
                raise DiffusionError("Triton says it is not ready", status=Status.UNAVAILABLE)
            stage.description = await client.describe(name, batched=stage.batched, timeout=_ANSWER_SECONDS)
            stage.proven_at = asked_at
            stage.problem = None
        except (DiffusionError, InferenceServerException) as error:
            failure = error if isinstance(error, DiffusionError) else to_error(error)
            if failure.code == "deadline_exceeded":
                return
            logger.debug("%s does not describe itself: %s", name, error)
            stage.problem = "it does not answer"
        if stage.problem != before:
            self._on_change(name)
