"""A step whose text is a formula of its inputs, such as ``0.9*m + (1-0.9)*g``: its value, and a running error bound.

The text is read by Python's own parser, and only numbers, names, + - * / ** and comparisons, and a few functions are
taken. A reading counts only if, on the golden's inputs, it gives the golden's step. The bound follows each operation
(Higham 2002, section 3.3): what its operands were off, carried to first order, and one rounding.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from labkit.magnitude import finite
from labkit.named import EPSILONS, meanings

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
"""A value, and how much it may be off."""

View = Callable[[Tensor], Tensor]
Reading = tuple[dict[str, int], tuple[View, ...]]
MOST_READINGS = 48
TELLING = 1e-4
"""A reading's own error relative to the golden's size up to which agreement says something."""
_ARITHMETIC = {
    2: ("a*b", "a-b", "a/b"),
    3: ("a*(b-c)", "a*b+c", "(a-b)*c", "a*b*c", "(a-b)/c"),
    4: ("a*(b-c*d)", "a*b+c*d", "a*(b-c)*d", "(a-b)*c*d"),
}
"""By the number of inputs: what a text that is no formula, such as `softmax_bwd`, may stand for."""
_WORD = re.compile(
    r"[a-z_ ]*(bwd|backward|grad|mul|sub|div|dequant|scale|rope|rotate|update|combine)[a-z_ ]*", re.IGNORECASE
)
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)\s*=\s*(-?\d+\.?\d*(?:e[-+]?\d+)?)(?![\w.]|\s*[-+*/^])", re.IGNORECASE)
_CAST = re.compile(r"^\s*cast\s+(?:to\s+)?\w+\s*\((.*)\)[^)]*$", re.IGNORECASE)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)

# name -> function, and the size of its derivative
_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sqrt": (torch.sqrt, lambda x: 0.5 / torch.sqrt(x)),
    "rsqrt": (torch.rsqrt, lambda x: 0.5 * torch.rsqrt(x) ** 3),
    "exp": (torch.exp, torch.exp),
    "log": (torch.log, lambda x: 1.0 / x.abs()),
    "sigmoid": (torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x)),
    "tanh": (torch.tanh, lambda x: 1.0 - torch.tanh(x) ** 2),
    "relu": (torch.relu, torch.ones_like),
    "abs": (torch.abs, torch.ones_like),
    "cos": (torch.cos, torch.ones_like),
    "sin": (torch.sin, torch.ones_like),
    "erf": (torch.erf, lambda x: (2.0 / math.sqrt(math.pi)) * torch.exp(-x * x)),
}

_ROUNDINGS = {"erf": 8.0}
"""Round-offs of a function's value where they are not 4. Vectorised erf in float32 is Abramowitz and Stegun's 7.1.26,
off by 1.5e-7 whatever its size."""

_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "max": lambda x: x.amax(-1, keepdim=True),
    "rows": lambda x: x.sum(-2, keepdim=True),
}
"""Functions of a whole row, along the last dimension, and `rows`, the sum of all rows."""

_MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1),
    "pairs": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
}
"""A quarter turn: halves of a row, or columns two by two, in each other's place, the new first ones negated."""
_EXCEPT = re.compile(r"\b(0|zero) (where|if|for)\b|ignored", re.IGNORECASE)


@dataclass(frozen=True)
class Formula:
    """One reading of a text. `names` are its variables, each an input's place or a number."""

    tree: ast.expr
    names: dict[str, int | float]
    views: tuple[View, ...]
    """How each input is laid out, so that all of them broadcast."""
    zeros: Tensor | None = None
    """Where the text says that the result is zero whatever the formula gives, as for ignored targets."""
    shape: torch.Size | None = None
    """Of the step, which may have dropped the dimension that a row function keeps."""
    stored: int = 0
    """How many results before the last one an implementation may have rounded to the stored type."""

    @property
    def steps(self) -> int:
        """How many operations it is made of."""
        return sum(isinstance(node, (ast.BinOp, ast.Call)) for node in ast.walk(self.tree))

    def off(self, inputs: Sequence[Tensor], golden: Tensor) -> float:
        """How far from the golden it is at most."""
        exact = self.value(inputs, [torch.zeros_like(x) for x in inputs], 0.0)[0]
        return float(finite(exact - golden).abs().max())

    def value(self, inputs: Sequence[Tensor], errors: Sequence[Tensor], unit: float, sums: float | None = None) -> Pair:
        """The formula in float64 on `inputs` that are `errors` off, and what arithmetic of `unit` round-off may add.

        `sums` is the round-off of sums and means where that is another.
        """
        given = {
            name: (
                (self.views[at](inputs[at]), self.views[at](errors[at])) if isinstance(at, int) else _number(at, unit)
            )
            for name, at in self.names.items()
        }
        value, error = _evaluate(self.tree, given, unit, unit if sums is None else sums)
        if self.shape is not None and value.shape == (*self.shape, 1):
            value, error = value.squeeze(-1), error.expand(value.shape).squeeze(-1)
        if self.zeros is not None and value.shape == self.zeros.shape:
            value, error = value.masked_fill(self.zeros, 0.0), error.expand(value.shape).masked_fill(self.zeros, 0.0)
        return value, error


