"""The pictures of requests, as they become what goes to Triton."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path

import pytest
from diffusion_backend.errors import DiffusionError
from diffusion_backend.model_config import read_model_config
from diffusion_backend.settings import ModelLimits, parse_limits
from hostile_files import WHOLE_PNG, save
from openai_adapter.image_inputs import ImageInputs, Inputs
from openai_adapter.image_request import EditRequest, Plan, parse
from openai_adapter.settings import Settings
from PIL import Image
from starlette.datastructures import UploadFile

from openai_adapter import uploads
from tests.running_server import ROOT


@pytest.fixture(scope="module")
def limits() -> ModelLimits:
    """Of emoji-flux, which takes one image."""
    return parse_limits(read_model_config(ROOT / "model_repository/emoji-flux").parameters)


@pytest.fixture
def inputs(tmp_path: Path) -> ImageInputs:
    return ImageInputs(Settings(triton_url="127.0.0.1:1", data_dir=tmp_path))


def edit(image: bytes | list[bytes], **fields: object) -> EditRequest:
    """A request as a form brings it."""
    files = [UploadFile(io.BytesIO(file)) for file in (image if isinstance(image, list) else [image])]
    return parse(
        EditRequest, {"prompt": "a fox", "image": files if isinstance(image, list) else files[0], **fields}
    )


def plan(inputs: ImageInputs, request: EditRequest, limits: ModelLimits) -> Plan:
    return asyncio.run(inputs.of(request).plan(limits))


@pytest.mark.parametrize("name", ["image", "images"])
def test_more_images_than_the_model_takes_are_not_looked_at(
    name: str, inputs: ImageInputs, limits: ModelLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "decode", None)
    files = [UploadFile(io.BytesIO(WHOLE_PNG)) for _ in range(2)]
    request = parse(EditRequest, {"prompt": "a fox", name: files})
    with pytest.raises(DiffusionError, match=f"'{name}' has 2 pictures, and .* allowed: at most 1") as caught:
        plan(inputs, request, limits)
    assert (caught.value.param, caught.value.code) == (name, "too_many_images")


def test_transparency_that_is_cut_off_is_said(inputs: ImageInputs, limits: ModelLimits) -> None:
    """A wide image with its left edge transparent, made a square: the whole would change, or nothing."""
    image = Image.new("RGBA", (200, 100), "red")
    image.paste((0, 0, 0, 0), (0, 0, 40, 100))
    request = edit(save(image, "PNG"), size="64x64")
    with pytest.raises(
        DiffusionError, match=r"marks nothing, .* of the 64x64 pixels that are left"
    ) as caught:
        plan(inputs, request, limits)
    assert (caught.value.param, caught.value.code) == ("mask", "invalid_mask")
    wide = edit(save(image, "PNG"), size="128x64")
    assert plan(inputs, wide, limits).settings.task == "inpainting"


def test_high_fidelity_with_too_few_steps_names_what_was_sent(
    inputs: ImageInputs, limits: ModelLimits
) -> None:
    request = edit(WHOLE_PNG, input_fidelity="high", num_inference_steps=1)
    with pytest.raises(DiffusionError, match="'input_fidelity' is 'high', so that 'strength' is") as caught:
        plan(inputs, request, limits)
    assert caught.value.param == "input_fidelity"


def test_files_of_another_size_are_made_anew(inputs: ImageInputs, limits: ModelLimits) -> None:
    """As when an earlier request with the same key was planned by other limits."""

    async def both() -> tuple[Inputs, Inputs]:
        mine = inputs.of(edit(WHOLE_PNG, size="64x64"))
        other = await inputs.of(edit(WHOLE_PNG, size="32x32")).plan(limits)
        return await mine.files(await mine.plan(limits)), await mine.files(other)

    files = [each.images[0] for each in asyncio.run(both())]
    assert [Image.open(io.BytesIO(file)).size for file in files] == [(64, 64), (32, 32)]


def test_pictures_of_many_requests_are_not_held_at_once() -> None:
    """Twelve at a time take what one does, but for their files."""
    script = """if True:
        import asyncio, io, sys, tempfile
        from pathlib import Path
        from diffusion_backend import malloc
        from diffusion_backend.model_config import read_model_config
        from diffusion_backend.settings import parse_limits
        from hostile_files import save
        from openai_adapter.image_inputs import ImageInputs
        from openai_adapter.image_request import EditRequest, parse
        from openai_adapter.settings import Settings
        from peak_memory import peak_memory
        from PIL import Image
        from starlette.datastructures import UploadFile

        limits = parse_limits(read_model_config(Path(sys.argv[1])).parameters)
        inputs = ImageInputs(Settings(triton_url="127.0.0.1:1", data_dir=Path(tempfile.mkdtemp())))
        data = save(Image.new("RGBA", (4000, 4000)), "PNG")

        async def plan(count):
            fields = {"prompt": "a fox", "size": "64x64"}
            requests = [
                parse(EditRequest, {**fields, **{name: UploadFile(io.BytesIO(data)) for name in ("image", "mask")}})
                for _ in range(count)
            ]
            made = [inputs.of(request) for request in requests]
            plans = await asyncio.gather(*(each.plan(limits) for each in made))
            return await asyncio.gather(*(each.files(plan) for each, plan in zip(made, plans)))

        malloc.return_freed_memory()
        start = peak_memory()
        asyncio.run(plan(1))
        one = peak_memory()
        asyncio.run(plan(12))
        print(one - start, peak_memory() - start)
    """
    done = subprocess.run(
        [sys.executable, "-c", script, ROOT / "model_repository/emoji-flux"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one, twelve = map(int, done.stdout.split())
    assert one > 64 * 2**20
    assert twelve < 1.5 * one
