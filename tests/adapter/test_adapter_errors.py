from __future__ import annotations

import json

import pytest
from diffusion_backend.errors import DiffusionError, Status
from openai_adapter.errors import ApiError, explain, from_diffusion_error
from openai_adapter.whole_files import StoreError


@pytest.mark.parametrize(
    ("error", "status", "code", "shown"),
    [
        (DiffusionError("bad", param="size", code="c", status=Status.INVALID_ARG), 400, "c", True),
        (DiffusionError("full", code="queue_full", status=Status.UNAVAILABLE), 503, "queue_full", True),
        (DiffusionError("ipv4:10.0.0.1", status=Status.UNAVAILABLE), 503, "service_unavailable", False),
        (DiffusionError("gone", status=Status.CANCELLED), 499, "cancelled", False),
        (DiffusionError("/path", code="not_finite"), 500, "not_finite", False),
        (DiffusionError("/path"), 500, "server_error", False),
        (DiffusionError("unexpected shape", status=Status.INVALID_ARG), 500, "server_error", False),
    ],
)
def test_upstream_errors(error: DiffusionError, status: int, code: str, shown: bool) -> None:
    answer = from_diffusion_error(error, "id")
    assert (answer.status, answer.code) == (status, code)
    assert (answer.message == error.message) == shown
    assert answer.headers.get("x-should-retry") == ("false" if status == 500 else None)
    assert ("Retry-After" in answer.headers) == (status == 503)


def test_a_store_that_cannot_be_used() -> None:
    answer = explain(StoreError("/path"), "id")
    assert (answer.status, answer.code) == (503, "service_unavailable")
    assert answer.message == "the store of files cannot be used now"
    assert explain(PermissionError(13, "Permission denied", "/path"), "id").status == 500


def test_the_envelope_always_encodes_and_has_all_keys() -> None:
    response = ApiError(400, "\ud800", param="\udfff" * 1000).to_response()
    error = json.loads(bytes(response.body))["error"]
    assert error["message"] == "\\ud800"
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None
    assert len(error["param"]) < 1000
