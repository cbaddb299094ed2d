"""Runs that are killed, resumed, split over processes, and compared."""

import functools
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from kernels.lm import checkpoints, config, experiments, jsonl, metrics, preflight, training
from kernels.lm.__main__ import main
from kernels.lm.model import build
from labkit.session.catalogue import ROOT
from whywrong.comparing.bounds import confidence
from whywrong.comparing.precision import UNIT_ROUNDOFF
from whywrong.errors import UsageError
from whywrong.reporting.command import main as whywrong_command

STEPS = 40


def test_what_only_reads_a_run_leaves_it_as_it_is_and_a_second_training_is_refused(raw, tmp_path):
    settings = config.parse(raw)[0]
    folder = tmp_path / "run"
    with training.joined(settings) as device:
        with pytest.raises(UsageError, match="holds no checkpoint"):
            training.trained(settings, device)
        assert not folder.exists()
        with training._alone(folder):
            (folder / "checkpoints" / ".step_0000005").mkdir(parents=True)
            with pytest.raises(UsageError, match="another training runs"):
                training.train(settings)
            with pytest.raises(UsageError, match="holds no checkpoint"):
                training.trained(settings, device)
            assert (folder / "checkpoints" / ".step_0000005").exists()
        (tmp_path / "target").write_text("precious")
        (folder / ".lock").unlink()
        (folder / ".lock").symlink_to(tmp_path / "target")
        with pytest.raises(UsageError, match=r"folder: .* cannot be written \(Too many levels"):
            training.train(settings)
        assert (tmp_path / "target").read_text() == "precious"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm") / "text"
    jsonl.write(folder, [f"Document {i}: {'word ' * (i % 9)}and {i * i}." for i in range(200)])
    return folder


@pytest.fixture
def raw(tmp_path, text):
    torch.set_num_threads(1)
    return given(tmp_path, text)


def given(folder, text):
    return {
        "folder": str(folder / "run"),
        "data": {"folder": str(text), "batch": 4, "length": 32},
        "validation": {"folder": str(text), "every": 20, "batches": 2},
        "evaluation": "none",
        "steps": STEPS,
        "precision": "float32",
        "compile": False,
        "device": "cpu",
        "model": {"dim": 24, "layers": 2, "heads": 2, "hidden": 40},
        "optimizer": {"rate": 1e-2, "warmup": 4},
        "checkpoints": {"every": 5},
    }


def parsed(raw):
    found, wrong = config.parse(raw)
    assert not wrong
    return found


KEPT = ("step", "loss", "grad_norm", "lr", "epoch", "place", "batch_crc")


def lines(path):
    return [{key: line[key] for key in KEPT} for line in metrics.read(path)]


# torch is imported once; each attempt is a fork, so that it dies within the training and not within the import. It is
# killed a random while after a random number of further steps, 0 of them too, which is while it starts or loads.
KILLED = """
import json, os, random, signal, sys, time
import torch
from kernels.lm import config, metrics, training
torch.set_num_threads(1)
raw, kills = json.loads(sys.argv[1]), int(sys.argv[2])
rng = random.Random(19)

def steps(folder):
    return len(metrics.whole(metrics.Path(folder) / metrics.FILE))

def attempt(folder, further):
    target, later = steps(folder) + further, rng.uniform(0.0, 0.03)
    child = os.fork()
    if child == 0:
        found, _ = config.parse(raw | {"folder": folder})
        training.train(found)
        os._exit(0)
    while steps(folder) < target:
        gone, status = os.waitpid(child, os.WNOHANG)
        if gone:
            assert status == 0, status
            return True
        time.sleep(0.001)
    time.sleep(later)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0

assert attempt(raw["folder"] + "/whole", 10**9)
killed, finished, newest = 0, 0, set()
while killed < kills or not finished:
    folder = f"{raw['folder']}/killed{finished}"
    if attempt(folder, rng.randint(0, 12) if killed < kills else 10**9):
        finished += 1
    else:
        killed += 1
        there = folder + "/checkpoints"
        newest.add(max(os.listdir(there), default="") if os.path.isdir(there) else "")
print(json.dumps({"killed": killed, "finished": finished, "newest": sorted(newest)}))
"""


