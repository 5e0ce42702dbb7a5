"""What Triton's own /metrics says of the stages."""

from __future__ import annotations

import re
import time
import urllib.request

_LINE = re.compile(r"^diffusion_(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


def read(url: str, name: str, stage: str = "denoise", **labels: str) -> float:
    """The sum of ``diffusion_<stage>_<name>`` over all series with these labels."""
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Connection": "close"})) as answer:
        text = answer.read().decode()
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    return sum(
        float(value)
        for found, series, value in _LINE.findall(text)
        if found == f"{stage}_{name}" and wanted <= set(series.split(","))
    )


def wait_until_idle(url: str, seconds: float) -> float:
    """Wait until no request is in an engine; how long that took."""
    started = time.monotonic()
    while rows := read(url, "running_rows"):
        assert time.monotonic() < started + seconds, f"{rows} rows are running yet"
        time.sleep(0.01)
    return time.monotonic() - started
