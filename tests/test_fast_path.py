"""The fast VAE decoders and the gate in front of them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    AutoencoderTiny,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from diffusion_backend import fast_layers, fast_path
from diffusion_backend.fast_decoders import CannotRewriteError, FastDecoder
from diffusion_backend.fast_path_gate import (
    register_vae_fast_path_gate,
    remove_vae_fast_path_gate,
    use_vae_fast_path,
)
from diffusion_kernels import cpu
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.parallel

KL = {
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [32, 64, 64],
    "norm_num_groups": 8,
    "latent_channels": 4,
}
WAN_22 = {
    "base_dim": 16,
    "decoder_base_dim": 24,
    "z_dim": 16,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
# 0.90 to 1.27 was measured.
MORE_ROUNDING = 1.5
# By name: how to make it, and the shape of its latents.
VAES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "AutoencoderKL": (lambda: AutoencoderKL(**KL), (2, 4, 9, 7)),
    "without attention": (lambda: AutoencoderKL(**KL, mid_block_add_attention=False), (1, 4, 9, 7)),
    "AutoencoderKLFlux2": (
        lambda: AutoencoderKLFlux2(block_out_channels=(32, 64, 64, 64), latent_channels=8),
        (1, 8, 6, 10),
    ),
    "AutoencoderKLWan": (lambda: AutoencoderKLWan(base_dim=16), (1, 16, 3, 8, 6)),
    "Wan 2.2": (lambda: AutoencoderKLWan(**WAN_22), (1, 16, 2, 6, 4)),
    "AutoencoderKLQwenImage": (lambda: AutoencoderKLQwenImage(base_dim=16), (1, 16, 1, 8, 6)),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    """A VAE with random weights (biases and affine parameters, too) and latents for it."""
    torch.manual_seed(0)
    build, shape = VAES[name]
    vae = build().to(dtype).eval().requires_grad_(False)
    for parameter in vae.parameters():
        if parameter.ndim == 1:
            parameter += 0.1 * torch.randn_like(parameter)
    return vae, torch.randn(shape, dtype=dtype)


def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        decoded: torch.Tensor = vae.decode(latents, return_dict=False)[0]
    return decoded


def decode_both_ways(vae: Any, latents: torch.Tensor) -> dict[bool, torch.Tensor]:
    """What is decoded with the gate open (True), and with it closed."""
    made = {}
    for enabled in (False, True):
        with use_vae_fast_path(vae, enabled):
            made[enabled] = decode(vae, latents)
    return made


def install(vae: Any, dtype: torch.dtype) -> FastDecoder:
    decoder = FastDecoder(vae, dtype)
    register_vae_fast_path_gate(vae, decoder)
    return decoder


@pytest.mark.parametrize("name", VAES)
def test_the_algebra_is_exact(name: str) -> None:
    """In float64; Wan's and Qwen-Image's own upsampling goes by way of float32, and rounds there."""
    vae, latents = make(name, torch.float64)
    lossless = decode(vae, latents)
    install(vae, torch.float64)
    with use_vae_fast_path(vae, True):
        fast = decode(vae, latents)
    is_wan = latents.ndim == 5
    assert (fast - lossless).abs().max() < (1e-5 if is_wan else 1e-11)
    assert not torch.equal(fast, lossless), "the same decoder ran"


@cache
def decoded_by_the_vae(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """In ``dtype``, and in float64."""
    vae, latents = make(name)
    return decode(copy.deepcopy(vae).to(dtype), latents.to(dtype)), decode(vae.double(), latents.double())


@pytest.mark.parametrize("name", VAES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_it_decodes_in_its_own_dtype_and_returns_the_vaes(
    name: str, dtype: torch.dtype, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rounds about as much as the VAE's own decoder does in that dtype: both are compared with float64."""
    kernels = fast_layers.kernels_for(torch.device("cpu"), dtype)
    if has_kernels and kernels is None:
        pytest.skip("there are no kernels for it here")
    monkeypatch.setattr(fast_layers, "kernels_for", lambda *_: kernels if has_kernels else None)
    vae, latents = make(name)
    own, exact = decoded_by_the_vae(name, dtype)
    install(vae, dtype)
    with use_vae_fast_path(vae, True):
        fast = decode(vae, latents)
    assert fast.dtype == torch.float32
    assert fast.shape == exact.shape
    assert _rms(fast - exact) < MORE_ROUNDING * _rms(own - exact)


