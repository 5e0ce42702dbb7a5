"""LoRAs on a real server: asked for through Triton and over the OpenAI API, of pictures and of clips."""

from __future__ import annotations

import base64
import io
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusion_backend import seams
from diffusion_backend.cli import main
from diffusion_backend.client import DiffusionClient
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.repository import read_model
from diffusion_backend.settings import resolve
from PIL import Image

from tests.families.family import PROMPT, Family
from tests.families.lora_files import save_lora
from tests.families.stable_diffusion import sd15
from tests.families.wan import wan21
from tests.running_server import RunningServer, running_server

PICTURES, CLIPS = "pictures", "clips"
# The second has no part in the text encoder; the third is that of the model of clips.
LORAS = {"style": ("unet", "text_encoder"), "ink.v2": ("unet",)}
ASKED = "style:0.6,ink.v2:-1.3"
FAST: dict[str, Any] = {"seed": 1, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def folders(
    saved: Callable[[Family], Path], repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Those of the model of pictures lie in its own folder."""
    made = {
        name: save_lora(saved(sd15), repository / PICTURES / name, *parts, seed=number)
        for number, (name, parts) in enumerate(LORAS.items())
    }
    return {**made, "motion": save_lora(saved(wan21), tmp_path_factory.mktemp("motion"), "transformer")}


@pytest.fixture(scope="module")
def added(saved: Callable[[Family], Path], repository: Path, folders: dict[str, Path]) -> Path:
    """A repository with two models that have LoRAs, added as operators do it."""
    for name, family, loras in ((PICTURES, sd15, LORAS), (CLIPS, wan21, ("motion",))):
        options = [option for lora in loras for option in ("--lora", f"{lora}={folders[lora]}")]
        assert main(["add", str(saved(family)), "--name", name, f"--repository={repository}", *options]) == 0
    return repository


@pytest.fixture(scope="module")
def server(added: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(added, tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[DiffusionClient]:
    with DiffusionClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.adapter_url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def pipe(saved: Callable[[Family], Path], folders: dict[str, Path]) -> Any:
    """Plain diffusers with the LoRAs of the model of pictures."""
    pipe = DiffusionPipeline.from_pretrained(saved(sd15), dtype=torch.float32, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    for number, name in enumerate(LORAS):
        pipe.load_lora_weights(folders[name], adapter_name=f"lora{number}")
    return pipe


def test_pictures_equal_diffusers_own(client: DiffusionClient, pipe: Any) -> None:
    limits = client.limits(PICTURES)
    assert set(limits.loras) == set(LORAS)
    made = {}
    for lora, names, weights in (
        (ASKED, ["lora1", "lora0"], [-1.3, 0.6]),
        ("style", ["lora0"], [1.0]),
        (None, [], []),
    ):
        pipe.enable_lora()
        pipe.set_adapters(names, weights) if names else pipe.disable_lora()
        arguments = seams.call_arguments(pipe, limits, resolve(limits, PROMPT, None, {"seed": 3}))
        expected = pipe(**{**arguments, "output_type": "pil"}).images[0]
        made[lora] = client.generate(PICTURES, PROMPT, seed=3, **({"lora": lora} if lora else {})).images
        np.testing.assert_array_equal(made[lora], np.asarray(expected))
    assert len({picture.tobytes() for picture in made.values()}) == 3


def test_requests_of_many_kinds_at_once(client: DiffusionClient) -> None:
    """Each is what it is alone, whatever runs beside it."""
    asked = [None, "style", ASKED, "ink.v2:0.3", "style:1.0"] * 4

    def make(number: int) -> Any:
        lora = {} if asked[number] is None else {"lora": asked[number]}
        return client.generate(PICTURES, PROMPT, seed=number % 5, **lora).images.astype(int)

    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(make, range(20)))
    for number, picture in enumerate(together):
        assert np.abs(picture - make(number)).max() <= 1, asked[number]


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("motion", "names 'motion'; allowed: ink.v2, style"),
        ("style:nan", "weight 'nan'"),
        ("style:-inf", "weight '-inf'"),
        ("style:21", "allowed: numbers from -20 to 20"),
        (1, "'lora' is 1; allowed: 'NAME'"),
    ],
)
def test_what_is_refused(client: DiffusionClient, lora: Any, words: str) -> None:
    with pytest.raises(DiffusionError) as caught:
        client.generate(PICTURES, PROMPT, lora=lora)
    assert words in caught.value.message
    assert (caught.value.param, caught.value.status) == ("lora", Status.INVALID_ARG)


def test_generate_stream_over_http(server: RunningServer, client: DiffusionClient) -> None:
    body = json.dumps({"prompt": PROMPT, "lora": ASKED, **FAST}).encode()
    url = f"{server.http_url}/v2/models/{PICTURES}/generate_stream"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        last = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line][-1]
    expected = client.generate(PICTURES, PROMPT, lora=ASKED, **FAST).images
    assert last["images"] == expected.reshape(-1).tolist()


@pytest.mark.parametrize("lora", [ASKED, {"style": 0.6, "ink.v2": -1.3}, {}], ids=type)
def test_pictures_over_the_openai_api(http: httpx.Client, client: DiffusionClient, lora: Any) -> None:
    asked = {"model": PICTURES, "prompt": PROMPT, "lora": lora, **FAST}
    answer = http.post("/v1/images/generations", json=asked)
    assert answer.status_code == 200, answer.text
    file = io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))
    expected = client.generate(PICTURES, PROMPT, **({"lora": ASKED} if lora else {}), **FAST)
    np.testing.assert_array_equal(np.asarray(Image.open(file)), expected.images)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("motion", "'lora' names 'motion'; allowed: ink.v2, style"),
        ({"style": "0.6"}, "'style' with the weight '0.6'"),
        ({"style": True}, "'style' with the weight true"),
        (["style"], "allowed: 'NAME' or 'NAME:WEIGHT'"),
        (7, "allowed: 'NAME' or 'NAME:WEIGHT'"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/images/generations", "/v1/videos"])
def test_the_openai_api_refuses_by_name(http: httpx.Client, route: str, lora: Any, words: str) -> None:
    model = PICTURES if "images" in route else CLIPS
    if model == CLIPS:
        lora = {"motion": lora["style"]} if isinstance(lora, dict) else "style" if lora == "motion" else lora
        words = words.replace("style", "motion").replace("'motion'; allowed: ink.v2, ", "'style'; allowed: ")
    answer = http.post(route, json={"model": model, "prompt": PROMPT, "lora": lora})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "lora"


def test_cards_name_them(http: httpx.Client) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert cards[PICTURES]["loras"] == sorted(LORAS)
    assert cards[CLIPS]["loras"] == ["motion"]
    assert "/" not in json.dumps(cards[PICTURES]["loras"])


def test_videos_as_json_and_as_forms(http: httpx.Client) -> None:
    """The same request is the same file: those that ask for the same LoRA are equal, and others are not."""
    asked = {"model": CLIPS, "prompt": PROMPT}
    fast = {name: str(value) for name, value in FAST.items()}
    answers = [
        http.post("/v1/videos", json={**asked, **FAST}),
        http.post("/v1/videos", json={**asked, **FAST, "lora": "motion:0.5"}),
        http.post("/v1/videos", json={**asked, **FAST, "lora": {"motion": 0.5}}),
        http.post("/v1/videos", data={**asked, **fast, "lora[motion]": "0.5"}),
        http.post("/v1/videos", data={**asked, **fast, "lora": "motion:0.5"}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5, [answer.text for answer in answers]
    jobs = [answer.json()["id"] for answer in answers]
    again = f"/v1/videos/{jobs[1]}"
    plain, *others = [_content(http, job) for job in jobs]
    assert set(others) == {others[0]} != {plain}
    assert http.get(again).json()["loras"] == {"motion": 0.5}
    remix = http.post(f"{again}/remix", json={"prompt": PROMPT}).json()
    assert _content(http, remix["id"]) == others[0]


def _content(http: httpx.Client, job: str) -> bytes:
    deadline = time.monotonic() + 60
    while (video := http.get(f"/v1/videos/{job}").json())["status"] != "completed":
        assert video["status"] != "failed", video
        assert time.monotonic() < deadline, video
        time.sleep(0.05)
    return http.get(f"/v1/videos/{job}/content").content


def test_add_and_list_say_which(
    added: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_model(added / PICTURES).loras == {name: f"./{name}" for name in LORAS}
    assert read_model(added / CLIPS).loras == {"motion": str(folders["motion"])}
    assert main(["list", f"--repository={added}"]) == 0
    assert capsys.readouterr().out.count(", LoRAs: ") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["style"], "'lora' is 'style'; allowed: NAME=FOLDER"),
        (["style="], "'lora' is 'style='; allowed: NAME=FOLDER"),
        (["a b=x"], "the name 'a b'; allowed: up to 64 letters"),
        (["a=x", "a=y"], "'a' twice"),
        (["a=nowhere"], "the LoRA 'a' cannot be used: there is no folder nowhere"),
    ],
)
def test_a_lora_that_cannot_be_used_adds_nothing(
    saved: Callable[[Family], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    loras = [part for option in options for part in ("--lora", option)]
    assert main(["add", str(saved(sd15)), "--name", "mine", f"--repository={tmp_path}", *loras]) == 1
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
