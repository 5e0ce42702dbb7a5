"""The text of the four ``config.pbtxt`` files, as an operator reads and edits them.

Reference: https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from diffusion_backend.clips import MAX_SLICE_BYTES
from diffusion_backend.settings import ModelLimits
from diffusion_backend.stage_names import Stage, stage_model
from diffusion_backend.warmup import Sample, WarmupInput

# Requests that one denoise instance holds, running and waiting, before it answers UNAVAILABLE.
MAX_QUEUED_REQUESTS = 64
# Rows of the default size in one forward of the denoiser; larger ones count for more, and guidance may take two.
MAX_BATCH_ROWS = 16
MAX_BATCH_SIZE = 8
# Pictures of the default size in one fast decode on a GPU; all others are decoded one at a time.
MAX_DECODE_ROWS = 4
# Where white against black is 0 dB: 40 is a root mean square difference of 2.6 levels of 255.
FAST_PATH_MIN_PSNR_DB = 40.0
# What an encode instance keeps of its encoders' results: T5-XXL's take 4 MiB a prompt in bfloat16.
ENCODER_CACHE_BYTES = 256 << 20
_DESCRIBE_NOTE = (
    "# With describe as its only input, whatever its value, it answers description (JSON of this process)."
)


def ensemble(name: str, limits: ModelLimits) -> str:
    """The ensemble ``name``: its parameters are the model's limits and defaults."""
    inputs = _request_inputs(limits)
    newline = ",\n"
    maps = "\n".join(f'      input_map {{ key: "{given}" value: "{given}" }}' for given in inputs)
    made, dims = _made(limits)
    overlay = '\n      {}_map {{ key: "overlay" value: "overlay" }}' if limits.takes_mask else ""
    return f"""\
# {name}: {limits.pipeline_class}, {", ".join(limits.tasks)}. Written by `triton-diffusion add`.
# The parameters are the model's limits and defaults; every stage and the adapter read them here.
name: "{name}"
platform: "ensemble"
max_batch_size: 0

input [
{newline.join(_input(given, "TYPE_STRING", of, optional=given != "prompt") for given, of in inputs.items())}
]
output [
  {{ name: "{made}" data_type: TYPE_UINT8 dims: {dims} }},
  {{ name: "info" data_type: TYPE_STRING dims: [ 1 ] }}
]

ensemble_scheduling {{
  step [
    {{
      model_name: "{stage_model(name, Stage.ENCODE)}"
      model_version: -1
{maps}
      output_map {{ key: "conditioning" value: "conditioning" }}
    }},
    {{
      model_name: "{stage_model(name, Stage.DENOISE)}"
      model_version: -1
      input_map {{ key: "conditioning" value: "conditioning" }}
      output_map {{ key: "latents" value: "latents" }}
      output_map {{ key: "settings" value: "settings" }}{overlay.format("output")}
    }},
    {{
      model_name: "{stage_model(name, Stage.VAE_DECODE)}"
      model_version: -1
      input_map {{ key: "latents" value: "latents" }}
      input_map {{ key: "settings" value: "settings" }}{overlay.format("input")}
      output_map {{ key: "{made}" value: "{made}" }}
      output_map {{ key: "info" value: "info" }}
    }}
  ]
}}

{_parameters(_limits_parameters(limits))}
"""


def _request_inputs(limits: ModelLimits) -> dict[str, str]:
    """The tensors of a request, and their dims: what the model takes of prompts and image files."""
    return {
        "prompt": "[ 1 ]",
        **({"negative_prompt": "[ 1 ]"} if limits.takes_negative_prompt else {}),
        **({"image": "[ -1 ]"} if limits.takes_image else {}),
        **({"mask": "[ 1 ]"} if limits.takes_mask else {}),
    }


def _made(limits: ModelLimits) -> tuple[str, str]:
    """The tensor that comes out, and its dims."""
    return ("frames", "[ -1, -1, -1, 3 ]") if limits.makes_video else ("images", "[ -1, -1, 3 ]")


