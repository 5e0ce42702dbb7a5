"""The embedded model of pictures: draws what it is asked for, and its recipe learns."""

import json
import random
from pathlib import Path
from typing import Any

import emoji
import evaluate
import finetune_decoder
import pytest
import torch
import train_flux
import train_vae
from diffusers import AutoencoderKL, FluxPipeline

MODEL = Path(__file__).resolve().parents[1] / "model_repository/emoji-flux"
PIPELINE = MODEL / "pipeline"

pytestmark = [pytest.mark.parallel, pytest.mark.usefixtures("two_threads")]


@pytest.fixture(scope="module")
def tiles() -> torch.Tensor:
    """The reference drawings, [74, 4, 64, 64]."""
    return emoji.load_sheet(MODEL / "training/references.png")


@pytest.fixture
def vae() -> Any:
    """The given autoencoder, a fresh one for each test since training changes it."""
    return AutoencoderKL.from_pretrained(PIPELINE / "vae", dtype=torch.float32)


def test_references_have_a_tile_for_every_name(tiles: torch.Tensor) -> None:
    """One tile per name, with an empty margin for the background."""
    assert len(tiles) == len(emoji.load_names()) == len(set(emoji.load_names())) == 74
    margin = tiles[:, 3].clone()
    margin[:, 4:-4, 4:-4] = 0
    assert not margin.any()


def test_judge_knows_right_from_wrong(vae: Any, tiles: torch.Tensor) -> None:
    """The judge that scores the model recognises the drawings themselves, and sees wrong ones as wrong."""
    names = emoji.load_names()
    colours = [list(emoji.BACKGROUNDS)[index % 9] for index in range(len(names))]
    pictures = emoji.composite(tiles, emoji.background_colours()[[index % 9 for index in range(74)]])
    pictures = (pictures.flip(3) + 1) / 2
    assert evaluate.recognise_names(vae, pictures, colours, tiles, names) == names
    assert evaluate.recognise_backgrounds(pictures) == colours
    score = evaluate.Score()
    score.add(names[1:] + names[:1], names, names)
    assert (score.right, score.total, len(score.mistakes)) == (0, 74, 74)


def test_model_draws_what_it_is_asked_for() -> None:
    """Every name once, on any of the nine backgrounds, with seeds of this test alone."""
    pipeline, defaults = evaluate.load_pipeline(PIPELINE)
    names, backgrounds = evaluate.evaluate(
        pipeline, defaults, colours=list(emoji.BACKGROUNDS), seeds=1, first_seed=777_000
    )
    assert names.total == backgrounds.total == 74
    assert names.share >= 0.98, str(names)
    assert backgrounds.share >= 0.95, str(backgrounds)


def test_training_objective_is_the_one_the_weights_were_trained_on(vae: Any, tiles: torch.Tensor) -> None:
    """The given weights have a low loss on the batches that the recipe draws."""
    pipeline = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    model = train_flux.EmojiFlux(len(pipeline.tokenizer), len(pipeline.tokenizer_2), layers=(2, 4))
    model.clip.load_state_dict(pipeline.text_encoder.state_dict())
    model.t5.load_state_dict(pipeline.text_encoder_2.state_dict())
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    latents = train_flux.encode_pictures(vae, tiles, emoji.load_names())
    batch = train_flux.draw_batch(latents, pipeline.tokenizer, pipeline.tokenizer_2, 96, random.Random(0))
    with torch.no_grad():
        velocity = model(batch.noisy, batch.time, batch.clip_ids, batch.t5_ids)
    assert (velocity - batch.velocity).pow(2).mean() < 0.2


@pytest.mark.long
def test_vae_training_learns(tiles: torch.Tensor) -> None:
    """The autoencoder's loss falls clearly within seconds."""
    _, losses = train_vae.train(tiles[:8], minutes=5, max_steps=50, batch_size=8)
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])


def test_flux_training_learns_and_saves_a_pipeline(vae: Any, tiles: torch.Tensor, tmp_path: Path) -> None:
    """A tiny transformer's loss falls clearly within seconds, and the pipeline it leaves draws pictures."""
    names = emoji.load_names()[:4]
    pipeline, losses = train_flux.train(
        vae, tiles[:4], names, minutes=5, max_steps=60, layers=(1, 1), batch_size=8
    )
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])
    pipeline.to(torch.float16).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(train_flux.SERVING_DEFAULTS))
    pictures = evaluate.generate(*evaluate.load_pipeline(tmp_path), names, 0)
    assert pictures.shape == (4, 3, 64, 64)
    assert pictures.isfinite().all()


def test_decoder_finetuning_leaves_the_latents_alone(vae: Any, tiles: torch.Tensor) -> None:
    """Only the decoder changes."""
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    after = finetune_decoder.finetune(vae, tiles[:4], minutes=5, max_steps=3, batch_size=4).state_dict()
    changed = {name.split(".")[0] for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {"decoder", "post_quant_conv"}
