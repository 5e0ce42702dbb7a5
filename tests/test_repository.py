"""The builder: what it writes, what it refuses, and that the repository's own model is what it writes."""

from __future__ import annotations

import errno
import filecmp
import itertools
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from diffusion_backend import cli, conditioning
from diffusion_backend import repository as repository_module
from diffusion_backend.errors import DiffusionError
from diffusion_backend.loading import open_pipeline
from diffusion_backend.model_config import list_ensembles, read_model_config
from diffusion_backend.quality import Tier
from diffusion_backend.repository import BuildOptions, add, read_model, remove
from diffusion_backend.settings import ModelLimits
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = ROOT / "model_repository"
PIPELINE = REPOSITORY / "emoji-flux/pipeline"
MODELS = ("emoji-flux", "emoji-flux_encode", "emoji-flux_denoise", "emoji-flux_vae_decode")


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``emoji-flux`` added to a fresh repository, from a pipeline folder inside it as in the real one."""
    repository = tmp_path_factory.mktemp("repository")
    shutil.copytree(PIPELINE, repository / "emoji-flux/pipeline")
    add(str(repository / "emoji-flux/pipeline"), "emoji-flux", repository)
    return repository


def skeleton(value: object) -> object:
    """Nested results with tensors replaced by shape and dtype."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple | list):
        return [skeleton(item) for item in value]
    return value


def test_the_repository_is_what_the_builder_writes(rebuilt: Path) -> None:
    for model in MODELS:
        written, kept = read_model_config(rebuilt / model), read_model_config(REPOSITORY / model)
        if kept.is_ensemble:
            assert int(kept.parameters["created"]) < int(written.parameters["created"])
            written.message.parameters["created"].CopyFrom(kept.message.parameters["created"])
        assert written.message == kept.message
        files = [p.relative_to(rebuilt) for p in (rebuilt / model).rglob("*") if p.is_file()]
        for file in files:
            if "pipeline" not in file.parts and file.name not in ("config.pbtxt", "64x64.conditioning"):
                assert filecmp.cmp(rebuilt / file, REPOSITORY / file, shallow=False), file


def test_the_warmup_conditioning_has_the_shapes_of_the_real_one(rebuilt: Path) -> None:
    ours, kept = (
        conditioning.unpack((repository / "emoji-flux_denoise/warmup/64x64.conditioning").read_bytes())
        for repository in (rebuilt, REPOSITORY)
    )
    assert ours.settings == kept.settings
    assert [(c.name, skeleton(c.result)) for c in ours.calls] == [
        (c.name, skeleton(c.result)) for c in kept.calls
    ]
    # A guided request encodes prompt and negative prompt: the warmup runs both branches.
    assert [call.name for call in ours.calls] == ["encode_prompt", "encode_prompt"]


def test_limits_come_from_the_pipeline_and_its_generation_config(rebuilt: Path) -> None:
    limits = ModelLimits.model_validate(read_model_config(rebuilt / "emoji-flux").parameters)
    assert (limits.pipeline_class, limits.task) == ("FluxPipeline", "text-to-image")
    assert (limits.default_width, limits.size_multiple, limits.max_width) == (64, 8, 128)
    assert (limits.guidance_argument, limits.default_guidance_scale) == ("true_cfg_scale", 2.0)
    assert limits.call_arguments == {"max_sequence_length": 16}
    assert limits.source_revision is None  # a local folder has none


def test_adding_again_changes_nothing_and_says_so(rebuilt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["add", str(rebuilt / "emoji-flux/pipeline"), "--name", "emoji-flux"]
    assert cli.main([*arguments, "--repository", str(rebuilt)]) == 0
    printed = capsys.readouterr().out
    assert "emoji-flux was up to date" in printed
    assert not {"created", "updated", "removed"} & {line.split()[0] for line in printed.splitlines()}


def test_adding_again_says_what_changed(tmp_path: Path) -> None:
    source = tmp_path / "pipeline"
    shutil.copytree(PIPELINE, source)
    repository = tmp_path / "repository"
    add(str(source), "other", repository)
    assert read_model_config(repository / "other").parameters["source"] == str(source.resolve())
    config = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps({**config, "num_inference_steps": 30}))
    (repository / "other_encode/warmup/stale").write_bytes(b"x")
    changes = {str(c.path): c.what for c in add(str(source), "other", repository) if c.what != "unchanged"}
    assert changes == {"other/config.pbtxt": "updated", "other_encode/warmup/stale": "removed"}
    assert list_ensembles(repository) == ["other"]


