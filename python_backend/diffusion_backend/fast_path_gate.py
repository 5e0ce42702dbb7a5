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
# By the VAE's decoder itself: a copy, or another one in its place, has no gate. Weak: what is here goes with its key.
_gates: WeakKeyDictionary[nn.Module, tuple[int, Callable[..., Any]]] = WeakKeyDictionary()
_open: ContextVar[frozenset[int]] = ContextVar("open_vae_fast_path_gates", default=frozenset())


def register_vae_fast_path_gate(vae: Any, fast: Callable[..., Any]) -> None:
    """From now on ``fast`` stands in for ``vae.decoder`` wherever the gate is open; it is called as that one is.

    ``fast`` must not hold on to ``vae``. It has the weights that it was built from: whoever changes those of ``vae``
    removes the gate first, and registers another.

    Raises:
        ValueError: ``vae`` has a gate already, or something else replaced its decoder's ``forward``.
    """
    decoder = vae.decoder
    if decoder in _gates:
        raise ValueError("this VAE has a fast path already")
    if not _has_plain_forward(decoder):
        raise ValueError("this VAE's decoder has a forward of somebody else's")
    # A bound method: a deep copy of the decoder has one of its own, which finds no fast decoder here.
    decoder.forward = MethodType(forward, decoder)
    _gates[decoder] = next(_numbers), fast


def has_vae_fast_path_gate(vae: Any) -> bool:
    """Whether ``vae`` is registered."""
    return getattr(vae, "decoder", None) in _gates


def remove_vae_fast_path_gate(vae: Any) -> None:
    """Leave ``vae`` as it was before it was registered."""
    decoder = getattr(vae, "decoder", None)
    if decoder is not None and _gates.pop(decoder, None) is not None:
        del decoder.forward


@contextmanager
def use_vae_fast_path(vae: Any, enabled: bool) -> Iterator[bool]:
    """Decode with the fast decoder (or with the VAE's own one) inside. May be nested.

    Yields whether decodes inside are fast: never for a VAE that is not registered.
    """
    decoder = getattr(vae, "decoder", None)
    if decoder is None or decoder not in _gates:
        yield False
        return
    number, _ = _gates[decoder]
    before = _open.get()
    token = _open.set(before | {number} if enabled else before - {number})
    try:
        yield enabled
    finally:
        _open.reset(token)


def _has_plain_forward(decoder: nn.Module) -> bool:
    """Whether it is its class's: what is left of a gate in a copy, deep or pickled, does nothing else."""
    if "forward" not in vars(decoder):
        return True
    function = getattr(vars(decoder)["forward"], "__func__", None)
    return function is forward or function is type(decoder).forward


def forward(decoder: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of a registered VAE's decoder. A pickle finds it by its name, which is the class's one's, too."""
    number, fast = _gates.get(decoder, (None, None))
    if fast is not None and number in _open.get():
        return fast(*args, **kwargs)
    return type(decoder).forward(decoder, *args, **kwargs)