@dataclass(frozen=True)
class Instances:
    """How many instances of a stage run, and where: KIND_AUTO, KIND_CPU or KIND_GPU.

    ``count`` is for each GPU. (KIND_AUTO cannot name some of them, as ``gpus: [ 0 ]``: where there is none, Triton
    makes it KIND_CPU, and refuses that with GPUs.)
    """

    count: int
    kind: str


def encode(name: str, limits: ModelLimits, instances: Instances, warmup: list[Sample]) -> str:
    """The encode stage of ``name``."""
    inputs = [
        _input(given, "TYPE_STRING", dims, optional=True) for given, dims in _request_inputs(limits).items()
    ]
    images, files = (" and image", ", image files") if limits.takes_image else ("", "")
    return _stage(
        name,
        Stage.ENCODE,
        f"Runs the text{images} encoders. Prompts{files} and request parameters in, one safetensors blob out.",
        f"max_batch_size: {MAX_BATCH_SIZE}\ndynamic_batching {{ }}",
        inputs,
        ['  { name: "conditioning" data_type: TYPE_UINT8 dims: [ -1 ] }'],
        instances,
        warmup,
        {"ensemble": name, "encoder_cache_bytes": str(ENCODER_CACHE_BYTES)},
    )


def denoise(
    name: str,
    limits: ModelLimits,
    latents_rank: int,
    instances: Instances,
    warmup: list[Sample],
    *,
    unary: bool,
    self_check: str,
) -> str:
    """The denoise stage of ``name``. ``unary``: one response a request, so that plain ``infer`` is served too.

    ``self_check`` is the file of the request with which it tries, when it loads, whether rows can share a batch.
    """
    dims = ", ".join(["-1"] * latents_rank)
    return _stage(
        name,
        Stage.DENOISE,
        "Runs the pipeline's own denoising loop, all requests together, a batch a step.\n"
        "# With cancel as its only input, the id of a request, it ends that request, in whatever stage it is.",
        f"max_batch_size: 0\nmodel_transaction_policy {{ decoupled: {str(not unary).lower()} }}",
        [
            _input("conditioning", "TYPE_UINT8", "[ -1 ]", optional=True),
            _input("cancel", "TYPE_STRING", "[ 1 ]", optional=True),
        ],
        [
            f'  {{ name: "latents" data_type: TYPE_FP32 dims: [ {dims} ] }}',
            '  { name: "settings" data_type: TYPE_STRING dims: [ 1 ] }',
            *(
                ['  { name: "overlay" data_type: TYPE_UINT8 dims: [ -1, -1, 4 ] }']
                if limits.takes_mask
                else []
            ),
        ],
        instances,
        warmup,
        {
            "ensemble": name,
            "max_queued_requests": str(MAX_QUEUED_REQUESTS),
            "max_batch_rows": str(MAX_BATCH_ROWS),
            "self_check": self_check,
        },
    )