def _rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("has_operation", [True, False])
def test_a_residual_sum_is_made_where_its_terms_are(
    has_operation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16: one rounding where the convolution adds the term, two where the sum comes after it."""
    if has_operation and not fast_layers._adds_in_convolutions():
        pytest.skip("no oneDNN for bfloat16 here")
    monkeypatch.setattr(fast_layers, "_adds_in_convolutions", lambda: has_operation)
    torch.manual_seed(0)
    conv = nn.Conv2d(32, 32, 3, padding=1).to(torch.bfloat16, memory_format=torch.channels_last)
    x, term = torch.randn(2, 2, 32, 9, 7).to(torch.bfloat16)
    x, term = (each.contiguous(memory_format=torch.channels_last) for each in (x, term))
    with torch.no_grad():
        exact = copy.deepcopy(conv).double()(x.double()) + term.double()
        made = fast_layers._convolve_and_add(conv, x, term)
    assert (made.data_ptr() == term.data_ptr()) is has_operation
    ulps = (made - exact).abs() / (exact.abs() * torch.finfo(torch.bfloat16).eps)
    assert (ulps.max().item() < 0.51) is has_operation


@pytest.mark.parametrize("kernel", [(3, 3, 3), (3, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("frames", [1, 2, 4])
@pytest.mark.parametrize("cached", [0, 1, 2])
def test_a_causal_convolution_is_what_it_was(kernel: tuple[int, int, int], frames: int, cached: int) -> None:
    torch.manual_seed(0)
    padding = tuple(side // 2 for side in kernel)
    conv = WanCausalConv3d(5, 7, kernel, padding=padding).double().requires_grad_(False)
    x, cache = torch.randn(2, 5, frames, 6, 4).double(), torch.randn(2, 5, cached, 6, 4).double()
    earlier = cache if cached else None
    assert (fast_layers.CausalConv3d(conv)(x, earlier) - conv(x, earlier)).abs().max() < 1e-13


def test_a_single_frame_costs_a_third() -> None:
    conv = WanCausalConv3d(5, 7, 3, padding=1).requires_grad_(False)
    x = torch.randn(1, 5, 1, 6, 4)
    flops = []
    for each in (fast_layers.CausalConv3d(conv), conv):
        with FlopCounterMode(display=False) as counter:
            each(x)
        flops.append(counter.get_total_flops())
    assert flops[1] == 3 * flops[0] > 0


def test_what_was_rewritten_is_counted() -> None:
    vae, _ = make("AutoencoderKL")
    assert FastDecoder(vae, torch.float32).rewritten == {
        "Decoder": 1,
        "ResnetBlock2D": 8,
        "Upsample2D": 2,
        "Attention": 1,
    }


@pytest.mark.parametrize("name", VAES)
def test_lossless_stays_what_it_was(name: str) -> None:
    """Before, beside and after fast decodes, bit by bit; and the VAE's weights and names stay, too."""
    vae, latents = make(name)
    before, names = decode(vae, latents), set(vae.state_dict())
    install(vae, torch.bfloat16)
    assert torch.equal(decode(vae, latents), before)
    with use_vae_fast_path(vae, True):
        assert not torch.equal(decode(vae, latents), before)
        with use_vae_fast_path(vae, False):
            assert torch.equal(decode(vae, latents), before)
        assert not torch.equal(decode(vae, latents), before)
    assert torch.equal(decode(vae, latents), before)
    assert set(vae.state_dict()) == names
    remove_vae_fast_path_gate(vae)
    with use_vae_fast_path(vae, True) as is_fast:
        assert not is_fast
        assert torch.equal(decode(vae, latents), before)


def test_threads_have_tiers_of_their_own() -> None:
    """Two tiers on one VAE at the same time: each picture is that of its tier."""
    vae, latents = make("AutoencoderKL")
    install(vae, torch.bfloat16)
    expected = decode_both_ways(vae, latents)
    meet = threading.Barrier(4)

    def run(number: int) -> bool:
        enabled = number % 2 == 0
        with use_vae_fast_path(vae, enabled):
            meet.wait(30)
            return all(torch.equal(decode(vae, latents), expected[enabled]) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_tasks_of_one_thread_have_tiers_of_their_own() -> None:
    """Each goes on in its own way after the others had their turn."""
    vae, latents = make("AutoencoderKL")
    install(vae, torch.bfloat16)
    expected = decode_both_ways(vae, latents)

    async def run(enabled: bool) -> bool:
        with use_vae_fast_path(vae, enabled):
            await asyncio.sleep(0)
            first = torch.equal(decode(vae, latents), expected[enabled])
            with use_vae_fast_path(vae, not enabled):
                await asyncio.sleep(0)
                other = torch.equal(decode(vae, latents), expected[not enabled])
            await asyncio.sleep(0)
            return first and other and torch.equal(decode(vae, latents), expected[enabled])

    async def run_all() -> list[bool]:
        return await asyncio.gather(*(run(number % 2 == 0) for number in range(4)))

    assert asyncio.run(run_all()) == [True] * 4


def test_the_gate_closes_after_an_error() -> None:
    vae, latents = make("AutoencoderKL")
    before = decode(vae, latents)
    install(vae, torch.bfloat16)
    with pytest.raises(RuntimeError, match="inside"), use_vae_fast_path(vae, True):
        raise RuntimeError("inside")
    assert torch.equal(decode(vae, latents), before)


def test_a_vae_that_is_not_registered_passes() -> None:
    registered, _ = make("AutoencoderKL")
    install(registered, torch.bfloat16)
    other, latents = make("AutoencoderKL")
    before = decode(other, latents)
    with use_vae_fast_path(registered, True), use_vae_fast_path(other, True) as is_fast:
        assert not is_fast
        assert torch.equal(decode(other, latents), before)


def test_a_vae_has_one_gate() -> None:
    vae, _ = make("AutoencoderKL")
    install(vae, torch.float32)
    with pytest.raises(ValueError, match="already"):
        install(vae, torch.float32)


def test_a_copy_is_another_vae() -> None:
    """It decodes with its own weights, in the original's open gate, too."""
    vae, latents = make("AutoencoderKL")
    before = decode(vae, latents)
    install(vae, torch.bfloat16)
    twin = copy.deepcopy(vae)
    with use_vae_fast_path(vae, True), use_vae_fast_path(twin, True) as is_fast:
        assert not is_fast
        assert torch.equal(decode(twin, latents), before)
        for parameter in twin.decoder.parameters():
            parameter.zero_()
        assert decode(twin, latents).abs().max() == 0


def _pickled(vae: Any) -> Any:
    return pickle.loads(pickle.dumps(vae))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled])
