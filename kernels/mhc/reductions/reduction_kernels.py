"""One kernel for every way: programs take tiles in turn; then atomics add, or one program adds all parts in order."""

import triton
import triton.language as tl

ATOMIC, TWO_STAGE, KAHAN, PAIRWISE, FLOAT64, FLAGGED = 0, 1, 2, 3, 4, 5


@triton.jit
def _both(sum_a, count_a, sum_b, count_b):
    """Adds values and flags at once: one trip through the program's warps, not two."""
    return sum_a + sum_b, count_a + count_b


@triton.jit
def _arrived(partial_ptr, PROGRAMS: tl.constexpr, BLOCK_P: tl.constexpr):
    """The sum of the parts that are there, and how many are."""
    p = tl.arange(0, BLOCK_P)
    words = tl.load(partial_ptr + p, mask=p < PROGRAMS, other=0, volatile=True)
    values = words.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.reduce((values, (words >> 32).to(tl.int32)), 0, _both)


@triton.jit(do_not_specialize=["COUNT"])
def sum_kernel(
    a_ptr,  # [COUNT], float32
    b_ptr,  # [COUNT], float32
    out_ptr,  # one number, float32
    partial_ptr,  # [PROGRAMS], of the type that WAY adds in; not used by ATOMIC
    counter_ptr,  # [1], int32; not used by ATOMIC and FLAGGED
    COUNT,
    PROGRAMS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    WAY: tl.constexpr,
):
    """out = sum of a b. ATOMIC adds to what out holds; the others write it, in an order that never changes.

    The counter counts arrivals, and the last to arrive adds. FLAGGED has no counter: a part and the flag that it is
    there are one word of 64 bits, and the last program waits for all words, so all programs must be resident at a
    time (CUDA declares no order in which they start): a GPU that cannot hold them is refused before. That spares a trip
    to memory. Counter and words are zero before, and zero again after.
    """
    program = tl.program_id(0)
    wide = tl.float64 if WAY == 4 else tl.float32
    total = tl.zeros([BLOCK], wide)
    lost = tl.zeros([BLOCK], tl.float32)
    for step in range(STEPS):
        at = (step * PROGRAMS + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + at, mask=at < COUNT, other=0.0).to(wide)
        b = tl.load(b_ptr + at, mask=at < COUNT, other=0.0).to(wide)
        if WAY == 2:
            term = a * b - lost
            grown = total + term
            lost = (grown - total) - term
            total = grown
        else:
            total += a * b
    if WAY == 2:
        total = total - lost
    part = tl.sum(total, 0)
    if WAY == 0:
        tl.atomic_add(out_ptr, part, sem="relaxed")
    elif PROGRAMS == 1:
        tl.store(out_ptr, part.to(tl.float32))
    elif WAY == 5:
        word = part.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF | (1 << 32)
        tl.atomic_xchg(partial_ptr + program, word, sem="relaxed")
        if program == PROGRAMS - 1:
            result, there = _arrived(partial_ptr, PROGRAMS, BLOCK_P)
            while there < PROGRAMS:
                result, there = _arrived(partial_ptr, PROGRAMS, BLOCK_P)
            tl.store(out_ptr, result)
            tl.debug_barrier()  # a warp that has all words polls alone: all warps have to see them before they are zero
            p = tl.arange(0, BLOCK_P)
            tl.store(partial_ptr + p, tl.zeros([BLOCK_P], tl.int64), mask=p < PROGRAMS)
    else:
        tl.store(partial_ptr + program, part)
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if arrived == PROGRAMS - 1:
            p = tl.arange(0, BLOCK_P)
            parts = tl.load(partial_ptr + p, mask=p < PROGRAMS, other=0.0, volatile=True)
            tl.store(out_ptr, tl.sum(parts, 0).to(tl.float32))
            tl.store(counter_ptr, 0)