def vae_decode(
    name: str, limits: ModelLimits, latents_shape: tuple[int, ...], kind: str, warmup: list[Sample]
) -> str:
    """The VAE decode stage of ``name``, one instance on each device.

    Where there are several, ``preserve_ordering`` keeps a preview from being overtaken by the picture.
    """
    dims = ", ".join([str(latents_shape[0]), *["-1"] * (len(latents_shape) - 1)])
    made, made_dims = _made(limits)
    if limits.makes_video:
        about = (
            "Decodes latents to raw clips, each sent in slices of at most max_slice_bytes, or of one frame."
        )
        policy = "max_batch_size: 0\nmodel_transaction_policy { decoupled: true }"
        own = {"max_slice_bytes": str(MAX_SLICE_BYTES)}
    else:
        about = "Decodes latents to raw pictures."
        policy = f"max_batch_size: {MAX_BATCH_SIZE}\ndynamic_batching {{ preserve_ordering: true }}"
        own = {"max_gpu_batch_rows": str(MAX_DECODE_ROWS)}
    return _stage(
        name,
        Stage.VAE_DECODE,
        about,
        policy,
        [
            _input("latents", "TYPE_FP32", f"[ {dims} ]", optional=True, ragged=not limits.makes_video),
            _input("settings", "TYPE_STRING", "[ 1 ]", optional=True),
            *(
                [_input("overlay", "TYPE_UINT8", "[ -1, -1, 4 ]", optional=True, ragged=True)]
                if limits.takes_mask
                else []
            ),
        ],
        [
            f'  {{ name: "{made}" data_type: TYPE_UINT8 dims: {made_dims} }}',
            '  { name: "info" data_type: TYPE_STRING dims: [ 1 ] }',
        ],
        Instances(1, kind),
        warmup,
        {
            "ensemble": name,
            # How many pixels wide a latent is.
            "vae_scale_factor": str(limits.default_width // latents_shape[-1]),
            "fast_path_min_psnr_db": f"{FAST_PATH_MIN_PSNR_DB:g}",
            **own,
        },
    )


def _stage(
    name: str,
    stage: Stage,
    about: str,
    policy: str,
    inputs: list[str],
    outputs: list[str],
    instances: Instances,
    warmup: list[Sample],
    parameters: dict[str, str],
) -> str:
    newline = ",\n"
    inputs = [*inputs, _input("describe", "TYPE_STRING", "[ 1 ]", optional=True)]
    outputs = [*outputs, '  { name: "description" data_type: TYPE_STRING dims: [ 1 ] }']
    return f"""\
# {about} Written by `triton-diffusion add`.
{_DESCRIBE_NOTE}
name: "{stage_model(name, stage)}"
backend: "python"
{policy}

input [
{newline.join(inputs)}
]
output [
{newline.join(outputs)}
]

instance_group [ {{ count: {instances.count} kind: {instances.kind} }} ]
{_warmup(warmup)}
{_parameters(parameters)}
"""


def _warmup(samples: list[Sample]) -> str:
    if not samples:
        return ""
    newline = ",\n"
    return f"""
# Run before the model is ready; a sample that fails stops the server.
model_warmup [
{newline.join(_sample(sample) for sample in samples)}
]
"""


def _sample(sample: Sample) -> str:
    inputs = "\n".join(_sample_input(sample, name, tensor) for name, tensor in sample.inputs.items())
    return f'  {{\n    name: "{sample.name}"\n    batch_size: {sample.requests}\n{inputs}\n  }}'


def _sample_input(sample: Sample, name: str, tensor: WarmupInput) -> str:
    dims = ", ".join(str(side) for side in tensor.dims)
    data = "zero_data: true" if tensor.data is None else f'input_data_file: "{sample.name}.{name}"'
    return (
        f'    inputs {{ key: "{name}" value: {{ data_type: {tensor.data_type} dims: [ {dims} ] {data} }} }}'
    )


def _input(name: str, data_type: str, dims: str, *, optional: bool = False, ragged: bool = False) -> str:
    flags = (" optional: true" if optional else "") + (" allow_ragged_batch: true" if ragged else "")
    return f'  {{ name: "{name}" data_type: {data_type} dims: {dims}{flags} }}'


def _limits_parameters(limits: ModelLimits) -> dict[str, str]:
    fields = limits.model_dump(mode="json", exclude_none=True)
    fields["call_arguments"] = json.dumps(limits.call_arguments)
    fields["tasks"] = ", ".join(limits.tasks)
    if limits.loras:
        fields["loras"] = json.dumps(limits.loras)
    else:
        del fields["loras"]
    return {name: str(value) for name, value in fields.items()}


def _parameters(parameters: dict[str, str]) -> str:
    return "\n".join(
        f'parameters {{ key: "{key}" value: {{ string_value: {_literal(value)} }} }}'
        for key, value in parameters.items()
    )


def _literal(text: str) -> str:
    return '"' + "".join(_escape(byte) for byte in text.encode()) + '"'


def _escape(byte: int) -> str:
    if byte in b'"\\':
        return "\\" + chr(byte)
    return chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}"
