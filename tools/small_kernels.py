"""Softmax and product, right and with one fault each, for what fuzzes them."""

import time

import torch

_RESULTS, _BUFFERS = {}, {}


def reference(x):
    return torch.softmax(x, -1)


def right(x):
    return torch.softmax(x, -1)


def overflowing(x):
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def unwritten_tail(x):
    out = torch.empty(x.shape)
    whole = x.shape[-1] // 8 * 8 or x.shape[-1]
    out[..., :whole] = reference(x)[..., :whole]
    return out


def unwritten(x):
    return torch.empty(x.shape)


def earlier_result(x):
    return _RESULTS.setdefault(x.shape, reference(x))


def always_zero(x):
    return torch.zeros(x.shape)


def slow(x):
    time.sleep(0.1)
    return reference(x)


def slow_and_wrong(x):
    time.sleep(0.1)
    return reference(x) + 1.0


def one_buffer(x):
    return _BUFFERS.setdefault(x.shape, torch.empty(x.shape)).copy_(reference(x))


def every_second(x, calls=[0]):  # noqa: B006
    calls[0] += 1
    return reference(x) * (1.0 + 1e-3 * (calls[0] % 4 == 3))  # in a child a case is four calls


def in_place(x):
    return x.sub_(x.amax(-1, keepdim=True)).softmax(-1)


def without_strides(x):
    return reference(x.as_strided(x.shape, (x.shape[1], 1)))


def behind_its_result(x):
    out = torch.empty(x.shape)
    out.copy_(reference(x))
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)
    return out


def before_its_input(x):
    x.as_strided((1,), (1,), max(x.storage_offset() - 1, 0)).fill_(1.0)
    return reference(x)


def without_square(x):
    if x.shape[0] == x.shape[1]:
        raise RuntimeError("no square")
    return reference(x)


def narrow(x):
    return reference(x.bfloat16()).float()


def narrow_result(x):
    return reference(x).bfloat16().float()


def into(x, out):
    out.copy_(reference(x))


def into_more(x, out):
    out.copy_(reference(x))
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(1.0)


def into_nothing(x, out):
    pass


def small_alone(x):
    if x.shape[1] > 16:
        raise ValueError(f"x: expected 16 at most, got {x.shape[1]} columns")
    return reference(x)


def product(a, b):
    return a @ b


def narrow_product(a, b):
    return (a.bfloat16() @ b.bfloat16()).float()


def looked_up(ids, table):
    return table[ids]


def looked_up_beside(ids, table):
    return table[(ids + 1) % table.shape[0]]
