"""The CUDA C++ TinyLLM against float64, its Tensor, the host runtime, and the Tensor under investigation."""

import ctypes
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import labkit
from kernels.corpus import corpus
from kernels.tinyllm import blind, counts, evidence, faulty, golden, tinyllm
from kernels.tinyllm.identify import identify
from kernels.tinyllm.tinyllm import Config, TinyLLM, library
from labkit import localise, repeat
from labkit.bench.native import build
from labkit.errors import UsageError
from labkit.session.device import decide

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
    parameters = {
        name: (value + 0.05 * rng.standard_normal(value.shape)).astype(np.float32)
        for name, value in tinyllm.initial(config, rng).items()
    }
    shape = (2, max(1, config.sequences - 1), max(1, config.context - 1))
    return parameters, *rng.integers(0, config.vocabulary, shape)


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
    found = localise(model.trace(tokens, targets), golden.reference(parameters, tokens, targets, config))
    assert found.first is None, str(found)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_each_time(where, rng):
    parameters, tokens, targets = drawn(CONFIGS[0], rng)
    model = TinyLLM(CONFIGS[0], where)
    model.write(parameters)
    assert repeat(lambda: model.trace(tokens, targets), 10).identical


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


def test_a_missing_scale_is_not_within_it(where, rng):
    config = CONFIGS[0]
    parameters, tokens, targets = drawn(config, rng)
    model = TinyLLM(config, where)
    scaled = parameters | {"L1.qkv.w": parameters["L1.qkv.w"] * np.float32(1.01)}
    model.write(scaled)
    found = localise(model.trace(tokens, targets), golden.reference(parameters, tokens, targets, config))
    assert found.first == "L1.heads"


def test_a_step_of_adamw_is_pytorchs(where, rng):
    import torch

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
    "name", ["copy", "assign", "move", "self", "return by value", "empty", "round trip", "survives", "thousand",
             "nothing on the device"],
)  # fmt: skip
def test_the_tensor(where, name):
    lib = library(where)
    live = None if where.is_cuda else lib.cuda_host_live()
    assert lib.tinyllm_tensor_scenario(name.encode()).decode() == "ok"
    if live is not None:
        assert (lib.cuda_host_live(), lib.cuda_host_overruns()) == (live, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [("mismatched host", "h2d of a [4], 4 elements, 16 bytes: the host holds 0 elements"),
     ("too large", "cudaMalloc of giant [35184372088832], 35184372088832 elements, 140737488355328 bytes")],
)  # fmt: skip
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


@pytest.mark.gpu
def test_the_sanitizer_finds_no_leak_and_no_error_in_what_is_right(where, rng):
    assert any("ERROR SUMMARY: 0 errors" in line for line in faulty.leak_check(where))
    p = faulty.program(0.1, rng)
    for tool in ("memcheck", "initcheck"):
        count, lines = faulty.sanitized(p, faulty.row(world="as left"), where, tool)
        assert count == 0, lines


@pytest.fixture(scope="module")
def small():
    return faulty.program(0.1, np.random.default_rng(1), width=32, vocabulary=16)


@pytest.fixture(scope="module")
def unknown():
    return [blind.draw(seed) for seed in range(50)]


@pytest.fixture(scope="module")
def swept(where, small, unknown):
    """The sweep of a small program, and the outcomes of the programs that are drawn, [50, kinds of memory]."""
    sweep, o = faulty.sweep(small, where, np.concatenate([one.rows() for one in unknown]))
    return sweep, o.reshape(50, len(faulty.WORLDS))


def outcome(swept, *names, world="zeros"):
    sweep = swept[0]
    return sweep.outcomes[world][sweep.at(counts.bits(names)[None])[0]]


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


@pytest.mark.parametrize("world", faulty.WORLDS)
def test_an_outcome_does_not_depend_on_what_ran_before(where, small, rng, world):
    rows = rng.permutation(faulty.sets())[:300]
    rows = np.column_stack([rows, np.zeros((300, 3), int), np.full(300, faulty.WORLDS.index(world))])
    there = faulty.run(small, rows, where, jobs=2)
    back = faulty.run(small, rows[::-1], where, jobs=1)[::-1]
    for name in there.dtype.names:
        np.testing.assert_array_equal(there[name], back[name], err_msg=name)


