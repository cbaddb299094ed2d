"""`whywrong diff` as people and programs call it: exit codes, JSON, several runs, pictures; what was found by
attack."""

import gc
import itertools
import json
import pickle
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import whywrong
from whywrong import Trace, capture, golden
from whywrong.checking.with_program import Rerun
from whywrong.checking.without_program import BLOCK_ELEMENTS
from whywrong.console import without_collector
from whywrong.reporting.command import main

EXAMPLES = Path(__file__).parents[2] / "data" / "examples"


@pytest.fixture
def diff(capsys):
    """The exit code, what `whywrong diff --json` says, and the other output."""

    def run(*arguments):
        code = main(["diff", *map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if code < 2 else {}, err

    return run


def block():
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)


@pytest.fixture
def recorded(tmp_path):
    """A recorded golden, a clean run, and one whose second linear layer is 0.1% off."""
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    golden(block(), x).save(tmp_path / "golden.safetensors")
    capture(block(), x).save(tmp_path / "right.safetensors")
    wrong = block()
    wrong.linear2.register_forward_hook(lambda m, i, o: o * 1.001)
    capture(wrong, x).save(tmp_path / "wrong.safetensors")
    return tmp_path


def test_no_divergence_where_a_step_could_not_be_checked_is_no_success(tmp_path, diff, monkeypatch):
    def fails(*given, **how):
        raise RuntimeError("out of bounds")

    monkeypatch.setattr(Rerun, "_simulated", fails)
    x = torch.randn(4, 3)
    golden(lambda x: x.sum(0), x=x).save(tmp_path / "golden.safetensors")
    save_file({"x": x, "output": 2.0 * x.sum(0)}, tmp_path / "observed.safetensors")
    assert diff(tmp_path / "golden.safetensors", tmp_path / "observed.safetensors")[0] == 2


@pytest.mark.long
def test_a_recorded_golden_tells_own_from_inherited_at_every_step(recorded, diff):
    assert diff(recorded / "golden.safetensors", recorded / "right.safetensors")[0] == 0
    code, said, _ = diff(recorded / "golden.safetensors", recorded / "wrong.safetensors")
    assert (code, said["alarm"], said["first_divergent_step"]) == (1, True, "linear2")
    steps = said["steps"]
    assert all(step["separated"] for step in steps.values())
    assert steps["linear2"]["own"]["ok"] is False
    assert steps["norm2"]["own"]["ok"] is True
    assert steps["norm2"]["ok"] is False
    assert steps["norm2"]["reasons"] == ["inherited only"]


def traces(tmp_path, golden_steps, observed_steps, about=None):
    """Two plain files, both with the metadata."""
    for name, steps in (("g", golden_steps), ("o", observed_steps)):
        Trace(steps, about).save(tmp_path / f"{name}.safetensors")
    return tmp_path / "g.safetensors", tmp_path / "o.safetensors"


def test_plain_dumps_are_checked_as_a_whole_and_that_is_said(tmp_path, diff, capsys):
    g = torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    paths = traces(tmp_path, {"a": g, "b": g @ g}, {"a": g.float(), "b": 1.001 * (g @ g).float()})
    code, said, _ = diff(*paths)
    assert (code, said["first_divergent_step"]) == (1, "b")
    assert (said["steps"]["b"]["separated"], said["steps"]["b"]["own"]) == (False, "not separated")
    main(["diff", *map(str, paths)])
    text = capsys.readouterr().out
    assert "own and inherited errors are not separated" in text
    assert "a guess from the dtypes" in text
    assert "first divergence: b" in text


def test_the_first_step_that_is_not_equal_is_named_where_rounding_may_explain_it(tmp_path, diff):
    """Two runs of one program on one machine declare equal bits, and the reader knows that."""
    a = torch.linspace(1.0, 2.0, 100)
    files = traces(tmp_path, {"a": a, "b": a, "c": a}, {"a": a, "b": a * (1.0 + 1e-7), "c": a * 1.5})
    assert diff(*files)[1]["notes"] == [
        "the first step that is not equal to the golden's is b; it may be so by rounding"
    ]
    assert diff(files[0], files[0])[1]["notes"] == []


WEIGHTS = {"fc.weight": torch.ones(4, 3), "weight": torch.ones(2), "out": torch.ones(4)}


@pytest.mark.parametrize(
    ("prefix", "container"),
    [
        ("module.", lambda steps: steps),
        ("_orig_mod.module.", lambda steps: steps),
        ("state_dict.", lambda steps: {"state_dict": steps, "optimizer": {"lr": 0.1}, "epoch": 3}),
    ],
)
def test_a_prefix_that_one_side_alone_has_is_taken_off_and_that_is_said(tmp_path, diff, prefix, container):
    """As of a module in a wrapper, and of a checkpoint that holds more."""
    inner = prefix if container(1) == 1 else ""
    torch.save(WEIGHTS, tmp_path / "plain.pt")
    torch.save(container({inner + name: x for name, x in WEIGHTS.items()}), tmp_path / "right.pt")
    torch.save(container({inner + n: 1.1 * x if n == "out" else x for n, x in WEIGHTS.items()}), tmp_path / "wrong.pt")
    code, said, _ = diff(tmp_path / "plain.pt", tmp_path / "right.pt")
    assert (code, list(said["steps"])) == (0, list(WEIGHTS))
    assert said["notes"] == [f"names: 3 of the observed are taken without {prefix!r} before them"]
    code, said, _ = diff(tmp_path / "plain.pt", tmp_path / "right.pt", tmp_path / "wrong.pt")
    assert (code, said["first_divergent_step"], list(said["run_to_run"])) == (1, "out", ["out"])
    code, said, _ = diff(tmp_path / "wrong.pt", tmp_path / "plain.pt")
    assert (code, said["notes"][0]) == (1, f"names: 3 of the observed are taken with {prefix!r} before them")
    assert f"{prefix}out" in said["divergent_steps"]


def test_of_two_prefixes_none_is_guessed(tmp_path, diff):
    torch.save(WEIGHTS, tmp_path / "plain.pt")
    torch.save({"model": WEIGHTS, "average": WEIGHTS}, tmp_path / "two.pt")
    code, _, err = diff(tmp_path / "plain.pt", tmp_path / "two.pt")
    assert (code, "shares no step with the golden (it has model.fc.weight" in err) == (2, True)
    torch.save({"block.out": WEIGHTS["out"], "a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "one.pt")
    code, _, err = diff(tmp_path / "plain.pt", tmp_path / "one.pt")
    assert (code, "shares no step with the golden (it has block.out, a, b" in err) == (2, True), err


def test_text_in_an_npz_that_the_golden_lacks_spoils_nothing(tmp_path, diff):
    np.savez(tmp_path / "g.npz", x=np.ones(3))
    np.savez(tmp_path / "o.npz", x=np.ones(3), config=np.array([{"lr": 1}]), note=np.array("text"))
    code, said, _ = diff(tmp_path / "g.npz", tmp_path / "o.npz")
    assert (code, said["unexpected"]) == (0, ["config", "note"])


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_a_golden_that_is_narrower_than_the_observed_may_be_off_by_its_own_rounding(tmp_path, diff, narrow):
    x, w = torch.randn(2, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).to(narrow)

    def steps(x, w, factor=1.0):
        a = x @ w
        b = torch.softmax(a, -1) * factor
        return {"x": x, "a": a, "b": b, "c": b @ w}

    code, said, _ = diff(*traces(tmp_path, steps(x, w), steps(x.double(), w.double())))
    assert (code, said["first_divergent_step"]) == (0, None)
    assert said["notes"] == ["in 4 steps the golden is narrower than the observed: its rounding is allowed"]
    code, said, _ = diff(*traces(tmp_path, steps(x, w), steps(x.double(), w.double(), 1.1)))
    assert (code, said["first_divergent_step"]) == (1, "b")
    other = {"x": x, "y": w.float()}, {"x": x.float(), "y": 1.0003 * w.float()}  # a step that is not narrower
    assert diff(*traces(tmp_path, *other))[1]["first_divergent_step"] == "y"
    code, said, _ = diff(*traces(tmp_path, {"x": x}, {"x": x[:5].double()}))
    assert (code, said["steps"]["x"]["reasons"]) == (1, ["shape: observed (5, 32), golden (32, 32)"])


def test_prose_changes_nothing(tmp_path, diff):
    """A fault of 1e-3 in float32 is one, whatever a note says was tried."""
    g = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    note = "bfloat16 was tried and rejected; tf32 matmul; 1% is fine"
    paths = traces(tmp_path, {"x": g}, {"x": 1.001 * g.float()}, {"dtype_note": note, "compute": "bf16"})
    code, said, _ = diff(*paths)
    assert (code, said["texts"]["dtype_note"]) == (1, note)
    assert diff(*paths, "--precision", "storage=bfloat16")[0] == 1, "systematic, below one rounding"


def test_a_declaration_in_the_file_or_on_the_command_line_is_taken(tmp_path, diff):
    g = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rounded = g.bfloat16().float()
    paths = traces(tmp_path, {"x": g}, {"x": rounded})
    assert diff(*paths)[0] == 1
    code, said, _ = diff(*paths, "--precision", "storage=bfloat16")
    assert (code, said["precision"]["fields"]["storage"], said["precision"]["guessed"]) == (0, "bfloat16", False)
    assert diff(*traces(tmp_path, {"x": g}, {"x": rounded}, {"precision": '{"storage": "bfloat16"}'}))[0] == 0


def test_single_tensors_are_compared_whatever_they_are_called(tmp_path, diff):
    np.save(tmp_path / "a.npy", np.arange(6.0))
    np.save(tmp_path / "b.npy", np.arange(6.0).astype(np.float32))
    assert diff(tmp_path / "a.npy", tmp_path / "b.npy")[0] == 0
    np.save(tmp_path / "b.npy", np.arange(6.0, dtype=np.float32) * 1.001)
    assert diff(tmp_path / "a.npy", tmp_path / "b.npy")[0] == 1


def test_where_no_order_is_known_the_first_is_not_guessed(tmp_path, diff, capsys):
    for side, factor in (("g", 1.0), ("o", 1.1)):
        (tmp_path / side).mkdir()
        for name in ("query", "attention"):
            np.save(tmp_path / side / f"{name}.npy", np.ones((4, 4)) * factor)
    code, said, _ = diff(tmp_path / "g", tmp_path / "o")
    assert (code, said["first_divergent_step"], said["order_known"]) == (1, None, False)
    assert said["divergent_steps"] == ["attention", "query"]
    main(["diff", str(tmp_path / "g"), str(tmp_path / "o")])
    assert "order not known: the first divergence is one of attention, query" in capsys.readouterr().out


def test_an_order_that_the_observed_alone_has_is_taken(tmp_path, diff):
    (tmp_path / "g").mkdir()
    for name in ("query", "attention"):
        np.save(tmp_path / "g" / f"{name}.npy", np.ones(4))
    path = Trace({"query": torch.full((4,), 1.1), "attention": torch.full((4,), 1.2)}).save(tmp_path / "o.safetensors")
    said = diff(tmp_path / "g", path)[1]
    assert (said["first_divergent_step"], said["order_known"]) == ("query", True)


def test_a_step_that_a_plain_dump_lacks_is_missing_at_the_end_and_fused_before(tmp_path, diff):
    g = {name: torch.ones(4, dtype=torch.float64) for name in "abc"}
    paths = traces(tmp_path, g, {"a": torch.ones(4), "c": torch.ones(4)})
    code, said, _ = diff(*paths)
    assert (code, said["steps"]["b"]["ok"]) == (0, None)
    code, said, _ = diff(*traces(tmp_path, g, {"a": torch.ones(4), "b": torch.ones(4)}))
    assert (code, said["first_divergent_step"]) == (1, "c")


def test_several_runs_are_compared_with_each_other(tmp_path, diff, capsys):
    g = torch.linspace(1.0, 2.0, 64, dtype=torch.float64).reshape(8, 8)
    paths = [Trace({"x": g}).save(tmp_path / "g.safetensors")]
    for i, change in enumerate((0.0, 2.0**-24, 0.5)):
        x = g.float()
        x[3, 3] += change * 2.0
        paths.append(Trace({"x": x}).save(tmp_path / f"run{i}.safetensors"))
    more = [Trace({"x": g.float() * 1.7}).save(tmp_path / "more.safetensors")]
    again = Trace({"x": g.float()}).save(tmp_path / "again.safetensors")
    code, said, _ = diff(*paths)
    assert (code, said["run"]) == (1, str(paths[3]))
    assert (said["run_to_run"]["x"]["distinct"], said["run_to_run"]["x"]["spread"]) == (3, 1.0)
    assert "run2.safetensors only: a race or an uninitialised read" in said["run_to_run"]["x"]["finding"]
    assert main(["diff", *map(str, paths)]) == 1
    assert "shown: run2.safetensors, of 3 runs" in capsys.readouterr().out
    findings = [diff(paths[0], *some)[1]["run_to_run"]["x"]["finding"] for some in (paths[1:3], paths[3:] + more)]
    assert findings[0] == "order noise, within the bound"
    assert findings[1].startswith("beyond the bound in every run, by different errors")
    assert main(["diff", str(paths[0]), str(paths[1]), str(again)]) == 0
    assert "every run gave the same bits in every step" in capsys.readouterr().out


@pytest.mark.long
def test_runs_of_which_some_have_no_gradients_are_compared_with_each_other(recorded, diff):
    right = whywrong.load(recorded / "right.safetensors")
    steps = {name: right[name] for name in right.names if "/" not in name}
    Trace({name: x for name, x in steps.items() if "grad:" not in name}).save(recorded / "forward.safetensors")
    Trace(steps | {"grad:norm1.bias": 1.01 * steps["grad:norm1.bias"]}).save(recorded / "backward.safetensors")
    runs = [recorded / f"{name}.safetensors" for name in ("right", "backward", "forward")]
    for some in (runs, runs[::-1]):
        code, said, _ = diff(recorded / "golden.safetensors", *some)
        assert (code, said["first_divergent_step"], said["run"]) == (1, "grad:norm1.bias", str(runs[1]))


@pytest.mark.long
def test_pictures_of_two_steps_never_overwrite_each_other(tmp_path, diff):
    g = {name: torch.ones(3, 3) for name in ("a/b", "a:b")}
    paths = traces(tmp_path, g, {name: 2 * value for name, value in g.items()})
    diff(*paths, "--plot", tmp_path / "pictures")
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.npy"], "is not there"),
        (["o.safetensors", "--precision", "storage=bf17"], "got storage='bf17'"),
        (["o.safetensors", "o.safetensors"], "expected each path once, got one twice"),
        (["other.safetensors"], "shares no step with"),
        (["old.pt"], "got what torch.load(weights_only=True) refuses"),
    ],
)
def test_what_is_no_divergence_exits_2_with_one_line(tmp_path, diff, recwarn, arguments, message):
    traces(tmp_path, {"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(2)})
    save_file({"p": torch.ones(2), "q": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Path, protocol=4))  # of which torch warns
    given = [tmp_path / a if a.endswith((".npy", ".pt", ".safetensors")) else a for a in arguments]
    code, _, err = diff(tmp_path / "g.safetensors", *given)
    assert code == 2
    assert message in err
    assert err.strip().count("\n") == 0
    assert not recwarn.list


def test_without_a_step_in_common_names_of_both_sides_are_told_and_what_maps_them(recorded, diff):
    golden = recorded / "golden.safetensors"
    torch.save({"steps": {"hidden": torch.ones(2), "logits": torch.ones(3)}}, recorded / "nested.pt")
    code, _, said = diff(golden, recorded / "nested.pt")
    assert code == 2
    both = (
        "it has steps.hidden, steps.logits; the golden input.0, self_attn.in_proj_weight, self_attn.in_proj_bias, ..."
    )
    assert f"nested.pt: shares no step with the golden ({both}); expected the same names, or --names" in said
    assert "whywrong.propose_names" in said
    for first in (golden, recorded / "nested.pt"):
        code, _, said = diff(first, golden)
        assert code == 2
        assert (
            f"{golden}: expected the steps of an implementation, as of whywrong.capture, got a recorded golden" in said
        )
    assert said.count("\n") == 1


def test_an_error_of_the_program_itself_exits_2_and_never_1(tmp_path, diff, monkeypatch):
    paths = traces(tmp_path, {"x": torch.ones(2)}, {"x": torch.ones(2)})

    def broken(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("whywrong.reporting.diff.localise", broken)
    code, _, err = diff(*paths)
    assert (code, err) == (2, "whywrong: RuntimeError: two (WHYWRONG_TRACEBACK=1 shows where)\n")


@pytest.mark.parametrize(
    ("g", "o", "alarm"),
    [
        (torch.tensor([2**63 - 1, 5]), torch.tensor([2**63 - 1, 5]).to(torch.uint64), False),
        (torch.tensor([-1, 5]), torch.tensor([2**64 - 1, 5], dtype=torch.uint64), True),
        (torch.tensor([2**62, -(2**62)]), torch.tensor([-(2**62), 2**62]), True),
        (torch.tensor([7], dtype=torch.uint16), torch.tensor([7], dtype=torch.uint16), False),
        (torch.tensor([7], dtype=torch.uint32), torch.tensor([8], dtype=torch.uint32), True),
        (torch.tensor([True]), torch.tensor([False]), True),
        (torch.tensor([1.0]), torch.tensor([1]), False),
        (torch.tensor([1.5]), torch.tensor([1]), True),
        (torch.tensor([1e150], dtype=torch.float64), torch.tensor([1e150], dtype=torch.float64), False),
        (torch.tensor([1e155, 1.0], dtype=torch.float64), torch.tensor([1.1e155, 1.0], dtype=torch.float64), True),
        (torch.ones(3), torch.ones(4), True),
        (torch.ones(0, 4), torch.ones(0, 4), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1e150], dtype=torch.float64), torch.tensor([2e150], dtype=torch.float64), True),
    ],
)
def test_types_sizes_and_extremes_found_by_attack(tmp_path, diff, g, o, alarm):
    torch.save({"": g}, tmp_path / "g.pt")
    torch.save({"": o}, tmp_path / "o.pt")
    code, said, _ = diff(tmp_path / "g.pt", tmp_path / "o.pt")
    assert (code, said["alarm"]) == (int(alarm), alarm)


def test_a_divergent_step_without_a_name_is_one(tmp_path, diff):
    assert diff(*traces(tmp_path, {"": torch.ones(3)}, {"": torch.ones(3) * 2.0}))[:1] == (1,)


def test_one_long_row_is_read_in_blocks(tmp_path, diff):
    g = torch.linspace(1.0, 2.0, 2 * BLOCK_ELEMENTS + 7, dtype=torch.float64)
    o = g.float()
    o[BLOCK_ELEMENTS + 5] *= 1.01
    code, said, _ = diff(*traces(tmp_path, {"x": g}, {"x": o}))
    step = said["steps"]["x"]
    assert (code, step["mismatches"], step["first_index"]) == (1, 1, [BLOCK_ELEMENTS + 5])


@pytest.mark.slow
def test_a_large_plain_step_is_read_in_blocks(tmp_path):
    """A pair of 128 MiB each: what is needed beyond the libraries and the files' own pages stays small."""
    x = torch.arange(1 << 25, dtype=torch.float32).reshape(1 << 12, -1)
    save_file({"x": x}, tmp_path / "g.safetensors")
    save_file({"x": x}, tmp_path / "o.safetensors")
    small = traces(tmp_path / "..", {"x": x[:2, :2].clone()}, {"x": x[:2, :2].clone()})
    peak = []
    for pair in (small, (tmp_path / "g.safetensors", tmp_path / "o.safetensors")):
        code = "import sys, resource; from whywrong.reporting.command import main; "
        code += f"c = main({['diff', *map(str, pair)]!r}); "
        code += "sys.stderr.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)); sys.exit(c)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peak.append(int(run.stderr))
    files = 2 * x.numel() * 4
    assert (peak[1] - peak[0]) * 1024 < files + 300 * 2**20


def network(dtype, wrong=None, layers=4):
    """The steps of a residual network that stores each of them in `dtype`, and those in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 48, dtype=torch.float64, generator=generator).to(dtype).double()
    weights = [
        torch.randn(48, 48, generator=generator, dtype=torch.float64).to(dtype).double() / 7 for _ in range(layers)
    ]
    golden, observed = {"x": x}, {"x": x.to(dtype)}
    for i, w in enumerate(weights):
        for steps, kept in ((golden, torch.float64), (observed, dtype)):
            h = steps["x"] if i == 0 else steps[f"{layers - i}.out"]
            p = torch.softmax((h.double() @ w) * (1.05 if steps is observed and wrong == i else 1.0), -1).to(kept)
            name = f"{layers - i - 1}"  # the alphabet is not the order
            steps[f"{name}.p"] = p
            steps[f"{name}.out"] = (h.double() + p.double() @ w.T).to(kept)
    return golden, observed


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_network_without_a_program_is_not_flagged(tmp_path, diff, dtype, known):
    for name, steps in zip("go", network(dtype), strict=True):
        save_file(steps, tmp_path / f"{name}.safetensors", {"order": json.dumps(list(steps))} if known else None)
    code, said, _ = diff(tmp_path / "g.safetensors", tmp_path / "o.safetensors")
    assert (code, said["order_known"]) == (0, known)


def test_the_first_wrong_step_of_a_narrow_network_is_named_where_the_order_is_known(tmp_path, diff):
    for name, steps in zip("go", network(torch.bfloat16, wrong=2), strict=True):
        save_file(steps, tmp_path / f"{name}.safetensors", {"order": json.dumps(list(steps))})
        save_file(steps, tmp_path / f"{name}2.safetensors")
    assert diff(tmp_path / "g.safetensors", tmp_path / "o.safetensors")[1]["first_divergent_step"] == "1.p"


def test_without_an_order_a_gap_in_the_errors_is_an_alarm_and_nothing_is_first(tmp_path, diff):
    for name, steps in zip("go", network(torch.float32, wrong=2), strict=True):
        save_file(steps, tmp_path / f"{name}.safetensors")
    code, said, _ = diff(tmp_path / "g.safetensors", tmp_path / "o.safetensors")
    assert (code, said["first_divergent_step"]) == (1, None)
    assert said["divergent_steps"] == ["0.out", "0.p", "1.out", "1.p"]


def test_without_an_order_errors_that_grow_from_step_to_step_are_no_gap_whatever_the_names(tmp_path, diff):
    generator = torch.Generator().manual_seed(0)
    g, o = {}, {}
    for k in range(6):
        name = "fedcba"[k]
        g[name] = torch.randn(64, 64, dtype=torch.float64, generator=generator)
        o[name] = (g[name] * (1.0 + 3e-8 * 8**k * torch.randn(64, 64, generator=generator))).float()
    for name, steps in zip("go", (g, o), strict=True):
        save_file(steps, tmp_path / f"{name}.safetensors")
    assert diff(tmp_path / "g.safetensors", tmp_path / "o.safetensors")[0] == 0


def test_inputs_that_are_given_are_all_that_a_step_inherits(tmp_path, diff):
    generator = torch.Generator().manual_seed(0)
    g = {name: torch.randn(64, 64, dtype=torch.float64, generator=generator) for name in ("a", "b", "c")}
    o = {"a": g["a"].float(), "b": g["b"].bfloat16(), "c": (g["c"] * (1.0 + 2.0**-9)).float()}
    declared = '{"steps": {"b": {"storage": "bfloat16"}}}'
    for inputs, first in ((["b"], None), (["a"], "c")):
        steps = json.dumps({"c": {"inputs": inputs}})
        o["c"] = (g["c"] * (1.0 + 2.0**-9 * torch.randn(64, 64, generator=generator).sign())).float()
        paths = traces(tmp_path, g, o, {"steps": steps, "precision": declared})
        assert diff(*paths)[1]["first_divergent_step"] == first


def test_a_function_that_is_nearly_right_is_found_below_the_rounding_of_its_type(tmp_path, diff):
    x = torch.randn(128, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).bfloat16()
    gelu = torch.nn.functional.gelu
    exact = {"x": x.double(), "y": gelu(x.double(), approximate="tanh")}
    for approximate, first in (("tanh", None), ("none", "y")):
        y = gelu(x.float(), approximate=approximate).bfloat16()
        paths = traces(tmp_path, exact, {"x": x, "y": y}, {"precision": '{"storage": "bfloat16"}'})
        assert diff(*paths)[1]["first_divergent_step"] == first


def test_masks_and_whole_numbers_are_exact_and_choices_after_rounding_may_be_ties(tmp_path, diff):
    see = torch.ones(32, 32, dtype=torch.bool).tril()
    mask, wrong = (torch.zeros(32, 32).masked_fill(~s, -65504.0) for s in (see, see.tril(-1)))
    exact = torch.zeros(32, 32, dtype=torch.float64).masked_fill(~see, torch.finfo(torch.float64).min)
    assert diff(*traces(tmp_path, {"mask": exact}, {"mask": mask.half()}))[0] == 0
    assert diff(*traces(tmp_path, {"mask": exact}, {"mask": wrong.half()}))[0] == 1
    assert diff(*traces(tmp_path, {"see": see}, {"see": see.tril(-1)}))[0] == 1
    x = torch.randn(5000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    best, rounded = x.argmax(-1), x.bfloat16().argmax(-1)
    assert 0 < int((best != rounded).sum()) < 100
    code, said, _ = diff(*traces(tmp_path, {"x": x, "best": best}, {"x": x.bfloat16(), "best": rounded}))
    assert (code, "may be ties" in said["steps"]["best"]["reasons"][0]) == (0, True)
    assert diff(*traces(tmp_path, {"x": x, "best": best}, {"x": x.bfloat16(), "best": (-x).argmax(-1)}))[0] == 1
    assert diff(*traces(tmp_path, {"x": x, "best": best}, {"x": x, "best": rounded}))[0] == 1, "nothing was rounded"


def test_a_type_that_was_not_declared_is_recognised(tmp_path, diff):
    paths = traces(tmp_path, *network(torch.bfloat16))
    hint = "this looks like bfloat16: declare it with --precision storage=bfloat16"
    code, said, _ = diff(*paths, "--precision", "storage=float32")
    assert (code, any(hint in note for note in said["notes"])) == (1, True)
    code, said, _ = diff(*paths, "--precision", "storage=bfloat16")
    assert (code, said["notes"][1:]) == (0, [])
    wrong = traces(tmp_path, *network(torch.float32, wrong=1))
    assert not any("looks like" in note for note in diff(*wrong)[1]["notes"])


@pytest.mark.parametrize("path", ["file", "file/below", "x" * 300], ids=["a file", "below a file", "a long name"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys, path):
    (tmp_path / "file").touch()
    dump, out = str(EXAMPLES / "attention_right.safetensors"), str(tmp_path / path)
    for option in (["--plot", out], ["--html", f"{out}/page.html"]):
        assert main(["diff", dump, dump, *option]) == 2
        assert re.search(r"whywrong: --\w+: .* cannot be written \(.*\)", capsys.readouterr().err)


def test_help_is_80_columns_wide_and_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["diff", "--help"])
    shown = capsys.readouterr().out
    assert "example:\n  whywrong diff golden.safetensors observed.safetensors --explain" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(("terminal", "seconds"), [(True, 3.0), (True, 0.1), (False, 3.0)])
def test_a_long_diff_says_on_a_terminal_how_far_it_is(terminal, seconds, tmp_path, diff, monkeypatch):
    files = [tmp_path / f"{side}.npz" for side in ("golden", "observed")]
    for file in files:
        np.savez(file, **{f"s{k}": np.ones(3) for k in range(4)})
    clock = iter(itertools.count(0.0, seconds))
    monkeypatch.setattr("whywrong.console.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    code, _, said = diff(*files)
    assert code == 0
    assert said.split("\r")[0] == ("0 of 4 steps" if terminal and seconds > 1 else "")
    assert said.replace("\r", "").strip().startswith("0 of 4") == (terminal and seconds > 1)


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"whywrong \d+\.\d+\.\d+\n", capsys.readouterr().out)


ENDS = """
import atexit, gc, sys
from whywrong.reporting.command import main
atexit.register(lambda: print("not looked through:", gc.get_freeze_count() > 1000, gc.isenabled()))
sys.argv = ["whywrong", *sys.argv[1:]]
sys.exit(main())
"""


def test_a_process_that_ends_looks_for_no_garbage_and_a_call_changes_nothing(capsys):
    """Python would look through all modules once more, which took a second of each command."""
    given = ["diff", EXAMPLES / "attention_golden.safetensors", EXAMPLES / "attention_wrong.safetensors"]
    done = subprocess.run([sys.executable, "-c", ENDS, *given], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "not looked through: True True", done.stderr
    kept = gc.get_freeze_count()
    assert done.returncode == main(list(map(str, given))) == 1
    assert gc.get_freeze_count() <= kept
    assert gc.isenabled()


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_afterwards_as_it_was(on):
    try:
        (gc.enable if on else gc.disable)()
        with suppress(OSError), without_collector():
            assert not gc.isenabled()
            raise OSError
        assert gc.isenabled() == on
    finally:
        gc.enable()