def test_a_copy_may_have_a_gate_of_its_own(duplicate: Callable[[Any], Any]) -> None:
    vae, latents = make("AutoencoderKL")
    before = decode(vae, latents)
    install(vae, torch.bfloat16)
    twin = duplicate(vae)
    install(twin, torch.float32)
    with use_vae_fast_path(vae, True):
        assert torch.equal(decode(twin, latents), before)
    with use_vae_fast_path(twin, True) as is_fast:
        assert is_fast
        assert torch.equal(decode(vae, latents), before)
        assert 0 < (decode(twin, latents) - before).abs().max() < 1e-4
    remove_vae_fast_path_gate(twin)
    assert "forward" not in vars(twin.decoder)
    assert torch.equal(decode(twin, latents), before)


def test_the_gate_tells_the_truth_of_whoever_shares_the_decoder() -> None:
    """Pipelines make shallow copies of a VAE."""
    vae, latents = make("AutoencoderKL")
    before = decode(vae, latents)
    install(vae, torch.bfloat16)
    shallow = copy.copy(vae)
    with use_vae_fast_path(shallow, True) as is_fast:
        assert is_fast
        assert not torch.equal(decode(shallow, latents), before)
        with use_vae_fast_path(shallow, False) as is_fast:
            assert not is_fast
            assert torch.equal(decode(shallow, latents), before)


