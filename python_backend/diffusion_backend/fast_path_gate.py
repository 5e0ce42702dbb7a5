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
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_numbers = itertools.count()
# By the VAE and its decoder themselves: a copy is another one. Weak: what is here goes when its VAE goes.
_gates: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_fast_decoders: WeakKeyDictionary[nn.Module, tuple[int, Callable[..., Any]]] = WeakKeyDictionary()
_open: ContextVar[frozenset[int]] = ContextVar("open_vae_fast_path_gates", default=frozenset())


def register_vae_fast_path_gate(vae: Any, fast: Callable[..., Any]) -> None:
    """From now on ``fast`` stands in for ``vae.decoder`` wherever the gate is open; it is called as that one is.

    ``fast`` must not hold on to ``vae``. It has the weights that it was built from: whoever changes those of ``vae``
    removes the gate first, and registers another.

    Raises:
        ValueError: ``vae`` has a gate already, or something else replaced its decoder's ``forward``.
    """
    if vae in _gates:
        raise ValueError("this VAE has a fast path already")
    if "forward" in vars(vae.decoder):
        raise ValueError("this VAE's decoder has a forward of somebody else's")
    number = next(_numbers)
    # A bound method: a deep copy of the decoder has one of its own, which finds no fast decoder here.
    vae.decoder.forward = MethodType(_forward, vae.decoder)
    _fast_decoders[vae.decoder] = number, fast
    _gates[vae] = number


def remove_vae_fast_path_gate(vae: Any) -> None:
    """Leave ``vae`` as it was before it was registered."""
    if _gates.pop(vae, None) is not None:
        del vae.decoder.forward
        del _fast_decoders[vae.decoder]


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


def _forward(decoder: nn.Module, *args: Any, **kwargs: Any) -> Any:
    number, fast = _fast_decoders.get(decoder, (None, None))
    if fast is not None and number in _open.get():
        return fast(*args, **kwargs)
    return type(decoder).forward(decoder, *args, **kwargs)
