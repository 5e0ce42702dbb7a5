"""Input tensors for tests that call Triton without our client."""

from __future__ import annotations

import numpy as np
from tritonclient.grpc import InferInput


def bytes_input(name: str, text: str | bytes) -> InferInput:
    """A BYTES [1] tensor."""
    tensor = InferInput(name, [1], "BYTES")
    data = text.encode() if isinstance(text, str) else text
    tensor.set_data_from_numpy(np.array([data], dtype=np.object_))
    return tensor