def test_a_decoder_that_was_put_in_its_place_has_no_gate() -> None:
    vae, latents = make("AutoencoderKL")
    before = decode(vae, latents)
    install(vae, torch.bfloat16)
    vae.decoder = make("AutoencoderKL")[0].decoder
    with use_vae_fast_path(vae, True) as is_fast:
        assert not is_fast
        assert torch.equal(decode(vae, latents), before)


def test_somebody_elses_forward_is_left_alone() -> None:
    vae, _ = make("AutoencoderKL")
    own = vae.decoder.forward
    vae.decoder.forward = lambda *args: own(*args)
    with pytest.raises(ValueError, match="somebody else's"):
        install(vae, torch.float32)


def _use_tiles(vae: Any, latents: torch.Tensor) -> None:
    """Small ones, so that a few make a picture."""
    vae.enable_slicing()
    vae.enable_tiling()
    if hasattr(vae, "tile_latent_min_size"):
        scale = decode(vae, latents[..., :1, :1]).shape[-1]
        vae.tile_latent_min_size, vae.tile_sample_min_size = 4, 4 * scale
    else:
        vae.tile_sample_min_height = vae.tile_sample_min_width = 48
        vae.tile_sample_stride_height = vae.tile_sample_stride_width = 32


@pytest.mark.parametrize("name", VAES)
def test_slicing_and_tiling_use_it_too(name: str) -> None:
    """They call the decoder for each slice and tile."""
    vae, latents = make(name)
    install(vae, torch.float32)
    whole = decode(vae, latents)
    _use_tiles(vae, latents)
    lossless = decode(vae, latents)
    assert not torch.equal(lossless, whole)
    with use_vae_fast_path(vae, True):
        fast = decode(vae, latents)
    assert not torch.equal(fast, lossless)
    assert (fast - lossless).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["AutoencoderKLWan", "Wan 2.2", "AutoencoderKLQwenImage"])
def test_the_state_that_a_clips_vae_keeps_is_of_one_decode(name: str) -> None:
    """Also where that one failed half-way, whichever way the next goes."""
    vae, latents = make(name)
    decoders = {False: vae.decoder, True: install(vae, torch.float32).decoder}
    expected = decode_both_ways(vae, latents)

    def fail(*_: Any) -> None:
        raise RuntimeError("half-way")

    for failing, decoder in decoders.items():
        hook = decoder.conv_out.register_forward_pre_hook(fail)
        with use_vae_fast_path(vae, failing), pytest.raises(RuntimeError, match="half-way"):
            decode(vae, 2 * latents)
        hook.remove()
        for enabled in (not failing, failing):
            with use_vae_fast_path(vae, enabled):
                assert torch.equal(decode(vae, latents), expected[enabled])


@pytest.mark.parametrize("name", VAES)
def test_the_fast_decoder_goes_with_its_vae(name: str) -> None:
    vae, latents = make(name)
    decoder = weakref.ref(install(vae, torch.bfloat16))
    with use_vae_fast_path(vae, True):
        decode(vae, latents)
    gone = weakref.ref(vae)
    del vae
    gc.collect()
    assert (gone(), decoder()) == (None, None)


class OtherKL(AutoencoderKL):
    """A class of somebody's own: what it does is not known."""


def _with_other_class() -> Any:
    return OtherKL(**KL)


def _with_another_attention_processor() -> Any:
    vae = AutoencoderKL(**KL)
    vae.decoder.mid_block.attentions[0].set_processor(AttnProcessor())
    return vae


def _with_other_activation() -> Any:
    return AutoencoderKL(**KL, act_fn="gelu")


def _with_other_layer() -> Any:
    vae = AutoencoderKL(**KL)
    vae.decoder.conv_in = nn.Sequential(vae.decoder.conv_in)
    return vae


def _with_other_upsampling() -> Any:
    vae = AutoencoderKL(**KL)
    conv = vae.decoder.up_blocks[0].upsamplers[0].conv
    conv.padding_mode = "reflect"
    return vae


