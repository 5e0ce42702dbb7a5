"""A small client for direct users, sync and asyncio: one call, one picture or clip.

    with DiffusionClient("127.0.0.1:8001") as client:
        generation = client.generate("emoji-flux", "a fox on a blue background", seed=1)
        generation.images   # uint8 [H, W, 3]
        generation.info     # {"seed": 1, "decode_path": ...}
        clip = client.generate("wan", "a fox runs", image=Path("fox.png").read_bytes(), num_frames=33)
        clip.frames         # uint8 [33, H, W, 3]

The ensemble is decoupled inside, so it is called through a gRPC stream; each generation has a stream of its own,
read to its end. A cancel goes the same way, to the denoise stage: Triton tells a running ensemble of none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from diffusion_backend.errors import DiffusionError, Status, invalid, show
from diffusion_backend.settings import ModelLimits, parse_limits
from diffusion_backend.stage_names import Stage, stage_model

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
    "unexpected inference input": Status.INVALID_ARG,
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


_PARAMETER_FIELDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
_MOST_UNREAD = 4  # answers; more, such as slices of a clip, stay with the server
# That a cancelled request gets to end, before its stream is broken off. A clip that is being decoded is done first.
_DRAIN_SECONDS = 900.0
_CLOSE_SECONDS = 30.0


_NO_IMAGE = np.zeros((0, 0, 3), np.uint8)
_NO_FRAMES = np.zeros((0, 0, 0, 3), np.uint8)


@dataclass(frozen=True)
class Generation:
    """What one answer brings: a picture, frames of a clip, or word of a step that is reached.

    ``images`` is a picture, uint8 [H, W, 3]; of a model that makes video it is empty, [0, 0, 3]. ``frames`` are those
    of a clip, uint8 [F, H, W, 3]; of other models empty, [0, 0, 0, 3]. Both are empty where ``is_progress``. ``info``
    is what the server says of it (seed, step, decode path, ...).
    """

    images: npt.NDArray[np.uint8]
    info: dict[str, Any]
    frames: npt.NDArray[np.uint8] = field(default_factory=_NO_FRAMES.copy)

    @property
    def is_progress(self) -> bool:
        """Whether it tells of a step (``info["step"]``), and nothing more."""
        return not self.images.size and not self.frames.size


def denoise_model(model: str) -> str:
    """The stage of an ensemble of ours that takes cancels."""
    return stage_model(model, Stage.DENOISE)


def vae_decode_model(model: str) -> str:
    """The stage of an ensemble of ours that decodes."""
    return stage_model(model, Stage.VAE_DECODE)


def infer_request(
    model: str,
    inputs: Mapping[str, str | bytes | Sequence[bytes]],
    request_id: str,
    parameters: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> service_pb2.ModelInferRequest:
    """A request whose inputs are texts and files, and which is answered with an explicit end; ``timeout`` in seconds.

    https://github.com/kserve/kserve/blob/master/docs/predict-api/v2/required_api.md (GRPC)

    Raises:
        DiffusionError: a parameter is of a type that Triton has none for.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        elements = (
            [value.encode()] if isinstance(value, str) else [value] if isinstance(value, bytes) else value
        )
        request.inputs.add(name=name, datatype="BYTES", shape=[len(elements)])
        data = b"".join(len(element).to_bytes(4, "little") + element for element in elements)
        request.raw_input_contents.append(data)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if timeout is not None:
        request.parameters["timeout"].int64_param = int(timeout * 1e6)
    for name, value in (parameters or {}).items():
        try:
            setattr(request.parameters[name], _PARAMETER_FIELDS[type(value)], value)
        except (KeyError, ValueError):
            raise invalid(
                name, f"{name!r} is {show(value)}; allowed: a string, a number of 64 bits, true or false"
            ) from None
    return request


