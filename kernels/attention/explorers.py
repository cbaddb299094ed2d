"""One sgemm whose every argument can be turned: its error, and which element of K each score was read from."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from kernels.attention import golden
from kernels.attention.blas import Gemm, GemmRejectedError, blas_for
from kernels.attention.faulty import prepare
from kernels.attention.memory import escapes
from kernels.attention.problem import Inputs, Sizes, decode, index_coded, uniform
from whywrong.drawing import plots

SIZES = Sizes(heads=1, n=13, m=11, d_k=7)
"""13 queries and 11 keys of 7 numbers: small, and no two alike, so that no two arguments stand for each other."""
RIGHT = {"transa": "N", "transb": "N", "m": 11, "n": 13, "k": 7, "lda": 11, "ldb": 7, "ldc": 11, "a": "KT", "b": "Q"}
"""The right call at these sizes: column-major, S^T = K Q^T with both operands as they are stored."""
REPORT = RIGHT | {"m": 13, "n": 11, "lda": 13, "ldc": 13, "a": "Q", "b": "KT"}
"""What the report's diagnosis describes, at these sizes: `lda` and `ldb` as `faulty.batched_matmul` has them."""
CONTROLS = {
    "transa": ["N", "T"], "transb": ["N", "T"], "m": (1, 16), "n": (1, 16), "k": (1, 16),
    "a": ["KT", "K", "Q"], "a_offset": (-16, 16), "lda": (1, 20), "b": ["Q", "K", "KT"], "b_offset": (-16, 16),
    "ldb": (1, 20), "c_offset": (-16, 16), "ldc": (1, 20),
}  # fmt: skip
"""What can be turned, and how far: no call within these limits leaves the memory around the operands."""
ALT = (
    "Three maps of 13 queries by 11 keys for one sgemm call: the product, its error, and for each score the row "
    "and column of the element of K that was read, coloured by whether it is the right one."
)


def gemm(
    transa: str = "N",
    transb: str = "N",
    m: int = 11,
    n: int = 13,
    k: int = 7,
    a: str = "KT",
    a_offset: int = 0,
    lda: int = 11,
    b: str = "Q",
    b_offset: int = 0,
    ldb: int = 7,
    c_offset: int = 0,
    ldc: int = 11,
    device: str = "cpu",
) -> Figure:
    """The product of this call by the device's own BLAS, its error, and what it reads of an index-coded K.

    Arguments are sgemm's own, column-major; `a` and `b` name operands, and the offsets are elements from their first
    one, as that of C is from the first score. The right call is the default. A call that BLAS rejects is one line.
    """
    layout = golden.plan(SIZES)
    starts = [layout.offset(name, 0) + off for name, off in ((a, a_offset), (b, b_offset), ("QK", c_offset))]
    call = Gemm(transa, transb, m, n, k, starts[0], lda, starts[1], ldb, starts[2], ldc)
    named = (f"{name}{off:+d}" if off else name for name, off in ((a, a_offset), (b, b_offset), ("S", c_offset)))
    at_a, at_b, at_c = named
    words = f"sgemm({transa}, {transb}, m={m}, n={n}, k={k}, {at_a}, lda={lda}, {at_b}, ldb={ldb}, {at_c}, ldc={ldc})"

    def run(inputs: Inputs) -> tuple[np.ndarray, str]:
        memory = prepare(inputs, layout, device)
        blas_for(device).sgemm(memory, call)
        left = escapes(layout, memory, "QK")
        counts = (
            (left.nan_results, "scores read outside an operand"),
            (left.unwritten, "scores never written"),
            (left.guards_written, "numbers written outside every operand"),
        )
        return layout.view(memory, "QK")[0].cpu().numpy(), ", ".join(f"{k} {what}" for k, what in counts if k)

    drawn, coded = uniform(SIZES, np.random.default_rng(0)), index_coded(SIZES)
    try:
        (product, escaped), (read, _) = run(drawn), run(coded)
    except GemmRejectedError as rejected:
        figure, axes = plots.figure(width=11.0, height=0.9)
        axes.axis("off")
        axes.set_title(words)
        axes.text(0.0, 0.4, f"BLAS rejects the call: {rejected}", color=plots.RED, fontsize=10)
        return figure
    exact, bound = golden.scores(*(x[0].astype(np.float64) for x in (drawn.q, drawn.k.swapaxes(1, 2))))
    error = abs(product.astype(np.float64) - exact)
    right = error <= bound.absolute
    figure, axes = plots.figure(1, 3, width=11.0, height=4.2)
    figure.suptitle(
        f"{words}\n{int(right.sum())} of {right.size} scores are right on uniform inputs",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    colours = plots.plt.get_cmap("viridis", 16).with_extremes(bad=plots.RED)
    look = {"cmap": colours, "vmin": 0.0, "vmax": float(2.0 * exact.max()), "aspect": "auto"}
    figure.colorbar(axes[0].imshow(np.where(np.isfinite(product), product, np.nan), **look), ax=axes[0])
    axes[0].set_title("product of this call")
    image = plots.error_map(axes[1], np.where(right, np.nan, error), "|this - right|", 10.0, smallest=1e-3)
    image.set_cmap(colours.with_extremes(bad="black"))
    figure.colorbar(image, ax=axes[1])
    shown = np.ma.masked_where(~np.isnan(product), np.ones_like(product))
    axes[1].imshow(shown, cmap=ListedColormap([plots.RED]), aspect="auto")
    _read_from(axes[2], read)
    for axis, what in zip(
        axes,
        ("", " (black: right, to rounding; orange: NaN)", " (blue: the right one; amber: another; orange: none)"),
        strict=True,
    ):
        axis.set(xlabel=f"key{what}", xticks=range(0, SIZES.m, 2), yticks=range(0, SIZES.n, 2))
    axes[0].set_ylabel("query")
    plots.caption(
        figure, f"on {blas_for(device).name}; {escaped or 'it reads and writes nothing outside its operands'}"
    )
    return figure


def _read_from(axes: Axes, read: np.ndarray) -> None:
    """Which element of an index-coded K each score is; score (i, j) should be K[j, i mod d_k]."""
    axes.set_title("row, column of K read, by one-hot inputs")
    colours = ListedColormap([plots.BLUE, plots.ORANGE, plots.RED])
    kinds = np.empty(read.shape, int)
    for (i, j), value in np.ndenumerate(read):
        element = decode(value, SIZES)
        one = element.startswith("K[")
        kinds[i, j] = 0 if element == f"K[{j}, {i % SIZES.d_k}]" else 1 if one else 2
        text = element[2:-1].replace(" ", "") if one else "NaN" if np.isnan(value) else f"{value:.3g}"
        axes.text(
            j,
            i,
            text,
            ha="center",
            va="center",
            fontsize=6.5,
            color="black" if kinds[i, j] == 1 else "white",
            in_layout=False,
        )
    axes.imshow(kinds, cmap=colours, vmin=0, vmax=2, aspect="auto", alpha=0.9)
