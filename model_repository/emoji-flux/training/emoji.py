"""The training set: emoji by name, on nine plain backgrounds, with the captions that describe them.

The drawings are kept as sheets, PNG grids of 64 x 64 RGBA tiles. Run as a script, this file makes the two
sheets of the recipe from the npm packages in package.json:

    references.png    the emoji of names.json that the model draws, in Fluent's flat style
    autoencoder.png   every emoji of names.json, in Fluent's flat style and in Noto's
"""

import argparse
import io
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

HERE = Path(__file__).resolve().parent
TILE = 64
DRAWING = 56  # a tile has a margin of 4 pixels, so that its border is always background
COLUMNS = 10

BACKGROUNDS = {
    "white": (255, 255, 255),
    "black": (20, 20, 24),
    "red": (214, 48, 49),
    "blue": (52, 120, 246),
    "green": (46, 160, 67),
    "yellow": (255, 214, 70),
    "pink": (255, 158, 196),
    "purple": (128, 80, 200),
    "gray": (140, 144, 150),
}

WITH_BACKGROUND = (
    "a {name} on a {colour} background",
    "{name}, {colour} background",
    "flat {name} on {colour} background",
    "a flat {name} on a {colour} background",
    "flat style {name}, {colour} background",
)
WITHOUT_BACKGROUND = ("{name}", "a {name}", "{name} emoji", "flat {name}", "a flat {name}")


def load_names() -> list[str]:
    """The names the model draws, in the order of the tiles of references.png."""
    return list(json.loads((HERE / "names.json").read_text())["drawn"])


def background_colours() -> Tensor:
    """The background colours, [9, 3] in 0..1, in the order of BACKGROUNDS."""
    return torch.tensor(list(BACKGROUNDS.values())) / 255


def load_sheet(path: Path) -> Tensor:
    """Read the tiles of a sheet, [n, 4, 64, 64] in 0..1, but for the empty ones that fill its last row."""
    with Image.open(path) as picture:
        sheet = torch.from_numpy(np.array(picture.convert("RGBA")))
    rows, columns = sheet.shape[0] // TILE, sheet.shape[1] // TILE
    tiles = sheet.view(rows, TILE, columns, TILE, 4).permute(0, 2, 4, 1, 3).reshape(-1, 4, TILE, TILE)
    return tiles[(tiles[:, 3] > 0).flatten(1).any(1)] / 255


def save_sheet(tiles: Sequence[Image.Image], path: Path) -> None:
    """Write RGBA tiles row by row as one PNG."""
    rows = -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGBA", (COLUMNS * TILE, rows * TILE))
    for index, tile in enumerate(tiles):
        sheet.paste(tile, (index % COLUMNS * TILE, index // COLUMNS * TILE))
    sheet.save(path, optimize=True)


def composite(tiles: Tensor, colours: Tensor) -> Tensor:
    """Lay tiles [n, 4, h, w] on colours [n or 1, 3], both in 0..1; returns pictures [n, 3, h, w] in -1..1."""
    alpha = tiles[:, 3:]
    return (tiles[:, :3] * alpha + colours[:, :, None, None] * (1 - alpha)) * 2 - 1


def draw_caption(name: str, colour: str, rng: random.Random) -> str:
    """Describe one picture at random; one caption in ten is empty, which guidance needs."""
    if rng.random() < 0.1:
        return ""
    # White is what a prompt without a background gets.
    plain = colour == "white" and rng.random() < 0.6
    return rng.choice(WITHOUT_BACKGROUND if plain else WITH_BACKGROUND).format(name=name, colour=colour)


def all_captions(names: Sequence[str]) -> list[str]:
    """Every caption that draw_caption can give for these names, to train the tokenizers on."""
    return [
        template.format(name=name, colour=colour)
        for name in names
        for colour in BACKGROUNDS
        for template in WITH_BACKGROUND + WITHOUT_BACKGROUND
    ]


def rasterise(labels: Mapping[str, str], icon_set: str, node_modules: Path) -> list[Image.Image]:
    """Draw emoji from an Iconify package as RGBA tiles, each 56 x 56 pixels in the middle of 64 x 64.

    labels maps our names to emojibase's labels, which give the code points by which Iconify lists its icons.
    """
    import resvg_py  # here, because only this function needs it: training and evaluation start from sheets

    listed = json.loads((node_modules / "emojibase-data/en/data.json").read_text())
    code_points = {entry["label"]: entry["hexcode"].lower() for entry in listed}
    package = node_modules / "@iconify-json" / icon_set
    icon_names = json.loads((package / "chars.json").read_text())
    icons = json.loads((package / "icons.json").read_text())

    tiles = []
    for label in labels.values():
        # Iconify leaves out U+FE0F, "show this as a picture", where a symbol needs none to be told apart.
        code = code_points[label]
        icon = icons["icons"][icon_names.get(code) or icon_names[code.removesuffix("-fe0f")]]
        left, top = icon.get("left", 0), icon.get("top", 0)
        width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
        )
        png = resvg_py.svg_to_bytes(svg_string=svg, width=2 * TILE, height=2 * TILE)
        with Image.open(io.BytesIO(bytes(png))) as picture:
            drawing = picture.convert("RGBA").resize((DRAWING, DRAWING), Image.Resampling.LANCZOS)
        tile = Image.new("RGBA", (TILE, TILE))
        tile.paste(drawing, ((TILE - DRAWING) // 2, (TILE - DRAWING) // 2))
        tiles.append(tile)
    return tiles


def main() -> None:
    """Write both sheets."""
    parser = argparse.ArgumentParser(description="Rasterise the emoji of the npm packages into sheets.")
    parser.add_argument("--node-modules", type=Path, default=HERE / "node_modules")
    parser.add_argument("--references", type=Path, default=HERE / "references.png")
    parser.add_argument("--autoencoder", type=Path, default=Path("build/emoji-flux/autoencoder.png"))
    options = parser.parse_args()

    names = json.loads((HERE / "names.json").read_text())
    drawn, everything = names["drawn"], names["drawn"] | names["autoencoder_only"]
    save_sheet(rasterise(drawn, "fluent-emoji-flat", options.node_modules), options.references)
    options.autoencoder.parent.mkdir(parents=True, exist_ok=True)
    both = [
        tile
        for icon_set in ("fluent-emoji-flat", "noto")
        for tile in rasterise(everything, icon_set, options.node_modules)
    ]
    save_sheet(both, options.autoencoder)
    print(f"{options.references}: {len(drawn)} tiles, {options.autoencoder}: {len(both)} tiles")


if __name__ == "__main__":
    main()
