"""Which calls of a denoiser may be joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusion_backend import batching
from diffusion_backend.batching import Digests, UnjoinableError, read_call
from torch import nn

pytestmark = pytest.mark.parallel


class Denoiser(nn.Module):
    def forward(self, hidden_states: Any, timestep: Any = None, **others: Any) -> Any:
        return (hidden_states, timestep, others)


DENOISER = Denoiser()


def key(rows: int = 1, **arguments: Any) -> Any:
    given = {"hidden_states": torch.zeros(rows, 8, 4), "timestep": torch.tensor(1.0), **arguments}
    return read_call(DENOISER, (), given, Digests()).key


def test_other_steps_and_row_counts_may_be_joined() -> None:
    assert key() == key(timestep=torch.tensor(2.0)) == key(rows=2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"hidden_states": torch.zeros(1, 16, 4)},
        {"hidden_states": torch.zeros(1, 8, 4, dtype=torch.float16)},
        {"img_shapes": [[(1, 2, 4)]]},  # as many tokens, laid out otherwise
        {"img_ids": torch.ones(8, 3)},
        {"img_ids": torch.ones(1, 8, 3)},
        {"rotary": (torch.ones(8, 2), torch.zeros(8, 2))},
        {"scale": 2.0},
        {"kwargs": {"scale": 1.0}},
        {"guider": object()},
    ],
)
def test_what_serves_all_rows_must_be_equal(arguments: dict[str, Any]) -> None:
    shared = {
        "img_shapes": [[(1, 4, 2)]],
        "img_ids": torch.zeros(8, 3),
        "rotary": (torch.zeros(8, 2), torch.zeros(8, 2)),
        "scale": 1.0,
        "kwargs": {"scale": 1},
    }
    if arguments.get("img_ids", torch.zeros(8, 3)).ndim == 3:
        shared["img_ids"] = torch.zeros(1, 8, 3)
    assert key(**shared) == key(**shared)
    assert key(**shared) != key(**{**shared, **arguments})


def test_lists_with_an_entry_a_row_are_joined() -> None:
    def call(rows: int, tokens: int) -> batching.DenoiserCall:
        latents = [torch.full((4, 1, tokens), float(tokens)) for _ in range(rows)]
        return read_call(DENOISER, (latents, torch.zeros(rows)), {}, Digests())

    calls = [call(1, 2), call(2, 3)]
    assert calls[0].key == calls[1].key
    latents, timesteps, _ = DENOISER(**batching.join(calls))
    assert [entry.shape[-1] for entry in latents] == [2, 3, 3]
    assert timesteps.shape == (3,)
    first, second = batching.split(latents, [1, 2])
    assert [len(first), len(second)] == [1, 2]


def test_a_list_of_a_tensor_a_layer_is_no_list_of_rows() -> None:
    """A ControlNet's residuals: by chance there are as many layers as rows."""

    def call(rows: int, value: float) -> batching.DenoiserCall:
        residuals = [torch.full((rows, 8, 4), value + layer) for layer in range(2)]
        latents = torch.zeros(rows, 8, 4)
        return read_call(DENOISER, (latents, torch.zeros(rows)), {"residuals": residuals}, Digests())

    calls = [call(2, 10.0), call(1, 20.0)]
    assert calls[0].key == calls[1].key
    joined = batching.join(calls)["residuals"]
    assert [layer[:, 0, 0].tolist() for layer in joined] == [[10, 10, 20], [11, 11, 21]]


def test_a_result_without_rows_is_not_split() -> None:
    with pytest.raises(UnjoinableError):
        batching.split(torch.zeros(3), [1, 1])
    with pytest.raises(UnjoinableError):
        batching.split(torch.tensor(1.0), [1, 1])


def test_a_shared_tensor_is_read_once_until_it_is_written_to() -> None:
    digests, tensor = Digests(), torch.zeros(4)
    first = digests.of(tensor)
    assert digests.of(tensor) is first
    tensor += 1
    assert digests.of(tensor) != first
