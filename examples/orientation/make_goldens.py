"""How the goldens of this example were made: lines of text, drawn, scaled and normalised as the classifier expects.

    python make_goldens.py    # needs Pillow; writes goldens/*.npz

Input ``x``: float32 [batch, 3, 48, 192], pixels scaled to [-1, 1] (the preprocessing of PaddleOCR's ``cls`` model).
Only inputs are stored; packager adds the reference's outputs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

HEIGHT, WIDTH = 48, 192


def line(text: str, *, flipped: bool) -> np.ndarray:
    """One drawn line of text: float32 [3, 48, 192]."""
    image = Image.new("RGB", (WIDTH, HEIGHT), (236, 232, 224))
    ImageDraw.Draw(image).text((6, 8), text, font=ImageFont.load_default(26), fill=(24, 28, 36))
    if flipped:
        image = image.rotate(180)
    pixels = np.asarray(image, np.float32) / 255
    return ((pixels - 0.5) / 0.5).transpose(2, 0, 1)


def main() -> None:
    """Write the cases."""
    folder = Path(__file__).with_name("goldens")
    folder.mkdir(exist_ok=True)
    cases = {
        "upright": [line("Release notes", flipped=False)],
        "upside-down": [line("Release notes", flipped=True)],
        "pair": [line("parity 1.2e-06", flipped=False), line("golden outputs", flipped=True)],
    }
    for name, lines in cases.items():
        np.savez_compressed(folder / f"{name}.npz", x=np.stack(lines))


if __name__ == "__main__":
    main()
