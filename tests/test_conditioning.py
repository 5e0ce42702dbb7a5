"""The conditioning blob: exact round trip, no pickle, and forged blobs refused."""

from __future__ import annotations

import json

import pytest
import torch
from diffusion_backend.conditioning import Call, Conditioning, pack, unpack
from diffusion_backend.errors import DiffusionError, Status
from safetensors.torch import save

pytestmark = pytest.mark.parallel


def sample() -> Conditioning:
    base = torch.arange(12.0).reshape(3, 4)
    return Conditioning(
        calls=[
            Call("encode_prompt", (base.to(torch.bfloat16), None, [base.T, {"mask": base[0] > 1}])),
            Call("encode_prompt", (base.half().expand(2, 3, 4), 3, "text", 0.5, True)),
        ],
        settings={"prompt": "a fox \u0000 🦊", "seed": 2**53 - 1},
        encode_seconds=0.25,
    )


def test_round_trip_keeps_values_types_and_nesting() -> None:
    before, after = sample(), unpack(pack(sample()))
    assert [call.name for call in after.calls] == ["encode_prompt", "encode_prompt"]
    assert (after.settings, after.encode_seconds) == (before.settings, before.encode_seconds)
    torch.testing.assert_close(after.calls[0].result, before.calls[0].result, rtol=0, atol=0)
    torch.testing.assert_close(after.calls[1].result[0], before.calls[1].result[0], rtol=0, atol=0)
    assert after.calls[1].result[1:] == (3, "text", 0.5, True)
    assert after.calls[0].result[0].dtype == torch.bfloat16


def test_the_same_conditioning_is_the_same_bytes() -> None:
    assert pack(sample()) == pack(sample())


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        pack(Conditioning([Call("encode_prompt", object())], {}, 0.0))


def blob(**header: object) -> bytes:
    return save({"t0": torch.zeros(1)}, {"conditioning": json.dumps(header)})


GOOD = {"format": 1, "calls": [], "settings": {}, "encode_seconds": 0.0, "rows": 1, "dtype": None}


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"\xff" * 64,
        (2**62).to_bytes(8, "little") + b"{}",
        pack(sample())[:-5],
        save({"t0": torch.zeros(1)}),
        save({"t0": torch.zeros(1)}, {"conditioning": "[1]"}),
        save({"t0": torch.zeros(1)}, {"conditioning": "[" * 100_000}),
        blob(**{**GOOD, "format": 2}),
        blob(**{**GOOD, "calls": [["encode_prompt", {"tensor": "t9"}]]}),
        blob(**{**GOOD, "calls": [["encode_prompt", {"pickle": "x"}]]}),
        blob(**{**GOOD, "calls": 7}),
        blob(**{**GOOD, "settings": 7}),
        blob(**{**GOOD, "encode_seconds": "soon"}),
        blob(**{**GOOD, "rows": 65}),
        blob(**{**GOOD, "rows": 0}),
        blob(**{**GOOD, "dtype": "int8"}),
        blob(**{**GOOD, "encode_seconds": 10**400}),
    ],
)
def test_forged_blobs(forged: bytes) -> None:
    with pytest.raises(DiffusionError) as caught:
        unpack(forged)
    assert (caught.value.param, caught.value.status) == ("conditioning", Status.INVALID_ARG)
