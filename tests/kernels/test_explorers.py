"""The figures that a reader turns: each shows what the real kernel does, and says in words where it does nothing."""

import inspect

import numpy as np
import pytest
from matplotlib import pyplot as plt

from kernels.attention import explorers as attention
from kernels.attention import faulty as attention_faulty
from kernels.attention.problem import uniform
from kernels.mhc import explorers as mhc
from kernels.tinyllm import explorers as tinyllm
from kernels.tinyllm import faulty as tinyllm_faulty
from labkit.session.catalogue import notebooks
from labkit.session.device import choose


@pytest.fixture(autouse=True)
def closed():
    """No figure stays open."""
    yield
    plt.close("all")


def words(figure):
    texts = [figure.get_suptitle(), *(text.get_text() for text in figure.texts)]
    for axes in figure.axes:
        texts += [axes.get_title(loc="left"), *(text.get_text() for text in axes.texts)]
    return "\n".join(texts)


def product(figure):
    return np.asarray(figure.axes[0].images[0].get_array())


def read(figure):
    """What each score was read from, as the figure has it: [query][key]."""
    texts = [text.get_text() for text in figure.axes[2].texts]
    return np.array(texts).reshape(attention.SIZES.n, attention.SIZES.m)


def test_the_right_call_reads_each_element_where_it_should(device):
    figure = attention.gemm(device=device)
    assert "143 of 143 scores are right on uniform inputs" in words(figure)
    assert read(figure)[9, 4] == f"4,{9 % attention.SIZES.d_k}"
    inputs = uniform(attention.SIZES, np.random.default_rng(0))
    np.testing.assert_allclose(product(figure), inputs.q[0] @ inputs.k[0].T, rtol=1e-5)


def test_the_call_of_the_report_gives_the_numbers_of_the_report_s_program(device):
    figure = attention.gemm(**attention.REPORT, device=device)
    inputs = uniform(attention.SIZES, np.random.default_rng(0))
    layout = attention.golden.plan(attention.SIZES)
    memory = attention.prepare(inputs, layout, device)
    attention_faulty.batched_matmul(memory, layout, attention.blas_for(device))
    np.testing.assert_array_equal(product(figure), layout.view(memory, "QK")[0].cpu().numpy())
    assert " 0 of 143" in " " + words(figure).splitlines()[1]


def test_an_offset_reads_one_element_on_and_past_the_end(device):
    shifted = read(attention.gemm(a_offset=1, device=device))
    assert (shifted[0, 0], shifted[8, 9]) == ("1,0", "10,1"), "K^T is read one element late"
    assert (shifted[:, 10] == "NaN").all(), "its last element lies behind K^T, and NaN times zero is NaN"
    figure = attention.gemm(c_offset=-1, device=device)
    assert "1 scores never written, 1 numbers written outside every operand" in words(figure)


def test_a_leading_dimension_that_is_too_small_is_one_line(device):
    figure = attention.gemm(lda=10, device=device)
    assert "BLAS rejects the call: sgemm: lda (argument 8) is 10; expected at least 11, the rows stored" in words(
        figure
    )
    assert not figure.axes[0].images


def test_no_call_within_the_limits_leaves_the_memory(device):
    """The furthest of each argument; BLAS's own rejections are lines, and nothing else is raised."""
    ends = {name: (how[0], how[-1]) for name, how in attention.CONTROLS.items()}
    for k in range(2):
        attention.gemm(**{name: pair[k] for name, pair in ends.items()}, device=device)
        attention.gemm(**{name: pair[1 - ("offset" in name and k)] for name, pair in ends.items()}, device=device)


@pytest.mark.parametrize(("tile", "columns"), [(32, 128), (8, 9), (16, 100), (128, 128), (64, 50)])
def test_the_columns_read_are_those_of_the_tile(tile, columns, device):
    expected = np.broadcast_to(np.arange(columns) < tile, (mhc.STREAMS, columns))
    np.testing.assert_array_equal(mhc.columns_read(tile, columns, device), expected)


def test_only_dalpha_pre_is_wrong_and_only_with_a_tile_that_is_too_narrow(device):
    assert mhc.tiles(tile=16, columns=18, tokens=2, device=device).axes[2].get_title(loc="left") == "wrong: dalpha_pre"
    figure = mhc.tiles(tile=16, columns=16, tokens=2, device=device)
    assert figure.axes[2].get_title(loc="left") == "wrong: none"
    assert "columns left out: none" in words(figure)


@pytest.fixture(scope="module")
def program():
    """Small; logits are more than x has, so that memory of the size of x is memory of x."""
    return tinyllm_faulty.program(0.1, np.random.default_rng(1), width=16, vocabulary=24)


def test_the_printed_lines_give_right_logits_and_say_so(program):
    seen = words(tinyllm.switches(program, choose("auto")))
    assert "How it ends: right" in seen
    assert "resize(size)" in seen
    assert "h_data: 128 numbers,\n32 of 32 right" in seen, "four times too long, and right where it counts"
    assert "one buffer" not in seen


def test_an_upload_that_trusts_the_length_makes_the_log_of_the_report(program):
    length = {"memory": "the report's numbers", "debug_print": "h_data.size() of x", "assignment_by_host_size": True}
    seen = words(tinyllm.switches(program, choose("auto"), **length))
    assert "5 of 5 lines show what the report saw" in seen
    assert "32 of 32 right" in seen, "x itself is right"
    assert "h_data\n0 of 48 right" in seen
    assert "x.d_data: 6.16847e-33 1.60859e-32" in seen
    corrected = words(tinyllm.switches(program, choose("auto"), **length, resize_by_size=False))
    assert "How it ends: right" in corrected
    assert "resize(size / 4)" in corrected


def test_the_path_is_drawn_as_the_switches_have_it(program):
    shared = {"prefer_host": False, "shallow_assignment": True, "no_layer_d2h": True, "no_other_d2h": True}
    seen = words(tinyllm.switches(program, choose("auto"), **shared))
    assert "one buffer,\ntwo owners" in seen
    assert "copies\nthe buffer" in seen
    assert "resize(" not in seen
    assert "not downloaded" in seen
    seen = words(tinyllm.switches(program, choose("auto"), way="shared_ptr", constructor_omits_shape=True))
    assert "no assignment" in seen
    assert "a kernel is given no memory" in seen


@pytest.mark.parametrize(
    ("draw", "module"), [(attention.gemm, attention), (mhc.tiles, mhc), (tinyllm.switches, tinyllm)]
)
def test_every_control_is_a_parameter_and_begins_within_its_limits(draw, module):
    parameters = inspect.signature(draw).parameters
    for name, how in module.CONTROLS.items():
        if isinstance(how, bool):
            assert name in tinyllm_faulty.SWITCHES
            assert how == (name in tinyllm_faulty.PRINTED)
        elif isinstance(how, tuple):
            assert how[0] <= parameters[name].default <= how[1]
        else:
            assert parameters[name].default in how
    assert len(module.ALT.split()) >= 8


@pytest.mark.parametrize("name", ["attention_matmul", "dalpha_atomics", "d2h_sizing"])
def test_a_committed_notebook_has_the_still_figure_of_its_explorer(name):
    cells = notebooks()[name].content["cells"]
    (outputs,) = [cell["outputs"] for cell in cells if "turnable(" in "".join(cell["source"])]
    assert [sorted(output["data"]) for output in outputs] == [["image/png", "text/plain"]]
