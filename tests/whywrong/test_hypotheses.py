import numpy as np
import pytest
import torch

from whywrong import Precision, Trace, bounded, golden, step, weigh
from whywrong.comparing.bounds import Bound
from whywrong.errors import UsageError

SETTINGS = {"square": np.array([2.0, 2.0]), "unequal": np.array([2.0, 3.0])}
BOUND = Bound(1e-9, "t")


def rule(f):
    return lambda x: (f(x), BOUND)


def test_the_cause_is_the_one_left_at_every_setting():
    found = weigh(
        lambda x: x[0] * x, {"first": rule(lambda x: x[0] * x), "last": rule(lambda x: x[1] * x)}, settings=SETTINGS
    )
    assert (found.cause, found.left) == ("first", ["first"])
    assert found.refuted == {"last": "unequal"}


def test_hypotheses_that_no_setting_separates_are_undecidable():
    same = {"square": SETTINGS["square"]}
    found = weigh(
        lambda x: x[0] * x, {"first": rule(lambda x: x[0] * x), "last": rule(lambda x: x[1] * x)}, settings=same
    )
    assert (found.cause, found.left) == ("undecidable", ["first", "last"])


def test_with_no_hypothesis_left_it_says_so():
    assert weigh(lambda x: x, {"zero": rule(lambda x: 0 * x)}, settings=SETTINGS).cause == "none of these"


@pytest.mark.parametrize("thorough", [True, False])
def test_what_could_not_fail_is_not_tested(thorough):
    unbounded = {"x": rule(lambda x: x), "anything": lambda x: (7 * x, Bound(float("inf"), "none"))}
    found = weigh(lambda x: x, unbounded, settings=SETTINGS, thorough=thorough)
    assert (found.left, found.untested, found.cause) == (["x"], ["anything"], "undecidable")
    assert "not tested" in str(found)
    empty = weigh(lambda x: x[:0], {"x": rule(lambda x: x[:0])}, settings=SETTINGS, thorough=thorough)
    assert (empty.left, empty.cause) == ([], "undecidable")


def test_every_step_of_a_trace_has_to_fit():
    def trace(x, second):
        found = Trace()
        found.add("a", x, bound=BOUND)
        found.add("b", second, bound=BOUND)
        return found

    hypotheses = {"right": lambda x: trace(x, 2 * x), "b is wrong": lambda x: trace(x, 3 * x)}
    assert weigh(lambda x: trace(x, 2 * x), hypotheses, settings=SETTINGS).cause == "right"


def test_an_error_is_an_outcome_and_its_text_counts():
    def refuse(argument):
        def run(x):
            if x[0] != x[1]:
                raise KeyError(argument)
            return x, BOUND

        return run

    def observe(x):
        return refuse("lda")(x)[0]

    found = weigh(
        observe,
        {a: refuse(a) for a in ("lda", "ldb")} | {"runs": rule(lambda x: x)},
        settings=SETTINGS,
        outcomes=(KeyError,),
    )
    assert found.left == ["lda"]
    assert found.refuted == {"ldb": "unequal", "runs": "unequal"}


def test_an_error_that_is_no_outcome_is_raised():
    def broken(x):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        weigh(lambda x: x, {"broken": broken}, settings=SETTINGS)


def test_without_thorough_a_refuted_hypothesis_is_not_tried_again():
    tried = []

    def wrong(x):
        tried.append(x)
        return 0 * x, BOUND

    found = weigh(lambda x: x, {"wrong": wrong, "right": rule(lambda x: x)}, settings=SETTINGS, thorough=False)
    assert len(tried) == 1
    assert found.cause == "right"
    assert "not tried" in str(found)


def test_without_thorough_a_setting_that_tests_nothing_does_not_end_the_search():
    def wrong_and_at_first_untested(x):
        bound = Bound(np.full(x.shape, np.inf), "anything") if x is SETTINGS["square"] else BOUND
        return 0 * x, bound

    settings = {"first": SETTINGS["square"], "then": SETTINGS["unequal"]}
    found = weigh(lambda x: x, {"wrong": wrong_and_at_first_untested}, settings=settings, thorough=False)
    assert found.refuted == {"wrong": "then"}
    assert found.untested == []


def traced(**steps):
    trace = Trace()
    for name, value in steps.items():
        trace.add(name, value, bound=BOUND)
    return trace


def test_a_hypothesis_of_which_no_step_was_observed_is_not_tested():
    found = weigh(lambda x: Trace(), {"it": lambda x: traced(a=x)}, settings=SETTINGS)
    assert (found.cause, found.left, found.refuted, found.untested) == ("undecidable", [], {}, ["it"])
    assert "has no a" in str(found)


def test_a_step_that_a_fused_kernel_does_not_return_refutes_nothing():
    """The true hypothesis is left, and others are told from it by the steps that are there."""
    hypotheses = {"true": lambda x: traced(r=x, y=2.0 * x), "false": lambda x: traced(r=x, y=3.0 * x)}
    found = weigh(lambda x: traced(y=2.0 * x), hypotheses, settings=SETTINGS)
    assert (found.left, list(found.refuted)) == (["true"], ["false"])


def test_an_observed_trace_without_the_inputs_refutes_nothing_and_is_an_error_of_one_line():
    x = torch.ones(3)
    made = bounded(golden(lambda x, w: {"y": x + w}, x=x, w=x), precision=Precision("float32"))
    with pytest.raises(UsageError) as error:
        weigh(lambda x: Trace({"x": x, "y": 2.0 * x}), {"it": lambda x: made}, settings={"ones": x})
    assert str(error.value) == "observe: has no w; expected the inputs of hypothesis 'it' too"


def test_one_of_two_names_of_a_value_is_enough():
    """A reference's last step, which it returns too, is also called output."""

    def reference(x):
        return step("y", x + 1.0)

    x = torch.ones(3)
    made = bounded(golden(reference, x=x), precision=Precision("float32"))
    assert {"y", "output"} <= set(made.names)
    assert weigh(lambda x: Trace({"x": x, "y": x + 1.0}), {"it": lambda x: made}, settings={"ones": x}).cause == "it"
