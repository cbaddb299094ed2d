"""The sealed call: draws from the list and as many from outside it, none named wrongly."""

import ast
import gc
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from kernels.attention import blind, calls, faulty, golden, identify, survey
from kernels.attention.blas import GemmRejectedError
from kernels.attention.calls import Call
from kernels.attention.problem import REPORT, Sizes, uniform
from whywrong import Weighing
from whywrong.explaining.hypotheses import UNDECIDABLE, Fit

BLOCK = 32
SIZES = [*(Sizes(1, *order) for order in permutations((31, 43, 61))), Sizes(1, 43, 43, 31), replace(REPORT, heads=1)]
"""Sizes that no setting of the search has."""


@pytest.fixture(scope="module")
def listed():
    return survey.every_call(BLOCK)


@pytest.fixture(scope="module")
def pool(listed):
    return [call for outcome in survey.suspects(survey.survey(REPORT, listed)) for call in outcome.calls]


@pytest.fixture(scope="module")
def candidates(listed):
    return identify.Candidates(listed, identify.separating_settings(REPORT), BLOCK)


@pytest.fixture(scope="module", params=[30, pytest.param(50, marks=pytest.mark.slow)])
def count(request):
    """How many draws of the list, and from outside it, are weighed."""
    return request.param


@pytest.fixture(scope="module")
def weighed(candidates, pool, device, count):
    """By seed, what was found of a blind draw: as many as it takes for `count` of the list and `count` from outside."""
    found, known = {}, {False: 0, True: 0}
    gc.disable()  # a thousand small results a draw: to look for garbage takes longer than to weigh
    for seed in range(1000):
        if min(known.values()) == count:
            break
        sealed = blind.suspect("blind", seed, pool, device, BLOCK)
        inside = str(sealed.reveal()) in candidates.listed
        if known[inside] < count:
            known[inside] += 1
            found[seed] = (sealed, inside, candidates.identify(sealed))
    gc.freeze()
    gc.enable()
    assert known == {False: count, True: count}
    return found


def outcome(run, *args, **given):
    """Scores as bytes, NaN as one number; or how BLAS or the buffer refuses the call."""
    try:
        return np.nan_to_num(run(*args, **given).astype(np.float32) + 0.0, nan=-7.0).tobytes()
    except GemmRejectedError as error:
        return error.argument
    except IndexError:
        return "beyond the buffer"


@cache
def exact(call, size, mode):
    return outcome(lambda: golden.called(call, survey.integers(size, seed=5), mode)[0])


def reads_what_it_writes(program):
    for size in SIZES:
        for g in program.gemms(size, golden.plan(size, "adjacent")):
            spans = g.extents()
            if any(max(spans[x][0], spans["C"][0]) < min(spans[x][1], spans["C"][1]) for x in "AB"):
                return True
    return False


def equal_in_what_they_compute(program, listed, device):
    """The listed calls whose exact result on integers is the program's real one, at sizes that no search has used."""
    left = listed
    for size in SIZES:
        inputs = survey.integers(size, seed=5)
        for mode in ("adjacent", "poison"):
            mine = outcome(faulty.scores, program, inputs, device, mode=mode)
            left = [call for call in left if exact(call, size, mode) == mine]
    return left


def test_a_fifth_of_the_blind_draws_are_from_outside_the_list(pool, candidates):
    outside = [str(blind.suspect("blind", seed, pool).reveal()) not in candidates.listed for seed in range(50)]
    assert 5 <= sum(outside) <= 15


@pytest.mark.long
def test_a_listed_call_is_never_ruled_out_and_no_other_is_named(weighed):
    for seed, (sealed, inside, found) in weighed.items():
        if inside:
            name = str(sealed.reveal())
            assert name in [*found.left, *found.untested], f"seed {seed}: {name}"
            assert found.cause in (name, UNDECIDABLE), f"seed {seed}: {found.cause}"
            assert blind.ended_rightly(found, name, listed=True)


@pytest.mark.long
def test_what_is_left_of_a_listed_call_is_one_computation_nearly_always_and_few_calls(weighed, candidates, count):
    left = [found.left for _, inside, found in weighed.values() if inside and found.left]
    assert len(left) >= 0.8 * count
    assert all(candidates.computations(names) == 1 for names in left)
    assert np.median([len(names) for names in left]) <= 4


