"""A small client for direct users, sync and asyncio: one call, one picture.

    with DiffusionClient("127.0.0.1:8001") as client:
        generation = client.generate("emoji-flux", "a fox on a blue background", seed=1)
        generation.images   # uint8 [H, W, 3]
        generation.info     # {"seed": 1, "decode_path": ...}

The ensemble is decoupled inside, so it is called through a gRPC stream; each generation has a stream of its own,
read to its end.
"""

from __future__ import annotations

import json
import queue
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
from tritonclient.utils import InferenceServerException

from diffusion_backend.errors import DiffusionError, Status
from diffusion_backend.settings import ModelLimits, parse_limits

CHANNEL_ARGS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A server that restarts is found again within a second, not after gRPC's two minutes of back-off.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# What the key of Triton's restricted APIs is sent under: a header over HTTP, and its name as gRPC metadata.
ADMIN_KEY_HEADER = "admin-key"
ADMIN_KEY_METADATA = f"triton-grpc-protocol-{ADMIN_KEY_HEADER}"
# Errors of Triton's own come without a status: a few are told by their words.
_TRITON_ERRORS = {
    "unknown model": Status.INVALID_ARG,
    "is not found": Status.INVALID_ARG,
    "not ready": Status.UNAVAILABLE,
    "unavailable": Status.UNAVAILABLE,
    "Exceeds maximum queue size": Status.UNAVAILABLE,
    "is not healthy": Status.UNAVAILABLE,
}
_GRPC_ERRORS = {
    "INVALID_ARGUMENT": Status.INVALID_ARG,
    "NOT_FOUND": Status.INVALID_ARG,
    "UNAVAILABLE": Status.UNAVAILABLE,
    "CANCELLED": Status.CANCELLED,
    "DEADLINE_EXCEEDED": Status.CANCELLED,
}


@dataclass(frozen=True)
class Generation:
    """One picture: ``images`` is uint8 [H, W, 3], ``info`` what the server says of it (seed, decode path, ...)."""

    images: npt.NDArray[np.uint8]
    info: dict[str, Any]


def bytes_input(name: str, text: str | bytes) -> triton_grpc.InferInput:
    """A BYTES [1] tensor. Object arrays keep trailing NULs, which ``np.bytes_`` drops."""
    tensor = triton_grpc.InferInput(name, [1], "BYTES")
    data = text.encode() if isinstance(text, str) else text
    tensor.set_data_from_numpy(np.array([data], dtype=np.object_))
    return tensor


def ensemble_inputs(prompt: str, negative_prompt: str | None) -> list[triton_grpc.InferInput]:
    """The ensemble's input tensors."""
    inputs = [bytes_input("prompt", prompt)]
    if negative_prompt is not None:
        inputs.append(bytes_input("negative_prompt", negative_prompt))
    return inputs


def to_generation(result: triton_grpc.InferResult) -> Generation:
    """Read the ensemble's output tensors."""
    return Generation(result.as_numpy("images"), json.loads(result.as_numpy("info")[0]))


def to_error(error: Exception) -> DiffusionError:
    """What Triton or gRPC raised, as our error."""
    if isinstance(error, grpc.RpcError):
        text, grpc_code = error.details() or "", error.code().name
    elif isinstance(error, InferenceServerException):
        text, grpc_code = error.message() or "", str(error.status() or "").removeprefix("StatusCode.")
    else:
        text, grpc_code = str(error), ""
    ours = DiffusionError.from_text(text)
    if ours is not None:
        return ours
    known = next((status for words, status in _TRITON_ERRORS.items() if words in text), Status.INTERNAL)
    code = "deadline_exceeded" if grpc_code == "DEADLINE_EXCEEDED" else None
    return DiffusionError(text, code=code, status=_GRPC_ERRORS.get(grpc_code, known))


def limits_from_config(config: Any) -> ModelLimits:
    """The limits of a model from its ensemble's ``ModelConfig`` message.

    Raises:
        ValueError: the parameters are none of ours, or wrong.
    """
    return parse_limits({key: value.string_value for key, value in config.parameters.items()})


def _one(generation: Generation | None) -> Generation:
    if generation is None:
        raise DiffusionError("the server ended the request without a picture", status=Status.UNAVAILABLE)
    return generation


