"""The text of the four ``config.pbtxt`` files, as an operator reads and edits them.

Reference: https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
"""

from __future__ import annotations

import json

from diffusion_backend.settings import ModelLimits

# Requests that one denoise instance holds, running and waiting, before it answers UNAVAILABLE.
MAX_QUEUED_REQUESTS = 64
MAX_BATCH_SIZE = 8
_DESCRIBE_NOTE = (
    "# With describe as its only input, whatever its value, it answers description (JSON of this process)."
)


def ensemble(name: str, limits: ModelLimits) -> str:
    """The ensemble ``name``: its parameters are the model's limits and defaults."""
    negative_input = _input("negative_prompt", "TYPE_STRING", "[ 1 ]", optional=True)
    negative_map = '\n      input_map { key: "negative_prompt" value: "negative_prompt" }'
    takes_negative = limits.takes_negative_prompt
    return f"""\
# {name}: {limits.pipeline_class}, {limits.task}. Written by `triton-diffusion add`.
# The parameters are the model's limits and defaults; every stage and the adapter read them here.
name: "{name}"
platform: "ensemble"
max_batch_size: 0

input [
{_input("prompt", "TYPE_STRING", "[ 1 ]")}{"," if takes_negative else ""}
{negative_input if takes_negative else ""}
]
output [
  {{ name: "images" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }},
  {{ name: "info" data_type: TYPE_STRING dims: [ 1 ] }}
]

ensemble_scheduling {{
  step [
    {{
      model_name: "{name}_encode"
      model_version: -1
      input_map {{ key: "prompt" value: "prompt" }}{negative_map if takes_negative else ""}
      output_map {{ key: "conditioning" value: "conditioning" }}
    }},
    {{
      model_name: "{name}_denoise"
      model_version: -1
      input_map {{ key: "conditioning" value: "conditioning" }}
      output_map {{ key: "latents" value: "latents" }}
      output_map {{ key: "settings" value: "settings" }}
    }},
    {{
      model_name: "{name}_vae_decode"
      model_version: -1
      input_map {{ key: "latents" value: "latents" }}
      input_map {{ key: "settings" value: "settings" }}
      output_map {{ key: "images" value: "images" }}
      output_map {{ key: "info" value: "info" }}
    }}
  ]
}}

{_parameters(_limits_parameters(limits))}
"""


def encode(name: str, limits: ModelLimits) -> str:
    """The encode stage of ``name``."""
    inputs = [_input("prompt", "TYPE_STRING", "[ 1 ]", optional=True)]
    warmup = [_warmup_file("prompt", "TYPE_STRING", "[ 1 ]", "prompt")]
    if limits.takes_negative_prompt:
        inputs.append(_input("negative_prompt", "TYPE_STRING", "[ 1 ]", optional=True))
        warmup.append(_warmup_file("negative_prompt", "TYPE_STRING", "[ 1 ]", "negative_prompt"))
    return _stage(
        name,
        "encode",
        "Runs the text encoders. Prompts and request parameters in, one safetensors blob out.",
        f"max_batch_size: {MAX_BATCH_SIZE}\ndynamic_batching {{ }}",
        inputs,
        ['  { name: "conditioning" data_type: TYPE_UINT8 dims: [ -1 ] }'],
        [("default", warmup)],
        {"ensemble": name},
    )


def denoise(name: str, conditioning_bytes: int, latents_rank: int) -> str:
    """The denoise stage of ``name``; its warmup file has ``conditioning_bytes`` bytes."""
    dims = ", ".join(["-1"] * latents_rank)
    return _stage(
        name,
        "denoise",
        "Runs the pipeline's own denoising loop on a thread of its own.",
        "max_batch_size: 0\nmodel_transaction_policy { decoupled: true }",
        [_input("conditioning", "TYPE_UINT8", "[ -1 ]", optional=True)],
        [
            f'  {{ name: "latents" data_type: TYPE_FP32 dims: [ {dims} ] }}',
            '  { name: "settings" data_type: TYPE_STRING dims: [ 1 ] }',
        ],
        [
            (
                "default",
                [_warmup_file("conditioning", "TYPE_UINT8", f"[ {conditioning_bytes} ]", "conditioning")],
            )
        ],
        {"ensemble": name, "max_queued_requests": str(MAX_QUEUED_REQUESTS)},
    )


