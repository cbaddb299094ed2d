"""Give the pictures of executed notebooks a palette, which makes them a third as large. Run by `make refresh`."""

import base64
import io
import json
import sys
from pathlib import Path

from PIL import Image, ImageChops

FURTHEST = 40
"""Of 255: how far a palette may move a pixel's red, green or blue; thin lines of a rare colour need a large one."""


def smaller(png: str) -> str:
    """A picture in base64, as a notebook has it; what has a palette already, or needs more, stays as it is."""
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "P":
        return png
    picture = picture.convert("RGB")
    for colours in (64, 128, 256):
        for method in (Image.Quantize.MEDIANCUT, Image.Quantize.FASTOCTREE):
            few = picture.quantize(colours, method, dither=Image.Dither.NONE)
            moved = ImageChops.difference(picture, few.convert("RGB")).getextrema()
            if max(most for _, most in moved) <= FURTHEST:
                found = io.BytesIO()
                few.save(found, "PNG", optimize=True)
                return base64.b64encode(found.getvalue()).decode()
    return png


for path in map(Path, sys.argv[1:]):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = smaller("".join(output["data"]["image/png"]))
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
