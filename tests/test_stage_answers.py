"""How a stage answers when Triton does not take its answer."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.stages import common


class NoRoomError(Exception):
    """Stands for Triton's."""


FINAL = 1


class TritonError:
    """Triton's, as far as it is used."""

    UNAVAILABLE = "UNAVAILABLE"

    def __init__(self, text: str, code: str) -> None:
        self.text, self.code = text, code


PB_UTILS = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    TritonModelException=NoRoomError,
    TritonError=TritonError,
    InferenceResponse=lambda error: error,
)


class Sender:
    """Triton's response sender: once the end was sent, also in vain, it takes nothing more."""

    def __init__(self, room: bool) -> None:
        self.room = room
        self.sent: list[Any] = []
        self.closed = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self.closed
        self.closed = flags == FINAL
        if response == "picture" and not self.room:
            raise NoRoomError
        self.sent.append(response)


@pytest.fixture(autouse=True)
def _pb_utils(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", PB_UTILS)  # type: ignore[arg-type]


def test_a_response_and_the_end_of_the_stream() -> None:
    sender = Sender(room=True)
    common.send_in_stream(sender, "picture", "id")
    assert sender.sent == ["picture", None]
    assert sender.closed


def test_an_error_where_shared_memory_has_no_room_for_the_response() -> None:
    sender = Sender(room=False)
    common.send_in_stream(sender, "picture", "id")
    (answer,) = sender.sent
    error = DiffusionError.from_text(answer.text)
    assert error is not None
    assert (error.code, error.status) == ("no_shared_memory", Status.UNAVAILABLE)
    assert sender.closed
