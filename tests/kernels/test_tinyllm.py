"""The CUDA C++ TinyLLM against float64, its Tensor, the host runtime, and the Tensor under investigation."""

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import labkit
from kernels.corpus import corpus
from kernels.native import build
from kernels.tinyllm import blind, claims, experiments, fault_sets, faulty, golden, tables, tinyllm
from kernels.tinyllm.identify import identify, outcome_in_words, wrongly_identified
from kernels.tinyllm.tinyllm import Config, TinyLLM, library
from labkit.session.claims import described
from labkit.session.device import decide
from labkit.session.record import Record
from labkit.session.wording import fill
from whywrong import localise, repeat
from whywrong.errors import UsageError

CONFIGS = [
    Config(vocabulary=61, context=17, width=48, layers=2, heads=4, sequences=3),
    Config(vocabulary=5, context=3, width=7, layers=1, heads=1, sequences=2),
    Config(vocabulary=256, context=64, width=64, layers=1, heads=2, sequences=2),
]


@pytest.fixture(scope="module")
def where():
    return decide("auto")


def drawn(config, rng):
    """Parameters whose biases, gains and shifts matter, and a batch smaller than the largest."""
    shape = (2, max(1, config.sequences - 1), max(1, config.context - 1))
    return experiments.perturbed(config, rng), *rng.integers(0, config.vocabulary, shape)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("engine", tinyllm.ENGINES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_step_and_gradient_is_within_its_bound(where, rng, config, engine):
    parameters, tokens, targets = drawn(config, rng)
    model = TinyLLM(config, where, engine)
    model.write(parameters)
    found = localise(model.trace(tokens, targets), golden.reference(parameters, tokens, targets, config))
    assert found.first is None, str(found)


@pytest.mark.gpu
def test_every_step_and_gradient_is_within_its_bound_at_full_size(where, rng):
    config = Config(sequences=4)
    parameters, tokens, targets = drawn(config, rng)
    model = TinyLLM(config, where)
    model.write(parameters)
    given = (torch.as_tensor(ids, device="cuda") for ids in (tokens, targets))  # a golden there is re-run there
    found = localise(model.trace(tokens, targets), golden.reference(parameters, *given, config))
    assert found.first is None, str(found)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_each_time(where, rng):
    parameters, tokens, targets = drawn(CONFIGS[0], rng)
    model = TinyLLM(CONFIGS[0], where)
    model.write(parameters)
    assert repeat(lambda: model.trace(tokens, targets), times=10).identical


@pytest.mark.parametrize("steps", [3, pytest.param(40, marks=pytest.mark.gpu)])
def test_gradients_computed_beside_others_have_the_same_bits(where, rng, steps):
    config = Config() if steps > 3 else CONFIGS[0]
    parameters, tokens, targets = drawn(config, rng)
    kept = []
    for overlap in (True, False):
        model = TinyLLM(config, where, overlap=overlap)
        model.write(parameters)
        for _ in range(steps):
            model.forward(tokens)
            model.score(targets, read=False)
            model.backward()
            model.step(1e-3)
        kept.append(model.parameters())
    for name, value in kept[0].items():
        np.testing.assert_array_equal(value, kept[1][name], err_msg=name)


@pytest.mark.long
def test_a_missing_scale_is_not_within_it(where, rng):
    config = CONFIGS[0]
    parameters, tokens, targets = drawn(config, rng)
    model = TinyLLM(config, where)
    scaled = parameters | {"L1.qkv.w": parameters["L1.qkv.w"] * np.float32(1.01)}
    model.write(scaled)
    found = localise(model.trace(tokens, targets), golden.reference(parameters, tokens, targets, config))
    assert found.first == "L1.heads"


def test_a_step_of_adamw_is_pytorchs(where, rng):
    config = CONFIGS[0]
    parameters, tokens, targets = drawn(config, rng)
    model = TinyLLM(config, where)
    model.write(parameters)
    theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in parameters.items()}
    matrices = [value for name, value in theirs.items() if name.endswith(".w")]
    rest = [value for name, value in theirs.items() if not name.endswith(".w")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        model.forward(tokens)
        model.score(targets)
        model.backward()
        for name, gradient in model.gradients().items():
            theirs[name].grad = torch.tensor(gradient)
        model.step(1e-3)
        optimizer.step()
    for name, value in model.parameters().items():  # a few roundings of the weight and of a step of 1e-3
        np.testing.assert_allclose(value, theirs[name].detach().numpy(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "name",
    [
        "copy",
        "assign",
        "move",
        "self",
        "return by value",
        "empty",
        "round trip",
        "survives",
        "thousand",
        "nothing on the device",
    ],
)
def test_the_tensor(where, name):
    lib = library(where)
    counters = () if where.is_cuda else (lib.cuda_host_live, lib.cuda_host_overruns)  # of the whole process
    before = [counter() for counter in counters]
    assert lib.tinyllm_tensor_scenario(name.encode()).decode() == "ok"
    assert [counter() for counter in counters] == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mismatched host", "h2d of a [4], 4 elements, 16 bytes: the host holds 0 elements"),
        ("too large", "cudaMalloc of giant [35184372088832], 35184372088832 elements, 140737488355328 bytes"),
    ],
)
def test_what_the_tensor_cannot_do_is_said_with_names_and_sizes(where, name, message):
    assert message in library(where).tinyllm_tensor_scenario(name.encode()).decode()


def test_the_copies_that_the_benchmark_times_bring_everything(where, rng):
    lib, sent = library(where), rng.standard_normal(1001).astype(np.float32)
    back = np.full_like(sent, np.nan)
    assert lib.tinyllm_round_trip(sent.size, sent.ctypes.data, back.ctypes.data) == 0
    np.testing.assert_array_equal(back, sent)
    for to_device in (1, 0):
        assert lib.tinyllm_copy(sent.size, to_device) == 0
    assert lib.tinyllm_round_trip(sent.size, sent.ctypes.data, back.ctypes.data) == 0
    np.testing.assert_array_equal(back, sent)