def test_defaults_without_a_generation_config(tmp_path: Path) -> None:
    """The pipeline's own: FLUX's 28 steps, and 128 latent pixels a side times the VAE's scale factor of 4."""
    source = tmp_path / "pipeline"
    shutil.copytree(PIPELINE, source, ignore=shutil.ignore_patterns("generation_config.json"))
    config = json.loads((source / "tokenizer_2/tokenizer_config.json").read_text())
    assert config["model_max_length"] == 32
    add(str(source), "plain", tmp_path / "repository")
    limits = ModelLimits.model_validate(read_model_config(tmp_path / "repository/plain").parameters)
    assert (limits.default_width, limits.default_height) == (512, 512)
    assert limits.default_num_inference_steps == 28
    assert limits.call_arguments == {}


def test_a_model_of_another_source_is_replaced_on_demand_only(tmp_path: Path) -> None:
    repository, source = tmp_path / "repository", tmp_path / "pipeline"
    add(str(PIPELINE), "fox", repository)
    shutil.copytree(PIPELINE, source)
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    asked = f"'name' is 'fox', which is a model of {PIPELINE}; allowed: another name, or --replace"
    with pytest.raises(DiffusionError, match=re.escape(asked)):
        add(str(source), "fox", repository)
    assert {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()} == before
    assert all(change.what == "unchanged" for change in add(str(PIPELINE), "fox", repository))
    replacing = BuildOptions(replace=True)
    changes = {str(c.path): c.what for c in add(str(source), "fox", repository, replacing)}
    assert {path for path, what in changes.items() if what != "unchanged"} == {"fox/config.pbtxt"}


@pytest.mark.parametrize("name", ["", "-x", "a/b", "../x", "a b", "é", "x" * 129])
def test_names_that_triton_cannot_take(tmp_path: Path, name: str) -> None:
    with pytest.raises(DiffusionError, match="'name' is"):
        add(str(PIPELINE), name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def broken_copy(tmp_path: Path, edit: dict[str, str | None]) -> Path:
    """The pipeline with some files replaced (text) or removed (None)."""
    source = tmp_path / "source"
    shutil.copytree(PIPELINE, source)
    for name, text in edit.items():
        if text is None:
            (source / name).unlink()
        else:
            (source / name).write_text(text)
    return source


WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
SHARDS = '{"weight_map": {"x": "b.safetensors"}}'
INDEX = (PIPELINE / "model_index.json").read_text()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"model_index.json": None}, "no model_index.json"),
        ({"model_index.json": INDEX.replace("FluxPipeline", "NoSuchPipeline")}, "NoSuchPipeline"),
        ({"model_index.json": INDEX.replace("FluxPipeline", "AutoencoderKL")}, "no diffusers pipeline class"),
        ({"model_index.json": INDEX.replace("CLIPTextModel", "NoSuchEncoder")}, "NoSuchEncoder"),
        ({"transformer/config.json": None}, "transformer: it has no config.json"),
        ({WEIGHTS: None}, "transformer: it has no weights; allowed: safetensors"),
        ({WEIGHTS: "short"}, "cut short or damaged: diffusion_pytorch_model.safetensors"),
        ({"transformer/a.safetensors.index.json": SHARDS}, "files that are not there: b.safetensors"),
        (
            {"model_index.json": INDEX.replace("FluxPipeline", "StableDiffusionImg2ImgPipeline")},
            "StableDiffusionImg2ImgPipeline cannot be served",
        ),
        ({"generation_config.json": "{"}, "not valid JSON"),
        ({"generation_config.json": "[]"}, "not a JSON object"),
        ({"generation_config.json": '{"colour": 1}'}, "colour"),
    ],
)
def test_sources_that_cannot_be_served(tmp_path: Path, edit: dict[str, str | None], words: str) -> None:
    source = broken_copy(tmp_path, edit)
    repository = tmp_path / "repository"
    with pytest.raises(DiffusionError, match=words):
        add(str(source), "broken", repository)
    assert not repository.exists() or list(repository.iterdir()) == []


