"""Copy the figure of each cell tagged `readme-figure` to data/figures/<notebook>.png. Run by `make refresh`."""

import base64

from labkit.session.catalogue import ROOT, notebooks

for book in notebooks().values():
    for cell in book.content["cells"]:
        if "readme-figure" in cell["metadata"].get("tags", []):
            (picture,) = [o["data"]["image/png"] for o in cell["outputs"] if "image/png" in o.get("data", {})]
            path = ROOT / "data" / "figures" / f"{book.name}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(base64.b64decode(picture))
