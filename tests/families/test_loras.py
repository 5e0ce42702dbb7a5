"""LoRAs: equal to diffusers' own, gone without a trace when none is asked for, and never mixed in one forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusion_backend import loading, loras, oddities, seams
from diffusion_backend.encoder_cache import EncoderCache
from diffusion_backend.engine import Engine, Job
from diffusion_backend.errors import DiffusionError
from diffusion_backend.loading import Stage
from diffusion_backend.lora_choice import Loras
from diffusion_backend.loras import LoraSwitch
from diffusion_backend.rows import Denoiser
from diffusion_backend.tombstones import Tombstones
from safetensors.torch import load_file, save_file

from tests.families.dit import pixart
from tests.families.family import Family
from tests.families.flux import flux_dev
from tests.families.four_requests import Batches
from tests.families.lora_files import FILE, as_kohya, save_lora
from tests.families.stable_diffusion import sd15
from tests.families.three_stages import CPU, arguments_of, limits_of, settings_of
from tests.families.wan import wan21

pytestmark = pytest.mark.parallel

Saved = Callable[[Family], Path]
# What each of two LoRAs has parts for.
PARTS: dict[Family, tuple[tuple[str, ...], tuple[str, ...]]] = {
    sd15: (("unet", "text_encoder"), ("unet",)),
    flux_dev: (("transformer", "text_encoder"), ("transformer",)),
    wan21: (("transformer",), ("transformer",)),
}
FIRST: Loras = (("first", 0.6),)
BOTH: Loras = (("first", 0.6), ("second", -1.3))
CHOICES: tuple[Loras, ...] = (FIRST, BOTH, (), (("second", 0.5),), (("first", 0.0),))
families = pytest.mark.parametrize("family", PARTS, ids=lambda family: family.name)


@pytest.fixture(scope="session")
def folders(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], dict[str, str]]:
    """The two LoRAs of a family."""
    made: dict[Family, dict[str, str]] = {}

    def make(family: Family) -> dict[str, str]:
        if family not in made:
            first, second = PARTS[family]
            home = tmp_path_factory.mktemp("loras")
            made[family] = {
                "first": str(save_lora(saved(family), home / "first", *first, seed=1)),
                "second": str(save_lora(saved(family), home / "second", *second, seed=2, rank=2)),
            }
        return made[family]

    return make


class Stages:
    """The three stages of a family, with its LoRAs in the first two."""

    def __init__(self, family: Family, folder: Path, folders: Mapping[str, str]) -> None:
        self._family, self._limits = family, limits_of(family, folder)
        pipeline = loading.open_pipeline(str(folder))
        self.encoder, self.denoiser, self.decoder = (
            loading.load_stage(
                pipeline, stage, device=CPU, dtype=torch.float32, methods=seams.STAND_IN_METHODS
            )[0]
            for stage in Stage
        )
        self.bytes = [loras.load(pipe, folders) for pipe in (self.encoder, self.denoiser)]
        self.encoding = LoraSwitch(self.encoder, Stage.ENCODE, folders)
        self.denoising = LoraSwitch(self.denoiser, Stage.DENOISE, folders)
        self.looked_up: list[str] = []
        cache = EncoderCache(1 << 24, self.looked_up.append)
        for name, encoder in loading.modules_of(self.encoder, Stage.ENCODE).items():
            vars(self.encoder)[name] = cache.wrap(encoder, self.encoding.state(encoder))

    def record(self, chosen: Loras) -> list[Any]:
        self.encoding.switch(chosen)
        settings = settings_of(self._limits)
        return seams.record(self.encoder, arguments_of(self.encoder, self._family, self._limits, settings))

    def denoise(self, chosen: Loras, calls: list[Any], denoiser: Denoiser) -> seams.Denoised:
        settings = settings_of(self._limits)
        arguments = arguments_of(self.denoiser, self._family, self._limits, settings)
        switched = self.denoising.denoiser(denoiser, chosen)
        return seams.replay(self.denoiser, calls, arguments, settings.seed, denoiser=switched)

    def make(self, chosen: Loras) -> torch.Tensor:
        denoised = self.denoise(
            chosen, self.record(chosen), lambda module, args, kwargs: module(*args, **kwargs)
        )
        return seams.decode_floats(self.decoder, denoised.latents, denoised.decode_arguments)


def unsplit(family: Family, folder: Path, folders: Mapping[str, str], chosen: Loras) -> torch.Tensor:
    """Plain diffusers, which has only those LoRAs that are asked for."""
    limits = limits_of(family, folder)
    pipe = DiffusionPipeline.from_pretrained(
        folder,
        dtype=torch.float32,
        **oddities.init_arguments(loading.open_pipeline(str(folder)).pipeline_class),
    )
    pipe.set_progress_bar_config(disable=True)
    for name, _ in chosen:
        pipe.load_lora_weights(folders[name], adapter_name=name)
    if chosen:
        pipe.set_adapters([name for name, _ in chosen], [weight for _, weight in chosen])
    settings = settings_of(limits)
    torch.manual_seed(settings.seed)
    floats: torch.Tensor = pipe(**arguments_of(pipe, family, limits, settings))[0]
    return floats


@families
def test_pictures_with_loras_equal_diffusers_own(
    family: Family, saved: Saved, folders: Callable[[Family], dict[str, str]]
) -> None:
    """One after the other on the same stages: what the one before had switched on is off again."""
    stages = Stages(family, saved(family), folders(family))
    made = [stages.make(chosen) for chosen in CHOICES]
    for chosen, picture in zip(CHOICES, made, strict=True):
        assert torch.equal(picture, unsplit(family, saved(family), folders(family), chosen)), chosen
    # Weight 0 is no LoRA at all; all else is a picture of its own.
    assert torch.equal(made[4], made[2])
    others = [(a, b) for a in range(4) for b in range(a)]
    assert min((made[a] - made[b]).abs().max().item() for a, b in others) > 1e-3


def test_a_lora_of_another_format_and_name(
    saved: Saved, folders: Callable[[Family], dict[str, str]], tmp_path: Path
) -> None:
    tensors = load_file(f"{folders(sd15)['first']}/{FILE}")
    save_file(as_kohya(tensors, alpha=3.0), tmp_path / "style.safetensors")
    other = {"other": str(tmp_path)}
    loras.check_files(loading.open_pipeline(str(saved(sd15))), other)
    stages = Stages(sd15, saved(sd15), other)
    for chosen in ((("other", 0.7),), ()):
        assert torch.equal(stages.make(chosen), unsplit(sd15, saved(sd15), other, chosen))


def test_each_stage_has_its_own_part(saved: Saved, folders: Callable[[Family], dict[str, str]]) -> None:
    stages = Stages(sd15, saved(sd15), folders(sd15))
    files = [load_file(f"{folder}/{FILE}") for folder in folders(sd15).values()]

    def size(part: str) -> int:
        return sum(tensor.nbytes for file in files for name, tensor in file.items() if name.startswith(part))

    assert stages.bytes == [size("text_encoder."), size("unet.")]
    assert min(stages.bytes) > 0


def test_cached_encodings_are_those_of_the_loras(
    saved: Saved, folders: Callable[[Family], dict[str, str]]
) -> None:
    stages = Stages(sd15, saved(sd15), folders(sd15))
    for chosen in (FIRST, (), FIRST, (("second", 1.0),)):
        stages.record(chosen)
    # A prompt and a negative one; the second LoRA has no part in the text encoder.
    assert Counter(stages.looked_up) == {"miss": 4, "hit": 4}


def test_rows_of_other_loras_never_share_a_forward(
    saved: Saved, folders: Callable[[Family], dict[str, str]], tmp_path: Path
) -> None:
    stages = Stages(flux_dev, saved(flux_dev), folders(flux_dev))
    chosen: list[Loras] = [FIRST, BOTH, (), FIRST, (("first", 0.61),), ()]
    calls = [stages.record(each) for each in chosen]
    alone = [
        stages.denoise(each, recorded, lambda module, args, kwargs: module(*args, **kwargs)).latents
        for each, recorded in zip(chosen, calls, strict=True)
    ]
    batches = Batches()
    results: list[Future[Any]] = [Future() for _ in chosen]
    engine = Engine(max_requests=8, max_batch_rows=64, tombstones=Tombstones(tmp_path), events=batches)
    jobs = [
        Job(
            str(number),
            partial(stages.denoise, each, recorded),
            results[number].set_result,
            results[number].set_exception,
            lambda: None,
        )
        for number, (each, recorded) in enumerate(zip(chosen, calls, strict=True))
    ]
    engine.run(lambda: engine.submit(*jobs))  # on its own thread, so that they begin together
    together = [result.result(60).latents for result in results]
    engine.close()
    steps = flux_dev.call["num_inference_steps"]
    assert sum(batches.rows) == len(chosen) * steps
    # The fifth and sixth start a step later (four starts a step): the pair without LoRAs meets on all but one.
    assert max(batches.rows) == 2
    assert batches.rows.count(2) >= 2 * steps - 1
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)
    assert (alone[0] - alone[4]).abs().max() > 1e-4, "a weight that is a little different is another picture"


@pytest.fixture
def broken(saved: Saved, folders: Callable[[Family], dict[str, str]], tmp_path: Path) -> Callable[..., str]:
    """Why FLUX refuses its first LoRA after ``change`` has been at its tensors."""

    def refuse(change: Callable[[dict[str, torch.Tensor]], object]) -> str:
        tensors = load_file(f"{folders(flux_dev)['first']}/{FILE}")
        change(tensors)
        save_file(tensors, tmp_path / FILE)
        return refusal(saved(flux_dev), tmp_path)

    return refuse


def refusal(pipeline: Path, folder: Path, name: str = "mine") -> str:
    with pytest.raises(DiffusionError) as caught:
        loras.check_files(loading.open_pipeline(str(pipeline)), {name: str(folder)})
    assert (caught.value.param, caught.value.code) == ("lora", "unusable")
    return caught.value.message


TO_Q = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"


def test_those_that_fit_are_not_refused(saved: Saved, folders: Callable[[Family], dict[str, str]]) -> None:
    for family in PARTS:
        loras.check_files(loading.open_pipeline(str(saved(family))), folders(family))


def test_loras_of_other_models_are_refused(saved: Saved, folders: Callable[[Family], dict[str, str]]) -> None:
    theirs = folders(sd15)["first"]
    assert "is for no part of FluxPipeline that takes LoRAs: transformer, text_encoder" in refusal(
        saved(flux_dev), Path(theirs)
    )
    assert "PixArtSigmaPipeline takes no LoRAs" in refusal(saved(pixart), Path(theirs))
    # Its layers have other names.
    assert "WanPipeline cannot load" in refusal(saved(wan21), Path(folders(flux_dev)["second"]))


def test_layers_of_another_size_are_refused(broken: Callable[..., str]) -> None:
    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".lora_B." in name]:
            tensors[name] = tensors[name][:-1].contiguous()

    assert "size mismatch" in broken(shrink)


def test_a_larger_input_layer_is_refused(broken: Callable[..., str]) -> None:
    """FLUX's control LoRAs: diffusers makes a layer of the model larger for them."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.x_embedder.lora_A.weight"] = torch.zeros(4, 32)
        tensors["transformer.x_embedder.lora_B.weight"] = torch.zeros(32, 4)

    assert "replaces layers of the model itself" in broken(add)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "transformer.transformer_blocks.0.attn.norm_q.weight",
            "replaces 'transformer.transformer_blocks.0.attn.norm",
        ),
        ("vae.decoder.conv_in.lora_A.weight", "is for no part of FluxPipeline"),
        (
            "transformer.transformer_blocks.7.attn.to_q.lora_A.weight",
            "without 'transformer.transformer_blocks.7",
        ),
        ("text_encoder.encoder.layers.0.self_attn.q_proj.dora_scale", "is a DoRA"),
    ],
)
def test_what_would_be_dropped_or_replace_weights_is_refused(
    broken: Callable[..., str], name: str, message: str
) -> None:
    assert message in broken(lambda tensors: tensors.update({name: torch.zeros(4, 4)}))


