"""The embedded video model: moves what it is asked to, and its recipe learns."""

from pathlib import Path
from typing import Any

import clips
import evaluate_wan
import pytest
import torch
import train_wan
import train_wan_vae
from diffusers import AutoencoderKLWan
from emoji import BACKGROUNDS
from torch.nn.functional import unfold

PIPELINE = Path(__file__).resolve().parents[1] / "model_repository/emoji-wan/pipeline"

pytestmark = [pytest.mark.parallel, pytest.mark.usefixtures("two_threads")]


def draw(subject: clips.Subject, offset: int) -> torch.Tensor:
    """The true clip of a subject, [3, 17, 64, 64] in -1..1."""
    still = clips.draw_stills([subject.name], torch.tensor(BACKGROUNDS[subject.colour]) / 255)[0]
    return clips.draw_clip(still, subject.direction, offset)


def test_every_name_has_a_motion_that_is_not_trained() -> None:
    """The figures for held-out motions are about these alone."""
    seen = {(subject.name, subject.direction) for subject in clips.seen_subjects()}
    assert len(seen) == 3 * len(clips.NAMES)
    assert not seen & {(name, clips.held_out(name)) for name in clips.NAMES}
    assert {clips.held_out(name) for name in clips.NAMES} == set(clips.DIRECTIONS)


@pytest.mark.parametrize("frames", [1, 5, 17])
def test_a_clip_at_once_is_the_same_as_frame_by_frame(frames: int) -> None:
    """The decoder is trained on whole clips, and served with Wan's cache of features."""
    vae = train_wan_vae.build_vae().eval()
    with torch.no_grad():
        batch = train_wan_vae.draw_batch(clips.seen_subjects(), 2, frames)
        latents = train_wan_vae.encode_clip(vae, batch).mean
        torch.testing.assert_close(latents, vae.encode(batch).latent_dist.mean, rtol=1e-4, atol=1e-4)
        output = train_wan_vae.decode_clip(vae, latents).clamp(-1, 1)
        torch.testing.assert_close(output, vae.decode(latents).sample, rtol=1e-4, atol=1e-4)


def test_latents_hold_the_pictures() -> None:
    """What the computed encoder keeps of every fourth frame gives it back by a linear map, at over 25 dB."""
    batch = train_wan_vae.draw_batch(clips.seen_subjects(), 8, clips.FRAMES)
    with torch.no_grad():
        latents = train_wan_vae.build_vae().encode(batch).latent_dist.mean
    frames, latents = batch[:, :, ::4].transpose(1, 2).flatten(0, 1), latents.transpose(1, 2).flatten(0, 1)
    squares = unfold(frames, 8, stride=8).transpose(1, 2).flatten(0, 1)
    features = latents.flatten(2).transpose(1, 2).flatten(0, 1)
    features = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    restored = features @ torch.linalg.lstsq(features, squares).solution
    assert -10 * ((restored - squares) / 2).pow(2).mean().log10() > 25


def test_judge_knows_right_from_wrong() -> None:
    """The judge recognises the true clips, and sees wrong ones as wrong."""
    subjects = evaluate_wan.choose_subjects(seen=False, seeds=1)
    offsets = [clips.OFFSETS[index % len(clips.OFFSETS)] for index in range(len(subjects))]
    made = torch.stack([draw(subject, offset) for subject, offset in zip(subjects, offsets, strict=True)])
    made = (made.transpose(1, 2) + 1) / 2
    for score in evaluate_wan.score_clips(subjects, made).values():
        assert score.share == 1, str(score)
    shifted = evaluate_wan.score_clips(subjects[1:] + subjects[:1], made)
    assert shifted["name"].right == shifted["direction"].right == 0


def test_model_moves_what_it_is_asked_to() -> None:
    """Six names, each in the direction that it was not trained on."""
    subjects = evaluate_wan.choose_subjects(seen=False, seeds=1)[:6]
    pipeline, defaults = evaluate_wan.load_pipeline(PIPELINE)
    made = evaluate_wan.generate(pipeline, defaults, [subject.prompt for subject in subjects], 777_000)
    assert made.shape == (6, clips.FRAMES, 3, clips.SIZE, clips.SIZE)
    score = evaluate_wan.score_clips(subjects, made)["direction"]
    assert score.share == 1, str(score)


@pytest.mark.long
def test_vae_training_learns_and_leaves_the_latents_alone() -> None:
    """The decoder's loss falls clearly within seconds, and only the decoder changes."""
    subjects = clips.seen_subjects(clips.NAMES[:1])[:1]
    vae = train_wan_vae.build_vae()
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    trained, losses = train_wan_vae.train(vae, subjects, minutes=5, max_steps=40, batch_size=2, frames=5)
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    assert train_wan_vae.measure_psnr(trained, subjects) > 3
    after = trained.state_dict()
    changed = {name.split(".")[0] for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {"decoder", "post_quant_conv"}


def test_wan_training_learns_and_saves_a_pipeline(tmp_path: Path) -> None:
    """A tiny transformer's loss falls clearly within seconds, and the pipeline it leaves makes clips."""
    vae: Any = AutoencoderKLWan.from_pretrained(PIPELINE / "vae", dtype=torch.float32)
    subjects = clips.seen_subjects(clips.NAMES[:2])[::5]
    latents = train_wan.encode_clips(vae, subjects, clips.OFFSETS[:1])
    assert latents.mean.shape == (len(subjects), train_wan_vae.LATENT_CHANNELS, 5, 8, 8)
    pipeline, losses = train_wan.train(vae, latents, minutes=5, max_steps=60, layers=2, batch_size=4)
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])
    train_wan.save(pipeline, tmp_path)
    loaded, defaults = evaluate_wan.load_pipeline(tmp_path)
    made = evaluate_wan.generate(loaded, defaults, [subject.prompt for subject in subjects[:2]], 0)
    assert made.shape == (2, clips.FRAMES, 3, clips.SIZE, clips.SIZE)
    assert made.isfinite().all()
