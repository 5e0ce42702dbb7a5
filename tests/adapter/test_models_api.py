"""The model routes and health, against the running server."""

from __future__ import annotations

from urllib.parse import quote

import httpx
import openai
import pytest
from diffusion_backend.client import DiffusionClient
from diffusion_backend.settings import ModelLimits

from tests.running_server import RunningServer

MODEL = "emoji-flux"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.adapter_url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def limits(server: RunningServer) -> ModelLimits:
    with DiffusionClient(server.grpc_url) as triton:
        return triton.limits(MODEL)


def test_list_has_the_ensembles_only(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_card(client: openai.OpenAI, limits: ModelLimits) -> None:
    card = client.models.retrieve(MODEL).model_dump()
    assert (card["id"], card["object"], card["owned_by"]) == (MODEL, "model", "triton-diffusion")
    assert (card["created"], card["root"]) == (limits.created, "emoji-flux")
    assert card["source_revision"] is None
    assert card["pipeline_class"] == card["pipeline_name"] == "FluxPipeline"
    assert card["task_type"] == limits.task
    assert (card["default_size"], card["max_size"], card["size_multiple"]) == ("64x64", "128x128", 8)
    assert (card["default_num_inference_steps"], card["default_guidance_scale"]) == (20, 2.0)
    assert {"auto", "lossless", "low"} <= set(card["qualities"])
    assert card["fast_path"]["state"] == "not_installed"
    assert (card["batching"]["enabled"], card["batching"]["joined"]) == (True, True)
    assert 0 <= card["batching"]["difference"] <= card["batching"]["tolerance"] == 1e-3
    assert "num_gpus" not in card


def test_card_has_what_each_stage_loaded(client: openai.OpenAI) -> None:
    stages = client.models.retrieve(MODEL).model_dump()["stages"]
    assert list(stages) == [f"{MODEL}_{stage}" for stage in ("encode", "denoise", "vae_decode")]
    for facts in stages.values():
        assert set(facts) == {"device", "bytes_loaded", "components"}
        assert facts["device"] == "cpu"
        assert facts["bytes_loaded"] == sum(part["bytes"] for part in facts["components"].values())
    assert stages[f"{MODEL}_vae_decode"]["components"] == {
        "vae": {"class": "AutoencoderKL", "dtype": "float32", "bytes": 5799292}
    }


def test_a_local_source_stays_private(server: RunningServer, limits: ModelLimits) -> None:
    """It is no hub id: not shown, and not a name to ask by."""
    assert limits.source == "./pipeline"
    assert "./pipeline" not in httpx.get(f"{server.adapter_url}/v1/models").text
    answer = httpx.get(f"{server.adapter_url}/v1/models/{quote(limits.source, safe='')}")
    assert answer.status_code == 404


@pytest.mark.parametrize("name", ["nope", "emoji-flux_denoise", "org/no model", "emoji-flux/"])
def test_unknown(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve(name)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert name in caught.value.message


def test_health(server: RunningServer) -> None:
    for path, status in (("/health/live", "live"), ("/health", "ready"), ("/health/serving", "serving")):
        answer = httpx.get(server.adapter_url + path)
        assert (answer.status_code, answer.json()["status"]) == (200, status)
        assert answer.headers["x-request-id"]
        assert "server" not in answer.headers
        assert httpx.head(server.adapter_url + path).status_code == 200
