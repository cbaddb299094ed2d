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
    word = words[k // 2] if k % 2 else words[k // 2] << 16
    return tl.where(word >= DROP << 16, 65536.0 / (65536 - DROP), 0.0)


@triton.jit
def random_words(seed, row, PART: tl.constexpr):
    """Four tensors [PART] of 32 random bits each, which follow from seed, row and column alone."""
    column = tl.arange(0, PART)
    return tl.philox(seed, column, row.to(tl.int32) + column * 0, column * 0, column * 0, ROUNDS)


@triton.jit
def part_of(row_ptr, k: tl.constexpr, H: tl.constexpr, PART: tl.constexpr):
    """Part k of a row in float32, [PART]; 0 beyond its H columns."""
    column = k * PART + tl.arange(0, PART)
    return tl.load(row_ptr + column, mask=column < H, other=0.0).to(tl.float32)


@triton.jit
def store_part(row_ptr, part, k: tl.constexpr, H: tl.constexpr, PART: tl.constexpr, wanted=True):
    """`part` [PART] to part k of a row, in the row's type, where that is wanted."""
    column = k * PART + tl.arange(0, PART)
    tl.store(row_ptr + column, part.to(row_ptr.dtype.element_ty), mask=(column < H) & wanted)


@triton.jit
def summed(token_ptr, position_ptr, kind_ptr, k: tl.constexpr, H: tl.constexpr, PART: tl.constexpr):
    """Part k of token + type + position in float32, [PART], from pointers to the rows of the three tables."""
    return part_of(token_ptr, k, H, PART) + part_of(kind_ptr, k, H, PART) + part_of(position_ptr, k, H, PART)


@triton.jit
def nearest(index, count):
    """The nearest row of a table of `count` rows, int64."""
    return tl.minimum(tl.maximum(index.to(tl.int64), 0), count - 1)


@triton.jit
def kind_of(types_ptr, row, KINDS, TYPED: tl.constexpr):
    """A row's token type, the nearest of KINDS; 0 unless TYPED."""
    kind = row * 0
    if TYPED:
        kind = nearest(tl.load(types_ptr + row), KINDS)
    return kind


@triton.jit(do_not_specialize=["S"])
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
    seed_ptr,  # int64; nothing follows from it where DROP is 0
    S,
    V,
    T,
    eps,
    H: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TYPED: tl.constexpr,
    DROP: tl.constexpr,
):
    """out[n] = dropout(LayerNorm(tokens[ids[n]] + kinds[types[n]] + positions[n % S])), a row a program.

    mean[n] and inverse[n], which is 1 / deviation, are kept for the backward. A row whose id or type is outside its
    table is NaN.
    """
    position_ptr = positions_ptr + (tl.program_id(0) % S).to(tl.int64) * H
    row = tl.program_id(0).to(tl.int64)
    words = ()
    if DROP > 0:
        words = random_words(tl.load(seed_ptr), row, PART)
    given = tl.load(ids_ptr + row)
    token = nearest(given, V)
    right = given == token
    kind = token * 0
    if TYPED:
        given = tl.load(types_ptr + row)
        kind = nearest(given, T)
        right = right & (given == kind)
    token_ptr = tokens_ptr + token * H
    kind_ptr = kinds_ptr + kind * H
    x = ()
    total = tl.zeros([PART], tl.float32)
    for k in tl.static_range(PARTS):
        x = x + (summed(token_ptr, position_ptr, kind_ptr, k, H, PART),)
        total += x[k]
    mean = tl.sum(total) / H
    squares = tl.zeros([PART], tl.float32)
    for k in tl.static_range(PARTS):
        away = tl.where(k * PART + tl.arange(0, PART) < H, x[k] - mean, 0.0)
        squares += away * away
    inverse = tl.where(right, 1.0 / tl.sqrt(tl.sum(squares) / H + eps), float("nan"))
    for k in tl.static_range(PARTS):
        y = (x[k] - mean) * inverse * part_of(gain_ptr, k, H, PART) + part_of(shift_ptr, k, H, PART)
        if DROP > 0:
            y = y * keep_factor(words, k, DROP)
        store_part(out_ptr + row * H, y, k, H, PART)
    tl.store(mean_ptr + row, mean)
    tl.store(inverse_ptr + row, inverse)


