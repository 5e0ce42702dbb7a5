"""Every family: three stages equal the unsplit pipeline, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.families.catalogue import FAMILIES
from tests.families.family import Family
from tests.families.three_stages import split, unsplit


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_three_stages_equal_the_unsplit_pipeline(family: Family, tmp_path: Path) -> None:
    family.save(tmp_path)
    floats, pixels = unsplit(family, tmp_path)
    made = split(family, tmp_path)
    assert floats.isfinite().all()
    assert pixels.std() > 1, "a flat picture proves nothing"
    assert torch.equal(made.floats, floats)
    np.testing.assert_array_equal(made.pixels, pixels)
