"""Draw a sheet of captioned clips: each row is one clip, its columns the frames 0, 4, 8, 12 and 16."""

import argparse
import textwrap
from pathlib import Path

import clips
from evaluate_wan import generate, load_pipeline
from PIL import Image, ImageDraw, ImageFont

SUBJECTS = tuple(
    clips.Subject(name, clips.held_out(name), colour)
    for name, colour in (
        ("red apple", "blue"),
        ("fox", "purple"),
        ("panda", "gray"),
        ("penguin", "blue"),
        ("rocket", "black"),
        ("pizza", "white"),
        ("alien", "purple"),
        ("robot", "black"),
    )
)
SHOWN = range(0, clips.FRAMES, 4)
PICTURE = 80
CAPTION = 150
GAP = 6


def main() -> None:
    """Generate every clip, in the direction its name was not trained on, and write the sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", type=Path, default=clips.HERE.parent / "pipeline")
    parser.add_argument("--out", type=Path, default=Path("docs/emoji_wan.png"))
    parser.add_argument("--first-seed", type=int, default=90_000)
    options = parser.parse_args()

    prompts = [subject.prompt for subject in SUBJECTS]
    made = generate(*load_pipeline(options.pipeline), prompts, options.first_seed)
    side = PICTURE + GAP
    sheet = Image.new("RGB", (CAPTION + len(SHOWN) * side + GAP, len(prompts) * side + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for row, (prompt, clip) in enumerate(zip(prompts, made, strict=True)):
        y = GAP + row * side
        draw.text((GAP, y + PICTURE // 4), textwrap.fill(prompt, 18), fill="black", font=font, spacing=2)
        for column, index in enumerate(SHOWN):
            x = CAPTION + column * side
            pixels = (clip[index].permute(1, 2, 0) * 255).round().byte().numpy()
            enlarged = Image.fromarray(pixels).resize((PICTURE, PICTURE), Image.Resampling.LANCZOS)
            sheet.paste(enlarged, (x, y))
            # An outline, so that a frame on white has an edge.
            draw.rectangle((x, y, x + PICTURE - 1, y + PICTURE - 1), outline="lightgray")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(options.out, optimize=True)


if __name__ == "__main__":
    main()