def formula(
    op: str, names: Sequence[str], inputs: Sequence[Tensor], golden: Tensor, unit: float, grid: Tensor
) -> Formula | None:
    """The reading of `op` that gives `golden` from `inputs`, float64 both, of step names `names`; None if none does.

    `unit` is the golden's own round-off, and `grid` what rounding to the promised type may move its elements.
    """
    for tree, numbers in _parsed(op) if inputs else ():
        found = _read(tree, numbers, names, inputs, golden, unit, grid, bool(_EXCEPT.search(op)))
        if found is not None:
            return found
    for text in _ARITHMETIC.get(len(inputs), ()) if _WORD.fullmatch(op.strip()) else ():
        for tree, numbers in _parsed(text):
            found = _read(tree, numbers, "abcd"[: len(inputs)], inputs, golden, unit, grid, False)
            if found is not None:
                return found
    return None


def named(op: str, inputs: Sequence[Tensor], golden: Tensor, unit: float, grid: Tensor) -> Formula | None:
    """The formula that a name such as `rmsnorm eps=1e-6` stands for, if it gives `golden` from `inputs`.

    As :func:`formula`; of a step without a name every known meaning is tried.
    """
    said = {name.lower(): float(value) for name, value in _ASSIGNED.findall(op)}
    for meaning in meanings(op, len(inputs)):
        ((tree, usual),) = _parsed(meaning.text)
        epsilons = [said["eps"]] if "eps" in said else [float(one) for one in EPSILONS]
        fitting: list[tuple[float, int, Formula]] = []
        for epsilon in epsilons if "eps" in meaning.text else [0.0]:
            numbers = usual | said | {"eps": epsilon}
            names = "abcd"[: len(inputs)]
            found = _read(tree, numbers, names, inputs, golden, unit, grid, bool(_EXCEPT.search(op)))
            if found is not None:
                fitting.append((found.off(inputs, golden), len(fitting), replace(found, stored=meaning.stored)))
        if fitting:  # a golden in float32 does not tell every epsilon from the next
            return min(fitting)[2]
    return None


def of_letters(text: str, inputs: Sequence[Tensor], golden: Tensor, unit: float, grid: Tensor) -> Formula | None:
    """`text` of the letters a, b, c, one for each of `inputs`, if it gives `golden`; as :func:`formula`."""
    places = {letter: at for at, letter in enumerate("abcd"[: len(inputs)])}
    views = [list(_views(x.shape, golden.shape))[:2] for x in inputs]
    readings = [(places, laid_out) for laid_out in itertools.product(*views)]
    for tree, numbers in _parsed(text):
        return _read(tree, numbers, list(places), inputs, golden, unit, grid, False, readings)
    return None


