"""Draw a grid of captioned samples, each prompt with one seed."""

import argparse
import textwrap
from pathlib import Path

from emoji import HERE
from evaluate import generate, load_pipeline
from PIL import Image, ImageDraw, ImageFont

PROMPTS = (
    "a fox on a blue background",
    "a rocket on a black background",
    "cat, yellow background",
    "pizza on red background",
    "a unicorn on a purple background",
    "red apple",
    "a sunflower on a green background",
    "robot on pink background",
    "a ghost on a black background",
    "a car on a gray background",
    "strawberry, white background",
    "a penguin on a blue background",
    "rainbow on white background",
    "cupcake on pink background",
    "a guitar on a yellow background",
    "a skull on a red background",
    "globe on a black background",
    "a frog on a pink background",
    "cactus on a purple background",
    "a panda on a green background",
    "soccer ball on a green background",
    "watermelon on yellow background",
    "a castle on a blue background",
    "an owl on a gray background",
)
COLUMNS = 8
PICTURE = 128
CAPTION = 40  # two lines of 14-pixel type
GAP = 8


def main() -> None:
    """Generate every prompt in one batch and write the grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", type=Path, default=HERE.parent / "pipeline")
    parser.add_argument("--out", type=Path, default=Path("docs/images/emoji-grid.png"))
    parser.add_argument("--first-seed", type=int, default=90_000)
    options = parser.parse_args()

    pictures = generate(*load_pipeline(options.pipeline), PROMPTS, options.first_seed)
    rows = -(-len(PROMPTS) // COLUMNS)
    width, height = PICTURE + GAP, PICTURE + CAPTION + GAP
    grid = Image.new("RGB", (COLUMNS * width + GAP, rows * height + GAP), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(size=14)
    for index, (prompt, picture) in enumerate(zip(PROMPTS, pictures, strict=True)):
        x, y = GAP + index % COLUMNS * width, GAP + index // COLUMNS * height
        pixels = (picture.permute(1, 2, 0) * 255).round().byte().numpy()
        enlarged = Image.fromarray(pixels).resize((PICTURE, PICTURE), Image.Resampling.LANCZOS)
        grid.paste(enlarged, (x, y))
        # An outline, so that a picture on white has an edge.
        draw.rectangle((x, y, x + PICTURE - 1, y + PICTURE - 1), outline="lightgray")
        draw.text((x, y + PICTURE + 3), textwrap.fill(prompt, 19), fill="black", font=font, spacing=2)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    grid.save(options.out, optimize=True)


if __name__ == "__main__":
    main()
