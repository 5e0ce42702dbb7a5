"""The gate between a VAE's two decoders: which one runs is decided for one decode at a time.

A registered VAE keeps its own decoder, untouched, beside a fast one. Its decodes run the fast one inside
``use_vae_fast_path(vae, True)`` and its own everywhere else. The state belongs to the thread (or the asyncio task), so
two threads may decode with the same VAE, each in its own way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_numbers = itertools.count()
# By the VAE object itself: a copy of it is another VAE. Weak, so that the fast decoder goes when its VAE goes.
_gates: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_open: ContextVar[frozenset[int]] = ContextVar("open_vae_fast_path_gates", default=frozenset())


def register_vae_fast_path_gate(vae: Any, fast: Callable[..., Any]) -> None:
    """From now on ``fast`` stands in for ``vae.decoder`` wherever the gate is open; it is called as that one is.

    Raises:
        ValueError: ``vae`` has a gate already.
    """
    if vae in _gates:
        raise ValueError("this VAE has a fast path already")
    number = next(_numbers)
    plain = vae.decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (fast if number in _open.get() else plain)(*args, **kwargs)

    vae.decoder.forward = forward
    _gates[vae] = number


def remove_vae_fast_path_gate(vae: Any) -> None:
    """Leave ``vae`` as it was before it was registered."""
    if _gates.pop(vae, None) is not None:
        del vae.decoder.forward


@contextmanager
def use_vae_fast_path(vae: nn.Module, enabled: bool) -> Iterator[bool]:
    """Decode with the fast decoder (or with the VAE's own one) inside. May be nested.

    Yields whether decodes inside are fast: never for a VAE that is not registered.
    """
    number = _gates.get(vae)
    if number is None:
        yield False
        return
    before = _open.get()
    token = _open.set(before | {number} if enabled else before - {number})
    try:
        yield enabled
    finally:
        _open.reset(token)
