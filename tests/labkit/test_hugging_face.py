"""Models of `transformers` that nobody tuned the judge to: right ones are not accused, a broken module is identified.

The long form takes every architecture, dtype and way of attention, with and without gradients, and writes tables into
the folder that LABKIT_HUGGING_FACE names, or a temporary one.
"""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))
import hugging_face as models  # beside this file


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = Path(os.environ.get("LABKIT_HUGGING_FACE") or tmp_path_factory.mktemp("hugging_face"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "attention", "layers"), [("llama", "sdpa", 1), ("bert", "eager", 1), ("mamba", "none", 2)]
)
def test_a_right_model_is_not_accused(name, attention, layers, dtype):
    case = models.measure(name, dtype, attention, backward=False, num_hidden_layers=layers)
    assert not case.accused, f"{case.first}: {case.words}"


def test_a_right_model_with_gradients_is_not_accused():
    case = models.measure("bert", "float32", "eager", backward=True, num_hidden_layers=1)
    assert not case.accused, f"{case.first}: {case.words}"


def test_a_broken_module_is_identified():
    (fault,) = models.measure_faults("llama", "bfloat16", "eager", ("a head of zeros",))
    assert fault.found
    assert fault.right, f"{fault.first} in place of {fault.module}"


def test_every_fault_has_a_place_in_some_architecture():
    model = models.make("llama", "float32", "eager"), models.make("bert", "float32", "eager")
    none = [fault for fault in models.FAULTS if not any(models.places(one, fault) for one in model)]
    assert none == []


def _broken(rows, wrong):
    return [f"{r.architecture} {r.dtype} {r.attention}: {r.first}: {r.words}" for r in rows if wrong(r)]


@pytest.mark.long
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("dtype", models.DTYPES)
def test_no_right_model_is_accused(dtype, backward, tables):
    rows = [models.measure(*case, backward) for case in models.cases((dtype,), (), ("eager", "sdpa"))]
    models.write(tables / f"right_{dtype}_{'gradients' if backward else 'forward'}.csv", rows, models.Case)
    assert _broken(rows, lambda row: row.accused) == []


@pytest.mark.long
@pytest.mark.parametrize("dtype", models.DTYPES)
def test_every_fault_above_the_noise_of_its_type_is_found_in_its_module(dtype, tables):
    chosen = models.cases((dtype,), (), ("eager", "sdpa"))
    rows = [row for case in chosen for row in models.measure_faults(*case)]
    models.write(tables / f"faults_{dtype}.csv", rows, models.Fault)
    assert _broken(rows, lambda row: row.size > 4.0 * row.noise and not row.right) == []