def to_generation(result: triton_grpc.InferResult) -> Generation:
    """Read the ensemble's output tensors."""
    images, frames = (result.as_numpy(name) for name in ("images", "frames"))
    return Generation(
        _NO_IMAGE if images is None else images,
        json.loads(result.as_numpy("info")[0]),
        _NO_FRAMES if frames is None else frames,
    )


def check_slice(part: Generation, count: int) -> None:
    """``part`` is the next slice of a clip, of which ``count`` frames have come.

    Raises:
        DiffusionError: INTERNAL, it is not.
    """
    start, stop, total = (
        part.info["frame_index"],
        part.info["frame_index"] + len(part.frames),
        part.info["num_frames"],
    )
    if start != count or stop > total or (stop == total) != part.info["is_final"]:
        raise DiffusionError(
            f"the server sent frames {start} to {stop} of {total} after {count} of them",
            code="slices_out_of_order",
        )


class _Clip:
    """The slices of a clip as they come, put into one array."""

    def __init__(self, first: Generation) -> None:
        self.frames = np.empty((first.info["num_frames"], *first.frames.shape[1:]), np.uint8)
        self._count = 0

    def add(self, part: Generation) -> None:
        """The next slice.

        Raises:
            DiffusionError: INTERNAL, it is not the next one.
        """
        check_slice(part, self._count)
        self.frames[self._count : self._count + len(part.frames)] = part.frames
        self._count += len(part.frames)


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


def require_final(last: Generation | None) -> Generation:
    """``last`` if it is the finished picture of a request.

    Raises:
        DiffusionError: CANCELLED, the stream ended before there was one: so it does when somebody cancels it.
    """
    if last is None or not last.info["is_final"]:
        raise DiffusionError("the request was cancelled", code="cancelled", status=Status.CANCELLED)
    return last


def _too_late(timeout: float | None) -> DiffusionError:
    return DiffusionError(f"no answer within {timeout} s", code="deadline_exceeded", status=Status.CANCELLED)


class _Exchange:
    """One request on a gRPC stream of its own.

    A task reads the stream to its end, also when nobody waits any more: in tritonserver 2.51 a stream that is broken
    off while its ensemble runs leaves a request that is never counted out.
    """

    def __init__(
        self,
        stub: service_pb2_grpc.GRPCInferenceServiceStub,
        request: service_pb2.ModelInferRequest,
        cancel: service_pb2.ModelInferRequest | None,
        timeout: float | None,
    ) -> None:
        self._timeout = timeout
        self._deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        self._request = request
        self._cancel = cancel
        self._over = asyncio.Event()
        self._left = asyncio.Event()
        self._room = asyncio.Event()
        self._answers: asyncio.Queue[triton_grpc.InferResult | Exception | None] = asyncio.Queue()
        self._call = stub.ModelStreamInfer(self._requests())
        self.reading = asyncio.create_task(self._read())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> triton_grpc.InferResult:
        try:
            async with asyncio.timeout_at(self._deadline):
                answer = await self._answers.get()
        except TimeoutError:
            raise _too_late(self._timeout) from None
        self._room.set()
        if answer is None:
            raise StopAsyncIteration
        if isinstance(answer, Exception):
            raise to_error(answer) from answer
        return answer

    def leave(self) -> None:
        """Nobody waits any more: what still runs is cancelled."""
        self._left.set()
        self._room.set()

    async def _requests(self) -> AsyncIterator[service_pb2.ModelInferRequest]:
        yield self._request
        over, left = (asyncio.create_task(event.wait()) for event in (self._over, self._left))
        try:
            await asyncio.wait({over, left}, return_when=asyncio.FIRST_COMPLETED)
            if self._cancel is not None and not self._over.is_set():
                yield self._cancel
            await asyncio.wait({over}, timeout=_DRAIN_SECONDS)
        finally:
            over.cancel()
            left.cancel()
        if not self._over.is_set():
            self._call.cancel()

    async def _hand_on(self, answer: triton_grpc.InferResult) -> None:
        """Put it where it is waited for, if it is, and wait while much else is there unread."""
        if self._left.is_set():
            return
        self._answers.put_nowait(answer)
        if self._answers.qsize() >= _MOST_UNREAD:
            self._room.clear()
            await self._room.wait()

    async def _read(self) -> None:
        try:
            async for response in self._call:
                answer = response.infer_response
                if response.error_message:
                    self._answers.put_nowait(InferenceServerException(msg=response.error_message))
                    self._over.set()
                elif answer.id == self._request.id:
                    if answer.outputs:
                        await self._hand_on(triton_grpc.InferResult(answer))
                    if answer.parameters["triton_final_response"].bool_param:
                        self._over.set()
        except grpc.RpcError as error:
            self._answers.put_nowait(error)
        except asyncio.CancelledError:
            if not self._left.is_set():
                raise
        finally:
            self._over.set()
            self._answers.put_nowait(None)


