"""The stages on the real server, called as direct Triton users call them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import queue
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
from diffusers import DiffusionPipeline
from diffusion_backend import conditioning, seams
from diffusion_backend.client import (
    ADMIN_KEY_METADATA,
    AsyncDiffusionClient,
    DiffusionClient,
    Generation,
)
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.settings import ModelLimits, resolve

from tests.running_server import ROOT, RunningServer
from tests.triton_inputs import bytes_input

MODEL = "emoji-flux"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    with DiffusionClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def limits(client: DiffusionClient) -> ModelLimits:
    return client.limits(MODEL)


def test_a_picture_equals_unsplit_diffusers(client: DiffusionClient, limits: ModelLimits) -> None:
    """Through three processes and two wires, with the same number of threads: the same pixels."""
    pipe = DiffusionPipeline.from_pretrained(
        ROOT / "model_repository/emoji-flux/pipeline", dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    for parameters in ({"seed": 1}, {"seed": 2, "width": 96, "height": 128, "num_inference_steps": 4}):
        generation = client.generate(MODEL, "a fox on a blue background", **parameters)
        settings = resolve(limits, "a fox on a blue background", None, parameters)
        arguments = {**seams.call_arguments(pipe, limits, settings), "output_type": "pil"}
        np.testing.assert_array_equal(generation.images, np.asarray(pipe(**arguments).images[0]))


def test_info_says_what_was_made(client: DiffusionClient) -> None:
    generation = client.generate(
        MODEL, "a fox", seed=7, quality="high", num_inference_steps=3, guidance_scale=3
    )
    info = generation.info
    assert generation.images.dtype == np.uint8
    assert (info["seed"], info["quality"], info["decode_path"]) == (7, "high", "fast")
    assert (info["step"], info["num_inference_steps"], info["is_final"]) == (3, 3, True)
    assert (info["width"], info["height"], info["guidance_scale"]) == (64, 64, 3.0)
    assert set(info["timings"]) == {"encode_seconds", "denoise_seconds", "decode_seconds"}
    assert all(seconds > 0 for seconds in info["timings"].values())


def test_seeds_prompts_and_negative_prompts_matter(client: DiffusionClient) -> None:
    def picture(prompt: str = "a fox", **parameters: Any) -> bytes:
        return client.generate(MODEL, prompt, num_inference_steps=4, **parameters).images.tobytes()

    same = picture(seed=1)
    assert same == picture(seed=1)
    different = [picture(seed=2), picture("a cat", seed=1), picture(seed=1, negative_prompt="a cat")]
    assert len({same, *different, picture(seed=1, guidance_scale=5.0)}) == 5


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"seed": -1}, "seed"),
        ({"width": 65}, "width"),
        ({"guidance_scale": 1000.0}, "guidance_scale"),
        ({"quality": "ultra"}, "quality"),
        ({"colour": "red"}, "colour"),
        ({"num_inference_steps": "4"}, "num_inference_steps"),
    ],
)
def test_refusals_name_the_field(client: DiffusionClient, arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(DiffusionError, match="allowed") as caught:
        client.generate(MODEL, **{"prompt": "a fox", **arguments})
    assert (caught.value.param, caught.value.status) == (param, Status.INVALID_ARG)


def test_a_prompt_that_is_not_utf8(server: RunningServer) -> None:
    answer = stream(server, MODEL, [bytes_input("prompt", b"fox \xff")])
    error = DiffusionError.from_text(str(answer))
    assert error is not None
    assert (error.param, error.code) == ("prompt", "invalid_unicode")


def test_a_request_is_one_picture(server: RunningServer, decode_settings: dict[str, Any]) -> None:
    """The stages have a batch axis for Triton's batcher; a client's second element would be another picture."""
    prompts = triton_grpc.InferInput("prompt", [2, 1], "BYTES")
    prompts.set_data_from_numpy(np.array([[b"a fox"], [b"a cat"]], dtype=np.object_))
    assert "'prompt' has 2 elements; allowed: 1" in str(stream(server, f"{MODEL}_encode", [prompts]))
    settings = triton_grpc.InferInput("settings", [2, 1], "BYTES")
    settings.set_data_from_numpy(np.array([[json.dumps(decode_settings).encode()]] * 2, dtype=np.object_))
    latents = tensor("latents", np.zeros((2, 4, 16, 16), np.float32), "FP32")
    assert "has 2 elements" in str(stream(server, f"{MODEL}_vae_decode", [latents, settings]))


def test_many_failures_do_not_hurt_the_server(client: DiffusionClient) -> None:
    for number in range(60):
        with pytest.raises(DiffusionError):
            client.generate(MODEL if number % 2 else "no-such-model", "a fox", seed=-1)
        if number % 10 == 0:
            client.generate(MODEL, "a fox", num_inference_steps=1)


def test_the_asyncio_client(server: RunningServer) -> None:
    async def run() -> tuple[list[Generation], DiffusionError]:
        async with AsyncDiffusionClient(server.grpc_url) as client:
            generations = await asyncio.gather(
                *(client.generate(MODEL, "a fox", seed=seed, num_inference_steps=2) for seed in range(4))
            )
            with pytest.raises(DiffusionError) as caught:
                await client.generate(MODEL, "a fox", seed=-1)
            return generations, caught.value

    generations, error = asyncio.run(run())
    assert [generation.info["seed"] for generation in generations] == [0, 1, 2, 3]
    assert len({generation.images.tobytes() for generation in generations}) == 4
    assert error.param == "seed"


def test_plain_tritonclient_as_documented(server: RunningServer) -> None:
    """The example of docs/direct_clients.md, as it stands there."""
    text = (ROOT / "docs/direct_clients.md").read_text()
    (example,) = [block for block in text.split("```python\n")[1:] if "import tritonclient" in block]
    code = example.split("```")[0].replace("127.0.0.1:8001", server.grpc_url)
    names: dict[str, Any] = {}
    exec(compile(code, "direct_clients.md", "exec"), names)
    assert names["picture"].shape == (64, 64, 3)
    assert names["info"]["seed"] == 1


def test_generate_stream_over_http(server: RunningServer) -> None:
    """What curl users do: plain JSON keys become request parameters."""
    body = json.dumps(
        {"prompt": "a fox", "seed": 3, "num_inference_steps": 2, "guidance_scale": 1.5}
    ).encode()
    request = urllib.request.Request(f"{server.http_url}/v2/models/{MODEL}/generate_stream", data=body)
    with urllib.request.urlopen(request, timeout=60) as response:
        (event,) = [
            json.loads(line[5:]) for line in response.read().splitlines() if line.startswith(b"data:")
        ]
    assert len(event["images"]) == 64 * 64 * 3
    assert json.loads(event["info"])["seed"] == 3


def test_management_apis_need_the_key(server: RunningServer) -> None:
    """Loading models runs code and shared memory reads memory: not for whoever reaches the port."""
    client = triton_grpc.InferenceServerClient(server.grpc_url)
    key = {ADMIN_KEY_METADATA: server.admin_key}
    for call in (
        lambda **headers: client.get_model_repository_index(**headers),
        lambda **headers: client.get_system_shared_memory_status(**headers),
        lambda **headers: client.get_trace_settings(**headers),
        lambda **headers: client.get_log_settings(**headers),
    ):
        with pytest.raises(Exception, match="restricted"):
            call()
        call(headers=key)
    with pytest.raises(Exception, match="restricted"):
        client.unload_model(MODEL)
    for path in ("repository/index", f"repository/models/{MODEL}/unload"):
        request = urllib.request.Request(f"{server.http_url}/v2/{path}", data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        assert caught.value.code == 403
    client.close()


def stream(server: RunningServer, model: str, inputs: list[Any]) -> Any:
    """One request to one model on a stream: the result, or the error."""
    answers: queue.Queue[Any] = queue.Queue()
    client = triton_grpc.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: answers.put(error if error else result))
    client.async_stream_infer(model, inputs, request_id=str(uuid.uuid4()))
    answer = answers.get(timeout=60)
    client.stop_stream()
    client.close()
    return answer


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str) -> Any:
    made = triton_grpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def warmup_blob(**settings: Any) -> conditioning.Conditioning:
    path = ROOT / "model_repository/emoji-flux_denoise/warmup/64x64.conditioning"
    blob = conditioning.unpack(path.read_bytes())
    return conditioning.Conditioning(blob.calls, {**blob.settings, **settings}, blob.encode_seconds)


def denoise(server: RunningServer, blob: bytes) -> Any:
    return stream(
        server, f"{MODEL}_denoise", [tensor("conditioning", np.frombuffer(blob, np.uint8), "UINT8")]
    )


def test_only_a_warmup_sample_asks_for_several_rows(server: RunningServer) -> None:
    forged = conditioning.pack(dataclasses.replace(warmup_blob(), rows=3))
    assert "'conditioning' has 3 rows; allowed: 1" in str(denoise(server, forged))


def test_latents_that_are_not_finite_are_an_error(server: RunningServer) -> None:
    """NaN from the model must never become a black picture. Forged here, by NaN prompt embeddings."""
    blob = warmup_blob()
    embeds, pooled, ids = blob.calls[0].result
    calls = [conditioning.Call("encode_prompt", (embeds * float("nan"), pooled, ids)), blob.calls[1]]
    answer = denoise(server, conditioning.pack(conditioning.Conditioning(calls, blob.settings, 0.0)))
    error = DiffusionError.from_text(str(answer))
    assert error is not None
    assert (error.code, error.status) == ("non_finite_latents", Status.INTERNAL)


@pytest.mark.parametrize(
    ("forged", "param"),
    [
        ({"width": 10**6}, "width"),
        ({"num_inference_steps": 10**9}, "num_inference_steps"),
        ({"x": 1}, "settings"),
    ],
)
def test_denoise_checks_what_encode_checked(
    server: RunningServer, forged: dict[str, Any], param: str
) -> None:
    error = DiffusionError.from_text(str(denoise(server, conditioning.pack(warmup_blob(**forged)))))
    assert error is not None
    assert (error.param, error.status) == (param, Status.INVALID_ARG)


def test_denoise_refuses_a_blob_that_is_none(server: RunningServer) -> None:
    error = DiffusionError.from_text(str(denoise(server, b"not safetensors")))
    assert error is not None
    assert error.param == "conditioning"


@pytest.mark.parametrize("stage", ["encode", "vae_decode", "denoise"])
def test_an_id_that_is_not_utf8_is_its_senders_fault_alone(server: RunningServer, stage: str) -> None:
    """Triton hands ids on as they come. Batch mates of such a request are answered."""
    url = f"{server.http_url}/v2/models/{MODEL}_{stage}/infer"
    if not url.startswith("http"):
        url = f"http://{url}"
    words = b"x " * 2000  # encoding takes a moment, so that requests wait and share a batch

    def infer(request_id: bytes) -> httpx.Response:
        inputs = b'{"name":"prompt","shape":[1,1],"datatype":"BYTES","data":["%s"]}' % words
        if stage != "encode":
            inputs = b'{"name":"describe","shape":[%s],"datatype":"BYTES","data":["x"]}' % (
                b"1" if stage == "denoise" else b"1,1"
            )
        return httpx.post(url, content=b'{"id":"%s","inputs":[%s]}' % (request_id, inputs), timeout=60)

    ids = [b"\xff\xfe" if number % 4 == 0 else b"good-%d" % number for number in range(40)]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(infer, ids))
    for request_id, answer in zip(ids, answers, strict=True):
        if request_id.startswith(b"good"):
            assert answer.status_code == 200 or stage == "denoise", answer.text
        else:
            error = DiffusionError.from_text(answer.json()["error"])
            assert stage == "denoise" or (error is not None and error.param == "id"), answer.text


def test_parameters_that_are_not_utf8_are_refused(server: RunningServer) -> None:
    url = server.http_url if server.http_url.startswith("http") else f"http://{server.http_url}"
    body = b'{"quality":"a\xff","prompt":"a fox"}'
    answer = httpx.post(f"{url}/v2/models/{MODEL}/generate_stream", content=body, timeout=60)
    assert "the parameters are not valid UTF-8" in answer.text


def decode(server: RunningServer, latents: np.ndarray[Any, Any], settings: str) -> Any:
    settings_tensor = triton_grpc.InferInput("settings", [1, 1], "BYTES")
    settings_tensor.set_data_from_numpy(np.array([[settings.encode()]], dtype=np.object_))
    return stream(server, f"{MODEL}_vae_decode", [tensor("latents", latents, "FP32"), settings_tensor])


@pytest.fixture(scope="module")
def decode_settings() -> dict[str, Any]:
    path = ROOT / "model_repository/emoji-flux_vae_decode/warmup/64x64_lossless.settings"
    settings: dict[str, Any] = json.loads(path.read_bytes()[4:])
    return settings


def test_vae_decode_by_itself(server: RunningServer, decode_settings: dict[str, Any]) -> None:
    result = decode(server, np.zeros((1, 4, 16, 16), np.float32), json.dumps(decode_settings))
    assert result.as_numpy("images").shape == (1, 64, 64, 3)


@pytest.mark.parametrize(
    ("latents", "change", "words"),
    [
        (np.full((1, 4, 16, 16), np.nan, np.float32), {}, "not finite"),
        (np.zeros((1, 4, 16, 16), np.float32), {"quality": "ultra"}, "allowed: auto, standard, lossless"),
        (np.zeros((1, 4, 16, 16), np.float32), {"width": "64"}, "width: Input should be a valid integer"),
        (
            np.zeros((1, 4, 16, 16), np.float32),
            {"width": 72},
            "allowed for 72x64: one request's, ending in 16, 18",
        ),
        (np.zeros((1, 4, 128, 128), np.float32), {"width": 512, "height": 512}, "at most 128x128"),
        (np.zeros((1, 4, 0, 16), np.float32), {}, "one request's, ending in 16, 16"),
        (
            np.zeros((1, 4, 16, 16), np.float32),
            {"seed": -5},
            "seed: Input should be greater than or equal to 0",
        ),
        (np.zeros((1, 4, 16, 16), np.float32), {"decode_arguments": {"evil": 1}}, "does not take: ['evil']"),
        (
            np.zeros((1, 4, 16, 16), np.float32),
            {"decode_arguments": {"return_dict": {"value": True}}},
            "does not take: ['return_dict']",
        ),
        (np.zeros((1, 4, 16, 16), np.float32), {"timings": {"x": 1.0}}, "timings.x"),
        (np.zeros((1, 5, 16, 16), np.float32), {}, "unexpected shape"),
    ],
)
def test_vae_decode_refuses(
    server: RunningServer,
    decode_settings: dict[str, Any],
    latents: np.ndarray[Any, Any],
    change: dict[str, Any],
    words: str,
) -> None:
    assert words in str(decode(server, latents, json.dumps({**decode_settings, **change})))


def describe_input(stage: str) -> Any:
    batched = stage != "denoise"
    value = np.array([b""], dtype=np.object_)
    return tensor("describe", value[None] if batched else value, "BYTES")


@pytest.mark.parametrize(
    ("stage", "components"),
    [
        ("encode", {"text_encoder", "text_encoder_2", "vae"}),
        ("denoise", {"transformer"}),
        ("vae_decode", {"vae"}),
    ],
)
def test_a_stage_describes_its_process(server: RunningServer, stage: str, components: set[str]) -> None:
    result = stream(server, f"{MODEL}_{stage}", [describe_input(stage)])
    description = json.loads(result.as_numpy("description").reshape(-1)[0])
    assert set(description["components"]) == components
    assert all(part["dtype"] == "float32" for part in description["components"].values())
    assert description["bytes_loaded"] == sum(part["bytes"] for part in description["components"].values())
    assert (description["stage"], description["device"]) == (stage, "cpu")
    assert description["instance"].startswith(f"{MODEL}_{stage}_0")
    command = Path(f"/proc/{description['pid']}/cmdline").read_text()
    assert f"{MODEL}_{stage}" in command
    assert description["versions"]["torch"] == torch.__version__


def test_denoise_describes_itself_while_it_works(client: DiffusionClient, server: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(client.generate, MODEL, "a fox", seed=1, num_inference_steps=100)
        time.sleep(0.3)
        started = time.monotonic()
        stream(server, f"{MODEL}_denoise", [describe_input("denoise")])
        assert time.monotonic() - started < 1
        assert not work.done()
        work.result()


@pytest.mark.parametrize(
    ("stage", "given", "missing"),
    [
        ("encode", "negative_prompt", "prompt"),
        ("vae_decode", "settings", "latents"),
        ("vae_decode", "latents", "settings"),
    ],
)
def test_optional_for_describe_alone(
    server: RunningServer, decode_settings: dict[str, Any], stage: str, given: str, missing: str
) -> None:
    inputs = {
        "negative_prompt": lambda: tensor("negative_prompt", np.array([[b"x"]], np.object_), "BYTES"),
        "settings": lambda: tensor(
            "settings", np.array([[json.dumps(decode_settings).encode()]], np.object_), "BYTES"
        ),
        "latents": lambda: tensor("latents", np.zeros((1, 4, 16, 16), np.float32), "FP32"),
    }
    error = DiffusionError.from_text(str(stream(server, f"{MODEL}_{stage}", [inputs[given]()])))
    assert error is not None
    assert (error.param, error.status) == (missing, Status.INVALID_ARG)


def test_the_log_says_what_each_stage_loaded(server: RunningServer) -> None:
    log = server.log.read_text()
    assert "emoji-flux_encode: loaded text_encoder_2 (T5EncoderModel, torch.float32, 1443328 bytes)" in log
    assert (
        "emoji-flux_denoise: loaded transformer (FluxTransformer2DModel, torch.float32, 20536384 bytes)"
        in log
    )
    assert "emoji-flux_vae_decode: loaded vae (AutoencoderKL, torch.float32, 5799292 bytes)" in log
