"""The adapter as a process: starting, stopping, and what it does when Triton goes away."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from adapter_process import AdapterProcess
from openai_adapter.triton import CLOSE_SECONDS
from tcp_link import TcpLink

from tests.running_server import RunningServer

StartAdapter = Callable[..., AdapterProcess]
GENERATIONS = "/v1/images/generations"


def flags_for(server: RunningServer, url: str | None = None) -> tuple[str, ...]:
    return (
        "--triton-url",
        url or server.grpc_url,
        f"--triton-admin-key={server.admin_key}",
    )  # it may begin with "-"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--host", "0.0.0.0"), "refusing to listen on '0.0.0.0' without API keys"),
        (("--trusted-proxies", "proxy"), "trusted_proxies.0: value is not a valid IPv4 or IPv6 network"),
    ],
)
def test_refuses_to_start(start_adapter: StartAdapter, flags: tuple[str, ...], said: str) -> None:
    adapter = start_adapter(*flags)
    assert adapter.process.wait(30) == 1
    (line,) = adapter.log.read_text().splitlines()
    assert line.startswith(said)


def test_without_triton(start_adapter: StartAdapter) -> None:
    adapter = start_adapter("--triton-url", "127.0.0.1:1", "--max-body-bytes", "1000")
    adapter.wait("/health/live")
    started = time.monotonic()
    answer = httpx.post(adapter.url + GENERATIONS, json={"prompt": "a fox"})
    assert time.monotonic() - started < 1
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "server" not in answer.headers
    large = httpx.post(adapter.url + GENERATIONS, json={"prompt": "a fox" * 1000})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "content_too_large")
    assert adapter.stop() == 0


def test_running_requests_end_before_the_process(start_adapter: StartAdapter, server: RunningServer) -> None:
    adapter = start_adapter(*flags_for(server))
    adapter.wait("/health")
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "a fox", "n": 4}
        answer = pool.submit(httpx.post, adapter.url + GENERATIONS, json=body, timeout=60)
        time.sleep(0.2)
        assert adapter.stop() == 0
        assert answer.result().status_code == 200
        assert len(answer.result().json()["data"]) == 4


def test_requests_that_outlast_the_shutdown_are_told(
    start_adapter: StartAdapter, server: RunningServer
) -> None:
    with TcpLink(server.grpc_url) as link:
        adapter = start_adapter(*flags_for(server, link.address), "--shutdown-seconds", "1")
        adapter.wait("/health")
        link.stall()
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "a fox"}
            answer = pool.submit(httpx.post, adapter.url + GENERATIONS, json=body, timeout=60)
            time.sleep(0.2)
            told = time.monotonic()
            assert adapter.stop() == 0
            assert time.monotonic() - told < 1 + CLOSE_SECONDS + 10  # a server that cancels nothing, at that
            assert answer.result().status_code == 503
            assert answer.result().json()["error"]["code"] == "shutting_down"


def test_keys_and_urls_behind_a_proxy(start_adapter: StartAdapter, server: RunningServer) -> None:
    flags = (*flags_for(server), "--trusted-proxies", "127.0.0.1", "--media-ttl-seconds", "2")
    adapter = start_adapter(*flags, OPENAI_ADAPTER_API_KEYS="one,two")
    adapter.wait("/health")
    body = {"prompt": "a fox", "response_format": "url", "num_inference_steps": 2}
    assert httpx.post(adapter.url + GENERATIONS, json=body).status_code == 401
    headers = {
        "authorization": "Bearer two",
        "x-forwarded-proto": "https",
        "x-forwarded-host": "api.example",
        "x-forwarded-prefix": "/pictures",
    }
    answer = httpx.post(adapter.url + GENERATIONS, json=body, headers=headers, timeout=60)
    url = answer.json()["data"][0]["url"]
    assert url.startswith("https://api.example/pictures/v1/media/")
    local = url.replace("https://api.example/pictures", adapter.url)
    assert httpx.get(local).status_code == 200
    time.sleep(2.1)
    assert httpx.get(local).json()["error"]["code"] == "not_found"


def test_models_by_name_need_no_admin_key(start_adapter: StartAdapter, server: RunningServer) -> None:
    flags = ("--triton-url", server.grpc_url, "--models")
    named = start_adapter(*flags, "emoji-flux", OPENAI_ADAPTER_TRITON_ADMIN_KEY="")
    named.wait("/health")
    assert [card["id"] for card in httpx.get(f"{named.url}/v1/models").json()["data"]] == ["emoji-flux"]


def test_a_model_that_is_not_there_keeps_it_unready_and_serving(
    start_adapter: StartAdapter, server: RunningServer
) -> None:
    adapter = start_adapter(*flags_for(server), "--models", "emoji-flux,later")
    adapter.wait("/v1/models")
    health = httpx.get(f"{adapter.url}/health")
    assert (health.status_code, health.json()["models"]) == (503, {"emoji-flux": True, "later": False})
    assert "later" in health.json()["error"]["message"]
    serving = httpx.get(f"{adapter.url}/health/serving")
    assert serving.status_code == 200
    assert serving.json() == {"status": "serving", "models": {"emoji-flux": True, "later": False}}
    body = {"prompt": "a fox", "num_inference_steps": 2}
    answers = {
        model: httpx.post(adapter.url + GENERATIONS, json={**body, "model": model}, timeout=60)
        for model in ("emoji-flux", "later")
    }
    assert answers["emoji-flux"].status_code == 200
    assert answers["later"].status_code == 503
    unnamed = httpx.post(adapter.url + GENERATIONS, json=body).json()["error"]
    assert unnamed["code"] == "model_required"
    assert "emoji-flux, later" in unnamed["message"]


def test_triton_goes_and_comes_back(start_adapter: StartAdapter, server: RunningServer) -> None:
    with TcpLink(server.grpc_url) as link:
        adapter = start_adapter(*flags_for(server, link.address))
        adapter.wait("/health")
        models = httpx.get(f"{adapter.url}/v1/models").json()
        link.cut()
        deadline = time.monotonic() + 10
        while httpx.get(f"{adapter.url}/health").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        serving = httpx.get(f"{adapter.url}/health/serving")
        assert (serving.status_code, serving.json()["models"]) == (503, {"emoji-flux": False})
        assert serving.json()["error"]["code"] == "not_serving"
        assert httpx.get(f"{adapter.url}/health/live").status_code == 200
        assert httpx.get(f"{adapter.url}/v1/models").json() == models
        answer = httpx.post(adapter.url + GENERATIONS, json={"prompt": "a fox"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
        link.mend()
        adapter.wait("/health", seconds=15)


def test_a_deadline_passes(start_adapter: StartAdapter, server: RunningServer) -> None:
    with TcpLink(server.grpc_url) as link:
        adapter = start_adapter(*flags_for(server, link.address), "--request-timeout-seconds", "0.5")
        adapter.wait("/health")
        link.stall()
        answer = httpx.post(adapter.url + GENERATIONS, json={"prompt": "a fox"}, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert answer.headers["x-should-retry"] == "false"
