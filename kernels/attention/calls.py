"""Calls of sgemm as their author writes them: arguments named by the problem's sizes, right ones and wrong ones.

A :class:`Call` is symbolic (``lda = M``), so the same call can be made at any sizes; at N = M two different calls may
be one and the same. `single_calls` and `blocked_calls` enumerate the plausible ones, the right one among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations, permutations, product

from kernels.attention.blas import Gemm
from kernels.attention.memory import Layout
from kernels.attention.problem import Sizes

_OFFSETS: dict[str, Callable[[int, int, Sizes], int]] = {
    "0": lambda i, j, s: 0,
    "i": lambda i, j, s: i,
    "j": lambda i, j, s: j,
    "i*d_k": lambda i, j, s: i * s.d_k,
    "j*d_k": lambda i, j, s: j * s.d_k,
    "i*N": lambda i, j, s: i * s.n,
    "j*N": lambda i, j, s: j * s.n,
    "i*M": lambda i, j, s: i * s.m,
    "j*M": lambda i, j, s: j * s.m,
    "i*d_k + j": lambda i, j, s: i * s.d_k + j,
    "j*d_k + i": lambda i, j, s: j * s.d_k + i,
    "i*M + j": lambda i, j, s: i * s.m + j,
    "i*N + j": lambda i, j, s: i * s.n + j,
    "j*N + i": lambda i, j, s: j * s.n + i,
    "j*M + i": lambda i, j, s: j * s.m + i,
}


@dataclass(frozen=True, order=True)
class Call:
    """sgemm's arguments in symbols. The defaults are the right call of the report's fix.

    With `block` > 0 the scores are computed in tiles: for rows i and columns j in steps of `block`, one call each,
    with block_N = min(block, N - i) and block_M = min(block, M - j), operands moved on by the three offsets.
    """

    a: str = "KT"
    b: str = "Q"
    transa: str = "N"
    transb: str = "N"
    m: str = "M"
    n: str = "N"
    k: str = "d_k"
    lda: str = "M"
    ldb: str = "d_k"
    ldc: str = "M"
    block: int = 0
    a_offset: str = "0"
    b_offset: str = "0"
    c_offset: str = "0"

    @property
    def right_one(self) -> Call:
        """The right call of this kind: single, or blocked with this block size."""
        return blocked(self.block) if self.block else Call()

    @property
    def departures(self) -> dict[str, str]:
        """The arguments that differ from the right call's."""
        right = self.right_one
        names = [item.name for item in fields(self)]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(right, name)}

    def __str__(self) -> str:
        text = (
            f"sgemm({self.transa}, {self.transb}, m={self.m}, n={self.n}, k={self.k}, "
            f"A={self.a} lda={self.lda}, B={self.b} ldb={self.ldb}, ldc={self.ldc})"
        )
        if not self.block:
            return text
        return f"{text} in blocks of {self.block}, offsets A {self.a_offset}, B {self.b_offset}, C {self.c_offset}"

    @property
    def difference(self) -> str:
        """The call by what is wrong in it: ``ldb=N``; ``right`` for the right one."""
        kind = f"blocks of {self.block}: " if self.block else ""
        return kind + (", ".join(f"{name}={value}" for name, value in self.departures.items()) or "right")

    def gemms(self, sizes: Sizes, layout: Layout, head: int = 0) -> list[Gemm]:
        """The concrete calls for one head: one, or one a tile."""
        base = [layout.offset(name, head) for name in (self.a, self.b, "QK")]
        if not self.block:
            m, n, k, lda, ldb, ldc = (sizes[name] for name in (self.m, self.n, self.k, self.lda, self.ldb, self.ldc))
            return [Gemm(self.transa, self.transb, m, n, k, base[0], lda, base[1], ldb, base[2], ldc)]
        return [
            self._tile(sizes, base, i, j) for i in range(0, sizes.n, self.block) for j in range(0, sizes.m, self.block)
        ]

    def _tile(self, sizes: Sizes, base: list[int], i: int, j: int) -> Gemm:
        here = {"block_N": min(self.block, sizes.n - i), "block_M": min(self.block, sizes.m - j)}

        def value(symbol: str) -> int:
            return here[symbol] if symbol in here else sizes[symbol]

        a, b, c = (
            start + _OFFSETS[offset](i, j, sizes)
            for start, offset in zip(base, (self.a_offset, self.b_offset, self.c_offset), strict=True)
        )
        return Gemm(
            self.transa,
            self.transb,
            value(self.m),
            value(self.n),
            value(self.k),
            a,
            value(self.lda),
            b,
            value(self.ldb),
            c,
            value(self.ldc),
        )


def blocked(block: int) -> Call:
    """The right decomposition into tiles of at most `block` x `block` scores."""
    return Call(m="block_M", n="block_N", block=block, a_offset="j", b_offset="i*d_k", c_offset="i*M + j")


