from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest
from fastapi import FastAPI
from in_process import send
from starlette.responses import Response

MakeApp = Callable[..., FastAPI]
JSON = {"content-type": "application/json"}
KEY = {"authorization": "Bearer second"}


def assert_envelope(answer: Response | object, status: int, code: str) -> None:
    assert answer.status_code == status  # type: ignore[attr-defined]
    error = answer.json()["error"]  # type: ignore[attr-defined]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert answer.headers["x-request-id"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/health/live", "/nope", "/v1/models", "/v1/media/x"])
def test_every_response_has_a_request_id(app: FastAPI, path: str) -> None:
    ids = {send(app, "GET", path).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("given", "kept"), [("a.B-c_9", True), ("x" * 129, False), ("a b", False), ("", False)]
)
def test_a_clients_request_id(app: FastAPI, given: str, kept: bool) -> None:
    answer = send(app, "GET", "/health/live", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) == kept


def test_router_errors(app: FastAPI) -> None:
    assert_envelope(send(app, "GET", "/nope"), 404, "not_found")
    assert_envelope(send(app, "GET", "/health/"), 404, "not_found")
    wrong = send(app, "DELETE", "/v1/images/generations")
    assert_envelope(wrong, 405, "method_not_allowed")
    assert wrong.json()["error"]["message"].endswith("; allowed: POST")
    assert wrong.headers["allow"] == "POST"


def test_an_unexpected_exception_tells_nothing(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("/secret/path")

    with caplog.at_level(logging.ERROR):
        answer = send(app, "GET", "/broken", headers={"x-request-id": "mine"})
    assert_envelope(answer, 500, "server_error")
    assert answer.headers["x-should-retry"] == "false"
    assert "secret" not in answer.text
    assert "mine" in caplog.text
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic second"}, {"x-api-key": "second"}],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/docs", "/nope", "/health/x"])
def test_keys(make_app: MakeApp, path: str, headers: dict[str, str]) -> None:
    app = make_app(api_keys="first,second")
    assert_envelope(send(app, "GET", path, headers=headers), 401, "invalid_api_key")
    assert send(app, "GET", path, headers=KEY).status_code != 401


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/serving", "/v1/media/x.png"])
def test_open_paths(make_app: MakeApp, path: str) -> None:
    assert send(make_app(api_keys="k"), "GET", path).status_code != 401


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(make_app: MakeApp, chunked: bool) -> None:
    app = make_app(max_body_bytes=100)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"12345"

    body = chunks() if chunked else b"1" * 150
    answer = send(app, "POST", "/v1/images/generations", content=body, headers=JSON)
    assert_envelope(answer, 413, "content_too_large")
    assert send(app, "POST", "/v1/images/generations", content=b"1" * 100, headers=JSON).status_code == 400


PREFLIGHT = {
    "origin": "https://page.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def test_cors_is_off_by_default(app: FastAPI) -> None:
    assert send(app, "OPTIONS", "/v1/models", headers=PREFLIGHT).status_code == 405
    answer = send(app, "GET", "/health/live", headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_cors_with_keys(make_app: MakeApp) -> None:
    app = make_app(api_keys="k", cors_origins="https://page.example")
    preflight = send(app, "OPTIONS", "/v1/images/generations", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    refused = send(app, "GET", "/v1/models", headers={"origin": "https://page.example"})
    assert_envelope(refused, 401, "invalid_api_key")
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    exposed = {name.strip() for name in refused.headers["access-control-expose-headers"].split(",")}
    of_every_answer = {"x-request-id", "retry-after", "x-should-retry"}
    of_videos = {"openai-poll-after-ms", "accept-ranges", "content-disposition", "content-range", "etag"}
    assert exposed == of_every_answer | of_videos
    stranger = send(app, "OPTIONS", "/v1/models", headers={**PREFLIGHT, "origin": "https://other.example"})
    assert_envelope(stranger, 400, "cors_refused")
    assert "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("/health", "not_ready", "the server is not ready"),
        ("/health/serving", "not_serving", "the server is not serving"),
    ],
)
def test_health_tells_strangers_no_names(make_app: MakeApp, path: str, code: str, message: str) -> None:
    app = make_app(api_keys="first,second")
    stranger = send(app, "GET", path)
    assert_envelope(stranger, 503, code)
    assert set(stranger.json()) == {"status", "error"}
    assert stranger.json()["error"]["message"] == message
    known = send(app, "GET", path, headers=KEY).json()
    assert known["models"] == {}
    assert "has not been reached" in known["error"]["message"]


def test_metrics_know_routes_not_paths(app: FastAPI) -> None:
    for path in ("/v1/models/a", "/v1/models/b", "/some/where", "/v1/media/secret"):
        send(app, "GET", path)
    send(app, "BREW", "/health/live")
    text = send(app, "GET", "/metrics").text
    assert 'requests_total{method="GET",route="/v1/models/{model:path}",status="503"} 2.0' in text
    assert 'requests_total{method="GET",route="unmatched",status="404"} 1.0' in text
    assert 'method="other"' in text
    assert "secret" not in text
    assert "BREW" not in text


def test_metrics_are_per_app(make_app: MakeApp) -> None:
    one, other = make_app(), make_app()
    send(one, "GET", "/nope")
    assert 'route="unmatched"' not in send(other, "GET", "/metrics").text


def test_health_with_an_unreachable_triton(app: FastAPI) -> None:
    async def poll() -> None:
        async with app.router.lifespan_context(app):
            await asyncio.sleep(0.5)

    asyncio.run(poll())
    assert send(app, "GET", "/health/live").json() == {"status": "live"}
    answer = send(app, "GET", "/health")
    assert_envelope(answer, 503, "not_ready")
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["message"] == "the model server cannot be reached"
    assert_envelope(send(app, "GET", "/health/serving"), 503, "not_serving")
    assert_envelope(send(app, "GET", "/v1/models"), 503, "not_ready")
    request = {"prompt": "a fox"}
    generation = send(app, "POST", "/v1/images/generations", json=request)
    assert_envelope(generation, 503, "not_ready")
    assert generation.headers["retry-after"]
