"""The adapter, but it encodes without loss, so that what it has published tells which frames it got.

And its clock is off by ``CLOCK_OFF`` seconds: in its own modules, as gRPC takes deadlines by the clock of the machine.
A store that takes nothing is waited for ``PATIENCE`` seconds.
"""

import os
import sys
import time
from types import SimpleNamespace

from openai_adapter.__main__ import main

from openai_adapter import video_files, video_worker

off = float(os.environ.get("CLOCK_OFF", "0"))
clock = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + off})
for name, module in list(sys.modules.items()):
    if name.startswith("openai_adapter.") and getattr(module, "time", None) is time:
        module.time = clock  # type: ignore[attr-defined]
video_files._ENCODER_OPTIONS["crf"] = "0"
video_worker.INSIST_SECONDS = float(os.environ.get("PATIENCE", video_worker.INSIST_SECONDS))

if __name__ == "__main__":
    main()
