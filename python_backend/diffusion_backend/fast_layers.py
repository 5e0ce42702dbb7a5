"""The layers of the fast VAE decoders, on dense channels_last tensors.

The normalizations are our own kernels (``diffusion_kernels``), where there are some. The algebra is exact: a rewritten
layer differs from the one it stands for only by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

# Of torch.ops.mkldnn: what torch.compile makes of a convolution and an addition on a CPU.
_ADDING = "_convolution_pointwise_"


def kernels_for(device: torch.device, dtype: torch.dtype) -> str | None:
    """Which of our kernels run there: ``triton``, on a GPU, ``cpu``, or None: PyTorch's own operations do."""
    if device.type == "cuda":
        return "triton"
    from diffusion_kernels import cpu

    return "cpu" if device.type == "cpu" and dtype in cpu.DTYPES and cpu.is_built() else None


def _kernel(name: str, x: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Ours for ``x``, of that name."""
    kernels = kernels_for(x.device, x.dtype)
    if kernels is None:
        return None
    module = import_module(f"diffusion_kernels.{'cpu' if kernels == 'cpu' else name}")
    kernel: Callable[..., torch.Tensor] = getattr(module, name)
    return kernel


class GroupNormSiLU(nn.Module):
    """``GroupNorm``, then SiLU where ``silu``: [N, C, H, W] to the same shape and dtype."""

    def __init__(self, norm: nn.GroupNorm, *, silu: bool = True) -> None:
        super().__init__()
        self.norm = norm
        self.silu = silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        if (kernel := _kernel("group_norm_silu", x)) is not None:
            x = x.contiguous(memory_format=torch.channels_last)
            return kernel(x, norm.num_groups, norm.weight, norm.bias, norm.eps, silu=self.silu)
        y: torch.Tensor = norm(x)
        return F.silu(y, inplace=True) if self.silu else y


class RmsNormSiLU(nn.Module):
    """Wan's and Qwen-Image's ``RMS_norm`` over the channels, then SiLU: [N, C, F, H, W] to the same shape and dtype."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.gamma = nn.Parameter(norm.gamma.flatten(), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if isinstance(norm.bias, nn.Parameter):
            self.bias = nn.Parameter(norm.bias.flatten(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (kernel := _kernel("rms_norm_silu", x)) is not None:
            # Not every convolution keeps the layout where there is one frame.
            return kernel(x.contiguous(memory_format=torch.channels_last_3d), self.gamma, self.bias)
        pixels = x.movedim(1, -1)  # dense, since x is channels_last
        # eps: F.normalize's, which bounds the norm by 1e-12, hardly differs for vectors that are not all but zero.
        y = F.rms_norm(pixels, (pixels.shape[-1],), self.gamma, eps=1e-24)
        if self.bias is not None:
            y = y + self.bias
        return F.silu(y, inplace=True).movedim(-1, 1)


class Resnet(nn.Module):
    """A residual block of two convolutions: [N, C, H, W] to [N, D, H, W]. It may overwrite its input.

    The sum is made in the place of one of its terms, and not divided where the divisor is 1: two tensors less to be
    written.
    """

    def __init__(self, block: ResnetBlock2D, norm1: GroupNormSiLU, norm2: GroupNormSiLU) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm1, block.conv1
        self.norm2, self.conv2 = norm2, block.conv2
        self.shortcut = block.conv_shortcut or nn.Identity()
        self.divisor = block.output_scale_factor

    def forward(self, x: torch.Tensor, temb: None = None) -> torch.Tensor:  # noqa: ARG002
        """``temb`` is the place of the embeddings that decoders of this kind do not have."""
        y = _convolve_and_add(self.conv2, self.norm2(self.conv1(self.norm1(x))), self.shortcut(x))
        return y / self.divisor if self.divisor != 1.0 else y


@cache
def _adds_in_convolutions() -> bool:
    """Whether this build of torch has oneDNN, with the operation, for this CPU."""
    if not hasattr(torch.ops.mkldnn, _ADDING):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _convolve_and_add(conv: nn.Conv2d, x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """``conv(x) + term``, in the place of one of them.

    On a CPU with bfloat16 units oneDNN adds the term while it holds the convolution's sums in float32: one pass over
    memory less, and one rounding.
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and _adds_in_convolutions():
        options = list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups
        added: torch.Tensor = getattr(torch.ops.mkldnn, _ADDING).binary(
            term, x, conv.weight, conv.bias, *options, "add", 1.0, None, [], None
        )
        return added
    y: torch.Tensor = conv(x)
    y += term
    return y


class Upsample(nn.Module):
    """Nearest-neighbour doubling and the 3x3 convolution after it, as one transposed convolution.

    [N, C, H, W] to [N, D, 2H, 2W]. Of the nine taps on a doubled picture those that meet the same source pixel are
    summed (in float64): 4x4 taps with stride 2, of which four meet at each output pixel: 2.25 times fewer
    multiplications, and no doubled picture in memory. Borders are exact, too.
    """

    # Which of a 3-tap filter's taps each of the four positions of a stride-2 transposed filter sums.
    _TAPS = ((0, 0, 1), (0, 1, 1), (1, 1, 0), (1, 0, 0))

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        taps = torch.tensor(self._TAPS, dtype=torch.float64, device=conv.weight.device)
        weight = torch.einsum("ax,by,oixy->ioab", taps, taps, conv.weight.double()).to(conv.weight.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = conv.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, self.weight, self.bias, stride=2, padding=1)


class CausalConv3d(nn.Module):
    """Wan's and Qwen-Image's causal convolution: [N, C, F, H, W] to [N, D, F, H, W]; ``cache_x`` are earlier frames.

    Taps that would meet only the zeros before a clip are left out. Of a single frame's 3x3x3 convolution a 3x3 one is
    left, a third of the multiplications: all there is for a picture, and the first frame of a clip. The borders are
    the convolution's own: no padded copy of the frames.
    """

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        width, _, height, *_ = conv._padding
        self.padding = (height, width)

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        weight = self.weight
        missing = weight.shape[2] - 1
        if cache_x is not None and missing:
            x = torch.cat([cache_x.to(x.device), x], dim=2)
            missing -= cache_x.shape[2]
        if x.shape[2] + missing == weight.shape[2]:  # one frame comes out
            weight, missing = weight[:, :, missing:], 0
        if x.shape[2] == weight.shape[2] == 1:
            return F.conv2d(x.squeeze(2), weight.squeeze(2), self.bias, padding=self.padding).unsqueeze(2)
        if missing:
            x = F.pad(x, (0, 0, 0, 0, missing, 0))
        return F.conv3d(x, weight, self.bias, padding=(0, *self.padding))


class FoldedAttention(nn.Module):
    """A VAE's single-head self-attention over its pixels: [N, C, H, W] to the same shape and dtype.

    The projections of the values and of the output are one: softmax(QK')(XV + v)O + o = softmax(QK')(XVO + vO + o),
    since each row of the softmax sums to one.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        value, out = attention.to_v, attention.to_out[0]
        weight = out.weight.double() @ value.weight.double()
        bias = out.weight.double() @ value.bias.double() + out.bias.double()
        self.norm = GroupNormSiLU(attention.group_norm, silu=False)
        self.to_q, self.to_k = attention.to_q, attention.to_k
        self.to_v = nn.Linear(value.in_features, out.out_features, device="meta")
        self.to_v.weight = nn.Parameter(weight.to(out.weight.dtype), requires_grad=False)
        self.to_v.bias = nn.Parameter(bias.to(out.bias.dtype), requires_grad=False)
        self.residual = attention.residual_connection
        self.rescale = attention.rescale_output_factor

    def forward(self, x: torch.Tensor, temb: None = None) -> torch.Tensor:  # noqa: ARG002
        """``temb`` is the place of the embeddings that decoders of this kind do not have."""
        n, c, h, w = x.shape
        pixels = self.norm(x).permute(0, 2, 3, 1).reshape(n, 1, h * w, c)
        y = F.scaled_dot_product_attention(self.to_q(pixels), self.to_k(pixels), self.to_v(pixels))
        y = y.view(n, h, w, -1).permute(0, 3, 1, 2)
        if self.residual:
            y = y + x
        return y / self.rescale if self.rescale != 1.0 else y