@pytest.mark.long
@pytest.mark.parametrize("kills", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_gives_the_losses_of_one_that_was_not(raw, tmp_path, kills):
    command = [sys.executable, "-c", KILLED, json.dumps(raw), str(kills)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"] == kills
    assert len(told["newest"]) >= (3 if kills == 20 else 2), told  # deaths between different checkpoints
    whole = lines(tmp_path / "run" / "whole" / "metrics.jsonl")
    assert [line["step"] for line in whole] == list(range(1, STEPS + 1))
    batch, sequences = raw["data"]["batch"], count(raw, tmp_path)
    places = [line["epoch"] * sequences + line["place"] for line in whole]
    assert places == list(range(0, batch * STEPS, batch))
    for i in range(told["finished"]):
        assert lines(tmp_path / "run" / f"killed{i}" / "metrics.jsonl") == whole
        held = (tmp_path / "run" / f"killed{i}" / "validation.jsonl").read_text()
        assert held == (tmp_path / "run" / "whole" / "validation.jsonl").read_text()


def count(raw, tmp_path):
    from kernels.lm.data import Sequences

    return Sequences(parsed(raw).data, 0, tmp_path / "cache").count


def test_a_half_written_checkpoint_is_never_loaded_and_is_removed(raw, tmp_path):
    whole = lines(training.train(parsed(raw)))
    folder = tmp_path / "run" / "checkpoints"
    newest = max(checkpoints.complete(folder).items())[1]
    half = folder / ".step_0000099"
    shutil.copytree(newest, half)
    next(half.glob("*.distcp")).write_bytes(b"half")
    shutil.rmtree(newest)
    assert max(checkpoints.complete(folder)) < STEPS
    assert lines(training.train(parsed(raw))) == whole
    assert not half.exists()


def test_a_checkpoint_of_another_model_or_text_is_refused(raw, tmp_path):
    training.train(parsed(raw | {"stop": 5}))
    wider = raw | {"model": raw["model"] | {"dim": 32}}
    with pytest.raises(UsageError, match="does not fit this configuration"):
        training.train(parsed(wider))
    other = tmp_path / "other"
    jsonl.write(other, [f"Another document {i} of some length." for i in range(200)])
    with pytest.raises(UsageError, match="the checkpoint was made with"):
        training.train(parsed(raw | {"data": raw["data"] | {"folder": str(other)}}))


def test_a_damaged_checkpoint_is_called_so(raw, tmp_path):
    training.train(parsed(raw | {"stop": 5}))
    (newest,) = checkpoints.complete(tmp_path / "run" / "checkpoints").values()
    part = next(newest.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(UsageError, match=rf"{part.name}: is not as it was written"):
        training.train(parsed(raw))
    (newest / "SHA256SUMS").unlink()
    with pytest.raises(UsageError, match=rf"{part.name}: is cut off"):
        training.train(parsed(raw))
    shutil.rmtree(newest)
    newest.mkdir()
    with pytest.raises(UsageError, match=r"\.metadata: is cut off, unreadable or not there"):
        training.train(parsed(raw))


class Planted:
    """An object whose pickle makes a folder where it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def into_index(checkpoint, planted):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(planted))


def into_index_beside_the_rest(checkpoint, planted):
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    index.planner_data["more"] = planted
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def into_small_entry(checkpoint, planted):
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    (key,) = (one for one in index.storage_data if one.fqn == "optimizer.param_groups.0.lr")
    content = io.BytesIO()
    torch.save(planted, content)
    part = checkpoint / index.storage_data[key].relative_path
    index.storage_data[key].offset, index.storage_data[key].length = part.stat().st_size, len(content.getvalue())
    part.write_bytes(part.read_bytes() + content.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def sums(checkpoint):
    command = "sha256sum .metadata *.distcp > SHA256SUMS"
    subprocess.run(command, shell=True, cwd=checkpoint, check=True)


@pytest.mark.parametrize(
    ("place", "signed"),
    [
        (into_index, True),
        (into_index_beside_the_rest, False),
        (into_small_entry, True),
        pytest.param(into_index, False, marks=pytest.mark.slow),
        pytest.param(into_index_beside_the_rest, True, marks=pytest.mark.slow),
        pytest.param(into_small_entry, False, marks=pytest.mark.slow),
    ],
)
def test_code_planted_in_a_checkpoint_is_refused_and_never_run(raw, tmp_path, capsys, monkeypatch, place, signed):
    training.train(parsed(raw | {"stop": 5}))
    (newest,) = checkpoints.complete(tmp_path / "run" / "checkpoints").values()
    mark = tmp_path / "ran"
    place(newest, Planted(mark))
    sums(newest) if signed else (newest / "SHA256SUMS").unlink()
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    for command in ("preflight", "validate", "train"):
        assert main([command, str(path)]) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert "whole" in shown
    with pytest.raises(UsageError, match="holds more than"):
        training.train(parsed(raw))
    monkeypatch.setattr(checkpoints, "flaw", lambda _: "")  # and reading it is safe by itself
    with pytest.raises(UsageError, match="does not fit"):
        training.train(parsed(raw))
    assert not mark.exists()
    pickle.loads(pickle.dumps(Planted(mark)))
    assert mark.exists()  # which is what torch's own reading would have done


def test_an_index_that_names_a_file_elsewhere_is_refused(raw, tmp_path):
    training.train(parsed(raw | {"stop": 5}))
    (newest,) = checkpoints.complete(tmp_path / "run" / "checkpoints").values()
    index = pickle.loads((newest / ".metadata").read_bytes())
    shutil.copy(newest / "__0_0.distcp", tmp_path / "elsewhere")
    for part in index.storage_data.values():
        part.relative_path = "../../../elsewhere"
    (newest / ".metadata").write_bytes(pickle.dumps(index))
    sums(newest)
    assert "holds more than the index" in checkpoints.flaw(newest)


def test_a_checkpoint_damaged_anywhere_is_one_line(raw, tmp_path):
    training.train(parsed(raw | {"stop": 5}))
    (newest,) = checkpoints.complete(tmp_path / "run" / "checkpoints").values()
    assert checkpoints.flaw(newest) == ""
    rng = random.Random(23)
    for path in (path for path in newest.iterdir() for _ in range(3)):
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :], b""):
            path.write_bytes(damaged)
            if path.name == "SHA256SUMS" and not damaged:
                continue  # as in a checkpoint that was written before there were sums
            (found,) = preflight.check(raw)[1]
            assert found.key == "folder"
            assert "is whole" in found.wanted
            with pytest.raises(UsageError, match="expected the checkpoint whole") as error:
                training.train(parsed(raw))
            assert "\n" not in str(error.value)
        path.write_bytes(whole)
    assert preflight.check(raw)[1] == []


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", ["metrics.jsonl", "validation.jsonl"])
@pytest.mark.parametrize("line", ["no line", '{"step": "x"}'])
def test_a_line_that_is_none_is_named_before_the_first_step(raw, tmp_path, name, line):
    training.train(parsed(raw | {"stop": 20}))
    path = tmp_path / "run" / name
    path.write_text(f"{line}\n" + path.read_text())
    (found,) = preflight.check(raw)[1]
    assert found.key == "folder"
    assert f"{name}, line 1: is no line of a step" in found.wanted
    with pytest.raises(UsageError, match=f"{name}, line 1: is no line of a step"):
        training.train(parsed(raw))


def test_only_the_newest_checkpoints_stay(raw, tmp_path):
    training.train(parsed(raw | {"checkpoints": {"every": 5, "keep": 3}}))
    assert list(checkpoints.complete(tmp_path / "run" / "checkpoints")) == [30, 35, 40]


def test_a_line_cut_off_by_a_kill_is_written_again(raw, tmp_path):
    path = training.train(parsed(raw | {"stop": 10}))
    with path.open("a") as file:
        file.write('{"step": 11, "lo')
    training.train(parsed(raw))
    assert [line["step"] for line in metrics.read(path)] == list(range(1, STEPS + 1))


def test_a_metrics_file_without_the_steps_before_the_checkpoint_is_refused(raw, tmp_path):
    path = training.train(parsed(raw | {"stop": 10}))
    path.unlink()
    with pytest.raises(UsageError, match="has 0 of the 10 steps"):
        training.train(parsed(raw))


def test_a_stopped_run_has_the_first_steps_of_the_whole_one(raw, tmp_path):
    short = lines(training.train(parsed(raw | {"stop": 10, "folder": str(tmp_path / "short")})))
    assert short == lines(training.train(parsed(raw)))[:10]


def test_the_first_step_updates_nothing_and_training_learns(raw):
    found = lines(training.train(parsed(raw)))
    assert found[0]["lr"] == 0.0
    assert found[-1]["loss"] < found[0]["loss"] - 1.0


TOGETHER = """
import json, sys
from kernels.lm import config, training
from kernels.lm.__main__ import main
for folder in ("one", "one", "other", "third"):
    found, _ = config.parse(json.loads(sys.argv[1]) | {"folder": f"{sys.argv[2]}/{folder}"})
    training.train(found)
sys.exit(main(["train", f"{sys.argv[2]}/two.yaml"]))
"""


@pytest.fixture(scope="module")
def torchrun(text, tmp_path_factory):
    """By how it is split, the configuration of a run that two processes took from step 4 to 12, and its folder.

    The same processes made four short trainings before, into the folders "one", "other" and "third".
    """

    @functools.cache
    def run(parallel):
        folder = tmp_path_factory.mktemp(parallel)
        short = given(folder, text) | {"validation": "none", "stop": 4}
        raw = short | {"precision": "float64", "parallel": parallel, "dumps": {"every": 6}}
        training.train(parsed(raw))  # two processes go on from what one has saved
        (folder / "two.yaml").write_text(yaml.safe_dump(raw | {"stop": 12}))
        (folder / "together.py").write_text(TOGETHER)
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(folder / "together.py")]
        command = [sys.executable, "-m", *command, json.dumps(short), str(folder)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=180
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return raw | {"stop": 16}, folder

    return run


@pytest.mark.long
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_processes_give_the_losses_of_one_and_either_goes_on_from_the_other(torchrun, tmp_path, parallel):
    raw, folder = torchrun(parallel)
    one = lines(training.train(parsed(raw | {"folder": str(tmp_path / "one")})))
    narrow = lines(training.train(parsed(raw | {"folder": str(tmp_path / "narrow"), "precision": "float32"})))
    assert [line["ranks"] for line in metrics.read(folder / "run" / "metrics.jsonl")] == [1] * 4 + [2] * 8
    ranks = [str(folder / "run" / "dumps" / f"rank{rank}") for rank in (0, 1)]
    assert whywrong_command(["diff", *ranks]) == 0
    two = lines(training.train(parsed(raw)))  # and one from what two have
    # what rounding does to these losses is measured in float32, and scales with the unit round-off
    grown = max(abs(a["loss"] - b["loss"]) for a, b in zip(one, narrow, strict=True)) / UNIT_ROUNDOFF["float32"]
    bound = confidence(1, len(one)) * grown * UNIT_ROUNDOFF["float64"]
    assert all(abs(a["loss"] - b["loss"]) <= bound < 1e-9 for a, b in zip(one, two, strict=True))
    assert [line["place"] for line in two] == [line["place"] for line in one]


def test_trainings_one_after_the_other_in_one_torchrun_end(torchrun):
    _, folder = torchrun("fsdp")
    first, *others = (lines(folder / name / "metrics.jsonl") for name in ("one", "other", "third"))
    assert others == [first, first]


def test_a_rank_whose_weights_have_drifted_is_told(raw, tmp_path, capsys):
    settings = parsed(raw | {"dumps": {"every": 1}})
    for rank in (0, 1):
        torch.manual_seed(0)
        model = build(settings, torch.device("cpu"))
        if rank:
            model.blocks[1].down.data *= 1.01
        own = {"batch": torch.tensor(rank), "loss": torch.tensor(1.0 + rank)}  # these differ by right
        training.Dumps(settings, rank, 2, 0).write(1, own, torch.tensor(2.0), torch.tensor(1.0), model)
    folders = [str(tmp_path / "run" / "dumps" / f"rank{rank}") for rank in (0, 1)]
    assert whywrong_command(["diff", *folders]) == 1
    assert "first divergence: 000001.weight.blocks.1.down" in capsys.readouterr().out


WRONG = """
import os, sys
from kernels.lm import config, data, training
batch, (what, path) = data.Sequences.batch, sys.argv[1:]

def other(self, step, rank=0, ranks=1):  # rank 1 sees another batch at step 3
    return batch(self, step + 40 * (rank == 1 and step == 2), rank, ranks)

if what == "batch":
    data.Sequences.batch = other
training.train(config.load(config.Path(path)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_a_rank_that_saw_another_batch_is_told_from_the_others(raw, tmp_path, parallel, capsys):
    (tmp_path / "wrong.py").write_text(WRONG)
    raw |= {"validation": "none", "parallel": parallel, "stop": 4, "dumps": {"every": 1}}
    for what in ("right", "batch"):
        (tmp_path / f"{what}.yaml").write_text(yaml.safe_dump(raw | {"folder": str(tmp_path / what)}))
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "wrong.py"), what]
        command = [sys.executable, "-m", *command, str(tmp_path / f"{what}.yaml")]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    right, wrong = (tmp_path / what / "dumps" for what in ("right", "batch"))
    assert whywrong_command(["diff", str(right / "rank0"), str(right / "rank1")]) == 0
    assert experiments.first_difference(right / "rank1", wrong / "rank1") == (3, "rank1of2.batch")
    assert experiments.first_difference(right / "rank0", wrong / "rank0") == (3, "loss")


@pytest.mark.long
def test_two_runs_that_part_are_told_by_the_first_step_and_tensor(raw, tmp_path, capsys):
    raw |= {"dumps": {"every": 2, "tensors": ["head.output"]}}
    paths = []
    for name, eps in (("one", 1e-8), ("same", 1e-8), ("other", 1e-3)):
        given = raw | {"folder": str(tmp_path / name), "optimizer": raw["optimizer"] | {"eps": eps}, "stop": 8}
        training.train(parsed(given))
        paths.append(tmp_path / name / "dumps" / "rank0")
    one, same, other = paths
    assert whywrong_command(["diff", str(one), str(same)]) == 0
    assert whywrong_command(["diff", str(one), str(other)]) == 1
    # the rate of step 1 is 0, and step 3 begins with the first change
    assert experiments.first_difference(one, other) == (4, "weight.embedding.table")
    assert (one / "000002.grad.head.output.npy").exists()
