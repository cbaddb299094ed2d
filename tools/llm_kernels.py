"""Twenty-six small Triton kernels as a language model writes them: 16 right, 10 with an error of transcription.

After "The Correctness Illusion in LLM-Generated GPU Kernels" (arXiv 2606.20128), written anew. Each wrapper checks its
operands, as a caller expects, makes them contiguous and allocates the result; beside it stands the reference in torch.
`RIGHT` and `FAULTY` have kernel, reference and an example by name; `STATEFUL` are two that do not compute at all.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional

BLOCK = 64


@triton.jit
def _elementwise(x_ptr, y_ptr, out_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if KIND == "silu and mul":
        z = x / (1.0 + tl.exp(-x)) * y
    elif KIND == "gelu":
        z = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu by tanh":
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        z = 0.5 * x * (1.0 + 1.0 - 2.0 / (tl.exp(2.0 * u) + 1.0))
    elif KIND == "residual":
        z = x + 0.5 * y
    elif KIND == "residual without its scale":
        z = x + y
    tl.store(out_ptr + at, z, mask=at < n)


@triton.jit
def _rows(
    x_ptr, w_ptr, b_ptr, out_ptr, n, KIND: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    there = at < n
    x = tl.load(x_ptr + row * n + at, mask=there, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=there, other=0.0).to(tl.float32)
    if KIND == "softmax":
        x = tl.where(there, x, float("-inf"))
        e = tl.exp(x - tl.max(x, 0))
        z = e / tl.sum(e, 0)
    elif KIND == "softmax without its maximum":
        e = tl.where(there, tl.exp(x), 0.0)
        z = e / tl.sum(e, 0)
    elif KIND == "log softmax":
        x = tl.where(there, x, float("-inf"))
        top = tl.max(x, 0)
        z = x - top - tl.log(tl.sum(tl.exp(x - top), 0))
    elif KIND == "layer norm":
        mean = tl.sum(x, 0) / n
        off = tl.where(there, x - mean, 0.0)
        z = off / tl.sqrt(tl.sum(off * off, 0) / n + EPS) * w + b
    elif KIND == "layer norm with n - 1":
        mean = tl.sum(x, 0) / n
        off = tl.where(there, x - mean, 0.0)
        z = off / tl.sqrt(tl.sum(off * off, 0) / tl.maximum(n - 1, 1) + EPS) * w + b
    elif KIND == "layer norm with its padding":
        mean = tl.sum(x, 0) / n
        off = x - mean
        z = off / tl.sqrt(tl.sum(off * off, 0) / n + EPS) * w + b
    elif KIND == "rms norm":
        z = x / tl.sqrt(tl.sum(x * x, 0) / n + EPS) * w
    elif KIND == "rms norm with eps outside the root":
        z = x / (tl.sqrt(tl.sum(x * x, 0) / n) + EPS) * w
    tl.store(out_ptr + row * n + at, z, mask=there)


@triton.jit
def _reduce(x_ptr, out_ptr, rows, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if KIND == "column sum":
        at_rows = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at_rows * n + row, mask=at_rows < rows, other=0.0).to(tl.float32)
        tl.store(out_ptr + row, tl.sum(x, 0))
    elif KIND == "column sum with the rows' stride":
        at_rows = tl.arange(0, BLOCK)
        inside = (at_rows < rows) & (at_rows * rows + row < rows * n)
        x = tl.load(x_ptr + at_rows * rows + row, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row, tl.sum(x, 0))
    elif KIND == "row sum":
        x = tl.load(x_ptr + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(out_ptr + row, tl.sum(x, 0))
    elif KIND == "row sum in float16":
        total = tl.load(x_ptr + row * n).to(tl.float16)
        for k in range(1, n):
            total = total + tl.load(x_ptr + row * n + k).to(tl.float16)
        tl.store(out_ptr + row, total.to(tl.float32))
    elif KIND == "cumulative sum":
        x = tl.load(x_ptr + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * n + at, tl.cumsum(x, 0), mask=at < n)


@triton.jit
def _matmul(a_ptr, b_ptr, out_ptr, m, n, k, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(tl.cdiv(k, BLOCK) if WHOLE else tl.maximum(k // BLOCK, 1)):
        at = start * BLOCK + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + i[:, None] * k + at[None, :], mask=(i < m)[:, None] & (at < k)[None, :], other=0.0)
        b = tl.load(b_ptr + at[:, None] * n + j[None, :], mask=(at < k)[:, None] & (j < n)[None, :], other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(out_ptr + i[:, None] * n + j[None, :], total, mask=(i < m)[:, None] & (j < n)[None, :])


@triton.jit
def _attention(
    q_ptr, k_ptr, v_ptr, out_ptr, n, d, scale, SHIFT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    keys = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    there = (keys < n)[:, None] & (columns < d)[None, :]
    q = tl.load(q_ptr + row * d + columns, mask=columns < d, other=0.0)
    k = tl.load(k_ptr + keys[:, None] * d + columns[None, :], mask=there, other=0.0)
    v = tl.load(v_ptr + keys[:, None] * d + columns[None, :], mask=there, other=0.0)
    s = tl.sum(k * q[None, :], 1) * scale
    s = tl.where((keys <= row + SHIFT) & (keys < n), s, float("-inf"))
    e = tl.exp(s - tl.max(s, 0))
    p = e / tl.sum(e, 0)
    tl.store(out_ptr + row * d + columns, tl.sum(v * p[:, None], 0), mask=columns < d)


@triton.jit
def _embedding(ids_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(table_ptr + tl.load(ids_ptr + row) * width + at, mask=at < width)
    tl.store(out_ptr + row * width + at, x, mask=at < width)


@triton.jit
def _cross_entropy(x_ptr, labels_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + at, mask=at < n, other=float("-inf"))
    top = tl.max(x, 0)
    label = tl.load(labels_ptr + row)
    tl.store(out_ptr + row, top + tl.log(tl.sum(tl.exp(x - top), 0)) - tl.load(x_ptr + row * n + label))


@triton.jit
def _rotary(x_ptr, cos_ptr, sin_ptr, out_ptr, half, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    there = at < half
    first = tl.load(x_ptr + row * 2 * half + at, mask=there)
    second = tl.load(x_ptr + row * 2 * half + half + at, mask=there)
    cos = tl.load(cos_ptr + row * half + at, mask=there)
    sin = tl.load(sin_ptr + row * half + at, mask=there)
    tl.store(out_ptr + row * 2 * half + at, first * cos - second * sin, mask=there)
    tl.store(out_ptr + row * 2 * half + half + at, first * sin + second * cos, mask=there)


def _wide(n):
    return triton.next_power_of_2(n)


def _elements(kind):
    def run(x, y):
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        _elementwise[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), KIND=kind, BLOCK=BLOCK)
        return out

    return run


def _of_rows(kind, eps=1e-5):
    def run(x, w, b):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        out = torch.empty_like(x)
        _rows[(len(x),)](x, w, b, out, x.shape[1], KIND=kind, EPS=eps, BLOCK=_wide(x.shape[1]))
        return out

    return run


def _reduced(kind):
    def run(x):
        x = x.contiguous()
        rows, n = x.shape
        shape = x.shape if kind == "cumulative sum" else (n,) if "column" in kind else (rows,)
        out = torch.empty(shape, device=x.device)
        grid = (n,) if "column" in kind else (rows,)
        _reduce[grid](x, out, rows, n, KIND=kind, BLOCK=_wide(max(rows, n)))
        return out

    return run


def _product(whole):
    def run(a, b):
        a, b = a.contiguous(), b.contiguous()
        (m, k), n = a.shape, b.shape[1]
        out = torch.empty(m, n, device=a.device)
        _matmul[(triton.cdiv(m, 16), triton.cdiv(n, 16))](a, b, out, m, n, k, WHOLE=whole, BLOCK=16)
        return out

    return run


def _causal(shift):
    def run(q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        n, d = q.shape
        out = torch.empty_like(q)
        _attention[(n,)](q, k, v, out, n, d, d**-0.5, SHIFT=shift, BLOCK=_wide(n), BLOCK_D=_wide(d))
        return out

    return run


def embedding(ids, table):
    ids, table = ids.contiguous(), table.contiguous()
    out = torch.empty(len(ids), table.shape[1], device=table.device)
    _embedding[(len(ids),)](ids, table, out, table.shape[1], BLOCK=_wide(table.shape[1]))
    return out


def cross_entropy(x, labels):
    x, labels = x.contiguous(), labels.contiguous()
    out = torch.empty(len(x), device=x.device)
    _cross_entropy[(len(x),)](x, labels, out, x.shape[1], BLOCK=_wide(x.shape[1]))
    return out


def rotary(x, cos, sin):
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    _rotary[(len(x),)](x, cos, sin, out, cos.shape[1], BLOCK=_wide(cos.shape[1]))
    return out


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def causal(q, k, v):
    hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax((q @ k.T * q.shape[1] ** -0.5).masked_fill(hidden, -torch.inf), -1) @ v


def layer_norm(x, w, b):
    return functional.layer_norm(x, x.shape[-1:], w, b, 1e-5)


def rms_norm(x, w, b):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w


def softmax(x, w, b):
    return torch.softmax(x, -1)


_kept = {}
_right_softmax = _of_rows("softmax")


def earlier_result(x, w, b):
    return _kept.setdefault(x.shape, _right_softmax(x, w, b))


def untouched(x, w, b):
    return torch.empty_like(x)


def _randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


PAIR = {"x": _randn(5, 7), "y": _randn(5, 7)}
ROWS = {"x": _randn(5, 7), "w": _randn(7), "b": _randn(7)}
ONE = {"x": _randn(5, 7)}
FACTORS = {"a": _randn(5, 7), "b": _randn(7, 6)}
QKV = {"q": _randn(5, 7), "k": _randn(5, 7), "v": _randn(5, 7)}
LOOKUP = {"ids": torch.tensor([0, 8, 3, 1]), "table": _randn(9, 7)}
LABELLED = {"x": _randn(5, 9), "labels": torch.tensor([0, 8, 3, 1, 2])}
TURNED = {"x": _randn(5, 14), "cos": _randn(5, 7), "sin": _randn(5, 7)}

RIGHT = {
    "silu and mul": (_elements("silu and mul"), lambda x, y: functional.silu(x) * y, PAIR),
    "gelu": (_elements("gelu"), lambda x, y: functional.gelu(x), PAIR),
    "gelu by tanh": (_elements("gelu by tanh"), lambda x, y: functional.gelu(x, approximate="tanh"), PAIR),
    "softmax": (_right_softmax, softmax, ROWS),
    "log softmax": (_of_rows("log softmax"), lambda x, w, b: torch.log_softmax(x, -1), ROWS),
    "layer norm": (_of_rows("layer norm"), layer_norm, ROWS),
    "rms norm": (_of_rows("rms norm"), rms_norm, ROWS),
    "column sum": (_reduced("column sum"), lambda x: x.sum(0), ONE),
    "row sum": (_reduced("row sum"), lambda x: x.sum(1), ONE),
    "cumulative sum": (_reduced("cumulative sum"), lambda x: x.cumsum(1), ONE),
    "matrix product": (_product(True), lambda a, b: a @ b, FACTORS),
    "causal attention": (_causal(0), causal, QKV),
    "embedding": (embedding, lambda ids, table: table[ids], LOOKUP),
    "cross entropy": (cross_entropy, lambda x, labels: functional.cross_entropy(x, labels, reduction="none"), LABELLED),
    "rotary": (rotary, rotated, TURNED),
    "residual": (_elements("residual"), lambda x, y: x + 0.5 * y, PAIR),
}

FAULTY = {
    "its scale missing": (_elements("residual without its scale"), lambda x, y: x + 0.5 * y, PAIR),
    "tanh for erf": (_elements("gelu by tanh"), lambda x, y: functional.gelu(x), PAIR),
    "its maximum not subtracted": (_of_rows("softmax without its maximum"), softmax, ROWS),
    "variance over n - 1": (_of_rows("layer norm with n - 1"), layer_norm, ROWS),
    "the mask of the tail missing": (_of_rows("layer norm with its padding"), layer_norm, ROWS),
    "eps outside the root": (_of_rows("rms norm with eps outside the root"), rms_norm, ROWS),
    "the stride of another axis": (_reduced("column sum with the rows' stride"), lambda x: x.sum(0), ONE),
    "summed in float16": (_reduced("row sum in float16"), lambda x: x.sum(1), ONE),
    "the last tile left out": (_product(False), lambda a, b: a @ b, FACTORS),
    "the causal mask off by one": (_causal(1), causal, QKV),
}

STATEFUL = {
    "an earlier call's result": (earlier_result, softmax, ROWS),
    "the output untouched": (untouched, softmax, ROWS),
}

SIZES = {
    "embedding": {"table": (9, "width")},
    "cross entropy": {"x": ("rows", 9)},
    "rotary": {"x": ("rows", 14), "cos": ("rows", 7), "sin": ("rows", 7)},
}
