"""Loops: one explanation for all steps of a line, and changes that the type of what they change hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whywrong

TIMES, ROWS, WIDTH = 6, 5, 4
FLOAT32 = whywrong.Precision("float32")


@pytest.fixture(scope="module")
def sequence() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"x": (TIMES, ROWS, WIDTH), "w": (WIDTH, WIDTH), "u": (WIDTH, WIDTH)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def recurrence(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """A recurrence with a gate, as a reference writes it."""
    h = torch.zeros_like(x[0])
    for t in range(TIMES):
        gate, candidate = torch.sigmoid(x[t] @ w), torch.tanh(x[t] + h @ u)
        h = whywrong.step(f"h.{t}", gate * h + (1 - gate) * candidate)
    return h


def port(given: dict[str, torch.Tensor], kept_from: int, every: bool = True) -> dict[str, torch.Tensor]:
    """The same in float32; in rows from `kept_from` on the buffer of h u is not cleared between two times."""
    x, w, u = given.values()
    h, buffer, steps = torch.zeros_like(x[0]), torch.zeros_like(x[0]), dict(given)
    for t in range(TIMES):
        buffer[:kept_from] = 0
        buffer = buffer + h @ u
        gate, candidate = torch.sigmoid(x[t] @ w), torch.tanh(x[t] + buffer)
        h = gate * h + (1 - gate) * candidate
        steps |= {f"h.{t}": h} if every else {}
    return steps | {"output": h}


@pytest.mark.long
@pytest.mark.parametrize("every", [True, False], ids=["all_steps", "the_end_alone"])
def test_a_buffer_that_is_not_cleared_is_one_explanation_for_all_times(
    sequence: dict[str, torch.Tensor], every: bool
) -> None:
    golden = whywrong.golden(recurrence, **sequence)
    assert whywrong.localise(port(sequence, ROWS, every), golden, precision=FLOAT32).first is None
    result = whywrong.explain(port(sequence, 2, every), golden, precision=FLOAT32, seconds=60.0)
    assert result.step == ("h.2" if every else "output")
    assert ("it explains h.0 ... h.5 together, which one line gives" in result.notes) == every
    (cause,) = result.causes
    assert cause.kind == "stale"
    assert "each result of mm (the second of the line) with u is added to that of the time before" in cause.says
    assert f"from 2 on of dimension {int(every)}" in cause.says


@pytest.mark.long
def test_all_steps_of_a_loop_are_a_step_to_look_at(sequence: dict[str, torch.Tensor]) -> None:
    golden, steps = whywrong.golden(recurrence, **sequence), port(sequence, 2)
    with pytest.raises(whywrong.UsageError, match=r"expected a wrong one: h.2 \.\.\. h.5, 'h.0 \.\.\. h.5', got"):
        whywrong.explain(steps, golden, precision=FLOAT32, step="h.1")
    result = whywrong.explain(steps, golden, precision=FLOAT32, step="h.0 ... h.5", seconds=60.0)
    assert "is added to that of the time before" in result.causes[0].says
    assert result.others == []


@pytest.mark.long
def test_where_nothing_explains_a_step_other_lines_are_looked_at() -> None:
    """Weight decay that is added to the gradient, in an update by the sign: two edits of one line, one of another."""
    generator = torch.Generator().manual_seed(1)
    given = {name: torch.randn(shape, generator=generator) for name, shape in {"p": (32, 24), "g": (4, 32, 24)}.items()}

    def updates(p: torch.Tensor, g: torch.Tensor, coupled: bool) -> torch.Tensor:
        m = torch.zeros_like(p)
        for t in range(4):
            each = g[t] + 0.1 * p if coupled else g[t]
            shrunk = p if coupled else p * (1.0 - 1e-4)
            p = whywrong.step(f"p.{t}", shrunk - 1e-3 * torch.sign(0.9 * m + 0.1 * each))
            m = whywrong.step(f"m.{t}", 0.99 * m + 0.01 * each)
        return p

    def reference(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return updates(p, g, coupled=False)

    wrong = whywrong.capture(lambda p, g: updates(p, g, coupled=True), **given)
    golden = whywrong.golden(reference, **given)
    steps = {name: wrong[name] for name in golden.names}
    result = whywrong.explain(steps, golden, precision=FLOAT32, seconds=20.0)
    assert not result.causes
    assert any(note.startswith("m.0, wrong by itself too: p is added, 0.001 times") for note in result.notes)


def adam(p: torch.Tensor, g: torch.Tensor, corrected: bool = True) -> torch.Tensor:
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t in range(1, 4):
        m = 0.9 * m + 0.1 * g[t - 1]
        v = 0.95 * v + 0.05 * g[t - 1] * g[t - 1]
        first = m / (1 - 0.9**t) if corrected else m
        second = v / (1 - 0.95**t) if corrected else v
        p = whywrong.step(f"p.{t}", p - 0.01 * first / (second.sqrt() + 1e-8))
    return p


def test_what_explains_one_time_alone_is_no_cause_where_something_explains_all() -> None:
    """After one time Adam without its corrections is the same as with other numbers; after three it is not."""
    generator = torch.Generator().manual_seed(8)
    given = {"p": torch.randn(7, 5, generator=generator), "g": torch.randn(3, 7, 5, generator=generator)}
    golden = whywrong.golden(adam, **given)
    wrong = whywrong.capture(lambda p, g: adam(p, g, corrected=False), **given)
    result = whywrong.explain({**given, **{f"p.{t}": wrong[f"p.{t}"] for t in (1, 2, 3)}}, golden, precision=FLOAT32)
    (cause,) = result.causes
    assert (result.step, result.others) == ("p.1", [])
    assert (
        cause.says == "each div is left out: each v passes as it is; and each div is left out: each m passes as it is"
    )
    assert "it explains p.1 ... p.3 together, which one line gives" in result.notes


def test_a_race_that_other_runs_show_is_not_explained_away_by_a_loop() -> None:
    generator = torch.Generator().manual_seed(3)
    given = {"x": torch.randn(16, generator=generator)}

    def doubled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        for t in range(3):
            x = whywrong.step(f"x.{t}", x * by)
        return x

    golden = whywrong.golden(doubled, **given)
    runs = [
        {**given, **{name: wrong[name] for name in golden.names if name != "x"}}
        for wrong in (whywrong.capture(lambda x, by=by: doubled(x, by), **given) for by in (3.0, 4.0))
    ]
    (cause,) = whywrong.explain(runs, golden, precision=FLOAT32).causes
    assert cause.kind == "race"
    assert cause.says.startswith("1 of 1 other runs gave other numbers in 16 of 16 elements")


def test_words_that_explain_the_first_step_stay_if_they_explain_all() -> None:
    """Of equivalent mutations the same leads; a number that is fitted to all replaces none that needed no fit."""
    generator = torch.Generator().manual_seed(9)
    given = {"x": torch.randn(6, 5, generator=generator), "w": torch.randn(5, 5, generator=generator)}

    def passes(x: torch.Tensor, w: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
        for t in range(3):
            e = x @ w
            x = whywrong.step(f"x.{t}", x + 0.1 * sign * torch.tanh(e))
        return x

    golden = whywrong.golden(passes, **given)
    wrong = whywrong.capture(lambda x, w: passes(x, w, sign=-1.0), **given)
    alone = {**given, "x.0": wrong["x.0"]}
    (one,) = whywrong.explain(alone, golden, precision=FLOAT32).causes
    (cause,) = whywrong.explain({**alone, "x.1": wrong["x.1"], "x.2": wrong["x.2"]}, golden, precision=FLOAT32).causes
    assert cause.says.replace("each ", "") == one.says
    assert cause.line == one.line


def trained(rate: float, dtype: torch.dtype, by: float = 1.0) -> dict[str, torch.Tensor]:
    """Weights after each of 5 steps of gradient descent with momentum, stored in a type; changes times `by`."""
    generator = torch.Generator().manual_seed(2)
    p, m = torch.randn(48, 64, generator=generator).to(torch.bfloat16), torch.zeros(48, 64)
    steps: dict[str, Any] = {"w.0": p.to(dtype)}
    p = p.to(dtype)
    for t in range(1, 6):
        m = 0.9 * m + torch.randn(48, 64, generator=generator)
        p = (p.double() - by * rate * m).to(dtype)
        steps[f"w.{t}"] = p
    return steps


@pytest.mark.parametrize("by", [0.0, 0.9, 1.0, 2.0])
def test_weights_are_checked_by_their_change_without_a_program(by: float) -> None:
    """A tolerance for the weights passes any change that is 1e-5 of them."""
    golden = whywrong.Trace(trained(1e-5, torch.float64))
    report = whywrong.localise(trained(1e-5, torch.float32, by), golden, precision=FLOAT32)
    assert report.first == (None if by == 1.0 else "w.1")
    if by != 1.0:
        assert report.findings["w.1"].words.startswith("the change from w.0: ")
        factor = float(report.findings["w.1"].words.split()[4])
        assert factor == pytest.approx(by, abs=0.01)


def test_a_type_that_hides_changes_is_named_and_correct() -> None:
    golden = whywrong.Trace(trained(1e-3, torch.float64))
    report = whywrong.localise(trained(1e-3, torch.bfloat16), golden)
    assert report.first is None
    assert any("of the changes are lost: they are below half a digit of bfloat16" in note for note in report.notes)
    wide = whywrong.localise(trained(1e-3, torch.float32), golden)
    assert not any("lost" in note for note in wide.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_converge_are_no_changes_by_themselves(dtype: torch.dtype) -> None:
    """Rows and columns in turn divided by their sums: what a step is off is no part of the next one's change."""
    start = torch.rand(24, 24, generator=torch.Generator().manual_seed(4)) + 0.1

    def normalised(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        a, steps = start.to(dtype), {"a.0": start.to(dtype)}
        for k in range(1, 30):
            a = a / a.sum(k % 2, keepdim=True)
            steps[f"a.{k}"] = a
        return steps

    golden = whywrong.Trace(normalised(torch.float64))
    assert whywrong.localise(normalised(dtype), golden).first is None


def test_changes_that_the_golden_s_own_type_hides_are_not_judged() -> None:
    golden = whywrong.Trace(trained(1e-5, torch.bfloat16))
    assert whywrong.localise(trained(1e-5, torch.float32), golden).first is None


def test_masked_scores_of_two_layers_are_no_change_of_each_other() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    exact = {f"scores.{k}": torch.randn(4, 6, 6, generator=generator, dtype=torch.float64) for k in range(2)}
    exact = {name: x.masked_fill(hidden, torch.finfo(torch.float32).min) for name, x in exact.items()}
    golden = whywrong.Trace({name: x.float() for name, x in exact.items()})
    observed = {name: (x * (1.0 + 1e-7)).clamp(min=torch.finfo(torch.float32).min).float() for name, x in exact.items()}
    assert whywrong.localise(observed, golden).first is None


def test_operations_that_come_in_another_order_are_not_each_others(rng):
    """A state that is read before it is set: the first read of one is of another time than the first of the other."""
    a, b, c = (torch.from_numpy(rng.standard_normal((5, 4))).float() for _ in range(3))

    def scan(a, b, c, before=False):
        h, out = torch.zeros(4), []
        for t in range(5):
            now = a[t] * h if before else None
            h = h * c[t] + b[t]
            out.append((now if before else a[t] * h).sum())
        return torch.stack(out)

    golden = whywrong.golden(scan, a, b, c)
    report = whywrong.localise(whywrong.capture(lambda a, b, c: scan(a, b, c, before=True), a, b, c), golden)
    assert report.first == "output"
    assert not [name for name in report.findings if name.startswith("/")]
    assert "/mul" in whywrong.localise(whywrong.capture(scan, a, b, c), golden).findings


def test_a_loops_row_has_the_largest_difference_of_any_of_its_steps():
    def doubled(x):
        for t in range(4):
            x = whywrong.step(f"h{t}", 2.0 * x + t)
        return x

    h = x = torch.ones(6)
    steps = {"x": x}
    for t in range(4):
        h = steps[f"h{t}"] = 2.0 * h + t + (0.1 if t == 0 else 0.0)
    report = whywrong.localise(steps, whywrong.golden(doubled, x=x))
    assert [row[1] for row in report.table().rows if row[0] == "h0 ... h3"] == ["0.8"]


def test_products_of_a_line_are_no_loop():
    """Both were transposed, as if one operation ran twice, and the sentence named the step."""
    generator = torch.Generator().manual_seed(6)
    d, rows, columns = (torch.rand(shape, generator=generator) for shape in ((16, 16), (16, 1), (16, 1)))
    recorded = whywrong.golden(lambda d, rows, columns: d * rows * columns.T, d=d, rows=rows, columns=columns)
    observed = {"d": d, "rows": rows, "columns": columns, "output": d * rows * columns}
    (cause,) = whywrong.explain(observed, recorded).causes
    words = "mul (the second of the line): the result of permute is applied along dimension 0, not 1"
    assert (cause.kind, cause.says) == ("axis", words)


def test_a_line_of_a_loop_is_one_operation_whatever_its_numbers():
    """Adam without its two corrections, each of which divides by another number each time."""
    generator = torch.Generator().manual_seed(8)
    p, *given = (torch.randn(7, 5, generator=generator) for _ in range(4))

    def adam(p, given, corrected=True):
        m = v = torch.zeros_like(p)
        for t, g in enumerate(given, 1):
            m = 0.9 * m + 0.1 * g
            v = 0.95 * v + 0.05 * g * g
            mean = m / (1 - 0.9**t if corrected else 1.0)
            square = v / (1 - 0.95**t if corrected else 1.0)
            p = p - 1e-2 * mean / (square.sqrt() + 1e-8)
        return p

    recorded = whywrong.golden(adam, p=p, given=given)
    observed = dict(zip(recorded.inputs, (p, *given), strict=True)) | {"output": adam(p, given, corrected=False)}
    (cause,) = whywrong.explain(observed, recorded, seconds=60).causes
    assert (
        cause.says == "each div is left out: each v passes as it is; and each div is left out: each m passes as it is"
    )


def test_one_run_of_a_line_is_said_by_its_number():
    """A state that is reset once."""
    generator = torch.Generator().manual_seed(7)
    x, a = torch.randn(6, 5, generator=generator), torch.rand(6, 5, generator=generator)

    def scan(x, a, reset=None):
        h, states = torch.zeros(5), []
        for t in range(6):
            kept = a[t].exp() * (t != reset)
            h = kept * h + x[t]
            states.append(h)
        return torch.stack(states)

    recorded = whywrong.golden(scan, x=x, a=a)
    (cause,) = whywrong.explain({"x": x, "a": a, "output": scan(x, a, reset=4)}, recorded).causes
    assert "run 5 of 6" in cause.says, cause
