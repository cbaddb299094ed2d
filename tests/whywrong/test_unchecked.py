"""Kernels that do not check their integers: which they are, and that no explanation ends the process in one."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import whywrong
from tools.unchecked_integers import PLACES, Called, changes, ended, recorded
from whywrong.explaining.part import Edit, NotRunError, Part
from whywrong.recording.operations import UNCHECKED
from whywrong.recording.program import Ref
from whywrong.recording.steps import as_trace

EXCHANGED_LENGTHS = """
import torch, whywrong
from torch.nn import functional as F

class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(5, 4)

    def forward(self, x):
        lengths = torch.tensor([6, 5]), torch.tensor([2, 1])
        return F.ctc_loss(self.inner(x).log_softmax(-1), torch.tensor([[1, 2], [3, 1]]), *lengths)

torch.manual_seed(0)
reference, x = Reference(), torch.randn(6, 2, 5)
golden = whywrong.golden(reference, x)
observed = {name: golden[name] * (1 + name.startswith("grad:inner")) for name in golden.names}
print(whywrong.explain(observed, golden, precision=whywrong.Precision("float32"), seconds=120).causes[0].says)
"""
"""Of a loss whose lengths stand in each other's place torch's backward writes outside of its memory."""


class Reference(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, *inputs):
        return self.run(self.weight, *inputs)


def loss(weight, x, targets, lengths):
    return F.ctc_loss((x * weight).log_softmax(-1), targets, torch.tensor([9, 9]), lengths, reduction="sum")


def pooled(weight, x):
    return F.max_pool2d(x * weight, 2)


def bags(weight, i):
    table = weight[:, None] * torch.linspace(1.0, 2.0, 3, dtype=weight.dtype)
    return F.embedding_bag(i, table, mode="sum", per_sample_weights=weight[i])


def chosen(weight, i):
    return weight[i] + weight.gather(0, i[0]).sum()


def golden_of(run):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(1, 6, (2, 3), generator=generator)
    x = torch.randn(9, 2, 6, generator=generator)
    inputs = {loss: (x, whole.flatten(), torch.tensor([4, 2])), pooled: (x[None],), bags: (whole,), chosen: (whole,)}
    return whywrong.golden(Reference(run), *inputs.get(run, inputs[loss]))


@pytest.mark.long
def test_an_explanation_does_not_end_the_process():
    command = [sys.executable, "-c", EXCHANGED_LENGTHS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout[-20:]) == (0, "is 2 times as large\n"), done.stderr


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="its guard pages are Linux's")
def test_the_list_is_what_ends_a_process_and_what_is_let_through_does_not():
    unchecked = {"_ctc_loss", "_ctc_loss_backward", "max_pool2d_with_indices_backward", "_embedding_bag_backward"}
    recordings = (recorded(golden_of(run).program) for run in (loss, pooled, bags, chosen))
    calls = {call.name.split(".")[0]: call for some in recordings for call in some}
    calls = [calls[name] for name in (*unchecked, "gather", "index", "index_put", "scatter_add")]
    assert unchecked < UNCHECKED.keys()
    assert {each.name.split(".")[0] for each in ended(calls, False, PLACES[2:])} == unchecked
    assert ended(calls, True, PLACES[2:]) == []


def part_of(run, step="grad:weight"):
    golden = golden_of(run)
    observed = {name: golden[name] for name in golden.names if "/" not in name}
    return Part(golden, as_trace("observed", observed), step)


def replaced(part, name, k, new):
    """The step if an operation's argument k were `new`."""
    (node,) = (node for node in part.nodes if node.op == name)

    def run(*args):
        return node.func(*args[:k], new, *args[k + 1 :])

    return part.value({node.id: Edit(run)})


def test_integers_within_limits_are_run_and_others_are_not():
    part = part_of(loss)
    targets, lengths = part.golden["input.1"], part.golden["input.2"]
    assert replaced(part, "_ctc_loss_backward", 2, targets.flip(0)).isfinite().all()
    line = "ctc_loss_backward with other integers or shapes is not run: its kernel does not check them"
    for k, new in ((2, targets + 1), (2, targets[:-1]), (3, torch.tensor([9, 10])), (4, lengths.flip(0)), (7, 1)):
        with pytest.raises(NotRunError, match=line):
            replaced(part, "_ctc_loss_backward", k, new)
    part = part_of(pooled)
    (node,) = (node for node in part.nodes if node.op == "max_pool2d_with_indices_backward")
    places = part.values[node.args[7].id]
    assert isinstance(node.args[7], Ref)
    assert not torch.equal(replaced(part, node.op, 7, places.flip(-1)), part.values[part.target])
    with pytest.raises(NotRunError):
        replaced(part, node.op, 7, places + 12)


def test_other_numbers_choose_other_places():
    part = part_of(pooled)
    found = part.fresh({name: -part.golden[name] for name in part.golden.inputs})
    assert not torch.equal(found[part.target], part.values[part.target])


def test_observed_integers_that_an_unchecked_kernel_would_take_are_noted():
    def counted(weight, x, targets, lengths):
        return loss(weight, x, targets, whywrong.step("lengths", lengths + 0))

    golden = golden_of(counted)
    observed = {name: golden[name] for name in golden.names if "/" not in name}
    observed |= {"lengths": torch.tensor([3, 3]), "grad:weight": observed["grad:weight"] * 2}
    found = whywrong.explain(observed, golden, step="grad:weight", precision=whywrong.Precision("float32"))
    assert found.verdict == "none of these"
    assert any("ctc_loss_backward with other integers or shapes is not run" in note for note in found.notes)


def test_a_call_is_changed_in_each_argument():
    call = Called("_fft_r2c.default", (torch.ones(4, 6), [1], 0, True), {})
    words = [each for each, _ in changes(call)]
    assert words[0] == "as it is"
    assert {"argument 0: 3 of 4 in dimension 0", "argument 1: [0] -1", "argument 2: 1", "argument 3: False"} <= {*words}
