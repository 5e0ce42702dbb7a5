"""Which of a model's LoRAs a request asks for, and how much of each. Nothing here imports torch.

As a request parameter: ``NAME`` or ``NAME:WEIGHT``, several joined with commas; without a weight it is 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from diffusion_backend.errors import DiffusionError, invalid, show

# Names and weights, by name: the same choice is the same value, and sums up in the same order.
Loras = tuple[tuple[str, float], ...]

MAX_WEIGHT = 20.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
NAMES_ALLOWED = "up to 64 letters, digits, '.', '_' and '-', no leading sign"
_NUMBER = re.compile(r"[+-]?([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?", re.ASCII)


def check_loras(known: Collection[str], value: object) -> Loras:
    """The LoRAs that ``value`` names, each with its weight.

    ``value`` is a text as above, an object of names and weights, or a list of pairs of both, as ``Settings`` has it;
    None is none. ``known`` are the names of those that the model has.

    Raises:
        DiffusionError: INVALID_ARG, naming ``lora``, the value and what is allowed.
    """
    chosen: dict[str, float] = {}
    for name, weight in _pairs(value):
        if not isinstance(name, str) or name not in known:
            raise _unknown(known, name)
        if name in chosen:
            raise invalid(
                "lora", f"'lora' has {show(name)} twice; allowed: each LoRA once", "conflicting_values"
            )
        chosen[name] = _weight(name, weight)
    return tuple(sorted(chosen.items()))


def to_text(loras: Loras) -> str:
    """The request parameter that asks for ``loras``."""
    return ",".join(f"{name}:{weight!r}" for name, weight in loras)


def _pairs(value: object) -> list[tuple[Any, Any]]:
    if value is None:
        return []
    if isinstance(value, str):
        return [_parse(part.strip()) for part in value.split(",")]
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    ):
        return [(name, weight) for name, weight in value]
    raise invalid(
        "lora",
        f"'lora' is {show(value)}; allowed: 'NAME' or 'NAME:WEIGHT', several joined with commas, "
        "or an object of names and weights",
    )


def _parse(part: str) -> tuple[str, Any]:
    name, colon, weight = part.partition(":")
    if not colon:
        return name, 1.0
    return name, float(weight) if _NUMBER.fullmatch(weight) else weight


def _weight(name: str, weight: object) -> float:
    # NaN is in no range.
    if (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not -MAX_WEIGHT <= weight <= MAX_WEIGHT
    ):
        raise invalid(
            "lora",
            f"'lora' has {show(name)} with the weight {show(weight)}; allowed: numbers from {-MAX_WEIGHT:g} to "
            f"{MAX_WEIGHT:g}",
        )
    return float(weight)


def _unknown(known: Collection[str], name: object) -> DiffusionError:
    allowed = f"allowed: {', '.join(sorted(known))}" if known else "this model has no LoRAs"
    return invalid("lora", f"'lora' names {show(name)}; {allowed}", "unknown_lora")
