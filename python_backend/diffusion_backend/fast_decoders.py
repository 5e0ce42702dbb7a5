"""Fast decoders: rewritten copies of the decoders of the VAEs that are known here.

All or nothing: a decoder is rewritten only when every one of its modules is of a class (exactly) and with the options
that are known here. The VAE's own decoder is not touched.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.autoencoders import autoencoder_kl_qwenimage as qwen
from diffusers.models.autoencoders import autoencoder_kl_wan as wan
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2D, UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

from diffusion_backend.fast_layers import (
    CausalConv3d,
    FoldedAttention,
    GroupNormSiLU,
    Resnet,
    RmsNormSiLU,
    Upsample,
)

VAES = (AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLWan, AutoencoderKLQwenImage)


class CannotRewriteError(Exception):
    """This decoder is none that is known here; the text says what is not."""


class FastDecoder(nn.Module):
    """The rewritten copy of a VAE's decoder, called as that one is; it computes in ``dtype``.

    ``rewritten`` counts the modules that were, by class.
    """

    def __init__(self, vae: Any, dtype: torch.dtype) -> None:
        """
        Raises:
            CannotRewriteError: ``vae``, or a part of its decoder, is not known here.
        """
        super().__init__()
        if type(vae) not in VAES:
            known = ", ".join(cls.__name__ for cls in VAES)
            raise CannotRewriteError(f"a {type(vae).__name__} has no fast decoder; those that do: {known}")
        counts: Counter[str] = Counter()
        # The weights are shared until each is converted below: no second copy of all of them, not even for a moment.
        weights = {id(parameter): parameter for parameter in vae.decoder.parameters()}
        self.decoder = _rewrite(copy.deepcopy(vae.decoder, weights), "decoder", counts)
        self.rewritten = dict(counts)
        self.dtype = dtype
        self.eval()
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    data = parameter.data.to(dtype)
                    module._parameters[name] = nn.Parameter(_channels_last(data), requires_grad=False)

    def forward(self, sample: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Latents [N, C, H, W] or [N, C, F, H, W] to pictures, in the dtype that the latents have."""
        decoded: torch.Tensor = self.decoder(_channels_last(sample.to(self.dtype)), *args, **kwargs)
        return decoded.to(sample.dtype)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats.get(tensor.ndim, torch.contiguous_format))


def _rewrite(module: nn.Module, path: str, counts: Counter[str]) -> nn.Module:
    """``module`` or what stands in for it, with all that is inside rewritten."""
    kind = type(module)
    if kind in _REWRITES:
        try:
            module = _REWRITES[kind](module)
        except CannotRewriteError as error:
            raise CannotRewriteError(f"{path} ({kind.__name__}): {error}") from None
        counts[kind.__name__] += 1
    elif kind not in _KEPT and kind not in _FAST_LAYERS:
        raise CannotRewriteError(f"{path} is a {kind.__name__}, which is not known")
    if type(module) not in _FAST_LAYERS:
        for name, child in module.named_children():
            setattr(module, name, _rewrite(child, f"{path}.{name}", counts))
    return module


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise CannotRewriteError(f"not {what}")


def _group_norm_silu(norm: nn.Module, activation: nn.Module) -> GroupNormSiLU:
    _require(type(norm) is nn.GroupNorm and norm.affine, "an affine GroupNorm")
    _require(type(activation) is nn.SiLU, "followed by SiLU")
    return GroupNormSiLU(norm)  # type: ignore[arg-type]


def _rewrite_decoder(decoder: Any) -> nn.Module:
    decoder.conv_norm_out = _group_norm_silu(decoder.conv_norm_out, decoder.conv_act)
    decoder.conv_act = nn.Identity()
    return decoder  # type: ignore[no-any-return]


def _rewrite_resnet(block: Any) -> nn.Module:
    _require(block.time_emb_proj is None, "without a time embedding")
    _require(block.time_embedding_norm in ("default", "group"), "of a plain normalization")
    _require(block.upsample is None and block.downsample is None, "of one size")
    convolutions = [conv for conv in (block.conv1, block.conv2, block.conv_shortcut) if conv is not None]
    plain = all(type(conv) is nn.Conv2d and conv.padding_mode == "zeros" for conv in convolutions)
    _require(plain, "of plain convolutions")
    norms = [_group_norm_silu(norm, block.nonlinearity) for norm in (block.norm1, block.norm2)]
    return Resnet(block, *norms)


def _rewrite_upsample(layer: Any) -> nn.Module:
    _require(
        layer.use_conv and layer.interpolate and not layer.use_conv_transpose,
        "interpolation and a convolution",
    )
    _require(layer.norm is None and layer.name == "conv", "plain")
    return _upsample(layer.conv)


