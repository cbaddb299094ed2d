"""`whywrong.assert_close` as a test calls it: what passes, and what the message says where it does not."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import whywrong
from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError

GENERATOR = torch.Generator().manual_seed(0)
Q, K = (torch.randn(33, 64, generator=GENERATOR) for _ in range(2))


def reference(q, k):
    scores = whywrong.step("scores", q @ k.T / 8.0)
    return whywrong.step("probabilities", scores.softmax(-1)) @ q


def steps(factor=1.0):
    scores = factor * (Q @ K.T / 8.0)
    probabilities = scores.softmax(-1)
    return {"scores": scores, "probabilities": probabilities, "output": probabilities @ Q}


def message(*arguments, **named):
    with pytest.raises(AssertionError) as caught:
        whywrong.assert_close(*arguments, **named)
    return str(caught.value)


@pytest.fixture(scope="module")
def golden():
    return whywrong.golden(reference, Q, K)


def test_a_correct_result_passes_against_every_kind_of_golden(golden):
    output = steps()["output"]
    whywrong.assert_close(steps(), golden)
    whywrong.assert_close(output, golden)
    whywrong.assert_close(steps(), golden.trace())
    whywrong.assert_close(steps(), {name: golden[name] for name in steps()})
    whywrong.assert_close(output, golden["output"])
    whywrong.assert_close(output.numpy(), golden["output"].numpy())
    whywrong.assert_close((output, Q), (golden["output"], Q.double()))


@pytest.mark.long
def test_a_result_may_have_parts_of_parts():
    x = torch.randn(5, 1, 3, generator=GENERATOR)
    module = torch.nn.LSTM(3, 4)  # gives output, (h, c)
    recorded = whywrong.golden(module, x)
    whywrong.assert_close(module(x), recorded)
    output, (h, c) = module(x)
    assert message((output, (h, 1.1 * c)), recorded).startswith("first divergence: output.1.1")
    whywrong.assert_close((np.float32(1.0), [2.0, None]), (np.float64(1.0), [2.0, None]))


def test_the_first_line_is_the_verdict_and_a_recorded_golden_separates_own_from_inherited(golden):
    text = message(steps(1.001), golden)
    assert text.startswith("first divergence: scores (own error: ")
    assert "a guess from the dtypes" in text
    assert "own errors: scores; inherited only: probabilities, output" in text
    assert "wrong elements are 1.001 times what is right" in text


@pytest.mark.long
@pytest.mark.parametrize("against", ["recorded", "numbers"])
def test_the_worst_elements_are_shown_with_what_each_may_be_off(golden, against):
    output = steps()["output"]
    output[2, 3] += 0.5
    output[20, 1] = torch.nan
    text = message(output, golden if against == "recorded" else golden["output"])
    first, second = (
        next(line for line in text.splitlines() if line.startswith(at)).split() for at in ("20, 1", "2, 3")
    )
    assert first[3] == "nan"
    assert float(second[2]) == pytest.approx(float(golden["output"][2, 3]))
    assert float(second[3]) - float(second[2]) == pytest.approx(0.5, rel=1e-2)
    assert 1e-8 < float(second[-2]) < 1e-4


def test_elements_of_a_tensor_that_is_judged_in_blocks_have_their_places_in_the_whole():
    x = torch.zeros(90, 10_000)
    x[85, 17] = x[88, 9_999] = 1.0
    text = message(x, torch.zeros(90, 10_000, dtype=torch.float64))
    assert "\n85, 17 " in text
    assert "\n88, 9999 " in text


def test_a_recorded_golden_says_the_cause(golden):
    text = message({**steps(), "output": steps()["output"] * 2.0}, golden)
    assert "why output: cause" in text
    assert "output is 2 times as large" in text


def test_other_names_progress_and_the_false_positive_rate_are_passed_on(golden, monkeypatch):
    names = {"scores": "logits"}
    good, faulty = ({names.get(name, name): x for name, x in steps(factor).items()} for factor in (1.0, 1.001))
    whywrong.assert_close(good, golden, names=names)
    text = message(faulty, golden, names=names)
    assert text.startswith("first divergence: scores (own error: ")
    assert "why scores: cause" in text
    lines = []
    monkeypatch.setattr("whywrong.checking.with_program.LONG_SECONDS", 0.0)
    whywrong.assert_close(steps(), golden, progress=lines.append)
    assert lines
    with pytest.raises(UsageError, match="false_alarm: expected a probability"):
        whywrong.assert_close(steps(), golden, false_alarm=2.0)


def test_the_declared_precision_decides_and_is_reported(golden):
    rounded = steps()["output"].bfloat16()
    whywrong.assert_close(rounded, golden, precision=whywrong.Precision(storage="bfloat16"))
    text = message(rounded, golden, precision=whywrong.Precision(storage="float32"))
    assert "precision: stored as float32" in text
    assert "this looks like bfloat16" in text


def test_whole_numbers_shapes_and_what_is_only_systematic_have_a_message(golden):
    text = message(np.arange(4), np.array([0, 1, 2, 5]))
    assert "1 of 4 elements beyond any bound" in text
    assert text.splitlines()[-1].split() == ["3", "5", "3", "2", "0", "inf"]
    assert "shape: observed (3, 64), golden (33, 64)" in message(steps()["output"][:3], golden)
    below_one_rounding = 1.001 * golden["output"].float(), golden["output"]
    assert "systematic" in message(*below_one_rounding, precision=whywrong.Precision(storage="bfloat16"))


def test_whole_numbers_that_float64_does_not_distinguish_are_shown_as_they_are():
    text = message(torch.tensor([2**63 - 2, 5]), torch.tensor([2**63 - 1, 5], dtype=torch.uint64))
    assert text.splitlines()[-1].split()[:3] == ["0", str(2**63 - 1), str(2**63 - 2)]


def test_what_cannot_be_compared_is_no_failed_assertion(golden):
    for observed in ("text", golden, {"scoers": Q}):
        with pytest.raises(UsageError):
            whywrong.assert_close(observed, golden)


@pytest.mark.long
def test_pytest_shows_the_caller_and_the_message_and_nothing_of_whywrong(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import whywrong, torch\n\ndef test_it():\n    whywrong.assert_close(torch.ones(3), torch.zeros(3).double())\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "E       AssertionError: first divergence: output (3 of 3 elements" in run.stdout
    assert "assertion.py" not in run.stdout


@pytest.mark.parametrize(
    ("observed", "golden", "words"),
    [
        ((Q, Q), (Q,), "output: expected a sequence of 1, got a sequence of 2"),
        ((Q,), (Q, Q), "output: expected a sequence of 2, got a sequence of 1"),
        ({"a": Q, "b": Q}, {"a": Q}, "b: expected nothing, got a tensor"),
        ({"a": Q}, {"a": Q, "b": Q}, "b: expected a tensor, got nothing"),
        ((Q, "a"), (Q, "b"), "output.1: expected 'b', got 'a'"),
        ((Q, None), (Q, Q), "output.1: expected a tensor, got None"),
        ((Q,), Q, "output: expected a tensor, got a sequence of 1"),
        ((Q, (Q, Q)), ((Q, Q), Q), "output.0: expected a sequence of 2, got a tensor"),
        ((Q, {"a": Q}), (Q, {"b": Q}), "output.1.b: expected a tensor, got nothing"),
    ],
)
def test_another_structure_is_a_failure_even_where_all_numbers_agree(observed, golden, words):
    assert message(observed, golden) == words
    whywrong.assert_close(golden, golden)


def test_results_of_a_recorded_golden_are_all_there_and_no_others(golden, tmp_path):
    reference = {"sum": lambda x: {"a": x * 2.0, "b": x + 1.0}, "pair": lambda x: (x * 2.0, x + 1.0)}
    named = whywrong.golden(reference["sum"], Q)
    for recorded in (named, whywrong.Golden.load(named.save(tmp_path / "both.safetensors"))):
        whywrong.assert_close({"a": Q * 2.0, "b": Q + 1.0, "input.0": Q}, recorded)
        assert message({"b": Q + 1.0}, recorded) == "a: expected a tensor, got nothing"
        both = message({"a": Q, "b": Q, "c": Q}, recorded)
        assert both.startswith("c: expected nothing, got a tensor\nfirst divergence: a (own error: ")
    pair = whywrong.golden(reference["pair"], Q)
    assert message((Q * 2.0, Q + 1.0, Q), pair) == "output.2: expected nothing, got a tensor"
    assert message(Q * 2.0, pair) == "output.0: expected a tensor, got nothing"
    whywrong.assert_close([Q * 2.0, Q + 1.0], pair)
    whywrong.assert_close({"output": steps()["output"]}, golden)  # intermediate steps may be missing


def test_whole_numbers_stay_so_where_a_storage_of_real_ones_is_declared():
    table, ids, mask = torch.randn(9, 4), torch.arange(5), torch.arange(5) > 2
    recorded = whywrong.golden(lambda ids, mask: table[ids] * mask[:, None], ids=ids, mask=mask)
    port = {"ids": ids, "mask": mask, "output": table[ids] * mask[:, None]}
    precision = whywrong.Precision("float32")
    whywrong.assert_close(port, recorded, precision=precision)
    assert "mask: expected bool, got float32" in message(port | {"mask": mask.float()}, recorded, precision=precision)


def test_a_narrower_dtype_or_another_kind_of_number_fails_unless_it_is_declared(golden, tmp_path):
    whole, exact = torch.arange(4), Q.half().float()
    again = whywrong.Golden.load(golden.save(tmp_path / "golden.safetensors"))
    for observed, reference in ((exact.half(), exact), (steps()["output"].half(), golden), (whole, whole.float())):
        wanted, got = "float32", str(observed.dtype).removeprefix("torch.")
        text = message(observed, reference)
        assert text.startswith(f"output: expected {wanted}, got {got}; where that is meant, declare it: ")
        whywrong.assert_close(observed, reference, precision=whywrong.Precision(storage=got))
    assert "expected float32, got float16" in message(steps()["output"].half(), again)
    assert "expected int64, got float32" in message(whole.float(), whole)
    whywrong.assert_close(exact.double(), exact)
    whywrong.assert_close(exact.half(), exact.double())  # a reference in float64 says nothing of the result's dtype
