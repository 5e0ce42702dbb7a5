"""What the three stage models share: their configuration, their device, and how they answer."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diffusion_backend import malloc
from diffusion_backend.errors import DiffusionError, Status, invalid, show
from diffusion_backend.model_config import read_model_config, resolve_source
from diffusion_backend.settings import ModelLimits, parse_limits

if TYPE_CHECKING:
    import torch

    from diffusion_backend.stage_names import Stage

logger = logging.getLogger("diffusion_backend")

# With the first as an input, whatever its value, a stage answers the second and does nothing else.
DESCRIBE = "describe"
DESCRIPTION = "description"
_VERSIONS = ("torch", "diffusers", "transformers", "triton-diffusion")


@dataclass(frozen=True)
class StageConfig:
    """What a stage learns from its own and its ensemble's ``config.pbtxt``; ``loras`` are folders by name."""

    model: str
    instance: str
    limits: ModelLimits
    source: str
    device: torch.device
    dtype: torch.dtype | None
    parameters: dict[str, str]
    loras: dict[str, str] = field(default_factory=dict)

    def parameter(self, name: str) -> str:
        """One of the ``parameters`` of the stage's own ``config.pbtxt``.

        Raises:
            DiffusionError: it has none of that name.
        """
        return _parameter(self.parameters, name, self.model)

    def integer(self, name: str, at_least: int) -> int:
        """``parameter`` as a number.

        Raises:
            DiffusionError: it is missing, or none that is allowed.
        """
        text = self.parameter(name)
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < at_least:
            raise self._wrong(name, text, f"integers from {at_least}")
        return int(text)

    def number(self, name: str, at_least: float) -> float:
        """The same, of numbers that need not be whole."""
        text = self.parameter(name)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not at_least <= value < math.inf:  # nor is NaN
            raise self._wrong(name, text, f"numbers from {at_least:g}")
        return value

    def _wrong(self, name: str, text: str, allowed: str) -> DiffusionError:
        return DiffusionError(
            f"the parameter {name!r} in the config.pbtxt of {self.model} is {show(text)}; allowed: {allowed}",
            code="invalid_config",
        )


def _parameter(parameters: dict[str, str], name: str, model: str) -> str:
    if name not in parameters:
        raise DiffusionError(
            f"the config.pbtxt of {model} has no parameter {name!r}: add the model again, with this version",
            code="outdated_config",
        )
    return parameters[name]