def test_a_missing_folder_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["add", str(tmp_path / "none"), "--name", "x", "--repository", str(tmp_path)]
    assert cli.main(arguments) == 1
    assert "no such folder" in capsys.readouterr().err


def test_pickle_weights_are_never_loaded(tmp_path: Path) -> None:
    source = broken_copy(tmp_path, {WEIGHTS: None})
    (source / "transformer/diffusion_pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        DiffusionError, match=r"only pickle weights .*diffusion_pytorch_model.bin.*never loaded"
    ):
        add(str(source), "broken", tmp_path / "repository")


def test_a_variant_alone_is_not_loaded(tmp_path: Path) -> None:
    source = broken_copy(tmp_path, {})
    (source / WEIGHTS).rename(source / WEIGHTS.replace("model.", "model.fp16."))
    with pytest.raises(DiffusionError, match=r"only a variant of its weights \(diffusion_pytorch_model.fp16"):
        add(str(source), "broken", tmp_path / "repository")


def test_a_half_present_folder(tmp_path: Path) -> None:
    source = broken_copy(tmp_path, {})
    shutil.rmtree(source / "text_encoder_2")
    with pytest.raises(DiffusionError, match="text_encoder_2: there is no folder"):
        add(str(source), "broken", tmp_path / "repository")


def test_a_hub_that_cannot_be_reached_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DiffusionError, match="'org/none' cannot be served: it is no folder here"):
        add("org/none", "x", tmp_path)


def test_a_hub_models_commit_is_pinned_until_it_is_added_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = "1" * 40

    def download(_source: str, *, revision: str | None, **_: object) -> Path:
        snapshot = tmp_path / "hub/snapshots" / (revision or newest)
        if not snapshot.exists():
            shutil.copytree(PIPELINE, snapshot)
        return snapshot

    monkeypatch.setattr("diffusers.DiffusionPipeline.download", download)
    arguments = ["--repository", str(tmp_path / "repository")]
    for newest in ("1" * 40, "2" * 40):
        assert cli.main(["add", "org/emoji", "--name", "m", *arguments]) == 0
        limits = read_model(tmp_path / "repository/m")
        assert (limits.source, limits.source_revision) == ("org/emoji", newest)
        capsys.readouterr()
        assert cli.main(["list", *arguments]) == 0
        assert capsys.readouterr().out.endswith(f" from org/emoji at {newest}\n")
    assert open_pipeline("org/emoji", "1" * 40).folder.name == "1" * 40


def test_a_revision_that_the_hub_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        DiffusionError,
        match=r"'org/none' cannot be served: .* the hub has no revision v2 of it or cannot be reached",
    ):
        open_pipeline("org/none", "v2")


@pytest.mark.parametrize("name", ["emoji-flux_encode", "emoji-flux_denoise"])
def test_a_name_that_is_anothers_stage(rebuilt: Path, name: str) -> None:
    with pytest.raises(DiffusionError, match=f"{name} in .* belongs to emoji-flux"):
        add(str(PIPELINE), name, rebuilt)


def test_a_name_whose_stage_is_another_model(rebuilt: Path) -> None:
    """No folder of a foreign model is overwritten: an ensemble of somebody's, a broken configuration."""
    for folder, text in (("mine_encode", 'platform: "ensemble"'), ("yours_vae_decode", "{")):
        (rebuilt / folder).mkdir()
        (rebuilt / folder / "config.pbtxt").write_text(text)
        with pytest.raises(DiffusionError, match="belongs to another model"):
            add(str(PIPELINE), folder.partition("_")[0], rebuilt)
        shutil.rmtree(rebuilt / folder)


