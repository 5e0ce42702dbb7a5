"""The cache of text encoders' results: the same bits, bounded, and nobody's to spoil."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusion_backend.encoder_cache import EncoderCache
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

pytestmark = pytest.mark.parallel

ENTRY = 4 * 4  # bytes of one result


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, scale: float = 1.0, hook: Any = None) -> BaseModelOutput:  # noqa: ARG002
        vars(self)["calls"] += 1
        return BaseModelOutput(last_hidden_state=(input_ids * scale).float())


def make(max_bytes: int) -> tuple[Encoder, nn.Module, EncoderCache, list[str]]:
    counted: list[str] = []
    cache = EncoderCache(max_bytes, counted.append)
    encoder = Encoder()
    return encoder, cache.wrap(encoder), cache, counted


def ids(number: int) -> torch.Tensor:
    return torch.full((1, 4), number)


def test_the_same_arguments_are_computed_once() -> None:
    encoder, wrapped, _, counted = make(1000)
    first, second = wrapped(ids(1)), wrapped(ids(1))
    assert torch.equal(first.last_hidden_state, second.last_hidden_state)
    assert isinstance(second, BaseModelOutput)
    assert (encoder.calls, counted) == (1, ["miss", "hit"])


def test_other_arguments_are_other_results() -> None:
    encoder, wrapped, _, _ = make(1000)
    results = [
        wrapped(ids(1)),
        wrapped(ids(2)),
        wrapped(ids(1), scale=2.0),
        wrapped(ids(1).int()),
        wrapped(torch.full((2, 2), 1)),
    ]
    assert encoder.calls == len(results)
    assert results[2].last_hidden_state.eq(2).all()


def test_writing_into_a_result_spoils_no_other() -> None:
    _, wrapped, _, _ = make(1000)
    wrapped(ids(1)).last_hidden_state.zero_()
    wrapped(ids(1)).last_hidden_state.zero_()
    assert wrapped(ids(1)).last_hidden_state.eq(1).all()


def test_the_oldest_goes_when_there_is_no_room() -> None:
    encoder, wrapped, cache, counted = make(2 * ENTRY)
    for number in (1, 2, 1, 3):  # 2 has waited longest when 3 comes
        wrapped(ids(number))
    assert cache.bytes == 2 * ENTRY
    counted.clear()
    for number in (1, 3, 2):
        wrapped(ids(number))
    assert counted == ["hit", "hit", "miss"]
    assert encoder.calls == 4


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    encoder, wrapped, cache, _ = make(ENTRY - 1)
    wrapped(ids(1))
    wrapped(ids(1))
    assert (encoder.calls, cache.bytes) == (2, 0)


def test_arguments_that_cannot_be_compared_are_computed() -> None:
    encoder, wrapped, _, counted = make(1000)
    for _ in range(2):
        wrapped(ids(1), hook=object())
    assert (encoder.calls, counted) == (2, [])


def test_it_is_still_the_encoder() -> None:
    encoder, wrapped, _, _ = make(1000)
    assert isinstance(wrapped, Encoder)
    assert wrapped.weight is encoder.weight


class LanguageModel(Encoder):
    """Returns keys and values, as language models do unless they are told not to."""

    def forward(self, input_ids: torch.Tensor) -> BaseModelOutputWithPast:  # type: ignore[override]
        vars(self)["calls"] += 1
        kept = DynamicCache()
        kept.update(torch.zeros(1, 1, 4, 1000), torch.zeros(1, 1, 4, 1000), 0)
        return BaseModelOutputWithPast(last_hidden_state=input_ids.float(), past_key_values=kept)


def test_keys_and_values_are_not_kept() -> None:
    counted: list[str] = []
    cache = EncoderCache(ENTRY, counted.append)
    encoder = LanguageModel()
    wrapped = cache.wrap(encoder)
    first, second = wrapped(ids(1)), wrapped(ids(1))
    assert counted == ["miss", "hit"]
    assert cache.bytes == ENTRY
    assert torch.equal(first.last_hidden_state, second.last_hidden_state)
    assert first.past_key_values is second.past_key_values is None


def test_a_result_of_unknown_size_is_not_kept() -> None:
    class Odd(Encoder):
        def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
            vars(self)["calls"] += 1
            return {"hidden": input_ids, "state": DynamicCache()}

    encoder = Odd()
    cache = EncoderCache(10**6, lambda _: None)
    wrapped = cache.wrap(encoder)
    wrapped(ids(1))
    wrapped(ids(1))
    assert (encoder.calls, cache.bytes) == (2, 0)