def tune_process() -> None:
    """Settings of this process that must stand before torch is imported. Freed memory is kept (``malloc``).

    The stages share the machine's cores. By default OpenMP's threads spin for long at a barrier, and wait for one that
    another stage has pushed off its core. Not spinning at all makes every small operation wait for a thread to wake. A
    short spin (libgomp's GOMP_SPINCOUNT) lies between; ``benchmarks/overhead.py`` shows what a value costs.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    if malloc.is_wanted():
        malloc.keep_freed_memory()


def prepare_process() -> None:
    """``tune_process``, and import the libraries that all stages use.

    Their half million objects are never garbage. The collector does not look for any while they are made (a fifth of
    the time that their import takes), nor at them later, when looking at all of them holds up a step for half a second.
    """
    tune_process()
    gc.disable()
    try:
        from diffusion_backend import inspection, loras, seams  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def start_stage(args: dict[str, str]) -> StageConfig:
    """Set up logging and read the configuration; ``args`` is what Triton gives ``initialize``."""
    from diffusion_backend.loading import quiet_libraries

    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(levelname).1s {args['model_name']}: %(message)s"
    )
    quiet_libraries()
    declared = json.loads(args["model_config"]).get("parameters", {})
    parameters = {name: value["string_value"] for name, value in declared.items()}
    ensemble = Path(args["model_repository"]).parent / _parameter(parameters, "ensemble", args["model_name"])
    limits = parse_limits(read_model_config(ensemble).parameters)
    device = choose_device(args["model_instance_kind"], args["model_instance_device_id"])
    return StageConfig(
        model=args["model_name"],
        instance=args["model_instance_name"],
        limits=limits,
        source=resolve_source(limits.source, ensemble),
        loras={name: resolve_source(folder, ensemble) for name, folder in limits.loras.items()},
        device=device,
        dtype=choose_dtype(limits.dtype, device),
        parameters=parameters,
    )


def check_warmup(args: dict[str, str], check: Callable[[dict[str, bytes]], object]) -> None:
    """Have ``check`` read the files of every warmup sample, before Triton runs it.

    tritonserver 2.51 tears a model down whose warmup failed, and crashes at that now and then (one time in five; in
    TritonBackendThread::StopBackendThread). An error of ``initialize`` ends in order.

    Raises:
        DiffusionError: a file is missing, or ``check`` refuses it; it names the sample.
    """
    folder = Path(args["model_repository"]) / "warmup"
    for sample in json.loads(args["model_config"]).get("model_warmup", []):
        files = {
            name: declared["input_data_file"]
            for name, declared in sample["inputs"].items()
            if declared.get("input_data_file")
        }
        try:
            check({name: (folder / file).read_bytes() for name, file in files.items()})
        except (DiffusionError, OSError) as error:
            raise DiffusionError(
                f"warmup sample '{sample['name']}' ({', '.join(files.values())}) cannot be used: {error}"
            ) from None


def text_sample(name: str, data: bytes) -> str:
    """The text in the data of a warmup file.

    Raises:
        DiffusionError: it is something else.
    """
    try:
        return bytes_sample(name, data).decode()
    except UnicodeDecodeError:
        raise invalid(name, f"'{name}' is not UTF-8") from None


def bytes_sample(name: str, data: bytes) -> bytes:
    """The one BYTES element in the data of a warmup file: little-endian length, then the element.

    Raises:
        DiffusionError: it is something else.
    """
    if int.from_bytes(data[:4], "little") != len(data) - 4:
        raise invalid(name, f"'{name}' is not one element with its length before it")
    return data[4:]


def load(config: StageConfig, stage: Stage) -> tuple[Any, str]:
    """``stage``'s share of the pipeline and of its LoRAs, and its description: the facts of this process, as JSON.

    Raises:
        DiffusionError: a file that the stage needs is missing or damaged.
    """
    import torch

    from diffusion_backend import inspection, loading, seams
    from diffusion_backend.stage_names import Stage

    started = time.perf_counter()
    if config.device.type == "cuda":
        torch.cuda.set_device(config.device)  # the current device is this thread's, and kernels go to it
    pipeline = loading.open_pipeline(config.source, config.limits.source_revision)
    for found in inspection.inspect_pipeline(pipeline):
        if found.problems and found.component.stage == stage:
            raise DiffusionError(f"{config.source} cannot be loaded: {'; '.join(found.problems)}")
    pipe, total = loading.load_stage(
        pipeline,
        stage,
        device=config.device,
        dtype=config.dtype,
        methods=seams.STAND_IN_METHODS,
        takes_image=config.limits.takes_image,
    )
    held = loading.stages_held(stage, config.limits.takes_image)
    own = {component.name: component for component in pipeline.modules if component.stage in held}
    if config.loras and stage is not Stage.VAE_DECODE:
        from diffusion_backend import loras

        total += loras.load(pipe, config.loras)
    components = {
        name: {
            "class": component.cls.__name__,
            "dtype": dtype_name(getattr(pipe, name).dtype),
            "bytes": loading.module_bytes(getattr(pipe, name)),
        }
        for name, component in own.items()
    }
    description = {
        "stage": stage.value,
        "instance": config.instance,
        "pid": os.getpid(),
        "device": str(config.device),
        "bytes_loaded": total,
        "components": components,
        "load_seconds": round(time.perf_counter() - started, 3),
        "versions": {name: importlib.metadata.version(name) for name in _VERSIONS},
    }
    return pipe, json.dumps(description)


def choose_device(kind: str, device_id: str) -> torch.device:
    """The instance's GPU if it has one, else the CPU; ``TRITON_DIFFUSION_DEVICE`` (cpu, cuda) overrules.

    Raises:
        DiffusionError: cuda is demanded and there is none.
    """
    import torch

    wish = os.environ.get("TRITON_DIFFUSION_DEVICE", "auto")
    if wish not in ("auto", "cpu", "cuda"):
        raise DiffusionError(f"TRITON_DIFFUSION_DEVICE is {wish!r}; allowed: auto, cpu, cuda")
    available = torch.cuda.is_available()
    if wish == "cuda" and not available:
        raise DiffusionError("TRITON_DIFFUSION_DEVICE is cuda, but torch finds no CUDA device")
    if wish == "auto" and kind == "GPU" and not available:
        logger.warning(
            "this instance is on GPU %s, but torch finds no CUDA device: it runs on the CPU", device_id
        )
    if wish == "cpu" or not available or (wish == "auto" and kind != "GPU"):
        return torch.device("cpu")
    return torch.device("cuda", int(device_id))


def choose_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """``auto``: what the weights are stored in (None) on a GPU, float32 on a CPU."""
    if name == "auto":
        name = "" if device.type == "cuda" else "float32"
    return parse_dtype(name)


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of that name; None for none."""
    import torch

    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return dtype


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """The inverse of ``parse_dtype``."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def text_tensor(name: str, text: str, shape: tuple[int, ...] = (1,)) -> Any:
    """A BYTES tensor of one element."""
    import triton_python_backend_utils as pb_utils

    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_).reshape(shape))


def read_request_id(request: Any) -> str:
    """The id that the client gave, or an empty text.

    Raises:
        DiffusionError: it is not valid UTF-8.
    """
    try:
        return str(request.request_id())
    except UnicodeDecodeError:
        raise invalid("id", "'id' is not valid UTF-8", "invalid_unicode") from None


def read_parameters(request: Any) -> dict[str, Any]:
    """The request's parameters.

    Raises:
        DiffusionError: they are not valid UTF-8.
    """
    try:
        parameters: dict[str, Any] = json.loads(request.parameters() or "{}")
    except UnicodeDecodeError:
        raise invalid("parameters", "the parameters are not valid UTF-8", "invalid_unicode") from None
    return parameters


def bytes_input(request: Any, name: str) -> bytes | None:
    """The one element of a BYTES input, or None when the optional input is absent.

    Raises:
        DiffusionError: it is not one element.
    """
    import triton_python_backend_utils as pb_utils

    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    elements = tensor.as_numpy().reshape(-1)
    if len(elements) != 1:
        raise invalid(
            name, f"'{name}' has {len(elements)} elements; allowed: 1, since a request makes one thing"
        )
    return bytes(elements[0])


def bytes_inputs(request: Any, name: str) -> list[bytes]:
    """The elements of a BYTES input; none when the optional input is absent."""
    import triton_python_backend_utils as pb_utils

    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else [bytes(element) for element in tensor.as_numpy().reshape(-1)]


def text_input(request: Any, name: str) -> str | None:
    """``bytes_input`` as text.

    Raises:
        DiffusionError: it is not one element, or not valid UTF-8.
    """
    data = bytes_input(request, name)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise invalid(
            name, f"'{name}' is not valid UTF-8: {error.reason} at byte {error.start}", "invalid_unicode"
        ) from None


def array_input(request: Any, name: str) -> np.ndarray[Any, Any]:
    """A numeric input, which Triton calls optional only because ``describe`` does without it.

    Raises:
        DiffusionError: it is absent.
    """
    import triton_python_backend_utils as pb_utils

    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise invalid(name, f"{name!r} is missing", "missing_input")
    array: np.ndarray[Any, Any] = tensor.as_numpy()
    return array


def has_input(request: Any, name: str) -> bool:
    """Whether an optional input is there."""
    import triton_python_backend_utils as pb_utils

    return pb_utils.get_input_tensor_by_name(request, name) is not None


def asks_to_describe(request: Any) -> bool:
    """Whether a request wants this process's description, and no work."""
    return has_input(request, DESCRIBE)