def test_what_lies_beside_buffers_decides_only_how_programs_end_that_write_beyond_theirs(
    where, small, rng, monkeypatch
):
    if where.is_cuda:
        pytest.skip("the host runtime alone can be told what lies beside a buffer")
    loose = faulty.sets()[faulty.sets()[:, -1] == 1]
    rows = rng.permutation(np.column_stack([loose, np.zeros((len(loose), 3), int), rng.integers(0, 4, len(loose))]))[
        :800
    ]
    found = []
    for byte in ("A5", "3F"):
        monkeypatch.setenv("CUDA_HOST_GUARD", byte)
        found.append(faulty.run(small, rows, where))
    differs = faulty.steady(*found)["status"] == faulty.UNSTEADY
    beyond = rows[:, faulty.NAMES.index("size_in_elements")] == 1
    assert differs[beyond].mean() > 0.5
    assert not differs[~beyond].any()


def test_a_program_that_writes_far_beyond_its_buffers_harms_no_other(where):
    p = faulty.program(0.1, np.random.default_rng(1), width=128, vocabulary=16, tokens=64)
    rows = [faulty.row("size_in_elements", "unchecked", world=world) for world in faulty.WORLDS]
    o = faulty.run(p, np.stack([*rows, faulty.row("unchecked")]), where, jobs=1)
    assert (o["status"] == faulty.FINISHED).all()
    assert faulty.right(o, p).tolist() == [False] * len(rows) + [True]


def test_what_a_program_shows_does_not_depend_on_its_sizes(where):
    """The trace counts the bytes of x, which are the report's 2048 at the report's sizes alone, and not the logits'."""
    p = faulty.program(0.1, np.random.default_rng(1), width=16, vocabulary=64, tokens=3)
    shared = faulty.row(*faulty.PRINTED, "no_other_d2h", "shallow_assignment", world="the report's numbers")
    o = faulty.run(p, shared[None], where, jobs=1)
    assert all(shown[0] for shown in faulty.observations(o, p).values())
    assert counts._prints(o[0], p)[1] == "cannot be read"  # x, whose debug print shows what its own buffer held


def test_memory_holds_what_its_kind_says_before_it_is_written(swept):
    refused = ("resize_by_size", "assignment_by_host_size", "h2d_by_host_size", "prefer_host", "unchecked")
    x = {world: outcome(swept, *refused, world=world)["x"] for world in faulty.WORLDS}
    assert np.isnan(x["NaN"]).all()
    assert (x["zeros"] == 0).all()
    np.testing.assert_array_equal(x["the report's numbers"], np.float32(counts.REPORTED_X))


def test_the_printed_lines_are_right_and_read_word_for_word_they_stop(where, small):
    (found,) = counts.together(small, where, counts.printed_lines(small))
    assert counts.tally(found["cut"]) == {"right": 48}
    assert counts.tally(found["literal"]) == {faulty.ENDS[faulty.ILLEGAL]: 48}


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
    for names, world, end in [
        (("no_layer_d2h", "zero_host"), "NaN", "logits all 0"),
        ((*faulty.PRINTED, "assignment_by_host_size"), "zeros", "logits all 0"),
        ((*faulty.PRINTED, "assignment_by_host_size"), "NaN", "wrong"),
        (("prefer_host", "unchecked", "assignment_by_host_size"), "zeros", "right"),
        (("shallow_assignment", "no_other_d2h", "unchecked"), "zeros", "logits all 0"),
        (("shallow_assignment", "no_other_d2h"), "zeros", faulty.ENDS[faulty.REPORTED]),
    ]:
        assert counts.ending(outcome(swept, *names, world=world), p) == end, names


def test_a_set_is_cured_when_it_is_right_and_not_when_it_is_no_longer_zero(swept):
    sweep, _ = swept
    found = counts.facts(sweep)["worlds"]["zeros"]
    resized = (*faulty.PRINTED, "assignment_by_host_size")
    assert found["smallest"][faulty.words(resized)]["cured"]
    assert not found["smallest"]["no_layer_d2h + zero_host"]["cured"]
    o = sweep.outcomes["zeros"]
    zero = faulty.observations(o, sweep.p)["logits all 0"]
    fixed = o[sweep.at(faulty.corrected(sweep.bits))]
    other = ~faulty.observations(fixed, sweep.p)["logits all 0"]
    assert found["zero"][2] == (zero & faulty.right(fixed, sweep.p)).sum() < (zero & other).sum()