class AsyncDiffusionClient:
    """For asyncio, on one shared channel."""

    def __init__(self, url: str = "127.0.0.1:8001") -> None:
        self.url = url
        self.triton = triton_grpc_aio.InferenceServerClient(url, channel_args=CHANNEL_ARGS)
        # tritonclient's own stream_infer cannot ask for empty final responses, which a cancelled request ends with.
        self._channel = grpc.aio.insecure_channel(url, options=CHANNEL_ARGS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._reading: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, drain_seconds: float = _CLOSE_SECONDS) -> None:
        """Close, when what was cancelled has ended, or after ``drain_seconds``."""
        if self._reading:
            await asyncio.wait(self._reading, timeout=drain_seconds)
        await self._channel.close()
        await self.triton.close()

    async def limits(self, model: str) -> ModelLimits:
        """What ``model`` accepts."""
        try:
            return limits_from_config((await self.triton.get_model_config(model)).config)
        except InferenceServerException as error:
            raise to_error(error) from error

    async def generate(self, model: str, prompt: str, **request: Any) -> Generation:
        """One picture or a whole clip; the arguments are those of ``stream``.

        Being cancelled cancels the request on the server, too. The ``info`` of a clip is that of its last slice, with a
        ``frame_index`` of 0: ``frames`` [num_frames, H, W, 3] are all of them.

        Raises:
            DiffusionError: what the server refused, and why; CANCELLED after ``timeout`` seconds.
        """
        final: Generation | None = None
        clip: _Clip | None = None
        async with aclosing(self.stream(model, prompt, **request)) as generations:
            async for generation in generations:
                if generation.frames.size:
                    clip = clip or _Clip(generation)
                    clip.add(generation)
                if generation.info["is_final"]:
                    final = generation
        final = require_final(final)
        if clip is None:
            return final
        return Generation(final.images, {**final.info, "frame_index": 0}, clip.frames)

    async def stream(
        self,
        model: str,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        image: bytes | Sequence[bytes] | None = None,
        mask: bytes | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[Generation, None]:
        """What is answered to one request as it comes.

        Of a picture: its previews (``partial_images``), then the finished one. Of a clip: slices of some frames each,
        in order; ``info`` has the ``frame_index`` of a slice's first frame, ``num_frames`` and ``fps``, and of the last
        one ``is_final``. Before either, with ``progress`` true, answers that tell of a step and nothing more.

        ``image`` is a PNG, JPEG or WebP file, or several, for models that take them; where ``mask`` is wholly
        transparent, the first one may change. ``parameters`` are the request's settings
        (``diffusion_backend.settings``). To stop reading (``aclose``) cancels the request. ``timeout`` is in seconds;
        the server ends the request after it, too.

        Raises:
            DiffusionError: what the server refused, and why; CANCELLED after ``timeout`` seconds.
        """
        request_id = request_id or str(uuid.uuid4())
        inputs: dict[str, str | bytes | Sequence[bytes]] = {"prompt": prompt}
        if image is not None:
            inputs["image"] = image
        if mask is not None:
            inputs["mask"] = mask
        if negative_prompt is not None:
            inputs["negative_prompt"] = negative_prompt
        request = infer_request(model, inputs, request_id, parameters, timeout)
        cancel = infer_request(denoise_model(model), {"cancel": request_id}, f"cancel-{request_id}")
        async with aclosing(self._exchange(request, cancel, timeout)) as results:
            async for result in results:
                generation = to_generation(result)
                if "error" in generation.info:  # a preview that could not be made, or a cancel
                    logger.debug(
                        "no picture of step %s: %s", generation.info["step"], generation.info["error"]
                    )
                else:
                    yield generation

    async def cancel(self, model: str, request_id: str) -> None:
        """Cancel a request by its id, whoever sent it. On a machine behind a load balancer: only if it is there.

        Raises:
            DiffusionError: the server could not be told.
        """
        request = infer_request(denoise_model(model), {"cancel": request_id}, f"cancel-{request_id}")
        async with aclosing(self._exchange(request, None, _CLOSE_SECONDS)) as results:
            async for _ in results:
                pass

    async def describe(self, stage: str, *, batched: bool, timeout: float | None = None) -> dict[str, Any]:
        """What a stage's process says of itself: device, dtypes, bytes loaded, versions.

        ``batched``: whether the stage's model has a batch axis (``max_batch_size`` above 0).

        Raises:
            DiffusionError: it could not answer.
        """
        request = infer_request(stage, {"describe": ""}, str(uuid.uuid4()))
        if batched:
            request.inputs[0].shape[:] = [1, 1]
        async with aclosing(self._exchange(request, None, timeout)) as results:
            async for result in results:
                description: dict[str, Any] = json.loads(result.as_numpy("description").reshape(-1)[0])
                return description
        raise DiffusionError("the server ended the request without an answer", status=Status.UNAVAILABLE)

    async def _exchange(
        self,
        request: service_pb2.ModelInferRequest,
        cancel: service_pb2.ModelInferRequest | None,
        timeout: float | None,
    ) -> AsyncGenerator[triton_grpc.InferResult, None]:
        exchange = _Exchange(self._stub, request, cancel, timeout)
        self._reading.add(exchange.reading)
        exchange.reading.add_done_callback(self._reading.discard)
        try:
            async for result in exchange:
                yield result
        finally:
            exchange.leave()


class DiffusionClient:
    """Blocking client, which threads may share: an ``AsyncDiffusionClient`` on a thread of its own."""

    def __init__(self, url: str = "127.0.0.1:8001") -> None:
        self.url = url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diffusion-client", daemon=True)
        self._thread.start()
        self._client = self._run(_connect(url))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close, when what was cancelled has ended."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def limits(self, model: str) -> ModelLimits:
        """What ``model`` accepts."""
        return self._run(self._client.limits(model))

    def generate(self, model: str, prompt: str, **request: Any) -> Generation:
        """One picture or a whole clip, as ``AsyncDiffusionClient.generate``.

        Raises:
            DiffusionError: what the server refused, and why; CANCELLED after ``timeout`` seconds.
        """
        return self._run(self._client.generate(model, prompt, **request))

    def stream(self, model: str, prompt: str, **request: Any) -> Iterator[Generation]:
        """What is answered to one request as it comes, as ``AsyncDiffusionClient.stream``."""
        generations = self._client.stream(model, prompt, **request)
        try:
            while (generation := self._run(_next(generations))) is not None:
                yield generation
        finally:
            self._run(generations.aclose())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where the wait was interrupted: the request is cancelled, too


async def _connect(url: str) -> AsyncDiffusionClient:
    return AsyncDiffusionClient(url)


async def _next(generations: AsyncGenerator[Generation, None]) -> Generation | None:
    return await anext(generations, None)