def sampled(text: str, given: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a formula's text where its names have these values; None where it cannot be had of them."""
    for tree, numbers in _parsed(text):
        exact = {name: (torch.tensor(x, dtype=torch.float64), torch.zeros(())) for name, x in numbers.items()}
        try:
            return _evaluate(tree, exact | {name: (x, torch.zeros_like(x)) for name, x in given.items()}, 0.0, 0.0)[0]
        except (RuntimeError, IndexError, ZeroDivisionError, OverflowError, KeyError):
            return None
    return None


def uses_rows(text: str) -> bool:
    """Whether a text has functions of whole rows."""
    return any(re.search(rf"\b{name}\(", text) for name in (*_ROWS, *_MOVED))


def _read(
    tree: ast.expr, numbers: dict[str, float], names: Sequence[str], inputs: Sequence[Tensor], golden: Tensor,
    unit: float, grid: Tensor, excepted: bool, readings: Iterable[Reading] | None = None,
) -> Formula | None:  # fmt: skip
    wanted = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(numbers)
    wanted -= {
        node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    if not wanted:
        return None
    least = 2.0**-126 if unit > 2.0**-53 else 1e-300  # denormal numbers of a golden in float32 have few digits
    if readings is None:
        readings = itertools.islice(_readings(sorted(wanted), names, inputs, golden), MOST_READINGS)
    for places, laid_out in readings:
        candidate = Formula(tree, {**numbers, **places}, laid_out, golden == 0.0 if excepted else None, golden.shape)
        try:
            value, error = candidate.value(inputs, [unit * x.abs() for x in inputs], unit)
        except (RuntimeError, IndexError, ZeroDivisionError, OverflowError, KeyError):
            continue
        if value.shape != golden.shape:
            continue
        if float(error.median()) > TELLING * float(finite(golden).abs().mean()):
            continue  # whatever the numbers are, they would do
        close = (value - golden).abs() <= 4.0 * error + grid + least
        if bool((close | (value.isnan() & golden.isnan()) | (value == golden)).all()):
            return candidate
    return None


@lru_cache(maxsize=4096)
def _parsed(op: str) -> tuple[tuple[ast.expr, dict[str, float]], ...]:
    """What the text may say, without the words before it: ``divide a / b``, ``weight decay: p*(1-lr*wd), lr=0.1``."""
    text = op.strip()
    if cast := _CAST.match(text):
        text = cast.group(1)
    usual = {"beta1": 0.9, "beta2": 0.999}  # of Adam, where the text gives no others
    numbers = usual | {name.lower(): float(value) for name, value in _ASSIGNED.findall(text)}
    text = re.split(r"[,;]", text)[0].lower().replace("^", "**").replace("\u00b7", "*").replace("\u00d7", "*")
    text = re.sub(r"(?<=[\w)]) o (?=[\w(])", " * ", text)  # Hadamard's
    text = re.sub(r"\brow(sum|max|mean)\b", r"\1", text)
    if "=" in text and not re.search(r"[<>]=", text):
        text = text.rsplit("=", 1)[1]
    rest = text.rsplit(":", 1)[-1].split()
    for dropped in range(min(4, len(rest))):
        try:
            tree = ast.parse(" ".join(rest[dropped:]), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if isinstance(tree, (ast.BinOp, ast.Call)) and _allowed(tree):
            return ((tree, numbers),)
    return ()


def _allowed(tree: ast.expr) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
            continue
        if (
            isinstance(node, ast.Compare)
            and len(node.ops) == 1
            and isinstance(node.ops[0], (ast.Gt, ast.GtE, ast.Lt, ast.LtE))
        ):
            continue
        if isinstance(node, ast.Call):
            if not (
                isinstance(node.func, ast.Name)
                and node.func.id in (*_FUNCTIONS, *_ROWS, *_MOVED)
                and len(node.args) == 1
                and not node.keywords
            ):
                return False
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            continue
        if isinstance(node, (ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd, ast.operator, ast.cmpop)):
            continue
        return False
    return True


def _readings(
    wanted: Sequence[str], names: Sequence[str], inputs: Sequence[Tensor], golden: Tensor
) -> Iterator[Reading]:
    """Which input each name may mean, the likeliest first, and how the inputs may be viewed."""
    tails = [re.split(r"[._/:]", name.lower())[-1] for name in names]
    whole = [name.lower() for name in names]

    def likeness(word: str, at: int) -> int:
        if word in (whole[at], tails[at]):
            return 0
        spelled = whole[at].replace(".", "_")
        if spelled.endswith("_" + word) or tails[at].rstrip("0123456789") == word:
            return 1
        return 2 if spelled.endswith(word) or word in spelled else 3

    options = [sorted(range(len(names)), key=partial(likeness, word)) for word in wanted]
    orders = sorted(
        (chosen for chosen in itertools.islice(itertools.product(*options), 4096) if len(set(chosen)) == len(chosen)),
        key=lambda chosen: sum(likeness(word, at) for word, at in zip(wanted, chosen, strict=True)),
    )
    views = [list(_views(x.shape, golden.shape)) for x in inputs]
    for chosen in orders[:12]:
        for laid_out in itertools.islice(itertools.product(*views), 16):
            yield dict(zip(wanted, chosen, strict=True)), laid_out


def _views(shape: torch.Size, target: torch.Size) -> Iterator[View]:
    """Ways to broadcast to `target`: as it is, by leading dimensions, by channel, a number for a group of columns."""
    yield lambda x: x
    missing = len(target) - len(shape)
    if missing > 0 and tuple(target[: len(shape)]) == tuple(shape):
        yield lambda x: x.reshape(*shape, *(1,) * missing)
    if len(shape) == 1 and len(target) > 2 and target[1] == shape[0]:
        yield lambda x: x.reshape(1, shape[0], *(1,) * (len(target) - 2))
    if missing == 0 and shape[:-1] == target[:-1] and 1 < shape[-1] < target[-1] and target[-1] % shape[-1] == 0:
        yield lambda x: x.repeat_interleave(target[-1] // shape[-1], -1)


def _number(x: float, unit: float) -> Pair:
    value = torch.tensor(float(x), dtype=torch.float64)
    exact = x == int(x) if math.isfinite(x) else False
    return value, torch.zeros_like(value) if exact else unit * value.abs()


def _evaluate(node: ast.expr, given: dict[str, Pair], unit: float, sums: float) -> Pair:
    if isinstance(node, ast.Constant):
        return _number(float(node.value), unit)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return given[node.id]
    if isinstance(node, ast.UnaryOp):
        value, error = _evaluate(node.operand, given, unit, sums)
        return (-value if isinstance(node.op, ast.USub) else value), error
    if isinstance(node, ast.Compare):
        (a, ea), (b, eb) = _evaluate(node.left, given, unit, sums), _evaluate(node.comparators[0], given, unit, sums)
        greater = isinstance(node.ops[0], (ast.Gt, ast.GtE))
        return ((a > b) if greater else (a < b)).double(), ((a - b).abs() <= ea + eb).double() * (ea + eb > 0)
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        x, error = _evaluate(node.args[0], given, unit, sums)
        if node.func.id in _MOVED:
            return _MOVED[node.func.id](x), _MOVED[node.func.id](error.expand(x.shape)).abs()
        if node.func.id in _ROWS:
            along = _ROWS[node.func.id]
            if node.func.id == "max":
                return along(x), along(_settled(x, error.expand(x.shape)))
            length = x.shape[-2 if node.func.id == "rows" else -1]
            return along(x), along(error.expand(x.shape)) + (length - 1 + (length > 1)) * sums * along(x.abs())
        run, slope = _FUNCTIONS[node.func.id]
        value = run(x)
        carried = torch.where(error > 0.0, slope(x).abs() * error * 1.01, 0.0)
        size = torch.ones_like(value) if node.func.id == "erf" else value.abs()
        return value, _settled(value, carried + _ROUNDINGS.get(node.func.id, 4.0) * unit * size)
    assert isinstance(node, ast.BinOp)
    (a, ea), (b, eb) = _evaluate(node.left, given, unit, sums), _evaluate(node.right, given, unit, sums)
    if isinstance(node.op, (ast.Add, ast.Sub)):
        value = a + b if isinstance(node.op, ast.Add) else a - b
        error = ea + eb
    elif isinstance(node.op, ast.Mult):
        value, error = a * b, a.abs() * eb + b.abs() * ea + ea * eb
    elif isinstance(node.op, ast.Div):
        value = a / b
        error = torch.where((ea > 0) | (eb > 0), (ea + value.abs() * eb) / (b.abs() - eb).clamp(min=1e-300), 0.0)
    else:
        value = a**b
        error = torch.where(ea > 0, (b * value / a).abs() * ea, 0.0)
        error = error + torch.where(eb > 0, (value * torch.log(a.abs().clamp(min=1e-300))).abs() * eb, 0.0)
        unit = unit * (1.0 + b.abs().max().item())  # a power may be taken by repeated products
    return value, _settled(value, error + unit * value.abs())


def _settled(value: Tensor, error: Tensor) -> Tensor:
    """An infinity is off by nothing: a mask stays one."""
    return torch.where(value.isfinite(), error, 0.0)
