"""Values that cross between stages: they come back as they were, and nothing but them comes back."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution, EncoderOutput
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusion_backend import seams, values
from diffusion_backend.errors import DiffusionError, Status


def through_text(value: Any) -> Any:
    return values.from_json(json.loads(json.dumps(values.to_json(value))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_keep_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(through_text({"x": [tensor]})["x"][0], tensor)
    assert through_text(tensor).dtype == dtype


def test_a_latent_distribution_draws_the_same_again() -> None:
    before = AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(torch.randn(1, 8, 2, 2)))
    after = through_text(before)
    assert type(after) is AutoencoderKLOutput

    def draw(output: AutoencoderKLOutput) -> torch.Tensor:
        drawn: torch.Tensor = output.latent_dist.sample(torch.Generator().manual_seed(1))
        return drawn

    assert torch.equal(draw(before), draw(after))
    assert torch.equal(before.latent_dist.mode(), after.latent_dist.mode())


def test_map_tensors_reaches_every_tensor() -> None:
    nested = [{"a": (torch.ones(1), 2)}, EncoderOutput(latent=torch.ones(1))]
    doubled = values.map_tensors(nested, lambda tensor: tensor * 2)
    assert (doubled[0]["a"][0].item(), doubled[0]["a"][1], doubled[1].latent.item()) == (2, 2, 2)
    assert type(doubled[1]) is EncoderOutput


def test_a_generator_goes_on_where_it_stood() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.randn(7, generator=generator)
    arrived = through_text(generator)
    assert torch.equal(torch.randn(4, generator=arrived), torch.randn(4, generator=generator))


class Pair(NamedTuple):
    """It would come back as a plain tuple."""

    one: int
    other: int


@pytest.mark.parametrize(
    "value", [object(), torch.zeros(1, dtype=torch.complex64), {"x": print}, [Pair(1, 2)], torch.Size([1])]
)
def test_what_cannot_travel(value: object) -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        values.to_json(value)


def test_numbers_drawn_on_a_gpu_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"generator": torch.Generator()}
    on_cpu = seams._random_state(arguments)
    assert seams._random_state(arguments) == on_cpu
    gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", gpu.get_state)
    before = seams._random_state(arguments)
    assert seams._random_state(arguments) == before
    torch.randn(1, generator=gpu)
    assert seams._random_state(arguments) != before


@pytest.mark.parametrize(
    "forged",
    [
        {},
        [],
        {"pickle": "x"},
        {"record": ["Exception", {}]},
        {"record": ["DiagonalGaussianDistribution", {"parameters": {"value": 1}}]},
        {"tensor": {"dtype": "float32", "values": [[1], [1, 2]]}},
        {"tensor": {"dtype": "object", "values": [1]}},
        {"generator": "AAAA"},
        {"generator": "?"},
    ],
)
def test_forged_values(forged: Any) -> None:
    with pytest.raises(values.MALFORMED):
        values.from_json(forged)


def test_forged_decode_arguments_are_the_clients_fault() -> None:
    with pytest.raises(DiffusionError, match="decode_arguments") as caught:
        seams.read_decode_arguments({"temb": {"pickle": "x"}})
    assert (caught.value.param, caught.value.status) == ("settings", Status.INVALID_ARG)
