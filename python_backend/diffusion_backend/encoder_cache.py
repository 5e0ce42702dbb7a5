"""What text encoders returned of late: a prompt that comes again (the negative one above all) is not encoded again.

An encoder's ``forward`` is a function of its arguments, so the cached result is the one that it would compute.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


class EncoderCache:
    """Results by the arguments they were computed from; the one that was not asked for longest goes first."""

    def __init__(self, max_bytes: int, count: Callable[[str], None]) -> None:
        """``count`` is told of each "hit" and "miss". ``max_bytes`` 0 caches nothing."""
        self._max_bytes = max_bytes
        self._count = count
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.bytes = 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """``module`` with its ``forward`` answered from here where that is possible; in all else it stays itself."""
        wrapped = copy.copy(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = _key((args, kwargs))
            if key is None:
                return module(*args, **kwargs)
            return self._get((id(module), key), lambda: module(*args, **kwargs))

        vars(wrapped)["forward"] = forward
        return wrapped

    def _get(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        if key in self._entries:
            self._entries.move_to_end(key)
            self._count("hit")
            # A copy, here and below: pipelines may write into what they are given.
            return copy.deepcopy(self._entries[key][0])
        self._count("miss")
        result = compute()
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(result))
        if size <= self._max_bytes:
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


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        for part in result.values():
            yield from _tensors(part)
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors(part)