def _too_late(timeout: float | None) -> DiffusionError:
    return DiffusionError(f"no answer within {timeout} s", code="deadline_exceeded", status=Status.CANCELLED)


class DiffusionClient:
    """Blocking client. Safe to share between threads: every generation opens a stream of its own."""

    def __init__(self, url: str = "127.0.0.1:8001") -> None:
        self.url = url
        self._control = self._connect()

    def _connect(self) -> triton_grpc.InferenceServerClient:
        return triton_grpc.InferenceServerClient(self.url, channel_args=CHANNEL_ARGS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._control.close()

    def limits(self, model: str) -> ModelLimits:
        """What ``model`` accepts."""
        try:
            return limits_from_config(self._control.get_model_config(model).config)
        except InferenceServerException as error:
            raise to_error(error) from error

    def generate(
        self,
        model: str,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        **parameters: Any,
    ) -> Generation:
        """Generate one picture; ``parameters`` are the request's settings (``diffusion_backend.settings``).

        Raises:
            DiffusionError: what the server refused, and why; CANCELLED when nothing came within ``timeout`` seconds.
        """
        answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        client = self._connect()
        generation: Generation | None = None
        ended = False
        try:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer(
                model,
                ensemble_inputs(prompt, negative_prompt),
                request_id=request_id or str(uuid.uuid4()),
                parameters=parameters,
                enable_empty_final_response=True,
            )
            while not ended:
                result, error = answers.get(timeout=timeout)
                if error is not None:
                    ended = True
                    raise to_error(error)
                response = result.get_response()
                if response.outputs:
                    generation = to_generation(result)
                ended = response.parameters["triton_final_response"].bool_param
        except queue.Empty:
            raise _too_late(timeout) from None
        finally:
            client.stop_stream(cancel_requests=not ended)
            client.close()
        return _one(generation)


class AsyncDiffusionClient:
    """The same for asyncio, on one shared channel."""

    def __init__(self, url: str = "127.0.0.1:8001") -> None:
        self.url = url
        self.triton = triton_grpc_aio.InferenceServerClient(url, channel_args=CHANNEL_ARGS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.triton.close()

    async def limits(self, model: str) -> ModelLimits:
        """What ``model`` accepts."""
        try:
            return limits_from_config((await self.triton.get_model_config(model)).config)
        except InferenceServerException as error:
            raise to_error(error) from error

    async def generate(
        self,
        model: str,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        **parameters: Any,
    ) -> Generation:
        """As ``DiffusionClient.generate``; ``timeout`` in seconds is the gRPC deadline of the stream.

        Raises:
            DiffusionError: what the server refused, and why.
        """

        request = {
            "model_name": model,
            "inputs": ensemble_inputs(prompt, negative_prompt),
            "request_id": request_id or str(uuid.uuid4()),
            "parameters": parameters,
        }
        return to_generation(await self._answer(request, timeout))

    async def describe(self, stage: str, *, batched: bool, timeout: float | None = None) -> dict[str, Any]:
        """What a stage's process says of itself: device, dtypes, bytes loaded, versions.

        ``batched``: whether the stage's model has a batch axis (``max_batch_size`` above 0).

        Raises:
            DiffusionError: it could not answer.
        """
        tensor = bytes_input("describe", "")
        if batched:
            tensor.set_shape([1, 1])
        request = {"model_name": stage, "inputs": [tensor], "request_id": str(uuid.uuid4())}
        result = await self._answer(request, timeout)
        description: dict[str, Any] = json.loads(result.as_numpy("description").reshape(-1)[0])
        return description

    async def _answer(self, request: Mapping[str, Any], timeout: float | None) -> triton_grpc.InferResult:
        """The one response to a request, on a stream of its own."""

        async def requests() -> AsyncIterator[Mapping[str, Any]]:
            yield request

        answer: triton_grpc.InferResult | None = None
        failure: Exception | None = None
        try:
            # To the end, also after an error: a stream that is dropped is a stream cancelled.
            async for result, error in self.triton.stream_infer(requests(), stream_timeout=timeout):
                if error is not None:
                    failure = failure or error
                else:
                    answer = result
        except (grpc.RpcError, InferenceServerException) as error:
            failure = failure or error
        if failure is not None:
            raise to_error(failure) from failure
        if answer is None:
            raise DiffusionError("the server ended the request without an answer", status=Status.UNAVAILABLE)
        return answer
