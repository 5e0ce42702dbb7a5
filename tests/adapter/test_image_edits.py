"""Edits and variations through OpenAI's own client, against the running server."""

from __future__ import annotations

import base64
import io
import uuid
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from diffusion_backend.client import DiffusionClient
from openai.types import ImageEditCompletedEvent, ImageEditPartialImageEvent, ImagesResponse
from PIL import Image
from video_server import refusal

from tests.running_server import RunningServer

MODEL = "emoji-flux"
PROMPT = "a panda on a blue background"
EDITS, VARIATIONS = "/v1/images/edits", "/v1/images/variations"
Pixels = npt.NDArray[np.int16]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.adapter_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def fox(client: openai.OpenAI) -> bytes:
    """A picture that the model made, as a PNG file."""
    answer = client.images.generate(prompt="a fox on a white background", extra_body={"seed": 1})
    return files_of(answer)[0]


@pytest.fixture(scope="module")
def left(fox: bytes) -> bytes:
    """A mask: the left half may change."""
    return mask_of(Image.open(io.BytesIO(fox)).size)


def mask_of(size: tuple[int, int]) -> bytes:
    mask = Image.new("RGBA", size, (9, 9, 9, 255))
    mask.paste((9, 9, 9, 0), (0, 0, size[0] // 2, size[1]))
    return save(mask)


def save(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def edit(
    client: openai.OpenAI, image: Any, extra: dict[str, Any] | None = None, **fields: Any
) -> ImagesResponse:
    answer = client.images.edit(image=image, **{"prompt": PROMPT, **fields}, extra_body=extra)
    assert isinstance(answer, ImagesResponse)
    return answer


def files_of(answer: ImagesResponse) -> list[bytes]:
    assert answer.data is not None
    return [base64.b64decode(image.b64_json or "") for image in answer.data]


def only(answer: ImagesResponse) -> bytes:
    (file,) = files_of(answer)
    return file


def pixels_of(file: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(np.int16)


def distance(one: bytes, other: bytes) -> int:
    return int(np.abs(pixels_of(one) - pixels_of(other)).max())


def mean_distance(one: bytes, other: bytes) -> float:
    return float(np.abs(pixels_of(one) - pixels_of(other)).mean())


def test_a_single_file(client: openai.OpenAI, fox: bytes) -> None:
    answer = edit(client, fox, {"seed": 3})
    assert answer.size == "64x64"
    assert (answer.quality, answer.output_format, answer.background) == ("auto", "png", "opaque")
    assert answer.model_extra is not None
    assert (answer.model_extra["model"], answer.model_extra["seed"]) == (MODEL, 3)
    assert only(answer) == only(edit(client, fox, {"seed": 3}))
    assert distance(only(answer), fox) > 30
    assert distance(only(answer), only(edit(client, fox, {"seed": 4}))) > 1


def test_a_list_of_files(client: openai.OpenAI, fox: bytes) -> None:
    assert only(edit(client, [fox], {"seed": 3})) == only(edit(client, fox, {"seed": 3}))
    with pytest.raises(openai.BadRequestError) as caught:
        edit(client, [fox, fox])
    assert caught.value.param == "image"
    assert "allowed: " in str(caught.value)


def test_what_the_mask_keeps_is_kept(client: openai.OpenAI, fox: bytes, left: bytes) -> None:
    answer = edit(client, fox, {"seed": 3}, mask=left)
    made, given = pixels_of(only(answer)), pixels_of(fox)
    middle = given.shape[1] // 2
    assert np.abs(made[:, middle:] - given[:, middle:]).max() <= 1
    assert np.abs(made[:, :middle] - given[:, :middle]).mean() > 3


def test_an_image_s_own_transparency_is_its_mask(client: openai.OpenAI, fox: bytes, left: bytes) -> None:
    image = Image.open(io.BytesIO(fox)).convert("RGB")
    image.putalpha(Image.open(io.BytesIO(left)).getchannel("A"))
    assert only(edit(client, save(image), {"seed": 3})) == only(edit(client, fox, {"seed": 3}, mask=left))


@pytest.mark.parametrize("with_mask", [False, True])
def test_several_are_those_of_the_following_seeds(
    client: openai.OpenAI, fox: bytes, left: bytes, with_mask: bool
) -> None:
    more: dict[str, Any] = {"mask": left} if with_mask else {}
    files = files_of(edit(client, fox, {"seed": 21}, n=3, **more))
    assert len(set(files)) == 3
    for seed, file in zip((21, 22, 23), files, strict=True):
        assert distance(file, only(edit(client, fox, {"seed": seed}, **more))) <= 1


@pytest.mark.parametrize("with_mask", [False, True])
def test_a_stream(client: openai.OpenAI, fox: bytes, left: bytes, with_mask: bool) -> None:
    more: dict[str, Any] = {"mask": left} if with_mask else {}
    events = list(
        client.images.edit(
            image=fox, prompt=PROMPT, stream=True, partial_images=2, extra_body={"seed": 3}, **more
        )
    )
    *partials, completed = events
    assert [type(event) for event in partials] == [ImageEditPartialImageEvent] * 2
    assert isinstance(completed, ImageEditCompletedEvent)
    assert [event.type for event in events] == ["image_edit.partial_image"] * 2 + ["image_edit.completed"]
    assert [event.size for event in events] == ["64x64"] * 3
    assert base64.b64decode(completed.b64_json) == only(edit(client, fox, {"seed": 3}, **more))
    if with_mask:
        for event in partials:
            preview = pixels_of(base64.b64decode(event.b64_json))
            assert np.abs(preview[:, 32:] - pixels_of(fox)[:, 32:]).max() <= 1


@pytest.mark.parametrize(
    ("given", "made"),
    [((72, 96), "72x96"), ((75, 91), "72x88"), ((500, 250), "128x64"), ((3, 1000), "8x128"), ((1, 1), "8x8")],
)
def test_the_size_is_the_image_s(
    client: openai.OpenAI, fox: bytes, given: tuple[int, int], made: str
) -> None:
    image = save(Image.open(io.BytesIO(fox)).resize(given))
    for size in (None, "auto"):
        answer = edit(client, image, {"seed": 3}, size=size)
        assert answer.size == made
        height, width, _ = pixels_of(only(answer)).shape
        assert f"{width}x{height}" == made


def test_a_size_of_its_own(client: openai.OpenAI, server: RunningServer, fox: bytes) -> None:
    """The stages make the same of the files as they were sent, by the same rule."""
    image = Image.open(io.BytesIO(fox)).convert("RGB").resize((300, 200))
    size = {"width": 128, "height": 64}
    with DiffusionClient(server.grpc_url) as direct:
        for mask in (None, mask_of((300, 200))):
            more: dict[str, Any] = {} if mask is None else {"mask": mask}
            file = only(edit(client, save(image), {"seed": 3}, size="128x64", **more))
            alone = direct.generate(MODEL, PROMPT, image=save(image), seed=3, **size, **more)
            assert np.abs(pixels_of(file) - alone.images.astype(np.int16)).max() <= 1


def test_json_and_forms_are_the_same(
    client: openai.OpenAI, server: RunningServer, fox: bytes, left: bytes
) -> None:
    expected = only(edit(client, fox, {"seed": 3}, mask=left))
    url, mask_url = (f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in (fox, left))
    fields = {"prompt": PROMPT, "seed": 3}
    for images in ({"image": url}, {"images": [{"image_url": url}]}, {"image": [{"image_url": url}]}):
        for mask in (mask_url, {"image_url": mask_url}):
            answer = httpx.post(
                server.adapter_url + EDITS, json={**fields, **images, "mask": mask}, timeout=60
            )
            assert answer.status_code == 200, answer.text
            assert base64.b64decode(answer.json()["data"][0]["b64_json"]) == expected


def test_strength(client: openai.OpenAI, fox: bytes) -> None:
    """A tenth keeps most of the image, and the whole leaves little of it."""

    def change(**extra: Any) -> float:
        return mean_distance(only(edit(client, fox, {"seed": 3, **extra})), fox)

    little, much = change(strength=0.1), change(strength=1.0)
    assert little < much / 2
    assert change(input_fidelity="low") == change()
    assert little < change(input_fidelity="high") < change()


def test_formats_and_urls(client: openai.OpenAI, fox: bytes) -> None:
    answer = edit(client, fox, {"seed": 3, "response_format": "url"}, output_format="webp", quality="low")
    assert answer.data is not None
    assert answer.quality == "low"
    assert answer.data[0].url is not None
    file = httpx.get(answer.data[0].url)
    assert file.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(file.content)).size == (64, 64)


def test_variations(client: openai.OpenAI, fox: bytes) -> None:
    answer = client.images.create_variation(
        image=fox, n=2, response_format="b64_json", model=MODEL, extra_body={"seed": 3}
    )
    files = files_of(answer)
    assert len(set(files)) == 2
    assert answer.size == "64x64"
    apple = only(edit(client, fox, {"seed": 3}, prompt="a red apple"))  # the model's default
    for file in files:
        assert 1 < mean_distance(file, fox) < mean_distance(file, apple) / 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.create_variation(image=fox, size="256x256")
    assert (caught.value.param, caught.value.code) == ("size", "invalid_size")


def test_a_repeated_edit_is_made_once(server: RunningServer, fox: bytes, left: bytes) -> None:
    key = {"idempotency-key": str(uuid.uuid4())}

    def post(image: bytes = fox, mask: bytes = left, name: str = "fox.png") -> httpx.Response:
        files = {"image": (name, image), "mask": mask}
        return httpx.post(
            server.adapter_url + EDITS, data={"prompt": PROMPT}, files=files, headers=key, timeout=60
        )

    first = post().json()
    assert post().json() == first, "no seed was given: it is the same picture all the same"
    assert post(name="other.png").json() == first
    for other in (post(image=left), post(mask=fox)):
        assert refusal(other) == (409, "Idempotency-Key", "idempotency_key_reused")


def test_the_card(client: openai.OpenAI) -> None:
    card = client.models.retrieve(MODEL).model_extra
    assert card is not None
    assert card["tasks"] == ["text-to-image", "image-to-image", "inpainting"]
    assert card["max_input_images"] == 1


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"mask": mask_of((32, 64))}, "mask", "invalid_mask"),
        ({"mask": save(Image.new("RGB", (64, 64)))}, "mask", "invalid_mask"),
        ({"mask": save(Image.new("RGBA", (64, 64), (0, 0, 0, 255)))}, "mask", "invalid_mask"),
        ({"mask": save(Image.new("RGBA", (64, 64), (0, 0, 0, 1)))}, "mask", "invalid_mask"),
        ({"mask": b""}, "mask", "empty_file"),
        ({"image": b"a fox"}, "image", "unsupported_image_format"),
        ({"image": [b"a fox"]}, "image[0]", "unsupported_image_format"),
        ({"size": "65x64"}, "size", "invalid_size"),
        ({"size": "256x256"}, "size", "invalid_size"),
        ({"strength": 0}, "strength", "invalid_value"),
        ({"strength": 1.5}, "strength", "invalid_value"),
        ({"n": 11}, "n", "invalid_value"),
        ({"prompt": " "}, "prompt", "empty_prompt"),
        ({"model": "none"}, "model", "model_not_found"),
    ],
)
def test_errors(client: openai.OpenAI, fox: bytes, fields: dict[str, Any], param: str, code: str) -> None:
    extra = {name: fields[name] for name in ("strength",) if name in fields}
    fields = {"image": fox, **{name: value for name, value in fields.items() if name not in extra}}
    with pytest.raises(openai.APIStatusError) as caught:
        edit(client, extra=extra, **fields)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.status_code == (404 if code == "model_not_found" else 400)


def test_what_a_generation_takes_no_image_for(client: openai.OpenAI) -> None:
    for field in ("image", "mask", "strength", "input_fidelity"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.images.generate(prompt=PROMPT, extra_body={field: "x"})
        assert (caught.value.param, caught.value.code) == (field, "unknown_parameter")
