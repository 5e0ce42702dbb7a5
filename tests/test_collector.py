"""Garbage collection in a stage: it does not go through the libraries again and again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.parallel

SCRIPT = """
import gc, json
from diffusion_backend.stages.common import prepare_process
prepare_process()
print(json.dumps([gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())]))
"""


def test_what_the_libraries_are_made_of_is_exempt() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    enabled, exempt, looked_at = json.loads(done.stdout.splitlines()[-1])
    assert enabled
    assert exempt > 200_000
    assert looked_at < exempt / 100
