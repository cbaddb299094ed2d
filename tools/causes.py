"""Write data/causes, a page and a picture for each kind of cause, from causes.yaml. Run by `make refresh`.

The picture is the error of one of whywrong's own mutations. tests/test_causes.py checks that the inputs called
hidden show nothing.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml

import whywrong
from whywrong.explaining.mutations import Context, Mutation, mutations
from whywrong.explaining.part import Part
from whywrong.explaining.partly import summed

Tensor = torch.Tensor
HERE = Path(__file__).resolve().parent
PAGES = HERE.parent / "data" / "causes"
CATALOGUE: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "causes.yaml").read_text(encoding="utf-8"))


def normal(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slope(n: int) -> Tensor:
    """Two columns, one from -1 to 1 and one of ones: products of these are slopes, whose places can be seen."""
    return torch.stack([torch.linspace(-1.0, 1.0, n), torch.ones(n)], 1)


def tensors(inputs: dict[str, str]) -> dict[str, Tensor]:
    """What the expressions of the catalogue give."""
    samplers = [partial(normal, seed=k) for k in range(len(inputs))]  # each input has other numbers
    return {
        name: eval(text, {"torch": torch, "n": sampler, "slope": slope})
        for sampler, (name, text) in zip(samplers, inputs.items(), strict=True)
    }


def tails(context: Context) -> Iterator[Mutation]:
    """Sums that leave out what is behind a place."""
    for whole, d in ((one, d) for one in summed(context) for d in one.dims):
        for first in range(1, whole.shape[d]):
            place = torch.arange(whole.shape[d]).view([-1 if k == d else 1 for k in range(len(whole.shape))])
            yield whole.within(d, place >= first)[0]


def mutated(kind: str, inputs: dict[str, Tensor]) -> tuple[whywrong.Golden, Tensor, Mutation]:
    """The golden of a kind's program on some inputs, what its mutation gives in float64, and the mutation."""
    entry = CATALOGUE[kind]
    golden = whywrong.golden(lambda **given: {"y": eval(entry["program"], {"torch": torch, **given})}, **inputs)
    part = Part(golden, whywrong.Trace({name: golden[name] for name in (*inputs, "y")}), "y")
    context = Context(part)
    for mutation in chain(mutations(context), tails(context)):
        if mutation.kind == kind and mutation.says.endswith(entry["mutation"]):
            return golden, part.value(mutation.edits), mutation
    raise LookupError(f"{kind}: no mutation of whywrong's ends with {entry['mutation']!r}")


def shows(kind: str, inputs: dict[str, str]) -> bool:
    """Whether the mutation gives anything else than the reference on these inputs."""
    golden, value, _ = mutated(kind, tensors(inputs))
    return not torch.allclose(value, golden["y"], rtol=1e-9, atol=1e-12)


def page(kind: str) -> str:
    """The text of a kind."""
    entry = CATALOGUE[kind]
    _, _, mutation = mutated(kind, tensors(entry["inputs"]))

    def fill(text: str) -> str:
        return textwrap.fill(" ".join(text.split()), 120)

    hidden = " and ".join(entry["hidden"])
    alt = f"Maps of the reference's step, of the mutated one, and of their difference: {entry['title'].lower()}"
    return "\n".join([
        f"# {kind}: {entry['title'][0].lower()}{entry['title'][1:]}\n",
        "Written by `tools/causes.py` from `tools/causes.yaml`; do not edit.\n",
        f"![{alt}]({kind}.png)\n",
        fill(f"The picture: `y = {entry['program']}`, mutated so that {mutation.says}.") + "\n",
        fill(f"**In a dump.** {entry['looks']}") + "\n",
        fill(f"**Hidden by** {hidden}: there this mutation changes nothing (a test checks it).") + "\n",
        fill(f"**Experiment.** {entry['experiment']}") + "\n",
        fill(f"**Fix.** {entry['fix']}") + "\n",
    ])  # fmt: skip


def usual(x: Tensor) -> float:
    """The end of a scale of colours that a few large values do not set."""
    return float(x.abs().flatten().quantile(0.97))


def picture(kind: str) -> bytes:
    """The reference's step, the mutated one, and the error, as a PNG."""
    import matplotlib
    from PIL import Image

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    golden, value, _ = mutated(kind, tensors(CATALOGUE[kind]["inputs"]))
    reference = golden["y"]
    figure = Figure(figsize=(7.5, 2.5), dpi=80, layout="constrained")
    axes = figure.subplots(1, 3)
    largest = max(usual(reference), usual(value))
    error = value - reference
    for axis, x, most, title in (
        (axes[0], reference, largest, "reference"),
        (axes[1], value, largest, "mutated"),
        (axes[2], error, usual(error), "mutated - reference"),
    ):
        image = axis.imshow(x, cmap="RdBu_r" if x is not error else "PuOr_r", vmin=-most, vmax=most, aspect="auto")
        axis.set(title=title, xlabel="dimension 1", ylabel="dimension 0" if axis is axes[0] else None)
        axis.title.set_fontsize(10)
        figure.colorbar(image, ax=axis, shrink=0.8)
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def contents() -> str:
    """The list of all kinds."""
    rows = [f"| [{kind}]({kind}.md) | {entry['title']} |" for kind, entry in CATALOGUE.items()]
    start = (
        "# Kinds of causes\n\nWritten by `tools/causes.py`; do not edit. `whywrong.explain` gives a cause one of these "
        "kinds. Each page\nhas a picture of the error, what hides it, and what distinguishes it from its neighbours.\n"
    )
    return "\n".join([start, "| kind | |\n|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    (PAGES / "README.md").write_text(contents(), encoding="utf-8")
    for name in CATALOGUE:
        (PAGES / f"{name}.md").write_text(page(name), encoding="utf-8")
        (PAGES / f"{name}.png").write_bytes(picture(name))
