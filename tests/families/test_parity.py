"""Every family: three stages equal the unsplit pipeline, bit for bit; and the table in the docs says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusion_backend import loading, seams, values

from tests.families import table
from tests.families.catalogue import FAMILIES
from tests.families.conftest import Added
from tests.families.family import Family
from tests.families.three_stages import Made, split, unsplit

pytestmark = pytest.mark.parallel

Saved = Callable[[Family], Path]


def by_name(name: str) -> Family:
    (family,) = (family for family in FAMILIES if family.name == name)
    return family


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, str]]:
    """The rows of the families that were tested. All of them rewrite the file, if that is asked for."""
    made: dict[str, str] = {}
    yield made
    if table.UPDATE and set(made) == {family.name for family in FAMILIES}:
        table.write(families=[made[family.name] for family in FAMILIES])


def check(family: Family, folder: Path, dtype: torch.dtype = torch.float32) -> Made:
    floats, pixels = unsplit(family, folder, dtype)
    made = split(family, folder, dtype)
    assert floats.isfinite().all()
    assert pixels.std() > 1, "a flat picture proves nothing"
    assert torch.equal(made.floats.to(floats.dtype), floats)
    np.testing.assert_array_equal(made.pixels, pixels)
    return made


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_three_stages_equal_the_unsplit_pipeline(
    family: Family, saved: Saved, added: Callable[[Family], Added], rows: dict[str, str]
) -> None:
    made = check(family, saved(family))
    rows[family.name] = row = table.row(family, saved(family), made, added(family).refusal)
    if not table.UPDATE:
        assert row in table.FILE.read_text().splitlines(), (
            f"{table.FILE} is stale: python -m tests.families.table"
        )


@pytest.mark.skipif(table.UPDATE, reason="it is being written")
def test_the_table_has_no_other_rows() -> None:
    rows, tasks = table.read()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [family.name for family in FAMILIES]
    assert table.FILE.read_text() == table.text(rows, tasks)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Stable Diffusion XL", torch.float16),  # its VAE is turned to float32 to decode
        ("FLUX.1 dev", torch.float16),  # its VAE, with the same configuration, is not
        ("LTX-Video 0.9.5 T2V", torch.bfloat16),  # a tensor in bfloat16 goes to vae_decode
    ],
)
def test_half_precision(name: str, dtype: torch.dtype, saved: Saved) -> None:
    family = by_name(name)
    check(family, saved(family), dtype)


def test_what_goes_to_vae_decode_besides_latents(saved: Saved) -> None:
    """A tensor of LTX's, and the generator, which goes on where the denoising loop left it."""
    ltx = split(by_name("LTX-Video 0.9.5 T2V"), saved(by_name("LTX-Video 0.9.5 T2V")))
    assert torch.equal(values.from_json(ltx.decode_arguments["temb"]), torch.tensor([0.05]))
    sd15 = split(by_name("Stable Diffusion 1.5"), saved(by_name("Stable Diffusion 1.5")))
    generator = values.from_json(sd15.decode_arguments["generator"])
    expected = torch.Generator("cpu").manual_seed(7)
    torch.randn(sd15.latents_shape, generator=expected)
    assert torch.equal(generator.get_state(), expected.get_state())


@pytest.mark.parametrize("takes_image", [False, True])
def test_the_encode_stage_holds_the_vae_only_to_encode_images(saved: Saved, takes_image: bool) -> None:
    pipe, _ = loading.load_stage(
        loading.open_pipeline(str(saved(by_name("FLUX.1 Kontext")))),
        loading.Stage.ENCODE,
        device=torch.device("cpu"),
        dtype=torch.float32,
        methods=seams.STAND_IN_METHODS,
        takes_image=takes_image,
    )
    assert {weight.is_meta for weight in pipe.vae.parameters()} == {not takes_image}
    assert {weight.is_meta for weight in pipe.text_encoder.parameters()} == {False}


def test_runs_share_no_scheduler_and_no_guider(saved: Saved) -> None:
    """HunyuanImage's guiders keep a momentum: runs side by side would add to each other's."""
    pipeline = loading.open_pipeline(str(saved(by_name("HunyuanImage 2.1"))))
    pipe = loading.load_dry(pipeline, loading.Stage.DENOISE, methods=seams.STAND_IN_METHODS)
    runs = [seams._private_copy(pipe) for _ in range(2)]
    for name in ("scheduler", "guider", "ocr_guider", "vae"):
        assert len({id(getattr(each, name)) for each in (pipe, *runs)}) == 3, name
    assert runs[0].transformer is runs[1].transformer is pipe.transformer