@triton.jit
def row_gradients(
    dout_ptr,
    token_ptr,
    position_ptr,
    kind_ptr,
    gain_ptr,
    mean_ptr,
    inverse_ptr,
    row,
    seed,
    H: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DROP: tl.constexpr,
):
    """Of a row, part by part: the gradient of the sum, of the LayerNorm's result, and the normalised sum.

    With y = gain z + shift and z = (x - mean) / deviation, g the gradient of y and h = gain g:
    dx = (h - mean(h) - z mean(h z)) / deviation.
    """
    mean = tl.load(mean_ptr + row)
    inverse = tl.load(inverse_ptr + row)
    words = ()
    if DROP > 0:
        words = random_words(seed, row, PART)
    g = ()
    z = ()
    h_sum = tl.zeros([PART], tl.float32)
    hz_sum = tl.zeros([PART], tl.float32)
    for k in tl.static_range(PARTS):
        dy = part_of(dout_ptr + row * H, k, H, PART)
        if DROP > 0:
            dy = dy * keep_factor(words, k, DROP)
        g = g + (dy,)
        z = z + ((summed(token_ptr, position_ptr, kind_ptr, k, H, PART) - mean) * inverse,)
        h = dy * part_of(gain_ptr, k, H, PART)
        h_sum += h
        hz_sum += h * z[k]
    h_mean = tl.sum(h_sum) / H
    hz_mean = tl.sum(hz_sum) / H
    dx = ()
    for k in tl.static_range(PARTS):
        dx = dx + ((g[k] * part_of(gain_ptr, k, H, PART) - h_mean - z[k] * hz_mean) * inverse,)
    return dx, g, z