def test_a_set_that_prints_the_trace_of_a_failed_upload_or_of_lost_values_is_found(swept):
    found = counts.facts(swept[0])["worlds"]["zeros"]
    names = (*faulty.PRINTED, "assignment_by_host_size"), ("no_layer_d2h", "prefer_host", "zero_host")
    assert found["liars"]["smallest"] == [faulty.words(one) for one in names]
    faithful = outcome(swept, "no_other_d2h", "prefer_host", "zero_host", "unchecked")  # zeros from the embedding on
    assert faithful["traces"] > 0 == faithful["ff_right"]
    assert 0 < found["zero within"] < found["zero"][0]


def test_the_correction_is_of_the_unit_that_size_has():
    bits = np.stack([counts.bits(names) for names in (["resize_by_size"], ["size_in_elements"], ["h2d_by_host_size"])])
    fixed = faulty.corrected(bits)
    assert [faulty.named(one) for one in fixed] == [set(), {"resize_by_size", "size_in_elements"}, set()]


def test_minimal_sets_hold_no_smaller_one():
    every = faulty.sets()
    first, third, sixth = (faulty.NAMES.index(name) for name in ("size_in_elements", "no_layer_d2h", "zero_host"))
    shows = (every[:, first] & every[:, third]) | every[:, sixth]
    assert set(faulty.minimal(every, shows.astype(bool))) == {
        frozenset({"size_in_elements", "no_layer_d2h"}), frozenset({"zero_host"})
    }  # fmt: skip


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
    unsteady = {world: o.copy() for world, o in sweep.outcomes.items()}
    for o in unsteady.values():
        o["status"] = faulty.UNSTEADY
    assert not any(seen.any() for seen in faulty.observations(unsteady["zeros"], sweep.p).values())
    found = counts.facts(replace(sweep, outcomes=unsteady))["worlds"]["zeros"]
    assert found["ends"] == dict.fromkeys(faulty.ENDS, 0) | {"otherwise when run again": len(sweep.bits)}
    assert (found["right"], found["wrong"], found["smallest that stop"]) == (0, [0, 0, 0], [])


def test_nothing_is_held_against_a_program_that_prints_otherwise_when_run_again(swept):
    """Its own outcome in the sweep another than the observed one, as a GPU gives them."""
    sweep, _ = swept
    truth = "resize_by_size"
    observed = {world: outcome(swept, truth, "unchecked", world=world).copy() for world in faulty.WORLDS}
    at = sweep.at(counts.bits({truth, "unchecked"})[None])[0]
    other = {world: o.copy() for world, o in sweep.outcomes.items()}
    other["zeros"]["x_zero"][at] += 1
    refuted = identify(replace(sweep, outcomes=other), observed)
    assert refuted.cause == "none of these"
    assert evidence.named_wrongly(truth, refuted)
    other["zeros"]["status"][at] = faulty.UNSTEADY
    held = identify(replace(sweep, outcomes=other), observed)
    assert (held.cause, held.untested) == ("undecidable", [truth])
    assert evidence.told(held).startswith("undecidable: 1 candidates print otherwise")
    for one in observed.values():
        one["status"] = faulty.UNSTEADY
    assert identify(sweep, observed).cause == "undecidable"


@pytest.mark.gpu
def test_on_a_gpu_no_unknown_program_is_named_wrongly_and_those_that_stay_in_their_buffers_are_steady(swept, unknown):
    sweep, rows = swept
    weighed = [identify(sweep, dict(zip(faulty.WORLDS, row, strict=True))) for row in rows]
    assert not any(evidence.named_wrongly(one.truth, found) for one, found in zip(unknown, weighed, strict=True))
    assert sum(found.cause == one.truth for one, found in zip(unknown, weighed, strict=True)) >= 12
    within = sweep.bits[:, faulty.NAMES.index("size_in_elements")] == 0
    for o in sweep.outcomes.values():
        assert (o["status"][within] != faulty.UNSTEADY).all()


def test_no_unknown_program_is_named_wrongly(swept, unknown):
    """Fifty programs, among them a fifth whose fault is none of the switches."""
    sweep, rows = swept
    weighed = [identify(sweep, dict(zip(faulty.WORLDS, row, strict=True))) for row in rows]
    outside = [one.outside_the_list for one in unknown]
    assert 8 <= sum(outside) <= 16
    assert not any(evidence.named_wrongly(one.truth, found) for one, found in zip(unknown, weighed, strict=True))
    causes = [found.cause for found in weighed]
    assert all(cause in ("none of these", "undecidable") for cause, out in zip(causes, outside, strict=True) if out)
    assert causes.count("none of these") >= sum(outside) - 3
    assert sum(cause == one.truth for one, cause in zip(unknown, causes, strict=True)) >= 12
    assert "undecidable" in causes