def _with_mirrored_borders() -> Any:
    vae = AutoencoderKL(**KL)
    vae.decoder.mid_block.resnets[0].conv2.padding_mode = "reflect"
    return vae


def _with_borders_of_its_own() -> Any:
    vae = AutoencoderKLWan(base_dim=16)
    vae.decoder.conv_in._padding = (1, 0, 1, 1, 2, 0)
    return vae


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: AutoencoderTiny(), "a AutoencoderTiny has no fast decoder"),
        (_with_other_class, "a OtherKL has no fast decoder"),
        (
            _with_another_attention_processor,
            r"decoder.mid_block.attentions.0 \(Attention\): not torch's attention",
        ),
        (_with_other_activation, "not followed by SiLU"),
        (_with_other_layer, "decoder.conv_in is a Sequential, which is not known"),
        (_with_other_upsampling, "not a plain 3x3 convolution"),
        (_with_mirrored_borders, "not of plain convolutions"),
        (_with_borders_of_its_own, "not one that looks back only"),
    ],
)
def test_what_is_not_known_is_refused_whole(build: Callable[[], Any], reason: str) -> None:
    vae = build().eval()
    names = [type(module).__name__ for module in vae.modules()]
    with pytest.raises(CannotRewriteError, match=reason):
        FastDecoder(vae, torch.float32)
    assert [type(module).__name__ for module in vae.modules()] == names


def pipeline(vae: Any) -> Any:
    """As much of a pipeline as decoding needs."""
    return SimpleNamespace(
        vae=vae, device=torch.device("cpu"), image_processor=VaeImageProcessor(vae_scale_factor=4)
    )


def installed(vae: Any, min_psnr_db: float = 30.0) -> fast_path.FastPath:
    return fast_path.install(pipeline(vae), (4, 16, 24), device=torch.device("cpu"), min_psnr_db=min_psnr_db)


def test_what_was_installed_is_told() -> None:
    vae, latents = make("AutoencoderKL")
    before = decode(vae, latents)
    path = installed(vae)
    assert (path.state, path.reason) == ("installed", None)
    assert path.psnr_db is not None
    assert 30 < path.psnr_db < 200
    assert path.max_difference is not None
    assert 0 < path.max_difference < 32
    assert path.rewritten["ResnetBlock2D"] == 8
    assert path.kernels == ("cpu" if cpu.is_built() else None)
    with use_vae_fast_path(vae, True) as is_fast:
        assert is_fast
        assert not torch.equal(decode(vae, latents), before)


def test_without_kernels_for_the_cpu_it_is_installed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_library", lambda: None)
    vae, latents = make("AutoencoderKL")
    path = installed(vae)
    assert (path.state, path.kernels) == ("installed", None)
    with use_vae_fast_path(vae, True):
        without = decode(vae, latents)
    monkeypatch.undo()
    with use_vae_fast_path(vae, True):
        assert torch.equal(decode(vae, latents), without) == (not cpu.is_built())


def test_pictures_that_differ_too_much_are_refused_with_the_figure() -> None:
    vae, latents = make("AutoencoderKL")
    before = decode(vae, latents)
    path = installed(vae, min_psnr_db=150)
    assert path.state == "refused"
    assert path.reason is not None
    assert "required: 150" in path.reason
    assert path.psnr_db is not None
    with use_vae_fast_path(vae, True) as is_fast:
        assert not is_fast
        assert torch.equal(decode(vae, latents), before)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_a_decoder_that_fails_is_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(FastDecoder, method, fail)
    vae, latents = make("AutoencoderKL")
    path = installed(vae)
    assert path.state == "refused"
    assert path.reason == "it failed: RuntimeError: no kernel for this device"
    decode(vae, latents)


def test_a_second_one_is_refused_and_the_first_stays() -> None:
    vae, _ = make("AutoencoderKL")
    assert installed(vae).state == "installed"
    with pytest.raises(ValueError, match="already"):
        installed(vae)
    with use_vae_fast_path(vae, True) as is_fast:
        assert is_fast