def test_options_reach_the_configurations(tmp_path: Path) -> None:
    options = BuildOptions(
        dtype="bfloat16",
        device="gpu",
        instances=2,
        unary=True,
        warmup_sizes=("128x64", "64x64"),
        warmup_batches=(4,),
        default_quality=Tier.FAST,
    )
    add(str(PIPELINE), "tuned", tmp_path, options)
    limits = read_model(tmp_path / "tuned")
    assert (limits.dtype, limits.default_quality) == ("bfloat16", Tier.FAST)
    encode, denoise, vae_decode = (
        read_model_config(tmp_path / f"tuned_{stage}").message
        for stage in ("encode", "denoise", "vae_decode")
    )
    assert [message.instance_group[0].count for message in (encode, denoise, vae_decode)] == [2, 2, 1]
    assert {message.instance_group[0].kind for message in (encode, denoise, vae_decode)} == {
        denoise.instance_group[0].KIND_GPU
    }
    assert not denoise.model_transaction_policy.decoupled
    further = ("", "_image-to-image", "_inpainting")
    assert [(w.name, w.batch_size) for w in encode.model_warmup] == [
        (f"default{task}{batch}", count) for task in further for batch, count in (("", 1), ("_batch_4", 4))
    ]
    assert [(w.name, w.batch_size) for w in denoise.model_warmup] == [
        (f"{size}{task}{batch}", 1)
        for size in ("64x64", "128x64")
        for task in further
        for batch in ("", "_batch_4")
    ]
    assert {w.name: w.batch_size for w in vae_decode.model_warmup} == {
        f"{size}{batch}_{quality}": 4 if batch else 1
        for size in ("64x64", "128x64")
        for batch in ("", "_batch_4")
        for quality in ("lossless", "high")
    }
    wide = conditioning.unpack((tmp_path / "tuned_denoise/warmup/128x64_batch_4.conditioning").read_bytes())
    assert (wide.rows, wide.settings["width"], wide.settings["num_inference_steps"]) == (4, 128, 2)


def test_no_warmup(tmp_path: Path) -> None:
    add(str(PIPELINE), "cold", tmp_path, BuildOptions(warmup=False))
    # What denoise checks itself with is there all the same.
    assert [path.name for path in tmp_path.rglob("warmup/*")] == ["64x64.conditioning"]
    for stage in ("encode", "denoise", "vae_decode"):
        assert not read_model_config(tmp_path / f"cold_{stage}").message.model_warmup


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BuildOptions(dtype="int8"), "'dtype' is 'int8'; allowed: auto, float32, float16, bfloat16"),
        (BuildOptions(device="tpu"), "'device' is 'tpu'; allowed: auto, cpu, gpu"),
        (BuildOptions(instances=0), "'instances' is 0; allowed: 1 to 64"),
        (BuildOptions(warmup_sizes=("65x64",)), "'size' is '65x64'"),
        (BuildOptions(warmup_batches=(9,)), "'warmup-batch' is 9; allowed: 1 to 8"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: BuildOptions, words: str) -> None:
    with pytest.raises(DiffusionError, match=words):
        add(str(PIPELINE), "x", tmp_path, options)
    assert list(tmp_path.iterdir()) == []


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file, with its content, and every folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_a_folder_in_the_place_of_a_file_changes_nothing(tmp_path: Path) -> None:
    add(str(PIPELINE), "m", tmp_path)
    (tmp_path / "m_vae_decode/1/model.py").unlink()
    (tmp_path / "m_vae_decode/1/model.py").mkdir()
    before = tree(tmp_path)
    with pytest.raises(DiffusionError, match=r"stays as it was: not all of 'm' could be .*1/model\.py"):
        add(str(PIPELINE), "m", tmp_path, BuildOptions(instances=2))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("moved", [0, 3, 7])
def test_an_add_or_remove_that_fails_halfway_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    """The disk is full, or a folder not writable, once some files have been moved."""
    add(str(PIPELINE), "m", tmp_path, BuildOptions(warmup_sizes=("128x64",)))
    before = tree(tmp_path)
    replace, calls = os.replace, itertools.count()

    def replace_until_full(source: Path, target: Path) -> None:
        if next(calls) == moved:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_until_full)
    # Files that are new, that change, and that are no longer needed.
    with pytest.raises(DiffusionError, match=r"stays as it was: .*No space left on device"):
        add(str(PIPELINE), "m", tmp_path, BuildOptions(instances=2, warmup_sizes=("64x128",)))
    assert tree(tmp_path) == before
    calls = itertools.count()
    with pytest.raises(DiffusionError, match="No space left on device"):
        remove("m", tmp_path)
    assert tree(tmp_path) == before


def test_remove_takes_what_add_wrote_and_no_weights(tmp_path: Path) -> None:
    shutil.copytree(PIPELINE, tmp_path / "inside/pipeline")
    before = sorted(tmp_path.rglob("*"))
    add(str(tmp_path / "inside/pipeline"), "inside", tmp_path)
    (tmp_path / "inside_encode/1/__pycache__").mkdir()
    (tmp_path / "inside_encode/1/__pycache__/model.pyc").write_bytes(b"")
    changes = remove("inside", tmp_path)
    assert {change.what for change in changes} == {"removed"}
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(DiffusionError, match="'inside' is no model"):
        remove("inside", tmp_path)


