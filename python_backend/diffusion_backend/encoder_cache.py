"""What text encoders returned of late: a prompt that comes again (the negative one above all) is not encoded again.

An encoder's ``forward`` is a function of its arguments (and of the LoRAs that are switched on in it), so the cached
result is the one that it would compute.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.utils import ModelOutput


class EncoderCache:
    """Results by the arguments they were computed from; the one that was not asked for longest goes first."""

    def __init__(self, max_bytes: int, count: Callable[[str], None]) -> None:
        """``count`` is told of each "hit" and "miss". ``max_bytes`` 0 caches nothing."""
        self._max_bytes = max_bytes
        self._count = count
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.bytes = 0

    def wrap(self, module: nn.Module, state: Callable[[], Hashable] = lambda: None) -> nn.Module:
        """``module`` with its ``forward`` answered from here where that is possible; in all else it stays itself.

        ``state`` tells what its results depend on besides their arguments.
        """
        wrapped = copy.copy(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = _key((args, kwargs))
            if key is None:
                return module(*args, **kwargs)
            return self._get((id(module), state(), key), lambda: module(*args, **kwargs))

        vars(wrapped)["forward"] = forward
        return wrapped

    def _get(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        if key in self._entries:
            self._entries.move_to_end(key)
            self._count("hit")
            # A copy, here and below: pipelines may write into what they are given.
            return copy.deepcopy(self._entries[key][0])
        self._count("miss")
        result = _without_attention_cache(compute())
        size = _bytes(result)
        if size is not None and size <= self._max_bytes:
            self._entries[key] = copy.deepcopy(result), size
            self.bytes += size
            while self.bytes > self._max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self.bytes -= freed
        return result


def _key(value: Any) -> Hashable:
    """Equal for equal arguments; None if they hold something whose equality is not known."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), str(value.device), tuple(value.shape), hashlib.sha256(data).digest()
    if isinstance(value, Mapping):
        value = tuple(sorted(value.items()))
    if isinstance(value, list | tuple):
        parts = tuple(_key(part) for part in value)
        return None if None in parts else ("parts", *parts)
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    return None


def _without_attention_cache(result: Any) -> Any:
    """Language models return the keys and values of all their layers as well, for text that is to go on: not here."""
    if isinstance(result, ModelOutput) and any(isinstance(value, Cache) for value in result.values()):
        return type(result)(**{name: value for name, value in result.items() if not isinstance(value, Cache)})
    return result


def _bytes(result: Any) -> int | None:
    """Of all tensors in ``result``; None if it holds something whose size is not known."""
    if isinstance(result, torch.Tensor):
        return result.numel() * result.element_size()
    if result is None or isinstance(result, bool | int | float | str):
        return 0
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, list | tuple):
        sizes = [_bytes(part) for part in result]
        return None if None in sizes else sum(size for size in sizes if size is not None)
    return None