def test_a_wrong_name_would_be_seen(swept):
    sweep, _ = swept
    weighing = identify(
        sweep, {world: outcome(swept, "resize_by_size", "unchecked", world=world) for world in faulty.WORLDS}
    )
    assert weighing.cause == "resize_by_size"
    assert not evidence.named_wrongly("resize_by_size", weighing)
    assert evidence.named_wrongly("prefer_host", weighing)
    assert evidence.named_wrongly("h2d starts one element late", weighing)


def test_what_names_a_program_does_not_know_how_it_was_drawn():
    code = "import sys, kernels.tinyllm.identify; sys.exit('kernels.tinyllm.blind' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_fault_outside_the_list_does_something(where, small):
    for name, needs in blind.NEEDS.items():
        with_it, without = (
            faulty.run(small, faulty.row(*needs, "unchecked", outside=i)[None], where, jobs=1)[0]
            for i in (faulty.OUTSIDE.index(name), 0)
        )
        assert counts.ending(with_it, small) != counts.ending(without, small) == "right", name


def test_a_product_that_writes_nothing_is_put_right_by_another_and_a_wrong_operand_is_not(where, small, swept):
    (told,) = counts.together(
        small, where, counts.products(small, counts.with_zero_logits(swept[0], 5, np.random.default_rng(0)))
    )
    assert told["engines"]["cublas"]["zero"] == told["sets"] == 5
    assert told["faults"][counts.ROUTINE] == {"cublas": "logits all 0", "kernel": "right", "host": "right"}
    assert set(told["faults"][counts.OPERAND].values()) == {"logits all 0"}


PRINTED_RIGHT = {way: {"zeros": {"right": 3}} for way in faulty.WAYS}


