"""Triton kernels of the embedding: three gathers, their sum, LayerNorm and dropout, forward and backward.

N rows (tokens of all sequences, S of them each), H columns, V tokens, T types. A row is cut into PARTS parts of PART
columns, a power of two each, so that few lanes are idle whatever H is. One Philox draw a column of the first part gives
16 random bits to the same column of every part, so PARTS is 8 at most. Tables, results and gradients are contiguous.
Offsets are int64: a table may have more than 2^31 elements. Nothing is added atomically: every sum has a fixed order.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
"""Of Philox4x32: seven pass every test of BigCrush (Salmon, Moraes, Dror, Shaw 2011)."""


@triton.jit
def keep_factor(words, k: tl.constexpr, DROP: tl.constexpr):
    """1 / (1 - p) where part k of a row stays, 0 where it is dropped; p = DROP / 2^16."""
    bits = (words[k // 2] >> (16 * (k % 2))) & 0xFFFF
    return tl.where(bits >= DROP, 65536.0 / (65536 - DROP), 0.0)


@triton.jit
def random_words(seed, rows, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Four tensors [BLOCK, PART] of 32 random bits each, which follow from seed, row and column alone."""
    column = tl.zeros([BLOCK, PART], tl.int32) + tl.arange(0, PART)[None, :]
    low = (rows & 0x7FFFFFFF).to(tl.int32)[:, None] + column * 0
    high = (rows >> 31).to(tl.int32)[:, None] + column * 0
    return tl.philox(seed, column, low, high, column * 0, ROUNDS)


