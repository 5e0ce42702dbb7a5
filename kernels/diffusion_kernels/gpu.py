"""Where the kernels in Triton's language run."""

from __future__ import annotations

import triton
from torch import Tensor

# Fixed when triton is imported: the decorators of the kernels read it at that moment too.
INTERPRETED: bool = triton.knobs.runtime.interpret
# A CUDA grid has at most so many programs on its second axis, where the kernels put the batch.
MAX_BATCH = 65535


def require_gpu(x: Tensor) -> None:
    """Refuses an input where none of these kernels can run, or of too large a batch: a ``ValueError`` says which."""
    if x.shape[0] > MAX_BATCH:
        raise ValueError(f"x has a batch of {x.shape[0]}: expected at most {MAX_BATCH}")
    if not x.is_cuda and not (INTERPRETED and x.device.type == "cpu"):
        raise ValueError(
            f"x is on {x.device}: expected a CUDA tensor (or a CPU tensor with TRITON_INTERPRET=1)"
        )