def test_a_process_whose_first_call_is_a_copy_ends_without_an_error(where):
    code = (
        "import ctypes, sys; three = ctypes.c_float * 3; sent, back = three(1, 2, 3), three(); "
        "ctypes.CDLL(sys.argv[1]).tinyllm_round_trip(ctypes.c_size_t(3), sent, back); print(*back)"
    )
    command = [sys.executable, "-c", code, str(build(tinyllm.FOLDER / "api.cu", tinyllm.HOST, where))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1.0 2.0 3.0\n", "")


@pytest.mark.gpu
def test_the_sanitizer_finds_no_leak_and_no_error_in_what_is_right(where, rng):
    assert any("ERROR SUMMARY: 0 errors" in line for line in faulty.leak_check(where))
    p = faulty.program(0.1, rng)
    for tool in ("memcheck", "initcheck"):
        count, lines = faulty.sanitized(p, faulty.row(memory="as left"), where, tool)
        assert count == 0, lines


@pytest.fixture(scope="module")
def small():
    return faulty.program(0.1, np.random.default_rng(1), width=32, vocabulary=16)


@pytest.fixture(scope="module")
def unknown():
    return [blind.sample(seed) for seed in range(50)]


@pytest.fixture(scope="module")
def swept(where, small, unknown):
    """The sweep of a small program, and the outcomes of the programs that are sampled, [50, kinds of memory]."""
    sweep, o = faulty.sweep(small, where, np.concatenate([one.rows() for one in unknown]))
    return sweep, o.reshape(50, len(faulty.MEMORY))


def outcome(swept, *names, memory="zeros"):
    sweep = swept[0]
    return sweep.outcomes[memory][sweep.at(fault_sets.bits(names)[None])[0]]


@pytest.mark.long
def test_a_right_program_is_right_in_any_memory_and_each_switch_changes_some_outcome(swept):
    sweep, _ = swept
    for o in sweep.outcomes.values():
        assert (o["status"] != faulty.LOST).all()
        assert faulty.right(o, sweep.p)[0]  # no switch is set
    for name in faulty.NAMES:
        if name != "constructor_omits_shape":
            there, fixed = sweep.bits, sweep.at(faulty.without(sweep.bits, name))
            changed = sweep.outcomes["zeros"][fixed] != sweep.outcomes["zeros"]
            assert changed[there[:, faulty.NAMES.index(name)] == 1].any(), name


def test_sets_that_are_left_out_of_the_sweep_end_as_those_that_stand_for_them(where, swept, rng):
    sweep, _ = swept
    bits = rng.integers(0, 2, (150, len(faulty.NAMES)))
    bits[:, faulty.NAMES.index("constructor_omits_shape")] = 0
    rows = np.column_stack([bits, np.zeros((150, 3), int), np.ones(150, int)])
    o, kept = faulty.run(sweep.p, rows, where), sweep.outcomes["zeros"][sweep.at(bits)]
    np.testing.assert_array_equal(o["status"], kept["status"])  # those of checked programs are not run in the sweep
    ended = o["status"] == faulty.FINISHED
    assert 0 < ended.sum() < len(bits)
    for name in o.dtype.names:
        np.testing.assert_array_equal(o[name][ended], kept[name][ended], err_msg=name)


def test_a_constructor_that_omits_the_shape_stops_every_program_at_its_first_layer(where, small, rng):
    bits = rng.integers(0, 2, (60, len(faulty.NAMES)))
    bits[:, faulty.NAMES.index("constructor_omits_shape")] = 1
    bits[:, faulty.NAMES.index("shallow_constructor")] = 0  # which allocates nothing
    rows = np.column_stack([bits, rng.integers(0, 4, 60), np.zeros((60, 2), int), rng.integers(0, 4, 60)])
    assert (faulty.run(small, rows, where)["status"] == faulty.ILLEGAL).all()


def test_a_mirror_of_the_c_struct_of_another_size_is_one_line(small, where, monkeypatch):
    larger = np.dtype([*((name, faulty.OUTCOME[name]) for name in faulty.OUTCOME.names), ("one_more", np.int64)])
    monkeypatch.setattr(faulty, "OUTCOME", larger)
    with pytest.raises(RuntimeError, match=rf"faulty::Outcome: expected {larger.itemsize} bytes .* got \d+$"):
        faulty.run(replace(small), faulty.row("unchecked")[None], where, processes=1)


@pytest.mark.parametrize("memory", faulty.MEMORY)
def test_an_outcome_does_not_depend_on_what_ran_before(where, small, rng, memory):
    rows = rng.permutation(faulty.sets())[:300]
    rows = np.column_stack([rows, np.zeros((300, 3), int), np.full(300, faulty.MEMORY.index(memory))])
    there = faulty.run(small, rows, where, processes=2)
    back = faulty.run(small, rows[::-1], where, processes=1)[::-1]
    for name in there.dtype.names:
        np.testing.assert_array_equal(there[name], back[name], err_msg=name)


def test_what_lies_beside_buffers_decides_only_how_programs_end_that_write_beyond_theirs(
    where, small, rng, monkeypatch
):
    if where.is_cuda:
        pytest.skip("the host runtime alone can be told what lies beside a buffer")
    unchecked = faulty.sets()[faulty.sets()[:, -1] == 1]
    rows = rng.permutation(
        np.column_stack([unchecked, np.zeros((len(unchecked), 3), int), rng.integers(0, 4, len(unchecked))])
    )[:800]
    found = []
    for byte in ("A5", "3F"):
        monkeypatch.setenv("CUDA_HOST_GUARD", byte)
        found.append(faulty.run(replace(small), rows, where))  # in new processes
    differs = faulty.steady(*found)["status"] == faulty.UNSTEADY
    beyond = rows[:, faulty.NAMES.index("size_in_elements")] == 1
    assert differs[beyond].mean() > 0.5
    assert not differs[~beyond].any()


def test_a_process_waits_for_the_next_run_and_one_that_died_is_replaced(where, small):
    p, row = replace(small), faulty.row(*faulty.PRINTED)[None]
    first = faulty.run(p, row, where)
    (process,) = p.idle[where]
    again = faulty.run(p, row, where)
    assert p.idle[where] == [process]
    process.kill()
    process.wait()
    third = faulty.run(p, row, where)
    assert process not in p.idle[where]
    assert len(p.idle[where]) == 1
    for other in (again, third):
        assert faulty.steady(first, other)["status"] == first["status"] == faulty.FINISHED


def test_a_program_that_writes_far_beyond_its_buffers_harms_no_other(where):
    p = faulty.program(0.1, np.random.default_rng(1), width=128, vocabulary=16, tokens=64)
    rows = [faulty.row("size_in_elements", "unchecked", memory=memory) for memory in faulty.MEMORY]
    o = faulty.run(p, np.stack([*rows, faulty.row("unchecked")]), where, processes=1)
    assert (o["status"] == faulty.FINISHED).all()
    assert faulty.right(o, p).tolist() == [False] * len(rows) + [True]


def test_what_a_program_shows_does_not_depend_on_its_sizes(where):
    """The trace counts the bytes of x, which are the report's 2048 at the report's sizes alone, and not the logits'."""
    p = faulty.program(0.1, np.random.default_rng(1), width=16, vocabulary=64, tokens=3)
    shared = faulty.row(*faulty.PRINTED, "no_other_d2h", "shallow_assignment", memory="the report's numbers")
    o = faulty.run(p, shared[None], where, processes=1)
    assert all(shown[0] for shown in faulty.observations(o, p).values())
    assert o["x_failed"][0]  # x, whose debug print shows what its own buffer held


def test_memory_holds_what_its_kind_says_before_it_is_written(swept):
    refused = ("resize_by_size", "assignment_by_host_size", "h2d_by_host_size", "prefer_host", "unchecked")
    x = {memory: outcome(swept, *refused, memory=memory)["x"] for memory in faulty.MEMORY}
    assert np.isnan(x["NaN"]).all()
    assert (x["zeros"] == 0).all()
    np.testing.assert_array_equal(x["the report's numbers"], np.float32(experiments.REPORTED_X))


def test_the_printed_lines_are_right_and_read_word_for_word_they_stop(where, small):
    (table,) = experiments.together(small, where, experiments.printed_lines(small))
    assert experiments.total(table["with its size known"]) == {"right": 48}
    assert experiments.total(table["word for word"]) == {faulty.ENDS[faulty.ILLEGAL]: 48}


def test_the_printed_lines_alone_fill_the_first_quarter_and_upload_it(where, rng):
    values = rng.standard_normal((3, 37)).astype(np.float32)
    host, back = faulty.round_trip(faulty.PRINTED, values, -values, where)
    assert len(host) == 4 * values.size
    np.testing.assert_array_equal(host[: values.size], values.reshape(-1))
    np.testing.assert_array_equal(back, values)
    host, back = faulty.round_trip(("unchecked", "resize_by_size", "h2d_by_host_size"), values, -values, where)
    np.testing.assert_array_equal(back, -values)  # too long an upload is refused as a whole


def test_zero_logits_have_the_causes_that_they_should(swept):
    p = swept[0].p
    for names, memory, end in [
        (("no_layer_d2h", "zero_host"), "NaN", "logits all 0"),
        ((*faulty.PRINTED, "assignment_by_host_size"), "zeros", "logits all 0"),
        ((*faulty.PRINTED, "assignment_by_host_size"), "NaN", "wrong"),
        (("prefer_host", "unchecked", "assignment_by_host_size"), "zeros", "right"),
        (("shallow_assignment", "no_other_d2h", "unchecked"), "zeros", "logits all 0"),
        (("shallow_assignment", "no_other_d2h"), "zeros", faulty.ENDS[faulty.REPORTED]),
    ]:
        assert fault_sets.ending(outcome(swept, *names, memory=memory), p) == end, names


def test_a_set_is_cured_when_it_is_right_and_not_when_it_is_no_longer_zero(swept):
    sweep, _ = swept
    cured = fault_sets.cured(sweep, "zeros")
    resized = (*faulty.PRINTED, "assignment_by_host_size")
    for names, right in ((resized, True), (("no_layer_d2h", "zero_host"), False)):
        assert cured[sweep.at(fault_sets.bits(names)[None])[0]] == right
    o = sweep.outcomes["zeros"]
    zero = faulty.observations(o, sweep.p)["logits all 0"]
    other = ~faulty.observations(o[sweep.at(faulty.corrected(sweep.bits))], sweep.p)["logits all 0"]
    counts = fault_sets.counts_by_memory(sweep)["zeros"]["zero"]
    assert counts[2] == (zero & cured).sum() < (zero & other).sum()


def test_a_set_that_prints_the_trace_of_a_failed_upload_or_of_lost_values_is_found(swept):
    counts = fault_sets.false_traces(swept[0])
    names = (*faulty.PRINTED, "assignment_by_host_size"), ("no_layer_d2h", "prefer_host", "zero_host")
    assert counts["smallest"] == [faulty.in_words(faults) for faults in names]
    assert all(0 < n < every for n, every in zip(counts["lost"], counts["printing"], strict=True))
    faithful = outcome(swept, "no_other_d2h", "prefer_host", "zero_host", "unchecked")  # zeros from the embedding on
    assert faithful["traces"] > 0 == faithful["ff_right"]


LENGTH = "h_data.size() of x"
BOTH = "h_data.size(), ff_out before d2h()", "h_data.size(), ff_out after d2h()"
ASSIGNMENT = (*faulty.PRINTED, "assignment_by_host_size")


@pytest.mark.parametrize(
    ("names", "memory", "debug_print", "shown"),
    [
        (faulty.PRINTED, "the report's numbers", "a fixed number", ["ff_out right", "trace"]),
        (faulty.PRINTED, "the report's numbers", LENGTH, ["ff_out right", "trace", "x near 1e-32"]),
        (ASSIGNMENT, "the report's numbers", LENGTH, list(faulty.OBSERVATIONS)),
        (ASSIGNMENT, "the report's numbers", BOTH[0], list(faulty.OBSERVATIONS[1:])),
        ((*ASSIGNMENT, "zero_host"), "the report's numbers", BOTH[0], list(faulty.OBSERVATIONS)),
        ((*ASSIGNMENT, "zero_host"), "the report's numbers", BOTH[1], list(faulty.OBSERVATIONS[1:])),
        (ASSIGNMENT, "zeros", LENGTH, ["ff_out right", "trace", "logits all 0", "only <pad>"]),
        (("prefer_host", "unchecked"), "the report's numbers", LENGTH, ["ff_out right", "trace"]),
    ],
)
def test_a_debug_print_by_the_host_vectors_length_shows_what_it_copied_to_where_its_copy_is_refused(
    swept, names, memory, debug_print, shown
):
    seen = faulty.observations(outcome(swept, *names, memory=memory)[None], swept[0].p, debug_print)
    assert [name for name, which in seen.items() if which[0]] == shown


def test_which_sets_fit_depends_on_the_debug_print(swept):
    fits = fault_sets.fits_by_print(swept[0])
    assert fits["a fixed number"]["kept_cured"] == 0 < fits["a fixed number"]["kept"]
    assert 0 < fits[LENGTH]["kept_cured"] < fits[LENGTH]["kept"]
    assert fits[BOTH[0]]["kept_cured"] == fits[BOTH[0]]["kept"] > 0
    assert fits[BOTH[1]]["cured"] == 0 < fits[BOTH[1]]["sets"]
    for fit in fits.values():
        assert fit["sets"] <= fits["any of these"]["sets"]
        assert [memory for memory, count in fit["memory"].items() if count] == ["the report's numbers"]


def test_candidates_are_the_smallest_sets_that_fit_and_the_printed_lines(swept):
    sweep, _ = swept
    rows = fault_sets.candidates(sweep)
    assert rows[0]["faults"] == faulty.in_words(faulty.PRINTED)
    assert not any(fault_sets.show_all(rows[0], name) for name in faulty.DEBUG_PRINTS)
    for row in rows[1:]:
        assert any(fault_sets.show_all(row, name) for name in faulty.DEBUG_PRINTS)
        assert row["contain"] >= 1
    assert {row["cured"] for row in rows[1:]} == {True, False}
    assert fault_sets.first_wrong(rows) == "x or logits"


def test_byte_frequencies_alone_cost_their_cross_entropy():
    even = np.arange(256, dtype=np.uint8)
    assert experiments.loss_by_frequencies(even, even) == pytest.approx(np.log(256))
    often = np.repeat(np.array([7], np.uint8), 255)
    assert experiments.loss_by_frequencies(often, often) == pytest.approx(np.log(511 / 256))


def test_a_set_that_shows_everything_is_the_cause_only_when_it_is_alone(swept):
    rows = fault_sets.candidates(swept[0])
    fit = sum(fault_sets.show_all(row, name) for row in rows for name in faulty.DEBUG_PRINTS)
    weighing = fault_sets.weigh_candidates(rows)
    assert (weighing.cause, len(weighing.left)) == ("undecidable", fit)
    for row in rows:
        for shown in row["shows"].values():
            shown["trace"] = False
    assert fault_sets.weigh_candidates(rows).cause == "none of these"
    rows[3]["shows"][LENGTH] = dict.fromkeys(faulty.OBSERVATIONS, True)
    cause = fault_sets.weigh_candidates(rows).cause
    assert cause == f"{rows[3]['faults']}; prints: {LENGTH}; memory: {rows[3]['memory']}"


def test_a_returned_copy_outlives_the_callees_tensor_only_with_a_buffer_of_its_own(where, small):
    (lives,) = experiments.together(small, where, experiments.lifetimes(small))
    right = {reading: [n for n, _ in by.values()] for reading, by in lives.items()}
    assert list(right.values()) == [[4, 4], [0, 4], [0, 0], [0, 0]]


def test_the_correction_is_of_the_unit_that_size_has():
    bits = np.stack(
        [fault_sets.bits(names) for names in (["resize_by_size"], ["size_in_elements"], ["h2d_by_host_size"])]
    )
    fixed = faulty.corrected(bits)
    assert [faulty.switches_of(one) for one in fixed] == [set(), {"resize_by_size", "size_in_elements"}, set()]


def test_minimal_sets_hold_no_smaller_one():
    every = faulty.sets()
    first, third, sixth = (faulty.NAMES.index(name) for name in ("size_in_elements", "no_layer_d2h", "zero_host"))
    shows = (every[:, first] & every[:, third]) | every[:, sixth]
    assert set(faulty.minimal(every, shows.astype(bool))) == {
        frozenset({"size_in_elements", "no_layer_d2h"}),
        frozenset({"zero_host"}),
    }


def test_an_outcome_that_differs_when_run_again_is_none():
    first = np.zeros(4, faulty.OUTCOME)
    first["x"][2] = np.nan
    again = first.copy()
    again["x_zero"][1] = 3
    again["logits_low"][3] = 1.0
    found = faulty.steady(first, again)
    assert found["status"].tolist() == [faulty.FINISHED, faulty.UNSTEADY, faulty.FINISHED, faulty.UNSTEADY]
    assert not first["status"].any()


def test_a_program_without_a_steady_outcome_shows_nothing_and_is_neither_right_nor_wrong(swept):
    sweep, _ = swept
    unsteady = {memory: o.copy() for memory, o in sweep.outcomes.items()}
    for o in unsteady.values():
        o["status"] = faulty.UNSTEADY
    assert not any(seen.any() for seen in faulty.observations(unsteady["zeros"], sweep.p).values())
    counts = fault_sets.counts_by_memory(replace(sweep, outcomes=unsteady))["zeros"]
    assert counts["ends"] == dict.fromkeys(faulty.ENDS, 0) | {"otherwise when run again": len(sweep.bits)}
    assert (counts["right"], counts["zero"]) == (0, [0, 0, 0])


def test_nothing_is_held_against_a_program_that_prints_otherwise_when_run_again(swept):
    """Its own outcome in the sweep another than the observed one, as a GPU gives them."""
    sweep, _ = swept
    truth = "resize_by_size"
    observed = {memory: outcome(swept, truth, "unchecked", memory=memory).copy() for memory in faulty.MEMORY}
    at = sweep.at(fault_sets.bits({truth, "unchecked"})[None])[0]
    other = {memory: o.copy() for memory, o in sweep.outcomes.items()}
    other["zeros"]["x_zero"][at] += 1
    refuted = identify(replace(sweep, outcomes=other), observed)
    assert refuted.cause == "none of these"
    assert wrongly_identified(truth, refuted)
    other["zeros"]["status"][at] = faulty.UNSTEADY
    held = identify(replace(sweep, outcomes=other), observed)
    assert (held.cause, held.untested) == ("undecidable", [truth])
    assert outcome_in_words(held) == "undecidable"
    for one in observed.values():
        one["status"] = faulty.UNSTEADY
    assert identify(sweep, observed).cause == "undecidable"


@pytest.mark.gpu
def test_on_a_gpu_no_unknown_program_is_wrongly_identified_and_those_that_stay_in_their_buffers_are_steady(
    swept, unknown
):
    sweep, rows = swept
    weighed = [identify(sweep, dict(zip(faulty.MEMORY, row, strict=True))) for row in rows]
    assert not any(wrongly_identified(one.truth, found) for one, found in zip(unknown, weighed, strict=True))
    assert sum(found.cause == one.truth for one, found in zip(unknown, weighed, strict=True)) >= 12
    within = sweep.bits[:, faulty.NAMES.index("size_in_elements")] == 0
    for o in sweep.outcomes.values():
        assert (o["status"][within] != faulty.UNSTEADY).all()


@pytest.mark.long
def test_no_unknown_program_is_wrongly_identified(swept, unknown):
    """Fifty programs, among them a fifth whose fault is none of the switches."""
    sweep, rows = swept
    weighed = [identify(sweep, dict(zip(faulty.MEMORY, row, strict=True))) for row in rows]
    outside = [one.outside_the_list for one in unknown]
    assert 8 <= sum(outside) <= 16
    assert not any(wrongly_identified(one.truth, found) for one, found in zip(unknown, weighed, strict=True))
    causes = [found.cause for found in weighed]
    assert all(cause in ("none of these", "undecidable") for cause, out in zip(causes, outside, strict=True) if out)
    assert causes.count("none of these") >= sum(outside) - 3
    assert sum(cause == one.truth for one, cause in zip(unknown, causes, strict=True)) >= 12
    assert "undecidable" in causes


def test_a_wrong_name_would_be_seen(swept):
    sweep, _ = swept
    weighing = identify(
        sweep, {memory: outcome(swept, "resize_by_size", "unchecked", memory=memory) for memory in faulty.MEMORY}
    )
    assert weighing.cause == "resize_by_size"
    assert not wrongly_identified("resize_by_size", weighing)
    assert wrongly_identified("prefer_host", weighing)
    assert wrongly_identified("h2d starts one element late", weighing)


@pytest.mark.long
def test_what_names_a_program_does_not_know_how_it_was_drawn():
    code = "import sys, kernels.tinyllm.identify; sys.exit('kernels.tinyllm.blind' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_fault_outside_the_list_does_something(where, small):
    for name, needs in blind.NEEDS.items():
        with_it, without = (
            faulty.run(small, faulty.row(*needs, "unchecked", outside=i)[None], where, processes=1)[0]
            for i in (faulty.OUTSIDE.index(name), 0)
        )
        assert fault_sets.ending(with_it, small) != fault_sets.ending(without, small) == "right", name


def test_a_product_that_writes_nothing_is_put_right_by_another_and_a_wrong_operand_is_not(where, small, swept):
    (counts,) = experiments.together(
        small, where, experiments.products(small, experiments.with_zero_logits(swept[0], 5, np.random.default_rng(0)))
    )
    assert counts["zero"]["cublas"] == counts["sets"] == 5
    assert counts["routine"] == {"cublas": "logits all 0", "kernel": "right", "host": "right"}
    assert set(counts["operand"].values()) == {"logits all 0"}


VALUES = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
ZERO, TINY = np.zeros(3, np.float32), np.full(3, 1e-30, np.float32)
RIGHT_ENDS = {"right": 48}
ENGINES = ("cublas", "kernel", "host")


def fit(sets, cured):
    counts = {"sets": sets, "cured": cured, "kept": 2, "kept_cured": 0}
    memory = dict.fromkeys(faulty.MEMORY, 0) | {faulty.MEMORY[2]: sets}
    return {"any of these": counts | {"memory": memory}, LENGTH: {"sets": 1, "cured": 1}}


def traces(printing=9, failed=0, lost=0):
    return {"printing": [printing] * 4, "failed": [failed] * 4, "lost": [lost] * 4, "smallest": ["zero_host"]}


def products(routine, operand, kept=4):
    zero = dict.fromkeys(ENGINES, 4) | {"host": kept}
    ends = [{"cublas": "logits all 0", "host": end} for end in (routine, operand)]
    return {"sets": 4, "zero": zero, "stopped": dict.fromkeys(ENGINES, 0), "routine": ends[0], "operand": ends[1]}


def pair(failed, checked):
    o = np.zeros(2, faulty.OUTCOME)
    o["failed_h2d"], o["status"] = failed, (faulty.FINISHED, checked)
    return o


def lives(*right):
    ways = faulty.WAYS[:2]
    return {name: dict(zip(ways, [[n, 4] for n in two], strict=True)) for name, two in zip("abcd", right, strict=False)}


CURVE = [(0, 5.5, 5.5), (9, 2.0, 2.25)]
PASS, NO_ZEROS = (1e-9, 0, 0), {"a": 0.0, "b": 0.0}
PADDED = np.concatenate([VALUES.reshape(-1), np.zeros(36, np.float32)])
SPREAD = np.concatenate([PADDED[:6], ZERO, ZERO, PADDED[6:12], np.zeros(30, np.float32)])
OUTCOMES = [
    ("first_quarter_only", "confirmed", claims.settle_round_trip, (PADDED, VALUES, VALUES), {"zeros": 36}),
    ("first_quarter_only", "refuted", claims.settle_round_trip, (SPREAD, VALUES, VALUES), {"quarters": [6, 0, 0, 0]}),
    ("first_quarter_only", "refuted", claims.settle_round_trip, (PADDED[:12], VALUES, VALUES), {"numbers": 12}),
    ("resize_zeroes_data", "refuted", claims.settle_round_trip, (PADDED, VALUES, VALUES), {"arrived": 12, "zero": 0}),
    ("resize_zeroes_data", "confirmed", claims.settle_round_trip, (PADDED, 0 * VALUES, VALUES), {"zero": 12}),
    ("correction_1_kept", "confirmed", claims.settle_preference, (44, 2), {"without": 2}),
    ("correction_1_kept", "refuted", claims.settle_preference, (44, 0), {"fitting": 44}),
    ("fix_resolves_90", "confirmed", claims.settle_fix, (fit(10, 10), RIGHT_ENDS, 30), {"cured": 10}),
    ("fix_resolves_90", "refuted", claims.settle_fix, (fit(10, 0), RIGHT_ENDS, 30), {"fitting": 10}),
    ("fix_resolves_90", "undecidable", claims.settle_fix, (fit(10, 1), {"right": 1, "wrong": 2}, 30), {"runs": 3}),
    ("fix_resolves_90", "undecidable", claims.settle_fix, (fit(0, 0), RIGHT_ENDS, 30), {"right": 48}),
    ("trace_proves_transfer", "confirmed", claims.settle_trace, (traces(),), {"lost": [0] * 4}),
    ("trace_proves_transfer", "refuted", claims.settle_trace, (traces(failed=2),), {"failed": [2] * 4}),
    ("trace_proves_transfer", "refuted", claims.settle_trace, (traces(lost=3),), {"lost": [3] * 4}),
    ("trace_proves_transfer", "untestable", claims.settle_trace, (traces(0),), {}),
    ("x_is_zero", "confirmed", claims.settle_x, ((0.0, 0.0), {"a": ZERO}), {"stored": [0.0, 0.0]}),
    ("x_is_zero", "refuted", claims.settle_x, ((6e-33, 0.0), {"a": ZERO}), {}),
    ("garbage_is_zero", "confirmed", claims.settle_x, ((0.0,), {"a": ZERO, "b": ZERO}), {"zero": ["a", "b"]}),
    ("garbage_is_zero", "undecidable", claims.settle_x, ((0.0,), {"a": ZERO, "b": TINY}), {"zero": ["a"]}),
    ("garbage_is_zero", "refuted", claims.settle_x, ((0.0,), {"a": TINY, "b": TINY}), {"zero": []}),
    ("loss_is_cross_entropy", "refuted", claims.settle_loss, (np.array([4.5, 5.0]), (-0.99, 0.7), 128), {"least": 4.5}),
    ("loss_is_cross_entropy", "confirmed", claims.settle_loss, (np.array([0.5]), (0.1, 0.7), 128), {"runs": 1}),
    ("not_the_matmul", "confirmed", claims.settle_products, (products("right", "right"),), {"stays": False}),
    ("not_the_matmul", "undecidable", claims.settle_products, (products("right", "logits all 0"),), {"stays": True}),
    ("not_the_matmul", "undecidable", claims.settle_products, (products("right", "right", kept=3),), {"stays": False}),
    ("not_the_matmul", "refuted", claims.settle_products, (products("logits all 0", "right"),), {}),
    ("small_init_underflows", "refuted", claims.settle_underflow, ({"a": PASS, "b": PASS}, NO_ZEROS), {}),
    (
        "small_init_underflows",
        "undecidable",
        claims.settle_underflow,
        ({"a": PASS, "b": PASS}, NO_ZEROS | {"b": 0.6}),
        {"passes": []},
    ),
    ("small_init_underflows", "undecidable", claims.settle_underflow, ({"a": PASS, "b": (0.0, 0, 2)}, NO_ZEROS), {}),
    (
        "small_init_underflows",
        "confirmed",
        claims.settle_underflow,
        ({"a": (1e-40, 5, 0)}, {"a": 0.0}),
        {"under": ["a"]},
    ),
    ("lifetime_frees_data", "refuted", claims.settle_returns, (lives((4, 4), (4, 4)), {"NaN": [8, 0, 1]}), {}),
    ("lifetime_frees_data", "confirmed", claims.settle_returns, (lives((0, 4), (0, 0)), {"NaN": [8, 0, 1]}), {}),
    (
        "lifetime_frees_data",
        "undecidable",
        claims.settle_returns,
        (lives((4, 4), (0, 4), (1, 0)), {"NaN": [8, 0, 1]}),
        {"kept": ["a"], "at_return": ["b"], "lost": ["c"]},
    ),
    ("out_parameter_avoids_it", "confirmed", claims.settle_returns, (lives((4, 4)), {"NaN": [8, 0, 1]}), {"out": [0]}),
    ("out_parameter_avoids_it", "refuted", claims.settle_returns, (lives((4, 4)), {"NaN": [8, 0, 0]}), {"sets": [8]}),
    ("fixed_model_learns", "confirmed", claims.settle_training, (CURVE, np.ones(3), {0, 32}, 256, 3.3), {"last": 2.25}),
    ("fixed_model_learns", "refuted", claims.settle_training, (CURVE[:1] * 2, np.ones(3), {32}, 100, 3), {"others": 1}),
    ("fixed_model_learns", "refuted", claims.settle_training, (CURVE[:1] * 2, np.ones(3), {32}, 256, 3.3), {}),
    ("fixed_model_learns", "refuted", claims.settle_training, (CURVE, np.ones(3), {0}, 256, 3.3), {"others": 0}),
    ("fixed_model_learns", "refuted", claims.settle_training, (CURVE, np.zeros(3), {32}, 256, 3.3), {"largest": 0.0}),
]


@pytest.mark.parametrize(("claim", "verdict", "settle", "inputs", "measured"), OUTCOMES)
def test_a_claims_verdict_follows_its_experiment(claim, verdict, settle, inputs, measured):
    ledger = labkit.claims("d2h_sizing")
    settle(ledger, *inputs)
    settled = ledger.settled[claim]
    assert settled.verdict == verdict
    assert settled.measured == settled.measured | measured
    assert bool(settled.given) == bool(
        ledger.claims[claim].given and (claim, verdict) != ("fix_resolves_90", "undecidable")
    )


@pytest.mark.parametrize(
    ("failed", "checked", "verdict"),
    [(3, faulty.REPORTED, "confirmed"), (3, faulty.FINISHED, "refuted"), (0, faulty.REPORTED, "refuted")],
)
def test_errors_hide_where_a_check_would_have_stopped_a_wrong_program(small, failed, checked, verdict):
    ledger = labkit.claims("d2h_sizing")
    claims.settle_errors(ledger, frozenset({"zero_host"}), pair(failed, checked), small)
    assert ledger.settled["unchecked_errors_hide"].verdict == verdict
    assert ledger.settled["unchecked_errors_hide"].measured["failed"] == failed


def test_every_claim_has_a_test_of_each_of_its_verdicts():
    tested = {(claim, verdict) for claim, verdict, *_ in OUTCOMES}
    tested |= {("unchecked_errors_hide", "confirmed"), ("unchecked_errors_hide", "refuted")}
    assert tested == {(name, v) for name, claim in labkit.claims("d2h_sizing").claims.items() for v in claim.texts}


@pytest.mark.parametrize("cured", [0, 4, 44])
def test_the_answer_says_what_was_measured(cured):
    ledger = labkit.claims("d2h_sizing")
    claims.settle_fix(ledger, fit(44, cured), RIGHT_ENDS, 3072)
    fix = ledger.settled["fix_resolves_90"]
    parts = {"claims": {"fix_resolves_90": {"verdict": fix.verdict, "measured": fix.measured}}}
    parts |= {"metrics": {"facts": {"fits": fit(44, cured)}}}
    answer = fill("answer", described("d2h_sizing")["answer"], parts)
    assert "44 fault sets show all symptoms, but only in memory filled with the report's numbers;" in answer
    parts["metrics"]["facts"]["fits"]["any of these"]["memory"]["zeros"] = 1
    assert "show all symptoms;" in fill("answer", described("d2h_sizing")["answer"], parts)
    words = {0: "the correction cures none", 44: "the correction cures all", 4: "their likelihood is unknown"}
    assert answer.endswith(f"{words[cured]}.")
    assert len(answer.split()) <= 30


def test_counts_of_an_earlier_record_stand_beside_those_of_this_run(swept):
    counts = fault_sets.counts_by_memory(swept[0])
    facts = {"memory": {"zeros": counts["zeros"]}}
    result = {"notebook": "d2h_sizing", "device": {"name": "a GPU"}, "date": "2026-11-24"}
    result |= {"metrics": {"facts": facts}, "provenance": {"sources": {}}}
    rows = tables.counts_beside(counts, "here", Record(Path("x.json"), result)).rows
    assert all(row[2] == row[3] for row in rows if row[0] == "zeros")
    ends = dict(row[1:3] for row in rows if row[0] == "zeros")
    zero = int(ends.pop("logits all 0 (with the suspected line; cured)").split()[0])
    assert sum(ends.values()) + zero == len(swept[0].bits), "each set is counted once"
    assert all(row[3] == "not recorded" for row in rows if row[0] != "zeros")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("engine", ["cublas", "kernel"])
def test_a_step_that_is_replayed_gives_the_numbers_of_one_that_is_launched(where, rng, engine, overlap):
    """The first step of a shape is launched, the second recorded as a graph, the third re-run."""
    parameters, tokens, targets = drawn(CONFIGS[0], rng)
    model = TinyLLM(CONFIGS[0], where, engine, overlap=overlap)
    model.write(parameters)
    one = model.trace(tokens, targets)
    shorter = model.trace(tokens[:1, :5], targets[:1, :5])
    for _ in range(3):
        for given, first in (((tokens, targets), one), ((tokens[:1, :5], targets[:1, :5]), shorter)):
            again = model.trace(*given)
            assert all(np.array_equal(again[name], first[name]) for name in first.names)


def test_a_replayed_step_reads_the_tokens_of_its_own_call(where, rng):
    parameters, tokens, targets = drawn(CONFIGS[0], rng)
    model, fresh = (TinyLLM(CONFIGS[0], where) for _ in range(2))
    for one in (model, fresh):
        one.write(parameters)
    for _ in range(3):
        model.trace(tokens, targets)
    other = (tokens + 1) % CONFIGS[0].vocabulary
    assert np.array_equal(model.trace(other, targets)["logits"], fresh.trace(other, targets)["logits"])


class TestHostRuntime:
    """kernels/cuda_host, which is there on a CPU alone."""

    @pytest.fixture(scope="class")
    def runtime(self, tmp_path_factory):
        source = tmp_path_factory.mktemp("probe") / "probe.cu"
        source.write_text(PROBE)
        return ctypes.CDLL(str(build(source, tinyllm.HOST, decide("cpu"))))

    @pytest.fixture(autouse=True)
    def without_an_error_for_others(self, runtime):
        """The last error is the process's, as CUDA's is: a model's next launch would find it."""
        yield
        runtime.probe_clear()

    @pytest.mark.parametrize(
        ("name", "error"),
        [
            ("probe_past_the_end", 1),
            ("probe_wrong_direction", 1),
            ("probe_freed_twice", 1),
            ("probe_too_large", 2),
            ("probe_too_many_threads", 9),
            ("probe_right", 0),
        ],
    )
    def test_errors_are_cudas(self, runtime, name, error):
        assert getattr(runtime, name)() == error

    def test_barriers_are_met_by_every_thread(self, runtime):
        assert runtime.probe_barrier() == 0

    def test_a_compiler_that_fortifies_by_default_changes_nothing(self, tmp_path, monkeypatch):
        wrapper = tmp_path / "c++"
        wrapper.write_text('#!/bin/sh\nexec c++ -D_FORTIFY_SOURCE=2 "$@"\n')
        wrapper.chmod(0o755)
        monkeypatch.setenv("CXX", str(wrapper))
        (tmp_path / "probe.cu").write_text(PROBE + "// fortified\n")
        assert ctypes.CDLL(str(build(tmp_path / "probe.cu", tinyllm.HOST, decide("cpu")))).probe_barrier() == 0

    def test_a_write_outside_is_found_when_it_is_freed(self, runtime):
        assert runtime.probe_overrun() == runtime.probe_overrun() - 1  # it counts those of the whole process

    def test_memory_that_nobody_wrote_holds_nan(self, runtime):
        assert runtime.probe_poison() == 1


PROBE = r"""
#include <cuda_runtime.h>
__global__ void reverse(int* x, int n) {
    __shared__ int part[64];
    part[threadIdx.x] = x[blockIdx.x * n + threadIdx.x];
    __syncthreads();
    x[blockIdx.x * n + threadIdx.x] = part[n - 1 - threadIdx.x];
}
__global__ void write(float* x, int at) { x[at] = 1.0f; }
extern "C" {
int probe_clear() { return cudaGetLastError(); }
int probe_past_the_end() { float* d; float h[8] = {}; cudaMalloc(&d, 16); int e = cudaMemcpy(d, h, 32, cudaMemcpyHostToDevice); cudaFree(d); return e; }
int probe_wrong_direction() { float* d; float h[4] = {}; cudaMalloc(&d, 16); int e = cudaMemcpy(h, d, 16, cudaMemcpyHostToDevice); cudaFree(d); return e; }
int probe_freed_twice() { float* d; cudaMalloc(&d, 16); cudaFree(d); return cudaFree(d); }
int probe_too_large() { float* d; return cudaMalloc(&d, size_t(1) << 45); }
int probe_too_many_threads() { cudaGetLastError(); float* d = nullptr; cuda_host::launch(1, 2048, [](auto... a) { write(a...); }, d, 0); return cudaGetLastError(); }
int probe_right() { float* d; float h[4] = {1, 2, 3, 4}, b[4]; cudaMalloc(&d, 16); cudaMemcpy(d, h, 16, cudaMemcpyHostToDevice); int e = cudaMemcpy(b, d, 16, cudaMemcpyDeviceToHost); cudaFree(d); return e || b[3] != 4; }
int probe_barrier() {
    int* d; int h[128]; for (int i = 0; i < 128; ++i) h[i] = i;
    cudaMalloc(&d, sizeof h); cudaMemcpy(d, h, sizeof h, cudaMemcpyHostToDevice);
    LAUNCH_BARRIER(reverse, 2, 64, d, 64);
    cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost); cudaFree(d);
    for (int i = 0; i < 128; ++i) if (h[i] != i / 64 * 64 + 63 - i % 64) return 1;
    return 0;
}
int probe_overrun() { float* d; cudaMalloc(&d, 16); LAUNCH(write, 1, 1, d, 5); cudaFree(d); return int(cuda_host::state().overruns); }
int probe_poison() { float* d; float h[4]; cudaMalloc(&d, 16); cudaMemcpy(h, d, 16, cudaMemcpyDeviceToHost); cudaFree(d); return std::isnan(h[0]) && std::isnan(h[3]); }
}
"""  # noqa: E501


def test_a_compiler_that_is_missing_is_one_clear_error(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"CXX: no-such-compiler is not on the PATH; expected a C\+\+ compiler"):
        build(tinyllm.FOLDER / "api.cu", tinyllm.HOST, decide("cpu"))


def test_a_source_that_does_not_compile_says_why(tmp_path):
    (tmp_path / "bad.cu").write_text("int x = ;\n")
    with pytest.raises(UsageError, match=r"bad.cu: .*\+\+ could not build it: .*error"):
        build(tmp_path / "bad.cu", tinyllm.HOST, decide("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "heads: 5 does not divide width 48"),
        ({"width": 0}, "width: .*got 0"),
        ({"sequences": -1}, "sequences: .*got -1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(where, change, message):
    sizes = {"vocabulary": 61, "context": 17, "width": 48, "layers": 2, "heads": 4, "sequences": 3} | change
    with pytest.raises(UsageError, match=message):
        TinyLLM(Config(**sizes), where)


def test_tokens_that_cannot_be_are_refused(where, rng):
    model = TinyLLM(CONFIGS[0], where)
    with pytest.raises(RuntimeError, match="tokens: expected 0 to 60, got 61 at 1"):
        model.forward(np.array([[0, 61]]))
    with pytest.raises(RuntimeError, match="tokens: expected 1 to 3 sequences of 1 to 17, got 4 of 2"):
        model.forward(np.zeros((4, 2), int))
    with pytest.raises(UsageError, match=r"engine: .*got 'cuda'"):
        TinyLLM(CONFIGS[0], where, "cuda")
    with pytest.raises(UsageError, match=r"switch: .*got 'speed'"):
        faulty.row("speed")


def test_the_corpus_is_text_and_a_folder_of_ones_own(tmp_path):
    text = corpus()
    training, validation = text.split()
    assert len(training) + len(validation) == text.facts["bytes"]
    assert 0.04 < len(validation) / len(training) < 0.07
    assert b"Return" in text.text
    with pytest.raises(UsageError, match="is no folder"):
        corpus(str(tmp_path / "none"))
    (tmp_path / "a.txt").write_text("few words")
    with pytest.raises(UsageError, match="holds 9 bytes"):
        corpus(str(tmp_path))
    (tmp_path / "b.md").write_text("many words " * 1000)
    assert len(corpus(str(tmp_path)).text) > 10_000


@pytest.mark.long
def test_it_learns(where, rng):
    config = Config(context=32, width=32, heads=2, layers=1, sequences=8)
    training, validation = corpus().split()
    model = TinyLLM(config, where)
    model.write(tinyllm.initial(config, rng))
    curve = tinyllm.train(model, training, validation, 60, 1e-2, rng, every=60, looked_at=2)
    assert (
        abs(curve[0][2] - np.log(256)) < 0.1
    )  # logits of a fresh head vary by 0.02 sqrt(width), which costs half its square
    assert curve[-1][2] < np.log(256) - 1.0  # a nat better than knowing nothing
    assert len(model.generate(b"Return", 5)) == 5
    assert model.generate(b"Return", 5, np.random.default_rng(0)) == model.generate(
        b"Return", 5, np.random.default_rng(0)
    )