class TestVerdicts:
    """Each experiment with outcomes made up both ways: the verdict follows, and its reason says what came out."""

    VALUES = np.arange(1, 13, dtype=np.float32).reshape(3, 4)

    @staticmethod
    def facts(cured, shown=5, liars=(0, 0), traces=9):
        part = {"most": [shown, 10, 10, cured]}
        told = {
            "trace": traces,
            "its upload failed": liars[0],
            "values lost": liars[1],
            "smallest": ["zero_host"] if liars[1] else [],
        }
        worlds = {"zeros": part | {"printed": part, "liars": told}}
        return {"worlds": worlds, "printed": {"cut": PRINTED_RIGHT}, "sets": 30}

    @staticmethod
    def products(routine, operand, kept=4):
        engines = {name: {"zero": 4, "stopped": 0} for name in ("cublas", "kernel", "host")}
        engines["host"]["zero"] = kept
        faults = {counts.ROUTINE: routine, counts.OPERAND: operand}
        ends = {name: {"cublas": "logits all 0", "host": end} for name, end in faults.items()}
        return {"sets": 4, "engines": engines, "faults": ends}

    @staticmethod
    def runs(failed, checked):
        o = np.zeros(2, faulty.OUTCOME)
        o["failed_h2d"], o["status"] = failed, (faulty.FINISHED, checked)
        return o

    def cases(self, p):
        v = self.VALUES
        padded = np.concatenate([v.reshape(-1), np.zeros(36, np.float32)])
        spread = np.concatenate(
            [v.reshape(-1)[:6], np.zeros(6, np.float32), v.reshape(-1)[6:], np.zeros(30, np.float32)]
        )
        mixed = self.facts(10)
        mixed["worlds"]["NaN"] = self.facts(0)["worlds"]["zeros"]
        wrong = {way: {"zeros": {"right": 1, "wrong": 2}} for way in faulty.WAYS}
        zero, tiny = np.zeros(3, np.float32), np.full(3, 1e-30, np.float32)
        curve = [(0, 5.5, 5.5), (9, 2.0, 2.25)]
        e = evidence
        return [
            (e.first_quarter_only(padded, v), "confirmed", "hold 12, 0, 0, 0 of the values"),
            (e.first_quarter_only(spread, v), "refuted", "not the first quarter alone"),
            (e.first_quarter_only(v.reshape(-1), v), "refuted", "1 times as many"),
            (e.resize_zeroes_data(v, v, -v), "refuted", "12 arrive, 0 are zero"),
            (e.resize_zeroes_data(0 * v, v, -v), "confirmed", "0 arrive, 12 are zero"),
            (e.fix_resolves(self.facts(10)), "confirmed", "helps whichever set it was"),
            (e.fix_resolves(self.facts(0)), "refuted", "does not help whichever set it was"),
            (e.fix_resolves(self.facts(1)), "undecidable", "makes 1 of these right"),
            (e.fix_resolves(mixed), "undecidable", "20 show all that the report saw"),
            (e.fix_resolves(self.facts(4, shown=4)), "undecidable", "0 show all that the report saw"),
            (e.trace_proves_transfer(self.facts(0)), "confirmed", "memory zeros: 0 and 0 of 9"),
            (e.trace_proves_transfer(self.facts(0, liars=(2, 3))), "refuted", "2 and 3 of 9; the smallest: zero_host"),
            (e.trace_proves_transfer(self.facts(0, traces=0)), "untestable", "no set prints the line"),
            (e.x_is_zero((0.0, 0.0), []), "confirmed", "as float32 they are zero"),
            (e.x_is_zero((6e-33, 0.0), ["all zero"]), "refuted", "not zero"),
            (e.garbage_is_zero({"a": zero, "b": zero}), "confirmed", "in every case"),
            (e.garbage_is_zero({"a": zero, "b": tiny}), "undecidable", "in some cases alone: a"),
            (e.garbage_is_zero({"a": tiny, "b": tiny}), "refuted", "b 1.0e-30"),
            (e.loss((-0.99, 0.7), np.array([4.6]), 128), "refuted", "never negative"),
            (e.loss((0.1, 0.7), np.array([0.05]), 128), "confirmed", "within what one can be"),
            (e.unchecked_errors_hide("s", *self.runs(3, faulty.REPORTED), p), "confirmed", "3 calls of h2d fail"),
            (e.unchecked_errors_hide("s", *self.runs(3, faulty.FINISHED), p), "refuted", "no set was found"),
            (e.unchecked_errors_hide("s", *self.runs(0, faulty.REPORTED), p), "refuted", "no set was found"),
            (e.not_the_matmul(self.products("right", "right")), "confirmed", "on the host: right. A head"),
            (e.not_the_matmul(self.products("right", "logits all 0")), "undecidable", "do not clear what it is"),
            (e.not_the_matmul(self.products("right", "right", kept=3)), "undecidable", "some do not stay"),
            (e.not_the_matmul(self.products("logits all 0", "right")), "refuted", "fault is in the routine"),
            (e.small_init({"a": (1e-9, 0, 0), "b": (1e-9, 0, 0)}), "refuted", "no kind of model"),
            (e.small_init({"a": (1e-9, 0, 0), "b": (0.0, 0, 2)}), "undecidable", "2 zero"),
            (e.small_init({"a": (1e-40, 5, 0)}), "confirmed", "5 denormal"),
            (e.lifetime({"cut": PRINTED_RIGHT}), "refuted", "6 of 6 runs"),
            (e.lifetime({"cut": wrong}), "confirmed", "2 of 6 runs"),
            (e.out_parameter({"zeros": [8, 0, 1]}), "confirmed", "0 and 1 of 8"),
            (e.out_parameter({"zeros": [8, 0, 0]}), "refuted", "neither helps any"),
            (e.learns(curve, np.ones(3), {0, 32}, 256), "confirmed", "5.50 to 2.25"),
            (e.learns(curve[:1] * 2, np.ones(3), {32}, 100), "refuted", "does not learn"),
            (e.learns(curve[:1] * 2, np.ones(3), {32}, 256), "refuted", "does not learn"),
            (e.learns(curve, np.ones(3), {0}, 256), "refuted", "are predicted: 0"),
            (e.learns(curve, np.zeros(3), {32}, 256), "refuted", "logits reach 0"),
        ]  # fmt: skip

    def test_each_follows_its_experiment(self, small):
        ledger = labkit.claims("d2h_sizing")
        for found, verdict, says in self.cases(small):
            ledger.settle("x_is_zero", **found)  # any claim will do: it refuses a reason that is missing or told twice
            assert ledger.settled["x_is_zero"].verdict == verdict, says
            assert says in ledger.settled["x_is_zero"].because

    def test_a_set_that_shows_everything_is_the_cause_only_when_it_is_alone(self, swept):
        found = counts.facts(swept[0])
        assert all(all(one["shows"]) for *_, one in evidence.left(found))
        assert len(evidence.weighed(found).left) == len(evidence.left(found))
        for world in found["worlds"].values():
            for one in world["smallest"].values():
                one["shows"] = [True, True, False, True, True]
        assert evidence.weighed(found).cause == "none of these"
        found["worlds"]["NaN"]["smallest"]["no_layer_d2h + zero_host"]["shows"] = [True] * 5
        assert evidence.weighed(found).cause == "no_layer_d2h + zero_host (memory: NaN)"