def diagnosis(block: int) -> dict[str, Call]:
    """The report's diagnosis as a whole: every correction that it makes is undone at once.

    Q comes first, m = N and n = M, the leading dimensions are N for Q, d_k for K^T and N for Q K^T. In blocks its
    offsets are not on record: those that fit row-major operands, and those that fit these leading dimensions.
    """
    one = Call(a="Q", b="KT", m="N", n="M", lda="N", ldb="d_k", ldc="N")
    blocks = replace(one, m="block_N", n="block_M", block=block)
    return {
        "in one call": one,
        "in blocks, row-major offsets": replace(blocks, a_offset="i*d_k", b_offset="j", c_offset="i*M + j"),
        "in blocks, column-major offsets": replace(blocks, a_offset="i", b_offset="j*d_k", c_offset="j*N + i"),
    }


def exchanged(call: Call) -> Call:
    """The call with its first two dimensions exchanged: m for n."""
    return replace(call, m=call.n, n=call.m)


def single_calls() -> Iterator[Call]:
    """Every single call on Q and one of K^T and K: order, transposes, dimensions, leading dimensions."""
    orders = (("KT", "Q"), ("Q", "KT"), ("K", "Q"), ("Q", "K"))
    for (a, b), ta, tb, (m, n, k), (lda, ldb, ldc) in product(
        orders, "NT", "NT", permutations(("M", "N", "d_k")), product(("M", "N", "d_k"), repeat=3)
    ):
        yield Call(a, b, ta, tb, m, n, k, lda, ldb, ldc)


ASPECTS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"a": "Q", "b": "KT"}, {"a": "K"}),
    ({"transa": "T"},),
    ({"transb": "T"},),
    ({"m": "block_N", "n": "block_M"}, {"m": "M", "n": "N"}, {"m": "N", "n": "M"}),
    ({"lda": "N"}, {"lda": "d_k"}, {"lda": "block_M"}),
    ({"ldb": "N"}, {"ldb": "M"}, {"ldb": "block_N"}),
    ({"ldc": "N"}, {"ldc": "block_M"}, {"ldc": "block_N"}),
    ({"a_offset": "0"}, {"a_offset": "j*d_k"}, {"a_offset": "j*M"}, {"a_offset": "i"}),
    ({"b_offset": "0"}, {"b_offset": "i"}, {"b_offset": "i*N"}, {"b_offset": "j*d_k"}),
    ({"c_offset": "j*M + i"}, {"c_offset": "j*N + i"}, {"c_offset": "i*N + j"}),
)
"""What a person may get wrong in a blocked product, by aspect: each entry changes one of them."""


def blocked_calls(block: int) -> Iterator[Call]:
    """The right decomposition and every one with one or two of its aspects wrong."""
    right = blocked(block)
    yield right
    for aspect in ASPECTS:
        for change in aspect:
            yield replace(right, **change)
    for first, second in combinations(ASPECTS, 2):
        for one, other in product(first, second):
            yield replace(right, **one, **other)


_TWIN = {
    ("KT", "M"): ("K", "d_k", {"0": "0", "i": "i*d_k", "j": "j*d_k"}),
    ("K", "d_k"): ("KT", "M", {"0": "0", "i*d_k": "i", "j*d_k": "j"}),
}
"""An operand with its leading dimension; its twin with that one's, and the offset in it of the same element."""


_INDEX = {"M": "j", "N": "i"}
"""What counts the blocks of a dimension: keys by j, queries by i."""


def other_forms(call: Call, block: int) -> set[Call]:
    """Other ways to write a call, of which some compute the same: K for K^T, blocks for one call, other blocks.

    No list of calls holds all of these, so whoever is left with one call of a list has to try them too.
    """
    found = {_with_twin(call, "a"), _with_twin(call, "b")}
    for one in {call, *found}:
        if one.block:
            found |= {replace(one, block=size) for size in (one.block // 2, 2 * one.block)}
        else:
            over = [name for name in "mn" if getattr(one, name) in _INDEX]
            found |= {_in_blocks(one, block, split) for split in [*over, "mn"] if over}
    return found - {call}


def _with_twin(call: Call, side: str) -> Call:
    """The call with K in place of K^T on one side, transposed to match, or K^T in place of K."""
    stored = (getattr(call, side), getattr(call, f"ld{side}"))
    if stored not in _TWIN or getattr(call, f"{side}_offset") not in _TWIN[stored][2]:
        return call
    operand, leading, offsets = _TWIN[stored]
    trans = "N" if getattr(call, f"trans{side}") == "T" else "T"
    offset = offsets[getattr(call, f"{side}_offset")]
    return replace(call, **{side: operand, f"ld{side}": leading, f"trans{side}": trans, f"{side}_offset": offset})


def _in_blocks(call: Call, block: int, over: str) -> Call:
    """A single call split over m, n or both, with the offsets that its own leading dimensions ask for.

    A dimension that is d_k stays whole: blocks go over the queries, i, and the keys, j.
    """
    row, column = (_INDEX.get(getattr(call, name), "") if name in over else "" for name in "mn")

    def times(index: str, leading: str) -> str:
        return f"{index}*{leading}" if index else "0"

    c_offset = f"{column}*{call.ldc} + {row}" if row and column else row or times(column, call.ldc)
    return replace(
        call,
        m=f"block_{call.m}" if row else call.m,
        n=f"block_{call.n}" if column else call.n,
        block=block,
        a_offset=(row or "0") if call.transa == "N" else times(row, call.lda),
        b_offset=times(column, call.ldb) if call.transb == "N" else (column or "0"),
        c_offset=c_offset,
    )