def description_response(description: str, shape: tuple[int, ...]) -> Any:
    """The answer to such a request; ``shape`` is (1,), or (1, 1) in a model with a batch axis."""
    import triton_python_backend_utils as pb_utils

    return pb_utils.InferenceResponse([text_tensor(DESCRIPTION, description, shape)])


def cancelled() -> DiffusionError:
    """What a request is told that was cancelled, by a stage that must answer it."""
    return DiffusionError("the request was cancelled", code="cancelled", status=Status.CANCELLED)


def send_in_stream(sender: Any, response: Any, request_id: str) -> None:
    """The one response of a stream; an error in its place if Triton cannot hand it on."""
    send_all_in_stream(sender, [response], request_id)


def send_all_in_stream(sender: Any, responses: Iterable[Any], request_id: str) -> None:
    """The responses of a stream, each when it is made; an error in the place of one that Triton cannot hand on.

    Raises:
        Exception: what making one of them raises; then the stream has no end yet.
    """
    import triton_python_backend_utils as pb_utils

    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    try:
        # Apart from the end of the stream: after that one, an error could not be sent any more.
        for response in responses:
            sender.send(response)
    except pb_utils.TritonModelException as error:
        logger.error("request %s cannot be answered: %s", request_id, error)
        full = DiffusionError(
            "the model server has no room in shared memory for what its stages hand on",
            code="no_shared_memory",
            status=Status.UNAVAILABLE,
        )
        sender.send(error_response(full, request_id), flags=final)
    else:
        sender.send(flags=final)


def error_response(error: BaseException, request_id: str) -> Any:
    """Triton's form of ``to_ours``."""
    import triton_python_backend_utils as pb_utils

    ours = to_ours(error, request_id)
    code = getattr(pb_utils.TritonError, ours.status.value)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(ours.to_text(), code))


def is_clients_fault(error: BaseException) -> bool:
    """Whether the request itself was wrong, and would be whatever ran it."""
    return isinstance(error, DiffusionError) and error.status is Status.INVALID_ARG


def to_ours(error: BaseException, request_id: str) -> DiffusionError:
    """What the client is told. What is not ours is logged in full and answered in general words.

    Without a request id it is a warmup request, whose error is the operator's: there the reason is told.
    """
    if not isinstance(error, DiffusionError):
        logger.error("request %s failed", request_id, exc_info=error)
        reason = "" if request_id else f": {error}"
        error = DiffusionError(f"the model failed with {type(error).__name__}{reason}", code="internal_error")
    if not request_id:
        # tritonserver may crash before it tells (see check_warmup).
        logger.error("a warmup sample, or another request without an id, failed: %s", error)
    return error