def _upsample(conv: nn.Module) -> Upsample:
    options = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    plain = type(conv) is nn.Conv2d and conv.padding_mode == "zeros"
    _require(
        plain and all(getattr(conv, name) == value for name, value in options.items()),
        "a plain 3x3 convolution",
    )
    return Upsample(conv)  # type: ignore[arg-type]


def _rewrite_attention(attention: Any) -> nn.Module:
    _require(type(attention.processor) is AttnProcessor2_0, "torch's attention")
    _require(
        attention.heads == 1 and attention.scale == attention.to_q.out_features**-0.5, "a single plain head"
    )
    _require(type(attention.group_norm) is nn.GroupNorm and attention.group_norm.affine, "after a GroupNorm")
    absent = ("spatial_norm", "norm_cross", "norm_q", "norm_k", "add_k_proj")
    _require(
        all(not getattr(attention, name, None) for name in absent),
        "without other normalizations and projections",
    )
    linears = (attention.to_q, attention.to_k, attention.to_v, attention.to_out[0])
    _require(
        all(type(layer) is nn.Linear and layer.bias is not None for layer in linears),
        "of projections with biases",
    )
    return FoldedAttention(attention)


def _rms_norm_silu(norm: Any, activation: nn.Module) -> RmsNormSiLU:
    _require(
        type(norm) in (wan.WanRMS_norm, qwen.QwenImageRMS_norm) and norm.channel_first,
        "an RMS norm of channels",
    )
    _require(type(activation) is nn.SiLU, "followed by SiLU")
    return RmsNormSiLU(norm)


def _rewrite_wan_decoder(decoder: Any) -> nn.Module:
    decoder.norm_out = _rms_norm_silu(decoder.norm_out, decoder.nonlinearity)
    decoder.nonlinearity = nn.Identity()
    return decoder  # type: ignore[no-any-return]


def _rewrite_wan_block(block: Any) -> nn.Module:
    norms = [_rms_norm_silu(norm, block.nonlinearity) for norm in (block.norm1, block.norm2)]
    block.norm1, block.norm2 = norms
    block.nonlinearity = nn.Identity()
    return block  # type: ignore[no-any-return]


def _rewrite_wan_resample(layer: Any) -> nn.Module:
    _require(layer.mode in ("upsample2d", "upsample3d"), "upsampling")
    doubling, conv = layer.resample
    _require(type(doubling) in (wan.WanUpsample, qwen.QwenImageUpsample), "a doubling")
    _require(doubling.scale_factor == (2.0, 2.0) and doubling.mode == "nearest-exact", "a doubling of pixels")
    layer.resample = _upsample(conv)
    return layer  # type: ignore[no-any-return]


def _rewrite_causal_conv(conv: Any) -> CausalConv3d:
    _require(
        conv.stride == conv.dilation == (1, 1, 1) and conv.groups == 1 and conv.padding_mode == "zeros",
        "a plain convolution",
    )
    left, right, top, bottom, before, after = conv._padding
    causal = left == right and top == bottom and after == 0 and before == conv.kernel_size[0] - 1
    _require(causal, "one that looks back only, between equal borders")
    return CausalConv3d(conv)


_REWRITES: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    Decoder: _rewrite_decoder,
    ResnetBlock2D: _rewrite_resnet,
    Upsample2D: _rewrite_upsample,
    Attention: _rewrite_attention,
    wan.WanCausalConv3d: _rewrite_causal_conv,
    wan.WanDecoder3d: _rewrite_wan_decoder,
    wan.WanResidualBlock: _rewrite_wan_block,
    wan.WanResample: _rewrite_wan_resample,
    qwen.QwenImageCausalConv3d: _rewrite_causal_conv,
    qwen.QwenImageDecoder3d: _rewrite_wan_decoder,
    qwen.QwenImageResidualBlock: _rewrite_wan_block,
    qwen.QwenImageResample: _rewrite_wan_resample,
}
_FAST_LAYERS = (CausalConv3d, GroupNormSiLU, RmsNormSiLU, Resnet, Upsample, FoldedAttention)
# What stays as it is: convolutions, and what only calls its parts.
_KEPT = {
    nn.Conv2d,
    nn.Dropout,
    nn.Identity,
    nn.ModuleList,
    UNetMidBlock2D,
    UpDecoderBlock2D,
    wan.DupUp3D,
    wan.WanAttentionBlock,
    wan.WanMidBlock,
    wan.WanResidualUpBlock,
    wan.WanRMS_norm,  # an attention's
    wan.WanUpBlock,
    qwen.QwenImageAttentionBlock,
    qwen.QwenImageMidBlock,
    qwen.QwenImageRMS_norm,
    qwen.QwenImageUpBlock,
}
