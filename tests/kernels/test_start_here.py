"""The reference against PyTorch's operations, the correct kernel at odd sizes, each fault, and what is said of it."""

import random

import pytest
import torch

import labkit
import whywrong
from kernels.start_here import claims, faulty, figures, files, golden, kernel
from whywrong.errors import UsageError

PROMISED = whywrong.Precision("float32")


def inputs(seed, rows=8, columns=100, device="cpu"):
    """As the notebook draws them: rows of all sizes."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draws) * torch.logspace(-3, 1, rows)[:, None]
    return x.to(device), (1.0 + 0.5 * torch.randn(columns, generator=draws)).to(device)


def recorded(x, gain):
    return whywrong.golden(golden.probabilities, x=x, gain=gain)


def observed(name, x, gain):
    return {"x": x, "gain": gain} | faulty.kernel(name)(x, gain)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (5, 129)])
def test_the_reference_is_pytorchs_rms_norm_and_softmax(rows, columns):
    x, gain = (one.double() for one in inputs(0, rows, columns))
    expected = torch.nn.functional.rms_norm(x, [columns], gain, golden.EPS).softmax(-1)
    assert torch.allclose(golden.probabilities(x, gain), expected, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 64, 97, 129])
def test_the_right_kernel_is_right_at_odd_sizes(columns, device):
    x, gain = inputs(columns, 5, columns, device)
    with whywrong.poisoned():
        assert whywrong.localise(observed(faulty.NONE, x, gain), recorded(x, gain), precision=PROMISED).first is None


def test_the_right_kernel_takes_a_transposed_tensor(device):
    x, gain = inputs(1, 7, 7, device)
    assert whywrong.localise(observed(faulty.NONE, x.T, gain), recorded(x.T, gain), precision=PROMISED).first is None


def expected(name, x, gain):
    """The first step that the fault spoils, with that fault, in float64."""
    x, gain = x.double(), gain.double()
    n, block = x.shape[1], kernel.BLOCK
    squares = x.square()
    root = (squares.mean(-1, True) + golden.EPS).sqrt()
    scaled = x / root * gain
    largest = scaled.amax(-1, True)
    padding = -n % block
    return {
        "padded_mean": lambda: squares.sum(-1, True) / (n + padding),
        "forgotten_tail": lambda: squares[:, : n - n % block].sum(-1, True) / n,
        "eps_outside": lambda: x / (squares.mean(-1, True).sqrt() + golden.EPS) * gain,
        "neighbour_gain": lambda: x / root * torch.cat([gain[1:], gain.new_zeros(1)]),
        "first_tile": lambda: scaled[:, :block].amax(-1, True),
        "power_of_two": lambda: (scaled - largest).exp2().sum(-1, True),
        "unmasked_tail": lambda: (scaled - largest).exp().sum(-1, True) + padding * (-largest).exp(),
    }[name]()


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", faulty.FAULTS)
def test_a_fault_is_what_it_says_and_spoils_its_step_first(name, device):
    x, gain = inputs(3, device=device)
    steps, first = observed(name, x, gain), faulty.FAULTS[name].first
    wanted = expected(name, x, gain)
    assert torch.allclose(steps[first].double(), wanted, rtol=2e-5, atol=1e-7)
    assert not torch.allclose(recorded(x, gain)[first], wanted, rtol=1e-3)
    assert whywrong.localise(steps, recorded(x, gain), precision=PROMISED).first == first


@pytest.mark.parametrize("name", faulty.FAULTS)
def test_the_lines_of_a_fault_can_be_shown(name):
    fault = faulty.FAULTS[name]
    assert len(labkit.show_source(fault.function, mark=fault.mark).marked) == 1
    assert labkit.show_source(getattr(kernel.CORRECT_PARTS, fault.part), mark=fault.right).marked


@pytest.mark.parametrize("name", [one for one in faulty.FAULTS if faulty.FAULTS[one].part in ("MEAN_SQUARE", "TOTAL")])
def test_a_full_tile_hides_a_fault_of_the_tail(name, device):
    x, gain = inputs(4, columns=2 * kernel.BLOCK, device=device)
    assert whywrong.localise(observed(name, x, gain), recorded(x, gain), precision=PROMISED).first is None


def test_a_seed_draws_one_fault_and_every_fault_is_drawn():
    assert {faulty.chosen(faulty.BLIND, seed) for seed in range(50)} == set(faulty.FAULTS)
    assert faulty.chosen(faulty.BLIND, 5) == faulty.chosen(faulty.BLIND, 5)
    assert [faulty.chosen(name, 5) for name in (faulty.NONE, "eps_outside")] == [faulty.NONE, "eps_outside"]


def test_seeds_next_to_each_other_hide_different_faults():
    assert {faulty.chosen(faulty.BLIND, seed) for seed in range(7)} == set(faulty.FAULTS)
    assert {faulty.chosen(faulty.BLIND, seed) for seed in range(7, 14)} == set(faulty.FAULTS)


LINES = {
    "padded_mean": "return tl.sum(squares, 0) / columns",
    "forgotten_tail": "for tile in range(tl.cdiv(columns, BLOCK)):",
    "eps_outside": "return x / tl.sqrt_rn(mean_square + eps) * gain",
    "neighbour_gain": "gain = tl.load(gain_ptr + column, mask=column < columns, other=0.0)",
    "first_tile": "for start in range(0, columns, BLOCK):",
    "power_of_two": "return tl.exp(z)",
    "unmasked_tail": 'z = tl.load(scaled_ptr + column, mask=column < columns, other=float("-inf"))',
}


@pytest.mark.parametrize("name", faulty.FAULTS)
def test_a_fault_is_repaired_by_its_marked_line_written_anew(name, device, tmp_path):
    x, gain = inputs(6, device=device)
    steps = {"x": x, "gain": gain} | files.repaired(tmp_path, name, LINES[name])(x, gain)
    assert whywrong.localise(steps, recorded(x, gain), precision=PROMISED).first is None


def test_a_line_that_repairs_nothing_leaves_the_fault(device, tmp_path):
    x, gain = inputs(6, device=device)
    steps = {"x": x, "gain": gain} | files.repaired(tmp_path, "power_of_two", "return tl.exp2(z)")(x, gain)
    assert whywrong.localise(steps, recorded(x, gain), precision=PROMISED).first == "total"


def test_a_line_that_is_not_python_and_a_kernel_without_fault_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"line: expected a line of Python, got 'return tl\.exp"):
        files.repaired(tmp_path, "power_of_two", "return tl.exp(z")
    with pytest.raises(UsageError, match=r"fault: expected one of padded_mean.*got 'none'"):
        files.repaired(tmp_path, faulty.NONE, "return 1")


@pytest.mark.long
def test_the_kernel_in_a_file_is_the_chosen_one_and_can_be_imported_by_a_script(device, tmp_path, capsys):
    x, gain = inputs(7, 2, 33, device)
    suspect = files.suspect(tmp_path, faulty.BLIND, 4)
    wanted = faulty.kernel(faulty.chosen(faulty.BLIND, 4))(x, gain)
    assert all(torch.equal(suspect(x, gain)[name], step) for name, step in wanted.items())
    assert faulty.chosen(faulty.BLIND, 4) not in (tmp_path / "suspect.py").read_text()
    fuzzed = whywrong.fuzz(suspect, golden.probabilities, {"x": x, "gain": gain}, precision=PROMISED, examples=3)
    assert "from suspect import suspect" in fuzzed.script()
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_the_picture_shows_where_a_tail_is_left_out(device):
    x, gain = inputs(8, device=device)
    axes = figures.plot_step("mean_square", faulty.kernel("forgotten_tail"), x, gain, "").axes
    ((columns, errors),) = [line.get_data() for line in axes[1].lines if len(line.get_xdata()) > 2]
    full = [error for column, error in zip(columns, errors, strict=True) if column % kernel.BLOCK == 0]
    rest = [error for column, error in zip(columns, errors, strict=True) if column % kernel.BLOCK]
    assert max(full) < 1e-6 < min(rest)


def test_the_cause_that_is_recorded_is_that_of_the_search(device):
    for name, seed in (("forgotten_tail", 0), (faulty.NONE, 0)):
        _, why = settled(name, seed, device)
        found = claims.found(why)
        assert found.cause == (why.causes[0].says if name != faulty.NONE else None)


def test_a_fault_that_is_not_known_is_refused():
    with pytest.raises(UsageError, match=r"fault: expected one of blind, none, padded_mean.*got 'eps'"):
        faulty.chosen("eps", 0)


def settled(name, seed, device):
    """The verdict on the claim that explain names the cause, and what explain says."""
    draws = random.Random(f"sizes {seed}")  # another stream than that of the fault
    x, gain = inputs(seed, draws.randint(4, 12), draws.choice([33, 50, 75, 100, 131]), device)
    why = whywrong.explain(observed(name, x, gain), recorded(x, gain), precision=PROMISED)
    ledger = labkit.claims("start_here")
    claims.settle_cause(ledger, why, name)
    return ledger.settled["cause"].verdict, why


@pytest.mark.parametrize("seed", range(3))
def test_no_wrong_cause_is_named(seed, device):
    verdict, why = settled(faulty.chosen(faulty.BLIND, seed), seed, device)
    assert verdict != "refuted", why


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_no_wrong_cause_is_named_in_fifty_draws(seed, device):
    verdict, why = settled(faulty.chosen(faulty.BLIND, seed), seed, device)
    assert verdict != "refuted", why


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("name", [name for name in faulty.FAULTS if name != "unmasked_tail"])
def test_the_cause_is_named(name, device):
    verdict, why = settled(name, 0, device)
    if name == "first_tile":  # where a maximum stops being looked for is seen no better than by the largest numbers
        assert {cause.kind for cause in why.causes} == {"truncate"}, why
    else:
        assert verdict == "confirmed"


def test_where_there_is_no_fault_none_is_named(device):
    verdict, why = settled(faulty.NONE, 0, device)
    assert (verdict, why.step) == ("confirmed", None)


def test_a_cause_that_is_not_the_fault_refutes_the_claim(device):
    _, why = settled("eps_outside", 0, device)
    ledger = labkit.claims("start_here")
    claims.settle_cause(ledger, why, "forgotten_tail")
    assert ledger.settled["cause"].verdict == "refuted"


def test_the_first_step_is_settled_both_ways(device):
    x, gain = inputs(0, device=device)
    report = whywrong.localise(observed("eps_outside", x, gain), recorded(x, gain), precision=PROMISED)
    for name, verdict in (("eps_outside", "confirmed"), ("first_tile", "refuted"), (faulty.NONE, "refuted")):
        ledger = labkit.claims("start_here")
        claims.settle_first_step(ledger, report, name)
        assert ledger.settled["first_step"].verdict == verdict


def test_the_hunt_and_the_repair_are_settled_both_ways(device):
    x, gain = inputs(0, 2, 33, device)
    right = whywrong.localise(observed(faulty.NONE, x, gain), recorded(x, gain), precision=PROMISED)
    wrong = whywrong.localise(observed("padded_mean", x, gain), recorded(x, gain), precision=PROMISED)
    for name, report in (("padded_mean", wrong), (faulty.NONE, right)):
        sizes = {"x": (2, "columns"), "gain": ("columns",)}
        fuzzed = whywrong.fuzz(
            faulty.kernel(name),
            golden.probabilities,
            {"x": x, "gain": gain},
            precision=PROMISED,
            examples=3,
            sizes=sizes,
            most=200,
        )
        for truth in ("padded_mean", faulty.NONE):
            ledger = labkit.claims("start_here")
            claims.settle_smallest(ledger, fuzzed, truth)
            assert (ledger.settled["smallest"].verdict == "confirmed") == (truth == name)
        ledger = labkit.claims("start_here")
        claims.settle_correct_kernel(ledger, {33: report}, fuzzed)
        assert ledger.settled["right_kernel"].verdict == ("confirmed" if name == faulty.NONE else "refuted")