def test_check_list_and_remove_on_the_command_line(
    rebuilt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(PIPELINE)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"transformer +FluxTransformer2DModel +1 files +10,282,944 bytes", printed)
    assert re.search(r"encode +loads +4,126,582 bytes", printed), "it encodes images: it has the VAE, too"
    assert "serves text-to-image, image-to-image, inpainting, by default 64x64, 20 steps\n" in printed
    assert cli.main(["check", str(REPOSITORY / "emoji-wan/pipeline")]) == 0
    printed = capsys.readouterr().out
    assert (
        "serves text-to-video, by default 64x64, 17 frames at 8 fps, 20 steps; 1 to 33 frames, in steps of 4"
        in printed
    )
    assert cli.main(["list", "--repository", str(rebuilt)]) == 0
    assert re.search(
        "^emoji-flux +FluxPipeline +text-to-image, image-to-image, inpainting, 64x64", capsys.readouterr().out
    )
    index = INDEX.replace("FluxPipeline", "StableDiffusionImg2ImgPipeline")
    edits: list[tuple[dict[str, str | None], str]] = [
        ({WEIGHTS: None}, "refused: transformer: it has no weights"),
        ({"model_index.json": index}, "refused: StableDiffusionImg2ImgPipeline cannot be served: "),
    ]
    for number, (edit, words) in enumerate(edits):
        source = broken_copy(tmp_path / str(number), edit)
        assert cli.main(["check", str(source)]) == 1
        assert words in capsys.readouterr().out
    assert cli.main(["remove", "none", "--repository", str(rebuilt)]) == 1
    assert "'none' is no model" in capsys.readouterr().err


def test_encoders_in_another_dtype_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, repository = tmp_path / "pipeline", tmp_path / "repository"
    shutil.copytree(PIPELINE, source)
    file = source / "text_encoder_2" / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    denoiser = "float16"
    warning = f"warning: transformer is stored in {denoiser}, but text_encoder_2 in bfloat16: "
    assert cli.main(["check", str(source)]) == 0
    error = capsys.readouterr().err
    assert error.startswith(warning)
    assert f"--dtype {denoiser}" in error
    assert error.count("\n") == 1
    arguments = ["add", str(source), "--name", "m", "--repository", str(repository), "--no-warmup"]
    for options, warned in (([], True), (["--dtype=float32"], False), (["--device=cpu"], False)):
        assert cli.main([*arguments, *options]) == 0
        assert capsys.readouterr().err.startswith(warning) == warned


def test_a_broken_configuration_is_no_other_models_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    config = tmp_path / "broken" / "config.pbtxt"
    config.write_text(
        'name: "broken" platform: "ensemble" parameters { key: "pipeline_class" value: { string_value: "X" } }'
    )
    arguments = ["--repository", str(tmp_path)]
    assert cli.main(["add", str(PIPELINE), "--name", "good", *arguments]) == 0
    assert "good is served from the next start on" in capsys.readouterr().out
    assert cli.main(["list", *arguments]) == 1
    shown = capsys.readouterr().out
    assert f"broken: {config}: parameter 'source'" in shown
    assert "FluxPipeline" in shown
    assert cli.main(["remove", "good", *arguments]) == 0
    assert cli.main(["remove", "broken", *arguments]) == 0
    assert not config.exists()


def test_two_changes_at_once_leave_one_of_the_two(tmp_path: Path) -> None:
    """Never the configuration of one with the warmup files of the other."""
    choices = [
        {
            f"m_{stage}/{file}": f"{choice}".encode()
            for stage in ("encode", "denoise", "vae_decode")
            for file in ("config.pbtxt", *(f"warmup/{choice} {number}" for number in range(10)))
        }
        for choice in ("one", "other")
    ]
    for number in range(30):
        repository = tmp_path / str(number)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(repository_module._install, ["m"] * 2, [repository] * 2, choices))
        found = {
            str(path.relative_to(repository)): path.read_bytes()
            for path in repository.rglob("*")
            if path.is_file()
        }
        assert found in choices