@pytest.mark.long
def test_a_call_from_outside_is_none_of_these_or_undecidable_where_listed_ones_compute_the_same(
    weighed, listed, device, count
):
    equal, different = 0, 0
    for seed, (sealed, inside, found) in weighed.items():
        if inside:
            continue
        program = sealed.reveal()
        assert found.cause in (blind.NONE, UNDECIDABLE), f"seed {seed}: {program} was named {found.cause}"
        assert blind.ended_rightly(found, str(program), listed=False)
        if reads_what_it_writes(program):
            continue  # its result depends on the order of BLAS's loads and stores: nothing is decided
        same = equal_in_what_they_compute(program, listed, device)
        # A call that reads what it writes wherever it runs at all can be held against nothing, and stays a possibility.
        expected = UNDECIDABLE if same or found.untested else blind.NONE
        assert found.cause == expected, f"seed {seed}: {program}, equal to {same}"
        equal, different = equal + bool(same), different + (not same)
    assert equal >= 0.06 * count
    assert different >= 0.4 * count
    assert sum(found.cause == blind.NONE for _, inside, found in weighed.values() if not inside) >= 0.5 * count


def test_the_identifying_code_does_not_import_the_generator():
    folder = Path(identify.__file__).parent
    seen, waiting = set(), ["identify"]
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for node in ast.walk(ast.parse((folder / f"{module}.py").read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module == "kernels.attention":
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("kernels.attention."):
                names = [node.module.split(".")[2]]
            waiting += [name for name in names if name not in seen and (folder / f"{name}.py").exists()]
    assert "calls" in seen
    assert "blind" not in seen


def test_naming_the_nearest_listed_call_would_be_found_out():
    fits = {"a": {"s": Fit(True, 0.1, "fits")}}
    assert not blind.ended_rightly(Weighing(["s"], fits), "b", listed=False)
    assert not blind.ended_rightly(Weighing(["s"], fits), "b", listed=True)
    assert blind.ended_rightly(Weighing(["s"], fits), "a", listed=True)
    assert blind.ended_rightly(Weighing(["s"], {}), "b", listed=False)


def test_a_call_in_other_words_computes_the_same(device):
    inputs = survey.integers(Sizes(2, 37, 53, 29))
    for call in (Call(), blind.named()["column_major"], calls.blocked(BLOCK)):
        others = calls.other_forms(call, BLOCK)
        mine = outcome(faulty.scores, call, inputs, device)
        same = [other for other in others if outcome(faulty.scores, other, inputs, device) == mine]
        assert len(same) >= 2, call
        assert call not in others


def test_a_later_setting_that_refutes_what_was_left_is_flagged():
    fit, beyond = Fit(True, 0.1, "fits"), Fit(False, 9.0, "beyond")
    before = Weighing(["first"], {"a": {"first": fit}, "b": {"first": beyond}})
    later = {"a": {"later": fit}, "b": {"later": fit}}
    both, words = identify.upheld(before, Weighing(["later"], later))
    assert both.left == ["a"]  # what was refuted once is not brought back
    assert words.startswith("upheld")
    assert "1 ruled out before would fit" in words
    both, words = identify.upheld(before, Weighing(["later"], {"a": {"later": beyond}, "b": {"later": fit}}))
    assert both.cause == blind.NONE
    assert words.startswith("CONTRADICTED: 1 of the 1 not ruled out before fail at later")
    assert identify.upheld(before, Weighing(["later"], {"b": {"later": fit}}))[1].startswith("NOT TESTED AGAIN")
    none = Weighing(["first"], {"b": {"first": beyond}})
    assert identify.upheld(none, Weighing(["later"], {}))[1] == "nothing was left to test again"


@pytest.mark.long
def test_a_proof_with_the_wrong_call_left_is_contradicted_by_a_real_run(device, listed):
    settings = {
        name: s for name, s in identify.separating_settings(REPORT).items() if name == "adjacent 128 x 128 x 64"
    }
    candidates = identify.Candidates(listed, settings, BLOCK)
    sealed = faulty.Suspect(blind.named()["column_major"], device)
    found = candidates.identify(sealed)
    assert candidates.computations(found.left) > 1  # one setting, N = M: too few
    inputs = {"37 x 53 x 29": uniform(Sizes(1, 37, 53, 29), np.random.default_rng(1))}
    both, words = identify.upheld(found, candidates.again(found, sealed, inputs))
    assert words.startswith("CONTRADICTED")
    assert candidates.computations(both.left) == 1