@triton.jit
def summed(
    token_ptr,
    position_ptr,
    type_ptr,
    k: tl.constexpr,
    there,
    H: tl.constexpr,
    PART: tl.constexpr,
):
    """Part k of token + type + position in float32, [BLOCK, PART], from pointers to the rows of the three tables."""
    column = k * PART + tl.arange(0, PART)[None, :]
    mask = there[:, None] & (column < H)
    token = tl.load(token_ptr[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    kind = tl.load(type_ptr[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    return token + kind + tl.load(position_ptr[:, None] + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def spread(vector_ptr, rows, k: tl.constexpr, H: tl.constexpr, PART: tl.constexpr):
    """Part k of a vector [H], read once a row, [BLOCK, PART]: what one warp reads needs no exchange between warps."""
    column = k * PART + tl.arange(0, PART)[None, :] + (rows * 0)[:, None]
    return tl.load(vector_ptr + column, mask=column < H, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["N", "S"])
def forward_kernel(
    ids_ptr,  # [B, S], int64
    types_ptr,  # [B, S], int64; not read unless TYPED
    tokens_ptr,  # [V, H], float32 or bfloat16
    positions_ptr,  # [P, H], of tokens' type
    kinds_ptr,  # [token types, H], of tokens' type
    gain_ptr,  # [H], of tokens' type
    shift_ptr,  # [H], of tokens' type
    out_ptr,  # [B, S, H], of tokens' type, written
    mean_ptr,  # [B S], float32, written
    inverse_ptr,  # [B S], float32, written
    seed_ptr,  # int64; not read where DROP is 0
    N,
    S,
    V,
    T,
    eps,
    H: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TYPED: tl.constexpr,
    DROP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[n] = dropout(LayerNorm(tokens[ids[n]] + kinds[types[n]] + positions[n % S])).

    mean[n] and inverse[n], which is 1 / deviation, are kept for the backward. A row whose id or type is outside its
    table is NaN.
    """
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there = rows < N
    ids = tl.load(ids_ptr + rows, mask=there, other=0).to(tl.int64)
    right = (ids >= 0) & (ids < V)
    types = ids * 0
    if TYPED:
        types = tl.load(types_ptr + rows, mask=there, other=0).to(tl.int64)
        right = right & (types >= 0) & (types < T)
    token_ptr = tokens_ptr + ids * H
    kind_ptr = kinds_ptr + types * H
    position_ptr = positions_ptr + (rows % S) * H
    x = ()
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(PARTS):
        x = x + (summed(token_ptr, position_ptr, kind_ptr, k, there & right, H, PART),)
        total += tl.sum(x[k], 1)
    mean = total / H
    squares = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(PARTS):
        column = k * PART + tl.arange(0, PART)[None, :]
        away = tl.where(column < H, x[k] - mean[:, None], 0.0)
        squares += tl.sum(away * away, 1)
    inverse = tl.where(right, 1.0 / tl.sqrt(squares / H + eps), float("nan"))
    tl.store(mean_ptr + rows, mean, mask=there)
    tl.store(inverse_ptr + rows, inverse, mask=there)
    words = ()
    if DROP > 0:
        words = random_words(tl.load(seed_ptr), rows, BLOCK, PART)
    for k in tl.static_range(PARTS):
        column = k * PART + tl.arange(0, PART)[None, :]
        y = (x[k] - mean[:, None]) * inverse[:, None] * spread(gain_ptr, rows, k, H, PART)
        y += spread(shift_ptr, rows, k, H, PART)
        if DROP > 0:
            y = y * keep_factor(words, k, DROP)
        to = out_ptr + rows[:, None] * H + column
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=there[:, None] & (column < H))


@triton.jit
def nearest(index, count):
    """The nearest row of a table of `count` rows, int64."""
    return tl.minimum(tl.maximum(index.to(tl.int64), 0), count - 1)


@triton.jit
def row_gradients(
    dout_ptr,
    token_ptr,
    position_ptr,
    kind_ptr,
    gain_ptr,
    mean_ptr,
    inverse_ptr,
    rows,
    there,
    seed,
    H: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DROP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of these rows, part by part: the gradient of the sum, of the LayerNorm's result, and the normalised sum.

    With y = gain z + shift and z = (x - mean) / deviation, g the gradient of y and h = gain g:
    dx = (h - mean(h) - z mean(h z)) / deviation.
    """
    mean = tl.load(mean_ptr + rows, mask=there, other=0.0)
    inverse = tl.load(inverse_ptr + rows, mask=there, other=0.0)
    words = ()
    if DROP > 0:
        words = random_words(seed, rows, BLOCK, PART)
    g = ()
    z = ()
    h_mean = tl.zeros([BLOCK], tl.float32)
    hz_mean = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(PARTS):
        column = k * PART + tl.arange(0, PART)
        mask = there[:, None] & (column < H)[None, :]
        dy = tl.load(dout_ptr + rows[:, None] * H + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if DROP > 0:
            dy = dy * keep_factor(words, k, DROP)
        x = summed(token_ptr, position_ptr, kind_ptr, k, there, H, PART)
        g = g + (dy,)
        z = z + (tl.where(mask, (x - mean[:, None]) * inverse[:, None], 0.0),)
        h = dy * spread(gain_ptr, rows, k, H, PART)
        h_mean += tl.sum(h, 1)
        hz_mean += tl.sum(h * z[k], 1)
    h_mean = h_mean / H
    hz_mean = hz_mean / H
    dx = ()
    for k in tl.static_range(PARTS):
        column = k * PART + tl.arange(0, PART)
        h = g[k] * spread(gain_ptr, rows, k, H, PART)
        inside = there[:, None] & (column < H)[None, :]
        dx = dx + (tl.where(inside, (h - h_mean[:, None] - z[k] * hz_mean[:, None]) * inverse[:, None], 0.0),)
    return dx, g, z


@triton.jit(do_not_specialize=["B", "S"])
def position_kernel(
    ids_ptr,  # [B, S], int64
    types_ptr,  # [B, S], int64; not read unless TYPED
    tokens_ptr,  # [V, H], float32 or bfloat16
    positions_ptr,  # [P, H], of tokens' type
    kinds_ptr,  # [token types, H], of tokens' type
    gain_ptr,  # [H], of tokens' type
    mean_ptr,  # [B S], float32
    inverse_ptr,  # [B S], float32
    dout_ptr,  # [B, S, H], of tokens' type
    seed_ptr,  # int64; not read where DROP is 0
    narrow_ptr,  # [B S], int16, int32 or int64, written
    sums_ptr,  # [groups, S, T, H], float32, written
    norm_ptr,  # [groups, S, 2, H], float32, written
    B,
    S,
    V,
    KINDS,
    H: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    T: tl.constexpr,
    TYPED: tl.constexpr,
    DROP: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Of position s and a group of sequences: dx summed for each type into sums[group, type, s], dgain and dshift
    into norm[group, s]. A program takes one position of STEPS times BLOCK sequences.

    The ids go into narrow_ptr in the type that they are sorted in. One that was outside its table, whose row is NaN, is
    the nearest inside here and in what follows, so that nothing is written beyond a table.
    """
    s = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    seed = tl.load(seed_ptr)
    dx_sum = ()
    gain_sum = ()
    shift_sum = ()
    for _ in tl.static_range(T):
        for _ in tl.static_range(PARTS):
            dx_sum = dx_sum + (tl.zeros([BLOCK, PART], tl.float32),)
    for _ in tl.static_range(PARTS):
        gain_sum = gain_sum + (tl.zeros([BLOCK, PART], tl.float32),)
        shift_sum = shift_sum + (tl.zeros([BLOCK, PART], tl.float32),)
    for step in range(STEPS):
        b = (group * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        there = b < B
        rows = b.to(tl.int64) * S + s
        ids = nearest(tl.load(ids_ptr + rows, mask=there, other=0), V)
        tl.store(narrow_ptr + rows, ids.to(narrow_ptr.dtype.element_ty), mask=there)
        types = ids * 0
        if TYPED:
            types = nearest(tl.load(types_ptr + rows, mask=there, other=0), KINDS)
        dx, g, z = row_gradients(
            dout_ptr,
            tokens_ptr + ids * H,
            positions_ptr + (s + ids * 0) * H,
            kinds_ptr + types * H,
            gain_ptr,
            mean_ptr,
            inverse_ptr,
            rows,
            there,
            seed,
            H,
            PART,
            PARTS,
            DROP,
            BLOCK,
        )
        dx_next = ()
        gain_next = ()
        shift_next = ()
        for t in tl.static_range(T):
            for k in tl.static_range(PARTS):
                mine = dx[k] if T == 1 else tl.where((types == t)[:, None], dx[k], 0.0)
                dx_next = dx_next + (dx_sum[t * PARTS + k] + mine,)
        for k in tl.static_range(PARTS):
            gain_next = gain_next + (gain_sum[k] + g[k] * z[k],)
            shift_next = shift_next + (shift_sum[k] + g[k],)
        dx_sum = dx_next
        gain_sum = gain_next
        shift_sum = shift_next
    for k in tl.static_range(PARTS):
        column = k * PART + tl.arange(0, PART)
        for t in tl.static_range(T):
            to = sums_ptr + ((group * S + s) * T + t) * H + column
            tl.store(to, tl.sum(dx_sum[t * PARTS + k], 0), mask=column < H)
        to = norm_ptr + ((group * S + s) * 2) * H + column
        tl.store(to, tl.sum(gain_sum[k], 0), mask=column < H)
        tl.store(to + H, tl.sum(shift_sum[k], 0), mask=column < H)


@triton.jit
def column_sums(from_ptr, rows, column, WIDTH: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over rows of [rows, WIDTH, H] in these columns of the first of WIDTH, BLOCK rows at a time."""
    total = tl.zeros([column.shape[0]], tl.float32)
    for first in range(0, rows, BLOCK):
        at = (first + tl.arange(0, BLOCK)).to(tl.int64)
        mask = (at < rows)[:, None] & (column < H)[None, :]
        total += tl.sum(tl.load(from_ptr + at[:, None] * (WIDTH * H) + column[None, :], mask=mask, other=0.0), 0)
    return total


@triton.jit(do_not_specialize=["S", "P", "groups"])
def finish_kernel(
    sums_ptr,  # [groups, S, T, H], float32
    norm_ptr,  # [groups, S, 2, H], float32
    dpositions_ptr,  # [P, H], of the tables' type, written
    dkinds_ptr,  # [KINDS, H], of the tables' type, written
    dgain_ptr,  # [H], of the tables' type, written
    dshift_ptr,  # [H], of the tables' type, written
    S,
    P,
    groups,
    H: tl.constexpr,
    T: tl.constexpr,
    KINDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """What :func:`position_kernel` left added up: dpositions, ROWS of them a program, and in the programs after these
    dkinds, dgain and dshift, whose sums over all positions are one for each column."""
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    sums = tl.num_programs(0) - (T + 2)
    which = tl.program_id(0) - sums
    if which < 0:
        at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        found = tl.zeros([ROWS, BLOCK_H], tl.float32)
        mask = (at < S)[:, None] & (column < H)[None, :]
        for group in range(groups):
            for t in tl.static_range(T):
                where = ((group * S + at) * T + t)[:, None] * H + column[None, :]
                found += tl.load(sums_ptr + where, mask=mask, other=0.0)
        to = dpositions_ptr + at[:, None] * H + column[None, :]
        tl.store(to, found.to(dpositions_ptr.dtype.element_ty), mask=(at < P)[:, None] & (column < H)[None, :])
    elif which < T:
        kind = column_sums(sums_ptr + which * H, groups * S, column, T, H, BLOCK)
        tl.store(dkinds_ptr + which * H + column, kind.to(dkinds_ptr.dtype.element_ty), mask=column < H)
        for t in tl.static_range(T, KINDS):  # types that no token has
            tl.store(dkinds_ptr + t * H + column, tl.zeros([BLOCK_H], dkinds_ptr.dtype.element_ty), mask=column < H)
    else:
        total = column_sums(norm_ptr + (which - T) * H, groups * S, column, 2, H, BLOCK)
        to_ptr = dgain_ptr if which == T else dshift_ptr
        tl.store(to_ptr + column, total.to(dgain_ptr.dtype.element_ty), mask=column < H)


@triton.jit(do_not_specialize=["N", "S", "padding"])
def token_kernel(
    sorted_ptr,  # [B S], the ids in order, int16, int32 or int64
    order_ptr,  # [B S], the row of each, int64
    types_ptr,  # [B, S], int64; not read unless TYPED
    tokens_ptr,  # [V, H], float32 or bfloat16
    positions_ptr,  # [P, H], of tokens' type
    kinds_ptr,  # [token types, H], of tokens' type
    gain_ptr,  # [H], of tokens' type
    mean_ptr,  # [B S], float32
    inverse_ptr,  # [B S], float32
    dout_ptr,  # [B, S, H], of tokens' type
    seed_ptr,  # int64; not read where DROP is 0
    dtokens_ptr,  # [V, H], of tokens' type, written
    partial_ptr,  # [chunks, 2, H], float32, written
    N,
    S,
    KINDS,
    padding,
    H: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TYPED: tl.constexpr,
    DROP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """dtokens[v] = sum of dx over the rows whose id is v, in the order of the rows, for CHUNK rows sorted by id.

    A run of one id that lies within the chunk is written. Of one that goes on beyond it the part here is kept, in
    partial[chunk, 0] where it has come from before the chunk, else in partial[chunk, 1]; :func:`join_kernel` adds
    these.
    """
    chunk = tl.program_id(0).to(tl.int64)
    seed = tl.load(seed_ptr)
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, N)
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1).to(tl.int64)
    total = ()
    for _ in tl.static_range(PARTS):
        total = total + (tl.zeros([1, PART], tl.float32),)
    came = tl.load(sorted_ptr + first).to(tl.int64) == before
    for at in range(first, last):
        v = tl.load(sorted_ptr + at).to(tl.int64)
        rows = tl.load(order_ptr + at + tl.arange(0, 1)).to(tl.int64)
        types = rows * 0
        if TYPED:
            types = nearest(tl.load(types_ptr + rows), KINDS)
        found = row_gradients(
            dout_ptr,
            tokens_ptr + (v + rows * 0) * H,
            positions_ptr + (rows % S) * H,
            kinds_ptr + types * H,
            gain_ptr,
            mean_ptr,
            inverse_ptr,
            rows,
            rows >= 0,
            seed,
            H,
            PART,
            PARTS,
            DROP,
            1,
        )
        dx = found[0]
        after = tl.load(sorted_ptr + at + 1, mask=at + 1 < N, other=-1).to(tl.int64)
        ends = after != v
        goes = (at + 1 == last) & (after == v)
        added = ()
        for k in tl.static_range(PARTS):
            column = k * PART + tl.arange(0, PART)[None, :]
            here = total[k] + dx[k]
            whole = ends & (came == 0) & (v != padding)
            tl.store(dtokens_ptr + v * H + column, here.to(dtokens_ptr.dtype.element_ty), mask=whole & (column < H))
            slot = tl.where(came, 0, 1)
            tl.store(partial_ptr + (chunk * 2 + slot) * H + column, here, mask=((ends & came) | goes) & (column < H))
            added = added + (tl.where(ends, 0.0, here),)
        total = added
        came = came & (ends == 0)


@triton.jit(do_not_specialize=["N", "chunks", "padding"])
def join_kernel(
    sorted_ptr,  # [N], the ids in order, int16, int32 or int64
    partial_ptr,  # [chunks, 2, H], float32
    dtokens_ptr,  # [V, H], of the tables' type, written
    N,
    chunks,
    padding,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """dtokens of the id whose run begins in this chunk and goes on: the parts of all its chunks, BLOCK at a time."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, N)
    v = tl.load(sorted_ptr + end - 1).to(tl.int64)
    begin = tl.load(sorted_ptr + first).to(tl.int64)
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1).to(tl.int64)
    after = tl.load(sorted_ptr + end, mask=end < N, other=-1).to(tl.int64)
    if (after == v) & ((begin != v) | (before != v)):
        total = tl.load(partial_ptr + (chunk * 2 + 1) * H + column, mask=column < H, other=0.0)
        c = chunk + 1
        going = 1
        while going > 0:
            several = c + tl.arange(0, BLOCK)
            there = several < chunks
            same = tl.load(sorted_ptr + several * CHUNK, mask=there, other=-1).to(tl.int64) == v
            parts = tl.load(
                partial_ptr + several[:, None] * 2 * H + column[None, :],
                mask=same[:, None] & (column < H)[None, :],
                other=0.0,
            )
            total += tl.sum(parts, 0)
            going = (tl.sum(same.to(tl.int32), 0) == BLOCK).to(tl.int32)
            c += BLOCK
        mask = (column < H) & (v != padding)
        tl.store(dtokens_ptr + v * H + column, total.to(dtokens_ptr.dtype.element_ty), mask=mask)