@triton.jit
def added(sums, parts, t: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr):
    """`sums`, T times PARTS of them, with `parts` added to those of type t."""
    found = ()
    for i in tl.static_range(T * PARTS):
        found = found + ((sums[i] + parts[i % PARTS]) if i // PARTS == t else sums[i],)
    return found


@triton.jit(do_not_specialize=["B", "S", "steps"])
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
    seed_ptr,  # int64; nothing follows from it where DROP is 0
    narrow_ptr,  # [B S], int16, int32 or int64, written
    sums_ptr,  # [groups, S, T, H], float32, written
    norm_ptr,  # [groups, S, 2, H], float32, written
    B,
    S,
    V,
    KINDS,
    steps,
    H: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    T: tl.constexpr,
    TYPED: tl.constexpr,
    DROP: tl.constexpr,
):
    """Of position s and a group of `steps` sequences: dx summed for each type into sums[group, s, type], dgain and
    dshift into norm[group, s].

    The ids go into narrow_ptr in the type that they are sorted in. One that was outside its table, whose row is NaN, is
    the nearest inside here and in what follows, so that nothing is written beyond a table.
    """
    s = (tl.program_id(0) % S).to(tl.int64)
    group = (tl.program_id(0) // S).to(tl.int64)
    seed = tl.load(seed_ptr)
    dx_sum = ()
    gain_sum = ()
    shift_sum = ()
    for _ in tl.static_range(T * PARTS):
        dx_sum = dx_sum + (tl.zeros([PART], tl.float32),)
    for _ in tl.static_range(PARTS):
        gain_sum = gain_sum + (tl.zeros([PART], tl.float32),)
        shift_sum = shift_sum + (tl.zeros([PART], tl.float32),)
    row = group * steps * S + s
    token = nearest(tl.load(ids_ptr + row), V)
    kind = kind_of(types_ptr, row, KINDS, TYPED)
    for _ in range(group * steps, tl.minimum((group + 1) * steps, B)):
        tl.store(narrow_ptr + row, token.to(narrow_ptr.dtype.element_ty))
        row_next = tl.minimum(row + S, B * S - 1)
        token_next = nearest(tl.load(ids_ptr + row_next), V)
        kind_next = kind_of(types_ptr, row_next, KINDS, TYPED)
        dx, g, z = row_gradients(
            dout_ptr,
            tokens_ptr + token * H,
            positions_ptr + s * H,
            kinds_ptr + kind * H,
            gain_ptr,
            mean_ptr,
            inverse_ptr,
            row,
            seed,
            H,
            PART,
            PARTS,
            DROP,
        )
        for t in tl.static_range(T):
            if kind == t:
                dx_sum = added(dx_sum, dx, t, T, PARTS)
        gain_next = ()
        for k in tl.static_range(PARTS):
            gain_next = gain_next + (gain_sum[k] + g[k] * z[k],)
        gain_sum = gain_next
        shift_sum = added(shift_sum, g, 0, 1, PARTS)
        row = row_next
        token = token_next
        kind = kind_next
    for k in tl.static_range(PARTS):
        for t in tl.static_range(T):
            store_part(sums_ptr + ((group * S + s) * T + t) * H, dx_sum[t * PARTS + k], k, H, PART)
        store_part(norm_ptr + (group * S + s) * 2 * H, gain_sum[k], k, H, PART)
        store_part(norm_ptr + ((group * S + s) * 2 + 1) * H, shift_sum[k], k, H, PART)


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


@triton.jit(do_not_specialize=["N", "S", "padding", "chunk_rows"])
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
    seed_ptr,  # int64; nothing follows from it where DROP is 0
    dtokens_ptr,  # [V, H], of tokens' type, written
    partial_ptr,  # [chunks, 2, H], float32, written
    N,
    S,
    KINDS,
    padding,
    chunk_rows,
    H: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TYPED: tl.constexpr,
    DROP: tl.constexpr,
):
    """dtokens[v] = sum of dx over the rows whose id is v, in the order of the rows, for a chunk of rows sorted by id.

    A run of one id that lies within the chunk is written. Of one that goes on beyond it the part here is kept, in
    partial[chunk, 0] where it has come from before the chunk, else in partial[chunk, 1]; :func:`join_kernel` adds
    these.
    """
    chunk = tl.program_id(0).to(tl.int64)
    seed = tl.load(seed_ptr)
    first = chunk * chunk_rows
    last = tl.minimum(first + chunk_rows, N)
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1).to(tl.int64)
    total = ()
    for _ in tl.static_range(PARTS):
        total = total + (tl.zeros([PART], tl.float32),)
    came = tl.load(sorted_ptr + first).to(tl.int64) == before
    for at in range(first, last):
        v = tl.load(sorted_ptr + at).to(tl.int64)
        row = tl.load(order_ptr + at)
        kind = kind_of(types_ptr, row, KINDS, TYPED)
        found = row_gradients(
            dout_ptr,
            tokens_ptr + v * H,
            positions_ptr + (row.to(tl.int32) % S).to(tl.int64) * H,
            kinds_ptr + kind * H,
            gain_ptr,
            mean_ptr,
            inverse_ptr,
            row,
            seed,
            H,
            PART,
            PARTS,
            DROP,
        )
        dx = found[0]
        after = tl.load(sorted_ptr + at + 1, mask=at + 1 < N, other=-1).to(tl.int64)
        ends = after != v
        goes = (at + 1 == last) & (after == v)
        whole = ends & (came == 0) & (v != padding)
        slot = tl.where(came, 0, 1)
        added = ()
        for k in tl.static_range(PARTS):
            here = total[k] + dx[k]
            store_part(dtokens_ptr + v * H, here, k, H, PART, whole)
            store_part(partial_ptr + (chunk * 2 + slot) * H, here, k, H, PART, (ends & came) | goes)
            added = added + (tl.where(ends, 0.0, here),)
        total = added
        came = came & (ends == 0)


@triton.jit(do_not_specialize=["N", "chunks", "padding", "chunk_rows"])
def join_kernel(
    sorted_ptr,  # [N], the ids in order, int16, int32 or int64
    partial_ptr,  # [chunks, 2, H], float32
    dtokens_ptr,  # [V, H], of the tables' type, written
    N,
    chunks,
    padding,
    chunk_rows,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """dtokens of the id whose run begins in this chunk and goes on: the parts of all its chunks, BLOCK at a time."""
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    first = chunk * chunk_rows
    end = tl.minimum(first + chunk_rows, N)
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
            same = tl.load(sorted_ptr + several * chunk_rows, mask=there, other=-1).to(tl.int64) == v
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
