"""A component without weights: what it computes again, and what it answers from memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusion_backend.standins import Method, dry_methods
from torch import nn

pytestmark = pytest.mark.parallel


class Doubling(nn.Module):
    """[N, 2] to [N, 4], its weights' dtype, and the input as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4, device="meta")
        self.calls = 0

    def forward(self, x: torch.Tensor, **_more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return self.linear(x.to(self.linear.weight.dtype)), x


@pytest.fixture
def doubling() -> tuple[Doubling, Method]:
    return Doubling(), dry_methods(Doubling)["forward"]


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def test_what_was_given_before_is_answered_from_memory(doubling: tuple[Doubling, Method]) -> None:
    """With tensors of its own each time: pipelines change them in place."""
    module, run = doubling
    for _ in range(2):
        made, kept = run(module, X.clone(), scale=2.0)
        assert torch.equal(made, torch.ones(2, 4))
        assert torch.equal(kept, X)
        made.zero_()
        kept.zero_()
    assert module.calls == 1


@pytest.mark.parametrize(
    "other",
    [
        X + 1e-7,
        X[:1],
        X.double(),
        X.t().contiguous().t(),  # the same values in another order
        X.bfloat16(),
    ],
    ids=["value", "shape", "dtype", "strides", "bfloat16"],
)
def test_what_differs_is_computed(doubling: tuple[Doubling, Method], other: torch.Tensor) -> None:
    module, run = doubling
    run(module, X)
    made, kept = run(module, other)
    assert module.calls == 2
    assert made.shape == (len(other), 4)
    assert (kept.dtype, kept.tolist()) == (other.dtype, other.tolist())


def test_what_else_differs_is_computed(doubling: tuple[Doubling, Method]) -> None:
    module, run = doubling
    run(module, X, scale=1)
    for more in ({"scale": 1.0}, {"scale": 2}, {"scale": None}, {"sizes": [1]}, {"sizes": (1,)}, {}):
        calls = module.calls
        run(module, X, **more)
        assert module.calls == calls + 1, more


def test_other_weights_are_another_component(doubling: tuple[Doubling, Method]) -> None:
    """Some pipelines change a component's dtype on the way."""
    module, run = doubling
    assert run(module, X)[0].dtype == torch.float32
    module.to(torch.bfloat16)
    assert run(module, X)[0].dtype == torch.bfloat16


def test_objects_may_hold_anything(doubling: tuple[Doubling, Method]) -> None:
    module, run = doubling
    for _ in range(2):
        run(module, X, cache=object())
    assert module.calls == 2


@pytest.mark.parametrize(
    "make", [lambda: torch.tensor(7), lambda: torch.tensor(7).expand(3), lambda: torch.zeros(0, 2)]
)
def test_tensors_of_any_kind_are_told_apart(
    doubling: tuple[Doubling, Method], make: Callable[[], torch.Tensor]
) -> None:
    """One value, strides of 0, no value at all."""
    module, run = doubling
    for step, calls in ((make(), 1), (make(), 1), (X, 2)):
        run(module, X, step=step)
        assert module.calls == calls