def test_the_answer_names_what_each_device_gave_and_follows_it(swept, where, small):
    (printed,) = counts.together(small, where, counts.printed_lines(small))
    one = counts.facts(swept[0]) | {"printed": printed}
    _, shown, _, cured = one["worlds"]["the report's numbers"]["most"]
    answer = evidence.answer({"CPU": one, "H200": {}})
    assert f"{shown} of {one['sets']} sets show all that the report saw" in answer
    assert f"makes {cured} of them right" in answer
    assert "changes no logit" in answer
    assert answer.startswith("Undecidable.")
    assert "The H200 has not run this version yet." in answer
    other = json.loads(json.dumps(one))
    other["worlds"]["the report's numbers"]["most"] = [5, 7, 5, 3]
    other["printed"]["cut"][faulty.WAYS[0]]["zeros"] = {"wrong": 3}
    answer = evidence.answer({"CPU": one, "H200": other})
    assert "7 of 3072 sets show all that the report saw" in answer
    assert "makes 3 of them right" in answer
    assert "(H200)" in answer
    assert "changes logits" in answer
    assert "not run this version" not in answer
    for world in other["worlds"].values():
        for name in world["smallest"].values():
            name["shows"] = [True, True, False, True, True]
    answer = evidence.answer({"CPU": other})
    assert answer.startswith("None of these.")
    assert "would have told" not in answer


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("engine", ["cublas", "kernel"])
def test_a_step_that_is_replayed_gives_the_numbers_of_one_that_is_launched(where, rng, engine, overlap):
    """The first step of a shape is launched, the second recorded as a graph, the third replayed."""
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
        [("probe_past_the_end", 1), ("probe_wrong_direction", 1), ("probe_freed_twice", 1), ("probe_too_large", 2),
         ("probe_too_many_threads", 9), ("probe_right", 0)],
    )  # fmt: skip
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
        assert runtime.probe_overrun() == 1

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
    with pytest.raises(UsageError, match=r"CXX: no-such-compiler is not on the PATH; wanted a C\+\+ compiler"):
        build(tinyllm.FOLDER / "api.cu", tinyllm.HOST, decide("cpu"))


def test_a_source_that_does_not_compile_says_why(tmp_path):
    (tmp_path / "bad.cu").write_text("int x = ;\n")
    with pytest.raises(UsageError, match=r"bad.cu: .*\+\+ could not build it: .*error"):
        build(tmp_path / "bad.cu", tinyllm.HOST, decide("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 5}, "heads: 5 does not divide width 48"), ({"width": 0}, "width: 0 is not right"),
     ({"sequences": -1}, "sequences: -1 is not right")],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused(where, change, message):
    sizes = {"vocabulary": 61, "context": 17, "width": 48, "layers": 2, "heads": 4, "sequences": 3} | change
    with pytest.raises(UsageError, match=message):
        TinyLLM(Config(**sizes), where)


def test_tokens_that_cannot_be_are_refused(where, rng):
    model = TinyLLM(CONFIGS[0], where)
    with pytest.raises(RuntimeError, match="tokens: 61 at 1; wanted 0 to 60"):
        model.forward(np.array([[0, 61]]))
    with pytest.raises(RuntimeError, match="tokens: 4 sequences of 2; wanted 1 to 3 of 1 to 17"):
        model.forward(np.zeros((4, 2), int))
    with pytest.raises(UsageError, match=r"engine: 'cuda' is not right"):
        TinyLLM(CONFIGS[0], where, "cuda")
    with pytest.raises(UsageError, match=r"switch: 'speed' is not right"):
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
