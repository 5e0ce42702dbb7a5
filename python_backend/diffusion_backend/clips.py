"""How a clip is cut into messages: slices of whole frames, none much larger than a picture.

As one message, 121 frames of 1280x704 would be 327 MB: in shared memory, in tritonserver, and on the wire.
"""

from __future__ import annotations

MAX_SLICE_BYTES = 16 << 20


def frames_a_slice(width: int, height: int, max_bytes: int = MAX_SLICE_BYTES) -> int:
    """As many frames as fit; where not even one does, one."""
    return max(1, max_bytes // (width * height * 3))