def vae_decode(name: str, latents_shape: tuple[int, ...], qualities: tuple[str, ...]) -> str:
    """The VAE decode stage of ``name``; warmed once for each of ``qualities`` with latents of ``latents_shape``."""
    dims = ", ".join([str(latents_shape[0]), *["-1"] * (len(latents_shape) - 1)])
    shape = ", ".join(str(side) for side in latents_shape)
    latents = (
        f'    inputs {{ key: "latents" value: {{ data_type: TYPE_FP32 dims: [ {shape} ] zero_data: true }} }}'
    )
    return _stage(
        name,
        "vae_decode",
        "Decodes latents to raw pictures.",
        f"max_batch_size: {MAX_BATCH_SIZE}\ndynamic_batching {{ preserve_ordering: true }}",
        [
            _input("latents", "TYPE_FP32", f"[ {dims} ]", optional=True, ragged=True),
            _input("settings", "TYPE_STRING", "[ 1 ]", optional=True),
        ],
        [
            '  { name: "images" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }',
            '  { name: "info" data_type: TYPE_STRING dims: [ 1 ] }',
        ],
        [
            (
                quality,
                [latents, _warmup_file("settings", "TYPE_STRING", "[ 1 ]", f"settings_{quality}")],
            )
            for quality in qualities
        ],
        {"ensemble": name},
    )


def _stage(
    name: str,
    stage: str,
    about: str,
    policy: str,
    inputs: list[str],
    outputs: list[str],
    warmups: list[tuple[str, list[str]]],
    parameters: dict[str, str],
) -> str:
    newline = ",\n"
    inputs = [*inputs, _input("describe", "TYPE_STRING", "[ 1 ]", optional=True)]
    outputs = [*outputs, '  { name: "description" data_type: TYPE_STRING dims: [ 1 ] }']
    samples = newline.join(
        f'  {{\n    name: "{sample}"\n    batch_size: 1\n' + "\n".join(tensors) + "\n  }"
        for sample, tensors in warmups
    )
    return f"""\
# {about} Written by `triton-diffusion add`.
{_DESCRIBE_NOTE}
name: "{name}_{stage}"
backend: "python"
{policy}

input [
{newline.join(inputs)}
]
output [
{newline.join(outputs)}
]

instance_group [ {{ count: 1 kind: KIND_AUTO }} ]

# Run before the model is ready; a sample that fails stops the server.
model_warmup [
{samples}
]

{_parameters(parameters)}
"""


def _input(name: str, data_type: str, dims: str, *, optional: bool = False, ragged: bool = False) -> str:
    flags = (" optional: true" if optional else "") + (" allow_ragged_batch: true" if ragged else "")
    return f'  {{ name: "{name}" data_type: {data_type} dims: {dims}{flags} }}'


def _warmup_file(name: str, data_type: str, dims: str, file: str) -> str:
    return (
        f'    inputs {{ key: "{name}" '
        f'value: {{ data_type: {data_type} dims: {dims} input_data_file: "{file}" }} }}'
    )


def _limits_parameters(limits: ModelLimits) -> dict[str, str]:
    fields = limits.model_dump(mode="json", exclude_none=True)
    fields["call_arguments"] = json.dumps(limits.call_arguments)
    return {name: str(value) for name, value in fields.items()}


def _parameters(parameters: dict[str, str]) -> str:
    # json.dumps writes a string literal that protobuf's text format reads back (ASCII, same escapes).
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
