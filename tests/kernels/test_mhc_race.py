"""The race that a compiler made of the projection: compiled texts, what is read from them, and what runs give."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex

import labkit
from kernels.mhc.race import claims, emitted, exercise, explanations, figures, spare_buffer, variants
from kernels.mhc.race.explanations import CAUSE, EXPLANATIONS, PAIRS, weigh
from kernels.mhc.race.spare_buffer import KERNELS, Pair
from kernels.mhc.race.variants import ANOTHER_STORE, AS_IT_WAS, VARIANTS, Repeats
from labkit.session.claims import described
from labkit.session.record import Record
from labkit.session.wording import fill
from tools.fuzz_kernels import CASES
from whywrong.drawing import plots

K = 16384
RACING = {AS_IT_WAS, "2 stages", ANOTHER_STORE, "8 streams, 2 stages", "float32, one TF32 product"}
GUARDED = "guarded, 4 stages"
ONE_READER = "one reader, 4 stages"


@pytest.fixture(scope="module")
def compiled():
    orders = {name: variant.order(K) for name, variant in (VARIANTS | KERNELS).items()}
    for dtype in variants.TYPES:
        orders |= variants.operator_orders(16384, 4096, dtype)
    return emitted.compiled(orders)


@pytest.fixture(scope="module")
def texts(compiled):
    return {name: emitted.read(text) for name, text in compiled.items()}


@pytest.fixture(scope="module")
def spare(compiled):
    """The texts with a spare buffer, and what is read from them."""
    pairs = spare_buffer.with_spare_buffer(compiled)
    return pairs, {name: Pair(*map(emitted.read, pair)) for name, pair in pairs.items()}


def test_the_text_overwrites_what_is_read_in_these_variants_and_in_no_other(texts):
    assert {name for name in VARIANTS if texts[name].overwrites} == RACING


def test_no_kernel_of_the_operator_overwrites_what_is_read(texts):
    own = {name: text for name, text in texts.items() if name not in VARIANTS | KERNELS}
    assert len(own) == 31  # eleven kernels in bfloat16, which packs its weights, and ten in the others
    assert not [name for name, text in own.items() if text.overwrites]
    assert own["phi_backward_kernel, bfloat16"].pending == 1  # read in the same way, and it has buffers enough
    assert all(own[f"project_kernel, {kind}"].pending == 0 for kind in ("bfloat16", "float16", "float32"))


def test_a_copy_is_called_an_overwrite_by_the_wait_before_it(compiled):
    """The racing text with its wait changed, and the guarded one: the same copies, other findings."""
    racing, guarded = compiled[AS_IT_WAS], compiled[GUARDED]
    assert not emitted.read(racing.replace("{pendings = 1 : i32}", "{pendings = 0 : i32}")).overwrites
    changed = emitted.read(guarded.replace("{pendings = 0 : i32}", "{pendings = 1 : i32}"))
    assert [copy.step for copy in changed.overwrites] == list(range(emitted.STEPS))
    assert {copy.slot for copy in changed.overwrites} == {0, 1, 2}
    assert all(copy.read_by == copy.step for copy in changed.overwrites)


def test_a_slot_that_is_not_known_is_an_error_and_not_passed_over(compiled):
    racing = compiled[AS_IT_WAS]
    unknown = racing.replace("arith.select", "arith.unheard_of")
    with pytest.raises(ValueError, match="slot is not known"):
        emitted.read(unknown)
    with pytest.raises(ValueError, match="is not known"):
        emitted.read(racing.replace("ttg.memdesc_index", "ttg.other_index"))


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_words():
    wrong = replace(VARIANTS[AS_IT_WAS].order(K), kernel="kernels.mhc.race.race_kernels:absent")
    with pytest.raises(RuntimeError, match="absent"):
        emitted.compiled({"it": wrong})


def test_an_excerpt_holds_buffers_copies_products_and_waits(compiled):
    lines = emitted.excerpt(compiled[AS_IT_WAS]).splitlines()
    assert len(lines) < 15
    for word in ("memdesc<3x", "memdesc<4x", "async_copy", "warp_group_dot ", "pendings = 1"):
        assert any(word in line for line in lines), word


def test_a_spare_buffer_that_is_used_removes_the_overwrite_and_one_that_is_unused_does_not(texts, spare):
    for name, (unused, used) in spare[1].items():
        was = texts[name]
        assert len(unused.overwrites) == len(was.overwrites) == emitted.STEPS
        assert not used.overwrites
        assert (used.pending, used.asynchronous) == (was.pending, was.asynchronous) == (1, True)
        assert list(unused.buffers.values()) == list(used.buffers.values())
        assert sum(used.buffers.values()) == sum(was.buffers.values()) + 1
        assert unused.reads == was.reads
        assert [copy[0] for copy in used.writes] == [copy[0] for copy in was.writes]


@pytest.mark.long
def test_the_texts_with_a_spare_buffer_differ_in_two_constants_down_to_the_machine_code(compiled, spare):
    for name, pair in spare[0].items():
        assert all("arith.cmpi sge" in line for lines in spare_buffer.differing(pair) for line in lines)
        assert len(spare_buffer.differing(pair)) == 2
        kernels = Pair(*map(spare_buffer.to_kernel, pair))
        assert kernels.unused.metadata.shared == kernels.used.metadata.shared
        assert kernels.used.metadata.num_warps == 4
        assert list(kernels.used.src.signature.values()) == ["*bf16", "*bf16", "*f32", "*f32", "i32", "f32"], name
        code = Pair(*map(spare_buffer.machine_code, kernels))
        assert len(code.used) > 500
        assert [(a.count("UISETP"), b.count("UISETP")) for a, b in spare_buffer.differing(code)] == [(1, 1)] * 2
        assert all(a.split()[0] == b.split()[0] for a, b in spare_buffer.differing(code))  # what each waits for


@pytest.mark.parametrize(("name", "message"), [(GUARDED, "none is to be spared"), ("2 stages", "of its slots wrap")])
def test_a_text_that_the_buffer_cannot_be_put_into_is_an_error(compiled, name, message):
    with pytest.raises(ValueError, match=message):
        spare_buffer.add_spare_buffer(compiled[name], used=True)


def test_a_variant_computes_the_projection_and_repeats_are_identical_where_it_is_interpreted(device):
    narrow = replace(VARIANTS["float32, three TF32 products"], columns=64)
    runs = variants.repeat_variant(narrow, 70, 256, 0, 3, device)
    assert (runs.differ, runs.uncommon, runs.counted) == (0, 0, "0 of 2")
    assert runs.error <= runs.bound


def test_a_compiled_kernel_is_launched_in_a_variants_place_with_the_arguments_that_are_no_constants(device):
    launches = []

    class Launched:
        def __getitem__(self, grid):
            return lambda x, weights, out, squares, t, one: launches.append((grid, t, one)) or out.fill_(len(launches))

    narrow = replace(VARIANTS["float32, three TF32 products"], columns=64)
    runs = variants.repeat_variant(narrow, 70, 256, 0, 3, device, Launched())
    assert launches == [((2, 1, 1), 70, 1.0)] * 3
    assert (runs.differ, runs.uncommon) == (2, 2)  # each result is another


SAME = Repeats(20, 0, 1e-4, 1e-2, (2e-3, 2e-3))
DIFFER = Repeats(20, 19, 0.2, 1e-2, (2e-3, 2.1e-3))
FAR = replace(DIFFER, rms=(2e-3, 5e-3))
OFF = replace(SAME, error=2.0)


def runs_of(racing):
    return {name: DIFFER if name in racing else SAME for name in VARIANTS}


def spare_runs(unused, used, times=200):
    """Both kernels with so many uncommon runs."""
    pair = Pair(*(replace(SAME, times=times, differ=n, uncommon=n) for n in (unused, used)))
    return dict.fromkeys(KERNELS, pair)


def test_an_explanation_is_refuted_only_by_a_difference_that_it_does_not_allow(texts, spare):
    weighing = weigh(texts, runs_of(RACING), spare[1], {})
    assert (weighing.cause, len(weighing.left), weighing.rivals) == ("undecidable", len(EXPLANATIONS), 0)
    assert weigh(texts, runs_of(RACING - {ANOTHER_STORE}), spare[1], {}).left == weighing.left
    assert weigh(texts, runs_of({}), spare[1], {}) is weigh(texts, {}, spare[1], {}) is None
    one_reader = weigh(texts, runs_of({AS_IT_WAS, ONE_READER}), spare[1], {})
    assert one_reader.refuted == dict.fromkeys(
        (CAUSE, "any pipelined tile with two readers", "the sum of squares itself"), ONE_READER
    )
    assert one_reader.cause == "undecidable"
    without_copies = {AS_IT_WAS, "1 stage", "32 tokens, 4 stages"}
    assert weigh(texts, runs_of(without_copies), spare[1], {}).cause == "the sum of squares itself"
    assert weigh(texts, runs_of(without_copies | {ONE_READER}), spare[1], {}).cause == "none of these"


@pytest.mark.parametrize(
    ("unused", "used", "cause", "refuted"),
    [
        (199, 0, CAUSE, set(EXPLANATIONS) - {CAUSE}),
        (199, 3, "undecidable", {CAUSE}),
        (0, 1, "undecidable", {CAUSE}),
        (1, 0, "undecidable", set()),
        (0, 0, "undecidable", set()),
    ],
)
def test_the_spare_buffer_decides_for_the_overwrite_or_against_it(texts, spare, unused, used, cause, refuted):
    weighing = weigh(texts, runs_of(RACING), spare[1], spare_runs(unused, used))
    assert (weighing.cause, set(weighing.refuted)) == (cause, refuted)
    assert set(weighing.refuted.values()) <= {PAIRS}
    outcomes = {row[0]: row[1] for row in explanations.outcome(weighing).rows}
    assert {name for name, words in outcomes.items() if words != "is left"} == refuted


def test_the_chance_is_that_of_a_draw_without_replacement():
    one = {"it": Pair(replace(SAME, times=3, uncommon=2), replace(SAME, times=4, uncommon=0))}
    assert spare_buffer.chance_without_effect(one) == pytest.approx(3 / 21)
    assert spare_buffer.chance_without_effect({}) == 1.0
    assert spare_buffer.chance_without_effect(spare_runs(199, 0)) < 1e-100


def test_predictions_say_what_each_explanation_allows(texts, spare):
    rows = {row[0]: row[1:] for row in explanations.predictions(texts, spare[1]).rows}
    assert rows.pop(CAUSE) == ("5 of 14", "may differ", "cannot")
    assert {row[1:] for row in rows.values()} == {("may differ", "may differ")}


def test_tables_say_which_check_sees_a_race_and_what_a_text_has(texts):
    rows = figures.checks(runs_of({AS_IT_WAS}) | {"2 stages": FAR}).rows
    assert [row[:4] for row in rows] == [
        (AS_IT_WAS, "sees it", "sees it", "does not"),
        ("2 stages", "sees it", "sees it", "sees it"),
    ]
    properties = {row[0]: row[1:] for row in figures.properties(texts, {AS_IT_WAS: DIFFER}).rows}
    assert properties[AS_IT_WAS] == (2, "3, 4", 1, "yes", "19 of 19")
    assert properties["1 stage"] == (2, "none", 0, "no", "no run")
    assert figures.spare_runs(spare_runs(199, 0)).rows[0][:3] == (AS_IT_WAS, "unused", "199 of 200")


def verdict(claim, settle):
    ledger = labkit.claims("pipeliner_race")
    settle(ledger)
    return ledger.settled[claim].verdict


@pytest.mark.parametrize(
    ("claim", "refuting"),
    [
        ("text_has_the_overwrite", {AS_IT_WAS: GUARDED}),
        ("needs_both", {ONE_READER: AS_IT_WAS}),
        ("needs_both", {GUARDED: AS_IT_WAS}),
        ("needs_both", {AS_IT_WAS: GUARDED}),
    ],
)
def test_another_text_refutes_a_claim_on_the_text(texts, claim, refuting):
    changed = texts | {name: texts[other] for name, other in refuting.items()}
    assert verdict(claim, lambda ledger: claims.settle_by_text(ledger, texts, {}, "3")) == "confirmed"
    assert verdict(claim, lambda ledger: claims.settle_by_text(ledger, changed, {}, "3")) == "refuted"


def test_a_kernel_of_the_operator_that_overwrites_refutes_that_none_does(texts):
    for name, expected in ((GUARDED, "confirmed"), (AS_IT_WAS, "refuted")):
        own = {"it": texts[name]}
        assert verdict(
            "own_kernels_are_free", lambda ledger, own=own: claims.settle_by_text(ledger, texts, own, "3")
        ) == (expected)


CODE = Pair(["ISETP R1, 0x2", "EXIT"], ["ISETP R1, 0x3", "EXIT"])


@pytest.mark.parametrize(
    ("swapped", "code", "expected"),
    [
        (False, CODE, "confirmed"),
        (True, CODE, "refuted"),  # the overwrite is in the text that uses the buffer
        (False, Pair(CODE.unused, ["ISETP R2, 0x3", "EXIT"]), "refuted"),  # another register
        (False, Pair(CODE.unused, [*CODE.used, "NOP"]), "refuted"),
    ],
)
def test_what_else_the_buffer_changes_refutes_that_it_changes_nothing(spare, swapped, code, expected):
    read = {name: Pair(*reversed(pair)) if swapped else pair for name, pair in spare[1].items()}
    claim = "spare_buffer_changes_nothing_else"
    assert verdict(claim, lambda ledger: claims.settle_spare_text(ledger, read, {"it": code})) == expected


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (spare_runs(199, 0), "confirmed"),
        (spare_runs(199, 1), "refuted"),
        (spare_runs(0, 1), "refuted"),
        (spare_runs(1, 0), "undecidable"),
        (spare_runs(0, 0), "undecidable"),
        ({"it": Pair(replace(DIFFER, uncommon=19), replace(OFF, uncommon=0))}, "undecidable"),  # alike, and wrong
        ({}, "untestable"),
    ],
)
def test_runs_with_a_spare_buffer_settle_whether_the_copy_is_the_cause(runs, expected):
    claim = "spare_buffer_is_clean"
    assert verdict(claim, lambda ledger: claims.settle_spare_runs(ledger, runs)) == expected


def test_what_no_run_showed_has_a_limit_of_95_percent_over_the_runs_of_kernels_that_decide():
    ledger = labkit.claims("pipeliner_race")
    racing, quiet = "64 tokens, 3 stages", AS_IT_WAS
    claims.settle_spare_runs(ledger, {quiet: spare_runs(0, 0)[quiet], racing: spare_runs(199, 0)[racing]})
    measured = ledger.settled["spare_buffer_is_clean"].measured
    assert measured["times"] == 400
    assert (measured["decide"], measured["quiet"]) == ([racing], [quiet])
    assert (1.0 - measured["limit"]) ** 200 == pytest.approx(0.05)
    assert math.isclose(measured["error_of_bound"], 1e-2)


@pytest.mark.parametrize(
    ("claim", "runs", "expected", "measured"),
    [
        ("repeats_differ", runs_of(RACING), "confirmed", {"differ": 19, "times": 20}),
        ("repeats_differ", runs_of({}) | {AS_IT_WAS: replace(DIFFER, differ=3)}, "confirmed", {"differ": 3}),
        ("repeats_differ", runs_of({}), "refuted", {"differ": 0}),
        ("beyond_rounding", runs_of(RACING), "confirmed", {"error": 0.2}),
        ("beyond_rounding", runs_of({}), "refuted", {"error": 1e-4}),
        ("tolerance_passes", runs_of(RACING), "confirmed", {"tokens": 1024}),
        ("tolerance_passes", runs_of({}) | {AS_IT_WAS: FAR}, "refuted", {}),
        ("text_predicts_the_runs", runs_of(RACING), "confirmed", {"differ": 5, "spared": []}),
        ("text_predicts_the_runs", runs_of(RACING - {"2 stages"}), "refuted", {"spared": ["2 stages"]}),
        ("text_predicts_the_runs", runs_of({}), "refuted", {"differ": 0}),
        ("text_predicts_the_runs", runs_of(RACING | {"1 stage"}), "refuted", {"unforeseen": ["1 stage"]}),
        ("only_where_the_text_has_it", runs_of({AS_IT_WAS}), "confirmed", {"overwriting": 5}),
        ("only_where_the_text_has_it", runs_of({"1 stage"}), "refuted", {"unforeseen": ["1 stage"]}),
        ("only_where_the_text_has_it", runs_of({}), "undecidable", {"overwriting": 5}),
    ],
)
def test_the_variants_runs_settle_their_claims(texts, claim, runs, expected, measured):
    ledger = labkit.claims("pipeliner_race")
    claims.settle_by_runs(ledger, texts, runs)
    settled = ledger.settled[claim]
    assert settled.verdict == expected
    assert {name: settled.measured[name] for name in measured} == measured


OPERATOR = {"bfloat16": replace(SAME, error=0.3, bound=1.0)}


@pytest.mark.parametrize(
    ("claim", "operator", "slower", "expected"),
    [
        ("guarded_repeats_are_identical", OPERATOR, 1.0, "confirmed"),
        ("guarded_repeats_are_identical", {"float16": DIFFER}, 1.0, "refuted"),
        ("guarded_repeats_are_identical", OPERATOR | {"float16": OFF}, 1.0, "refuted"),
        ("guard_costs_nothing", OPERATOR, 1.02, "confirmed"),
        ("guard_costs_nothing", OPERATOR, 1.2, "refuted"),
    ],
)
def test_the_guards_runs_and_times_settle_its_claims(claim, operator, slower, expected):
    assert verdict(claim, lambda ledger: claims.settle_guard(ledger, operator, slower)) == expected


def record_of(runs, spare_repeats):
    """A record of these runs, with verdicts that its own code wrote: none that follows from them."""
    recorded = {name: {"verdict": "untestable", "because": "as recorded"} for name in claims.BY_RUNS + claims.GUARD}
    for claim in recorded.values():
        claim["measured"] = {}
    metrics = {"runs": variants.as_json(runs)}
    if spare_repeats:
        metrics["spare_buffer"] = spare_buffer.pairs_as_json(spare_repeats)
    result = {"notebook": "pipeliner_race", "claims": recorded, "metrics": json.loads(json.dumps(metrics))}
    about = {"device": {"name": "a GPU"}, "date": "2026-01-01", "provenance": {"sources": {}}}
    return Record(Path("it"), result | about)


def test_a_records_claims_on_runs_are_settled_by_its_runs_and_the_others_as_recorded(texts):
    for spare_repeats, expected in (({}, "untestable"), (spare_runs(199, 0), "confirmed")):
        ledger = labkit.claims("pipeliner_race")
        claims.settle_from_record(ledger, record_of(runs_of(RACING), spare_repeats), texts)
        assert ledger.settled["repeats_differ"].verdict == "confirmed"
        assert ledger.settled["repeats_differ"].source.startswith("recorded on a GPU")
        assert ledger.settled["guard_costs_nothing"].because == "as recorded"
        assert ledger.settled["spare_buffer_is_clean"].verdict == expected
        assert bool(ledger.settled["spare_buffer_is_clean"].source) == bool(spare_repeats)
    ledger = labkit.claims("pipeliner_race")
    claims.settle_from_record(ledger, None, texts)
    assert {settled.verdict for settled in ledger.settled.values()} == {"untestable"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("racing", "spare_repeats", "begins"),
    [
        ({}, {}, "Not shown"),
        (RACING, {}, "Probably the compiler"),
        (RACING, spare_runs(1, 0), "Probably the compiler"),
        (RACING, spare_runs(199, 0), "The compiler"),
        (RACING, spare_runs(199, 2), "Not only the overwrite: with one more buffer"),
        (RACING | {"1 stage"}, {}, "Not only the overwrite: variants without it"),
    ],
)
def test_the_answer_follows_the_runs(texts, racing, spare_repeats, begins):
    ledger = labkit.claims("pipeliner_race")
    claims.settle_from_record(ledger, record_of(runs_of(racing), spare_repeats), texts)
    measured = {name: {"verdict": s.verdict, "measured": s.measured} for name, s in ledger.settled.items()}
    answer = fill("answer", described("pipeliner_race")["answer"], {"claims": measured})
    assert answer.startswith(begins)
    assert len(answer.split()) <= 30


def test_the_picture_of_errors_counts_repeats_and_shows_those_that_differ_first():
    _, axes = plots.figure()
    figures.draw_errors(axes, runs_of({"float32, one TF32 product"}))
    assert len(axes.texts) == figures.ROWS
    assert [text.get_text() for text in axes.texts][:2] == ["19 of 19 repeats differ", "0 of 19 repeats differ"]
    assert axes.get_title(loc="left").startswith("The variants whose repeats differ are wrong by more")
    figures.draw_errors(axes, {"a": OFF})
    assert axes.get_title(loc="left") == "Repeats of 0 variants differ, and 1 are wrong by more than rounding"


def outlines(axis, colour):
    """The buffers that have an outline of a colour in one frame of the film."""
    return [round(bar.get_y() + bar.get_height() / 2) for bar in axis.patches
            if not bar.get_fill() and to_hex(bar.get_edgecolor()) == colour.lower()]  # fmt: skip


def test_the_film_shows_a_copy_over_what_is_read_in_each_step_and_with_one_reader_in_none(texts):
    frames = figures.film({"two": texts[AS_IT_WAS], "one": texts[ONE_READER]}, steps=4).axes
    assert [outlines(axis, plots.RED) for axis in frames] == [[0], [1], [2], [0], [], [], [], []]
    assert [outlines(axis, plots.GREEN) for axis in frames[4:]] == [[3], [0], [1], [2]]
    with pytest.raises(ValueError, match="nothing can be drawn"):
        figures.film({"1 stage": texts["1 stage"], "two": texts[AS_IT_WAS]})


class Turns:
    """A compiled kernel that writes how often any has run into its output."""

    def __init__(self, order, name):
        self.order, self.name = order, name

    def __getitem__(self, grid):
        def launch(x, weights, out, squares, tokens, one):
            self.order.append(self.name)
            out.fill_(1.0)

        return launch


def test_kernels_that_are_repeated_in_turn_alternate_and_each_begins_as_often(device):
    order = []
    kernels = [Turns(order, "a"), Turns(order, "b")]
    narrow = next(iter(VARIANTS.values()))
    runs = variants.repeat_in_turn(narrow, 70, 256, 0, 4, device, kernels)
    assert "".join(order) == "abbaabba"
    assert [(one.times, one.differ) for one in runs] == [(4, 0), (4, 0)]


def test_runs_that_did_not_take_turns_are_said_to_assume_that_nothing_else_changed():
    for in_turn, words in ((True, "took turns"), (False, "Nothing but the buffer changed")):
        ledger = labkit.claims("pipeliner_race")
        claims.settle_spare_runs(ledger, spare_runs(199, 0), in_turn)
        assert words in ledger.settled["spare_buffer_is_clean"].given


def test_the_smallest_share_of_runs_is_that_of_clopper_and_pearson():
    share = claims.smallest_share(199, 200)
    more = sum(math.comb(200, k) * share**k * (1 - share) ** (200 - k) for k in (199, 200))
    assert more == pytest.approx(0.05)
    assert claims.smallest_share(0, 20) == 0.0


def test_runs_come_back_from_a_record_as_they_were():
    recorded = json.loads(json.dumps(variants.as_json({"a": SAME, "b": replace(DIFFER, uncommon=4)})))
    assert variants.as_json(variants.from_json(recorded)) == recorded
    without_count = {"a": {name: value for name, value in recorded["a"].items() if name != "uncommon"}}
    assert variants.from_json(without_count)["a"].uncommon is None  # a record from before it was counted
    pairs = json.loads(json.dumps(spare_buffer.pairs_as_json(spare_runs(5, 0))))
    assert spare_buffer.pairs_as_json(spare_buffer.pairs_from_json(pairs)) == pairs


@pytest.mark.gpu
def test_repeats_differ_where_the_text_says_so_and_the_guard_ends_it(texts):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the texts are those of compute capability 9.0")
    for name in (AS_IT_WAS, GUARDED, "8 streams, 2 stages", "8 streams, guarded, 2 stages"):
        runs = variants.repeat_variant(VARIANTS[name], 16384, K, 0, 20, "cuda")
        assert (runs.differ > 0) == bool(texts[name].overwrites), name


@pytest.mark.gpu
def test_fuzzing_compares_the_calls_and_sees_that_they_differ(texts):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the texts are those of compute capability 9.0")
    found = CASES["projection as it was"].fuzz(40)
    assert re.search(r"two calls on the same inputs differ in \d+ of \d+ elements", found.failure.words)
    assert found.failure.explain().causes[0].kind == "race"
    assert CASES["projection, guarded"].fuzz(20).failure is None


@pytest.mark.gpu
def test_a_text_with_a_spare_buffer_runs_and_is_right_where_the_buffer_is_used(spare):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the texts are those of compute capability 9.0")
    for pair in spare_buffer.repeat_pairs(spare[0], 16384, K, 0, 5).values():
        assert pair.used.error <= pair.used.bound
        assert pair.used.times == pair.unused.times == 5


@pytest.mark.parametrize(("line", "copies"), [("total = total * runtime_one", 0), ("total = total * 1.0", 12)])
def test_a_guard_is_one_only_where_the_compiler_does_not_know_its_factor(tmp_path, line, copies):
    assert len(exercise.compile_with(tmp_path, line, K).overwrites) == copies


def test_a_guard_that_does_not_compile_is_the_compilers_error(tmp_path):
    with pytest.raises(RuntimeError, match="nothing_of_that_name"):
        exercise.compile_with(tmp_path, "total = nothing_of_that_name", K)
