"""Training: the frozen text, tokens, batches, resumption bit for bit, rows, predictions, the command line."""

import hashlib
import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.bert import __main__ as command
from kernels.bert import ablation, corpus, experiments, sentences, tokens, training
from kernels.bert.model import IGNORED, MaskedLM
from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError

TINY = training.Run(hidden=16, layers=1, heads=2, length=24, batch=4, steps=6)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own."""
    patch = pytest.MonkeyPatch()
    patch.setenv("LABKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def sample():
    return corpus.corpus("sample")


def test_the_sample_is_the_frozen_text(sample):
    assert sample.facts["sha256"] == corpus.DIGESTS["sample"]
    assert sample.training.isascii()
    assert len(sample.validation) > 30_000


def test_another_text_in_its_place_is_refused(monkeypatch, tmp_path):
    made = corpus.divide("x", [["one two three four five six seven eight nine ten"] * 2])
    corpus.keep(made, tmp_path / "x.xz")
    monkeypatch.setattr(corpus, "SAMPLE", tmp_path / "x.xz")
    with pytest.raises(UsageError, match=r"x\.xz has SHA-256 .*; expected .*, the frozen text's"):
        corpus._load.__wrapped__("sample")


def test_without_the_packages_the_corpus_says_what_it_wants(tmp_path):
    with pytest.raises(
        UsageError, match=r"english\.txt\.xz is missing; expected `python -m kernels\.bert corpus FOLDER`"
    ):
        corpus._load.__wrapped__("english")
    with pytest.raises(UsageError, match=r"FOLDER: .*anarchism_15\.3-3_all\.deb is missing"):
        corpus.build(tmp_path)
    (tmp_path / corpus.SOURCES[0].file).write_bytes(b"another")
    with pytest.raises(UsageError, match=r"has SHA-256 .*; expected cf21c10948b00e92"):
        corpus.build(tmp_path)
    with pytest.raises(UsageError, match="corpus: 'nowhere' is no folder; expected english, sample, or a folder"):
        corpus.corpus("nowhere")


def test_prose_is_kept_and_all_else_is_not():
    kept = corpus.prose(
        [
            "This  is a sentence of\nmore than ten words, which is what “prose” needs.",
            "Too short a line.",
            "x = 1; y = 2; z = [3, 4]; f(x, y, z) -> 12; g(7) -> 8; h() == 9 (10)",
            "Un café où l’on est bien vaut mieux que deux cafés où l’on attend",
        ]
    )
    assert kept == [
        'This is a sentence of more than ten words, which is what "prose" needs.',
        "Un cafe ou l'on est bien vaut mieux que deux cafes ou l'on attend",
    ]


@pytest.mark.long
def test_a_held_out_paragraph_that_was_trained_on_is_left_out(rng):
    """Pieces are held out by their hash; copies of them in the training text, and near copies, are found."""
    words = [f"word{k}" for k in range(500)]

    def line():
        return " ".join(rng.choice(words, 40))

    documents = [[line() for _ in range(40)] for _ in range(120)]
    apart = corpus.divide("x", documents)
    held_out = [one for one in apart.validation.split("\n") if one]
    assert held_out
    near = [" ".join([*one.split()[:30], "and", "other", "words"]) for one in held_out[:2]]
    far = [" ".join([*one.split()[:8], *line().split()]) for one in held_out[2:4]]
    trained = corpus.divide("x", [*documents, *([one] * 1 for one in (*near, *far))])
    assert all(one in trained.training for one in (*near, *far))
    left = [one for one in trained.validation.split("\n") if one]
    assert left == [one for one in held_out if one not in held_out[:2]]


def test_training_and_held_out_text_share_no_long_passage(sample):
    known = corpus._Words()
    seen = np.unique(np.concatenate([known.shingles(line) for line in sample.training.split("\n")]))
    held_out = [line for line in sample.validation.split("\n") if line]
    assert max(corpus.copied(known.shingles(line), seen) for line in held_out) <= corpus.COPIED


def test_a_folder_of_text_is_a_corpus(tmp_path, rng):
    words = [f"word{chr(97 + k % 26)}{chr(97 + k // 26)}" for k in range(300)]
    for name in range(60):
        lines = [" ".join(rng.choice(words, 30)) for _ in range(60)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(lines))
    made = corpus.corpus(str(tmp_path))
    assert made.name == tmp_path.name
    assert made.training
    assert made.validation
    vocabulary = tokens.vocabulary(made, size=400)
    assert vocabulary.get_vocab_size() <= 400
    assert [vocabulary.id_to_token(i) for i in range(5)] == list(tokens.SPECIAL)
    ids = tokens.encode(made.validation, vocabulary)
    assert tokens.UNKNOWN not in ids
    (tmp_path / "few").mkdir()
    with pytest.raises(UsageError, match=r"holds 0 characters of prose; expected 400000 or more"):
        corpus.corpus(str(tmp_path / "few"))


def test_the_frozen_vocabulary_has_the_special_tokens_first_and_the_sentences_words():
    words = tokens.FROZEN.read_text(encoding="utf-8").splitlines()
    assert len(words) == len(set(words)) == tokens.SIZE
    assert words[:5] == list(tokens.SPECIAL)
    assert hashlib.sha256(tokens.FROZEN.read_bytes()).hexdigest() == tokens.digest(tokens.tokenizer())
    tokenizer = tokens.tokenizer()
    assert tokenizer.encode(sentences.REPORT.text, add_special_tokens=False).tokens == [
        "all",
        "human",
        "[MASK]",
        "are",
        "born",
        "free",
        "and",
        "equal",
        "in",
        "dignity",
        "and",
        "rights",
        ".",
    ]
    assert sentences.REPORT.right in words


def test_blocks_hold_the_text_in_order(sample):
    tokenizer = tokens.vocabulary(sample)
    ids = tokens.encode(sample.validation, tokenizer)
    rows = tokens.blocks(ids, 24)
    assert (rows[:, 0] == tokens.START).all()
    assert (rows[:, -1] == tokens.END).all()
    assert np.array_equal(rows[:, 1:-1].ravel(), ids[: rows[:, 1:-1].size])
    assert len(ids) - rows[:, 1:-1].size < 22
    first = sample.validation.split("\n")[0].lower()
    shown = tokenizer.decode(ids[:40].tolist()).replace(" ", "")
    assert first.replace(" ", "").startswith(shown[:60])
    with pytest.raises(UsageError, match=r"length: expected 3 at least.*got 2"):
        tokens.blocks(ids, 2)


def test_an_epoch_sees_each_block_once_and_another_in_another_order(sample):
    data = training.Data(TINY, sample)
    first, second = data.order(0), data.order(1)
    assert torch.equal(first.sort().values, torch.arange(len(data.training)))
    assert not torch.equal(first, second)
    assert torch.equal(first, data.order(0))


def test_runs_of_one_seed_see_the_same_text_and_masks_whatever_the_model(sample):
    changes = ({}, {"preset": "report"}, {"seed": 1})
    a, b, c = (training.Data(replace(TINY, **change), sample).batch(3) for change in changes)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], c[0])
    ids, at, labels = a
    assert ids.shape == (4, 24)
    assert (labels != IGNORED).any()
    assert at.max() < ids.numel()


def states(run, folder, source, stops):
    """The row of a run that is stopped after so many seconds, again and again."""
    row, calls = None, 0
    while row is None:
        row = training.train(run, folder, seconds=stops, source=source)
        calls += 1
    return row, calls


def plain(row):
    return {name: value for name, value in row.items() if name != "seconds"}


@pytest.mark.long
@pytest.mark.parametrize("preset", ["bert", "report"])
def test_a_run_resumed_at_every_step_is_bit_identical(sample, tmp_path, preset):
    run = replace(TINY, preset=preset)
    whole, calls = states(run, tmp_path / "a", sample, np.inf)
    assert calls == 1
    pieces, calls = states(run, tmp_path / "b", sample, 0.0)
    assert calls == run.steps
    assert plain(whole) == plain(pieces)
    assert not list((tmp_path / "b").iterdir())


@pytest.mark.long
def test_training_learns_and_its_row_says_all(sample, tmp_path):
    run = replace(TINY, steps=60, rate=1e-2, batch=16)
    row = training.train(run, tmp_path, source=sample)
    assert row is not None
    assert json.loads(json.dumps(row)) == row
    assert row["validation_loss"] < 0.85 * np.log(tokens.SIZE)
    assert row["perplexity"] == pytest.approx(np.exp(row["validation_loss"]))
    assert row["loss_last"] < row["curve"][0]
    assert len(row["predictions"]) == 21
    assert row["sources"] == training.sources()
    assert row["text"]["sha256"] == corpus.DIGESTS["sample"]


@pytest.mark.long
@pytest.mark.parametrize("preset", ["bert", "report"])
def test_a_loss_is_one_compiled_graph(preset):
    """The names of its steps would otherwise end a graph each."""
    model = training.model_of(replace(TINY, preset=preset, layers=2), 100)
    ids, at = torch.randint(5, 100, (4, 24)), torch.arange(6)
    torch._dynamo.reset()
    found = torch._dynamo.explain(training.loss_of(model))(ids, at, torch.randint(5, 100, (6,)))
    assert (found.graph_count, found.graph_break_count) == (1, 0)


@pytest.mark.long
def test_hugging_faces_model_starts_where_bert_starts_and_trains(sample, tmp_path):
    ours, theirs = (
        training.model_of(replace(TINY, preset=name), 50).eval() for name in ("bert", training.HUGGING_FACE)
    )
    ids = torch.arange(5, 29)[None]
    with torch.no_grad():
        a, b = (training.logits_of(model, ids).double() for model in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=2.0**-14, atol=2.0**-14)  # float32: a thousand roundings
    labels = torch.full((1, 24), IGNORED)
    labels[0, 3], labels[0, 9] = 7, 8
    at, wanted = training.places(labels, 16)
    losses = [float(training.loss_of(model)(ids, at, wanted).detach()) for model in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=2.0**-14)
    assert training.train(replace(TINY, preset=training.HUGGING_FACE), tmp_path, source=sample) is not None


def test_the_learning_rate_warms_up_and_decays():
    run = replace(TINY, steps=100, warmup=0.1, rate=2.0)
    rates = [training.learning_rate(run, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == 2.0
    assert rates[99] == pytest.approx(2.0 / 90)


def test_weight_decay_is_for_matrices_alone():
    groups = training.optimizer_of(training.model_of(TINY, 50), TINY).param_groups
    assert [group["weight_decay"] for group in groups] == [TINY.decay, 0.0]
    assert all(p.ndim > 1 for p in groups[0]["params"])
    assert all(p.ndim == 1 for p in groups[1]["params"])


def test_evaluation_is_the_mean_over_guesses_however_it_is_batched(rng):
    torch.manual_seed(0)
    model = MaskedLM(TINY.config(50))
    ids = torch.from_numpy(rng.integers(5, 50, (7, 12)))
    labels = torch.where(torch.from_numpy(rng.random((7, 12)) < 0.3), ids, IGNORED)
    one, other = (training.evaluate(model, ids, labels, size) for size in (7, 2))
    assert model.training
    assert one["guesses"] == int((labels != IGNORED).sum())
    assert one["validation_loss"] == pytest.approx(other["validation_loss"], rel=2.0**-18)
    assert one["top1"] == other["top1"]
    nothing = training.evaluate(model, ids, torch.full_like(ids, IGNORED))
    assert (nothing["guesses"], nothing["validation_loss"]) == (0, 0.0)


def test_rows_are_appended_once_a_key_and_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    made = [{"key": f"{k % 20}", "text": "x" * 5000} for k in range(60)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: training.append(path, row), made))
    assert sorted(int(row["key"]) for row in training.rows(path)) == list(range(20))
    runs = training.grid(TINY, ["bert", "report"], [0, 1])
    assert [(run.preset, run.seed) for run in runs] == [("bert", 0), ("report", 0), ("bert", 1), ("report", 1)]
    training.append(path, {"key": training.key(runs[1])})
    assert training.unfinished(runs, path) == [runs[0], *runs[2:]]
    assert len({training.key(run) for run in runs}) == 4


def test_held_out_sentences_are_picked_by_their_hash(sample):
    tokenizer = tokens.vocabulary(sample)
    found = sentences.held_out(sample, tokenizer)
    assert len(found) == 20
    assert found == sentences.held_out(sample, tokenizer)
    for sentence in found:
        whole = re.sub(re.escape(sentences.HOLE), sentence.right, sentence.text)
        assert whole.lower() in sample.validation.lower()
        assert sentence.right in tokenizer.get_vocab()


def test_a_prediction_names_words_with_probability_and_rank(sample):
    tokenizer = tokens.vocabulary(sample)
    wanted = tokenizer.token_to_id("beings")

    def logits(ids):
        found = torch.zeros(*ids.shape, tokens.SIZE)
        found[0, 3, wanted], found[0, 3, wanted + 1] = 1.0, 2.0
        return found

    found = sentences.predict(logits, sentences.REPORT, tokenizer, 64)
    assert found["rank"] == 2
    assert found["top"][1][0] == "beings"
    assert found["right"][2] == pytest.approx(np.exp(1.0) / (np.exp(1.0) + np.exp(2.0) + tokens.SIZE - 2))
    with pytest.raises(UsageError, match=r"sentence: expected one \[MASK\] and 62 tokens.*got 'no hole'"):
        sentences.predict(logits, sentences.Sentence("no hole", "x"), tokenizer, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "no"}, "preset: expected report, vaswani.*got 'no'"),
        ({"steps": 0}, "steps: expected 1 at least.*got 0"),
        ({"precision": "int8"}, "precision: expected float32 or bfloat16.*got 'int8'"),
        ({"warmup": 2.0}, "warmup: expected a share of the steps, 0 to 1.*got 2.0"),
    ],
)
def test_wrong_settings_are_one_clear_error(change, message):
    with pytest.raises(UsageError, match=message):
        replace(TINY, **change)


def test_a_batch_larger_than_the_corpus_is_refused(sample):
    with pytest.raises(UsageError, match=r"^batch: expected at most the corpus's .*, got 99999999$"):
        training.Data(replace(TINY, batch=99999999), sample)


@pytest.mark.long
def test_the_command_line_trains_resumes_and_reports(device, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "length": 24, "batch": 4, "steps": 4, "device": device}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    given = ["train", "--presets", "bert,report", "--rows", str(rows), "--states", str(tmp_path / "s"), *options]
    assert command.main([*given, "--seconds", "0"]) == 1
    assert command.main(given) == 0
    assert [row["preset"] for row in training.rows(rows)] == ["bert", "report"]
    assert "2 of 2 trainings finished" in capsys.readouterr().out
    assert command.main(given) == 0
    assert "0 of 0 trainings finished" in capsys.readouterr().out
    assert command.main(["train", "--presets", "no", "--rows", str(rows)]) == 2
    assert re.search("kernels.bert: preset: expected report, .*got 'no'", capsys.readouterr().err)
    assert command.main(["train", "--seeds", "a"]) == 2
    assert "seeds: expected numbers, parted by commas, got 'a'" in capsys.readouterr().err
    assert command.main(["corpus", str(tmp_path)]) == 2


TINY_PLAN = """
run: {corpus: sample, hidden: 16, layers: 1, heads: 2, length: 24, batch: 4, steps: 4, rate: 1.0e-3, warmup: 0.06,
  decay: 0.01, clip: 1.0, precision: float32, compiled: false}