def test_tensors_for_layers_that_are_not_there_are_refused(broken: Callable[..., str]) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("lora_A", "lora_B"):
            name = f"transformer.transformer_blocks.0.attn.to_q.{part}.weight"
            tensors[name.replace("blocks.0", "blocks.7")] = tensors[name].clone()

    assert "2 of 14 tensors in pytorch_lora_weights.safetensors fit nowhere in transformer" in broken(add)


def test_numbers_that_are_none_are_refused(broken: Callable[..., str]) -> None:
    assert f"{TO_Q!r} in {FILE} is not finite" in broken(lambda tensors: tensors[TO_Q].fill_(float("nan")))


def test_folders_without_a_whole_file_are_refused(
    saved: Saved, folders: Callable[[Family], dict[str, str]], tmp_path: Path
) -> None:
    def why(name: str = "mine") -> str:
        return refusal(saved(flux_dev), tmp_path / "lora", name)

    assert "there is no folder" in why()
    (tmp_path / "lora").mkdir()
    assert "no weights; allowed: a safetensors file" in why()
    (tmp_path / "lora/old.bin").touch()
    assert "only pickle weights (old.bin), which are never loaded" in why()
    data = Path(folders(flux_dev)["first"], FILE).read_bytes()
    (tmp_path / "lora/one.safetensors").write_bytes(data[:-8])
    assert "one.safetensors is cut short or damaged" in why()
    (tmp_path / "lora/two.safetensors").write_bytes(data)
    assert "has one.safetensors, two.safetensors; allowed: one of them" in why()
    (tmp_path / "lora" / FILE).write_bytes(data)  # the usual name
    for name in ("", "a:1", "a,b", "-a", "ä", "x" * 65):
        assert "allowed: up to 64 letters" in why(name)
    loras.check_files(loading.open_pipeline(str(saved(flux_dev))), {"x" * 64: str(tmp_path / "lora")})
