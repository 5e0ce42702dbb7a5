"""``docs/families.md``: written by ``python -m tests.families.table``, which runs the tests that check it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from diffusion_backend import loading, oddities, processors
from diffusion_backend.loading import Component, Stage

from tests.families.family import Family
from tests.families.three_stages import Made

FILE = Path(__file__).resolve().parents[2] / "docs/families.md"
_TESTS = ("test_parity.py", "test_image_tasks.py")
_UPDATE = "UPDATE_FAMILIES_TABLE"
UPDATE = _UPDATE in os.environ

_TASKS_HEADING = "\n## Tasks that take images\n"
_ABOUT = f"""\
# Pipeline families

Every family below is run by `tests/families` in a tiny version with random weights: once by plain diffusers, and once
by way of the three stages, with everything that crosses between them turned to bytes and back. **Bit-identical** says
that both made the same tensor in float32 on a CPU, with the same number of threads, before and after it was rounded
to pixels.

The last column names what the product knows about a pipeline beyond what its own code does; the reasons stand in
`{Path(oddities.__file__ or "").name}` and, for processors that transformers loads with torchvision only, in
`{Path(processors.__file__ or "").name}` (`python_backend/diffusion_backend`).

Families that are not in the table may well work: `triton-diffusion add` tries a pipeline without its weights, and
refuses it, with the reason, if it does not split.

This file is written by `python -m tests.families.table`, which runs the tests; they fail when it is stale.

| Family | Pipeline | Task | Three stages | `add` | VAE | Recorded by encode | Sent to vae_decode | Exceptions |
|---|---|---|---|---|---|---|---|---|
"""


_TASKS = f"""{_TASKS_HEADING}
One model on disk does several tasks, with pipelines of other classes that share its components; `add` finds them by
dry runs. Here the whole is the task's own class in plain diffusers. Where there is a strength it is 0.6, and a mask
marks a part of the image. The last column is the largest difference that batching made to the latents: four different
requests that arrive at different steps, against each alone, in float32. `test_edits_on_server.py` asks a running server
for each of them, three pictures at a time, with OpenAI's client.

| Family | Task | Images | Class | Three stages | Batched |
|---|---|---|---|---|---|
"""


def row(family: Family, folder: Path, made: Made, refusal: str | None) -> str:
    """A family's line of the table."""
    pipeline = loading.open_pipeline(str(folder))
    (vae,) = (component for component in pipeline.modules if component.stage is Stage.VAE_DECODE)
    calls = [f"`{name}`{_times(made.recorded.count(name))}" for name in dict.fromkeys(made.recorded)]
    sent = [f"latents {'x'.join(str(side) for side in made.latents_shape[1:])}"]
    sent += [f"`{name}`" for name in made.decode_arguments]
    verdict = "served" if refusal is None else "refused: " + refusal.partition("cannot be served: ")[2]
    cells = (
        family.name,
        f"`{family.pipeline}`",
        family.task,
        "bit-identical",
        verdict,
        f"`{vae.cls.__name__}`",
        ", ".join(calls),
        ", ".join(sent),
        ", ".join(f"`{name}`" for name in _exceptions(pipeline, vae, made)) or "none",
    )
    return "| " + " | ".join(cells) + " |"


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


def _exceptions(pipeline: loading.PipelineFolder, vae: Component, made: Made) -> list[str]:
    """The entries of ``oddities`` and the classes of ``processors`` that apply."""
    cls = pipeline.pipeline_class
    names = [*oddities.call_arguments(cls, 1, 1), *oddities.init_arguments(cls)]
    names += [c.cls.__name__ for c in pipeline.modules if c.cls.__name__ in oddities.NESTED_CONFIGURATIONS]
    if hasattr(cls, "upcast_vae") and vae.cls.load_config(pipeline.folder / vae.name).get("force_upcast"):
        names.append("upcast_vae")
    if len(made.latents_shape) == 5 and made.pixels.ndim == 3:
        names.append(oddities.picture.__name__)
    return names + [replacement.__name__ for replacement in pipeline.processors.values()]


def task_row(family: Family, difference: float) -> str:
    """The line of one of a family's tasks."""
    cells = (
        family.name,
        family.task,
        str(family.images),
        f"`{family.relative or family.pipeline}`",
        "bit-identical",
        f"{difference:.0e}" if difference else "0",
    )
    return "| " + " | ".join(cells) + " |"


def without_figure(row: str) -> str:
    """A task's line without the last cell: how float32 rounds is the CPU's matter."""
    return row.rpartition(" | ")[0]


def read() -> tuple[list[str], list[str]]:
    """The lines of the families, and of their tasks, that the file has."""
    families, _, tasks = FILE.read_text().partition(_TASKS_HEADING)
    first, second = ([x for x in part.splitlines() if x.startswith("| ")][1:] for part in (families, tasks))
    return first, second


def write(families: list[str] | None = None, tasks: list[str] | None = None) -> None:
    """The file with one of its tables replaced, or both."""
    old = read()
    FILE.write_text(text(old[0] if families is None else families, old[1] if tasks is None else tasks))


def text(families: list[str], tasks: list[str]) -> str:
    """The whole file."""
    return _ABOUT + "".join(f"{x}\n" for x in families) + _TASKS + "".join(f"{x}\n" for x in tasks)


if __name__ == "__main__":
    os.environ[_UPDATE] = "1"
    sys.exit(pytest.main([str(Path(__file__).with_name(name)) for name in _TESTS]))