margin: 0.05
great: 0.1
level: 0.95
least: 2
pilot: {presets: [report], seeds: [100]}
first: {presets: [option_b], seeds: [0]}
then: {presets: [report], seeds: [0]}
contrasts: [[option_b, report]]
"""


@pytest.mark.long
def test_the_planned_trainings_are_made_over_several_calls_and_by_several_jobs(tmp_path):
    """As it is called, since jobs are processes of their own that have to find the code again."""
    plan, rows, kept = tmp_path / "plan.yaml", tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    plan.write_text(TINY_PLAN)
    given = ["--plan", str(plan), "--rows", str(rows), "--states", str(tmp_path / "s"), "--device", "cpu"]
    assert command.main(["ablation", *given, "--seconds", "0"]) == 1
    assert not training.rows(rows)
    done = subprocess.run(
        [sys.executable, "-m", "kernels.bert", "ablation", *given, "--jobs", "2", "--parts", "first"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row["preset"] for row in training.rows(rows)] == ["option_b"]
    assert command.main(["ablation", *given]) == 0
    assert [row["preset"] for row in training.rows(rows)] == ["option_b", "report"]
    assert command.main(["keep", str(rows), str(rows), "--into", str(kept)]) == 0
    assert [row["preset"] for row in training.rows(kept)] == ["option_b", "report"]
    now = ablation.current(training.rows(kept), ablation.plan(plan))
    assert [row["preset"] for row in now] == ["option_b", "report"]
    assert all(row["input"]["std"] > 0.0 and row["sources"] == training.sources() for row in now)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["bert", "report", training.HUGGING_FACE])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_runs_on_a_gpu_in_bfloat16(sample, tmp_path, preset, compiled):
    run = replace(TINY, preset=preset, compiled=compiled, device="cuda", precision="bfloat16", hidden=64, steps=20)
    row, _ = states(run, tmp_path, sample, np.inf)
    assert row["validation_loss"] < np.log(tokens.SIZE) + 0.1


@pytest.mark.gpu
def test_a_run_on_a_gpu_repeats_bit_for_bit(sample, tmp_path):
    run = replace(TINY, device="cuda", hidden=64, steps=20)
    rows = [plain(states(run, tmp_path / name, sample, stops)[0]) for name, stops in (("a", np.inf), ("b", np.inf))]
    assert rows[0] == rows[1]


def test_the_loss_of_the_frequencies_counts_each_token_once_more():
    data = SimpleNamespace(
        training=np.array([[0, 0, 1, 2]]),
        tokens=SimpleNamespace(get_vocab_size=lambda: 4),
        held_out=lambda: (None, torch.tensor([[0, 3, -100]])),
    )
    assert experiments.frequency_loss(data) == pytest.approx(-(math.log(3 / 8) + math.log(1 / 8)) / 2)