def test_what_it_shares_with_the_vae_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the VAE's own dtype all that has one axis is the VAE's."""
    vae, _ = make("AutoencoderKL")
    half = installed(vae).bytes
    remove_vae_fast_path_gate(vae)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    whole = installed(vae)
    own = sum(each.numel() * 4 for each in vae.decoder.parameters() if each.ndim == 4)
    assert whole.dtype == "float32"
    assert own <= whole.bytes < 2 * half


def test_a_picture_of_one_colour_is_told_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """No span, no peak: a figure all the same."""
    monkeypatch.setattr(
        FastDecoder, "forward", lambda _, z: torch.rand(len(z), 3, 4 * z.shape[2], 4 * z.shape[3])
    )
    vae, _ = make("AutoencoderKL")
    for parameter in vae.decoder.conv_out.parameters():
        parameter.zero_()
    path = installed(vae)
    assert path.state == "refused"
    assert json.loads(json.dumps(dataclasses.asdict(path), allow_nan=False))["own_range_psnr_db"] == -200


def test_what_is_not_finite_is_unlike_anything() -> None:
    numbers = torch.zeros(3)
    for odd in (float("nan"), float("inf")):
        assert fast_path.psnr_db(numbers, numbers + odd, 255) == fast_path.UNLIKE_DB


def test_differences_beyond_white_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that is white all over is equal to any other one."""
    forward = FastDecoder.forward
    monkeypatch.setattr(FastDecoder, "forward", lambda *args: 3 * forward(*args) + 7)
    vae, _ = make("AutoencoderKL")
    vae.decoder.conv_out.bias += 100
    path = installed(vae)
    assert path.psnr_db == 200
    assert path.state == "refused"
    assert path.reason is not None
    assert path.reason.startswith("before they are clamped, its pictures have a PSNR of ")


def test_the_latents_of_flux2_are_those_of_its_own_statistics() -> None:
    vae, _ = make("AutoencoderKLFlux2")
    vae.bn.running_mean.uniform_(-2, 2)
    vae.bn.running_var.uniform_(0.5, 4)
    noise = torch.randn(1, 8, 5, 6)
    packed = torch.nn.functional.pixel_unshuffle(noise[..., :4, :], 2)
    std = (vae.bn.running_var + vae.bn.eps).sqrt().view(1, -1, 1, 1)
    expected = torch.nn.functional.pixel_shuffle(packed * std + vae.bn.running_mean.view(1, -1, 1, 1), 2)
    assert torch.allclose(fast_path._denormalize(noise, vae)[..., :4, :], expected, atol=1e-6)


def test_a_gpu_without_bfloat16_units_gets_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_units, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_units, **_: has)
        assert fast_path.fast_dtype(torch.device("cuda"), torch.float32) == expected


def test_a_vae_of_an_unknown_class_is_refused_by_name() -> None:
    path = installed(AutoencoderTiny(latent_channels=4).eval())
    assert path.state == "refused"
    assert path.reason is not None
    assert path.reason.startswith("a AutoencoderTiny has no fast decoder; those that do: AutoencoderKL, ")


@pytest.mark.parametrize(
    ("able", "expected"),
    [
        ({"amx_bf16": True, "avx512_bf16": False}, torch.bfloat16),
        ({"amx_bf16": False, "avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": False, "avx512_bf16": False, "avx2": True}, torch.float32),
        ({"architecture": "aarch64", "bf16": True, "sve_bf16": True}, torch.float32),
    ],
)
def test_a_cpu_gets_what_it_has_units_for(
    able: dict[str, Any], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert fast_path.fast_dtype(torch.device("cpu"), torch.float32) == expected


def test_without_bfloat16_units_float32_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    vae, _ = make("AutoencoderKL")
    path = installed(vae, min_psnr_db=60)
    assert (path.state, path.dtype) == ("installed", "float32")


def test_without_triton_there_is_none_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path.importlib.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    vae, _ = make("AutoencoderKL")
    path = fast_path.install(pipeline(vae), (4, 8, 8), device=torch.device("cuda"), min_psnr_db=40)
    assert path.reason == "triton is not installed, and so there are no kernels for the GPU"
