"""Steps of which each rank holds a part: put together, the wrong rank named, replicas and sums that are not right."""

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import whywrong
from labkit.session.catalogue import ROOT
from whywrong import Trace, localise
from whywrong.errors import UsageError
from whywrong.recording.dumps import open_dump
from whywrong.recording.shards import Part, Shards, parse_dims
from whywrong.reporting.command import main


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def held(values, dims="", axes=None, declared=None):
    """A step of which each rank holds one of the values, with its place on each axis where there are axes."""
    places = axes or [{} for _ in values]
    parts = [
        Part(k, partial(torch.as_tensor, x), place, dims)
        for k, (x, place) in enumerate(zip(values, places, strict=True))
    ]
    return Shards("h", parts, declared or {})


def on(axis, size):
    """The places of as many ranks on one axis."""
    return [{axis: (k, size)} for k in range(size)]


def found(values, exact, dims, axes=None, **options):
    """What is found of a step in shards after the input x, of which all ranks hold the same."""
    golden = Trace({"x": exact.double(), "h": exact.double()})
    observed = Trace.lazy({"x": lambda: exact, "h": held(values, dims, axes)}, {}, "", True)
    return localise(observed, golden, progress=lambda _: None, **options)


@pytest.mark.parametrize(
    ("text", "count", "splits"),
    [
        ("b s h", 3, []),
        ("b s/sp h/tp", 3, [(1, "sp", "natural"), (2, "tp", "natural")]),
        ("t h/cp/tp", 2, [(1, "cp", "natural"), (1, "tp", "natural")]),
        ("s/cp:zigzag d +tp", 2, [(0, "cp", "zigzag"), (1, "tp", "partial")]),
        ("b s[cp:zigzag,sp] (heads*d)[tp] 1 # dp:=moe_dp ep:replicated", 4,
         [(1, "cp", "zigzag"), (1, "sp", "natural"), (2, "tp", "natural")]),
        ("t h[tp:partial]", 2, [(1, "tp", "partial")]),
    ],
)  # fmt: skip
def test_dims_in_both_notations(text, count, splits):
    assert parse_dims("h", text) == (count, splits)


@pytest.mark.parametrize("text", ["b s/", "b,s", "b s/tp:round", "s/tp h/tp", "b [tp]", "b s/(tp)"])
def test_dims_that_are_none_are_one_line(text):
    with pytest.raises(UsageError, match=r"^dims: h: expected .*, got"):
        parse_dims("h", text)


def test_parts_are_put_together_along_several_axes_and_in_a_zigzag():
    x = drawn(2, 8, 6)
    axes = [{"cp": (i, 2), "tp": (j, 3)} for i in range(2) for j in range(3)]
    halves = x[:, [0, 1, 6, 7]], x[:, [2, 3, 4, 5]]
    values = [halves[place["cp"][0]][..., 2 * place["tp"][0] :][..., :2] for place in axes]
    assert torch.equal(held(values, "b s/cp:zigzag h/tp", axes)(), x)
    summands = [x * k for k in (1.0, 2.0, -2.0)]
    assert torch.equal(held(summands, "b s h +tp", on("tp", 3))(), x)
    alike = [x[:, :4], x[:, :4], x[:, 4:], x[:, 4:]]
    axes = [{"dp": (k % 2, 2), "tp": (k // 2, 2)} for k in range(4)]
    assert torch.equal(held(alike, "b s/tp h", axes)(), x), "what an axis does not split is on all of its ranks"


def test_the_ranks_of_each_axis_are_declared_where_no_file_has_them():
    x = drawn(4, 6)
    values = [x[2 * i :, 3 * j :][:2, :3] for i in range(2) for j in range(2)]
    assert torch.equal(held(values, declared={"h": "b/dp h/tp", "ranks": "dp=2 tp=2"})(), x)
    assert not torch.equal(held(values, declared={"*": "b/dp h/tp", "ranks": "tp=2 dp=2"})(), x)
    for ranks in ({}, {"ranks": "dp=1 tp=3"}):
        with pytest.raises(UsageError, match=r"h: the ranks 0, 1, 2, 3 hold it; expected all, or --dims 'ranks: dp=2"):
            held(values, declared={"h": "b/dp h/tp", **ranks})()
    with pytest.raises(UsageError, match="h: rank 1 of tp is missing; expected all 3"):
        held(values, declared={"h": "b/dp h/tp", "ranks": "dp=2 tp=3"})()
    with pytest.raises(
        UsageError, match="dims: ranks: expected axes with their sizes, such as 'dp=2 tp=4', got 'tp=x'"
    ):
        held(values, declared={"h": "b/dp h/tp", "ranks": "tp=x"})()
    later = Shards(
        "h", [part._replace(rank=part.rank + 4) for part in held([x[:, :3], x[:, 3:]]).parts], {"h": "b h/tp"}
    )
    assert torch.equal(later(), x), "on a later stage of a pipeline"
    gap = Shards("h", [part._replace(rank=2 * part.rank) for part in later.parts], {"h": "b h/tp"})
    with pytest.raises(UsageError, match="h: the ranks 8, 10 hold it; expected all"):
        gap()
    with pytest.raises(UsageError, match=r"h: expected parts that fit \(b h \+tp\), got \[4, 6\], \[2, 6\]"):
        held([x, x[:2]], "b h +tp", on("tp", 2))()
    with pytest.raises(UsageError, match="4 ranks hold different values; expected --dims 'h: b s h/tp'"):
        held(values)()
    assert torch.equal(held([x, x])(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dims", ["b h/tp", "b/tp h"])
def test_a_wrong_shard_is_named_and_a_correct_run_is_silent(dims, dtype):
    exact = drawn(16, 32)
    values = [x.to(dtype) for x in exact.chunk(8, 1 if "h/tp" in dims else 0)]
    assert found(values, exact, dims, on("tp", 8)).first is None
    values[3] = values[3] * 1.5
    result = found(values, exact, dims, on("tp", 8))
    assert result.first == "h"
    assert result.findings["h"].words.endswith("; wrong in rank 3 of tp alone")


def test_two_axes_name_a_rank_by_both():
    exact = drawn(8, 8)
    axes = [{"sp": (i, 2), "tp": (j, 2)} for i in range(2) for j in range(2)]
    values = [exact[4 * i :, 4 * j :][:4, :4].clone() for i in range(2) for j in range(2)]
    values[2] += 1.0
    assert (
        "; wrong in rank 1 of sp and rank 0 of tp alone" in found(values, exact, "s/sp h/tp", axes).findings["h"].words
    )


def test_shards_in_a_wrong_order_are_said_to_hold_each_other_s_part():
    exact = drawn(16, 32)
    values = list(exact.chunk(8, 1))
    values[2], values[5] = values[5], values[2]
    words = found(values, exact, "b h/tp", on("tp", 8)).findings["h"].words
    assert "wrong in rank 2 of tp (it holds what is of rank 5 of tp), rank 5 of tp (it holds what is of rank 2" in words


@pytest.mark.parametrize("fault", ["scaled", "nan"])
def test_where_all_ranks_are_wrong_none_is_named(fault):
    exact = drawn(16, 32)
    values = [x * 1.5 if fault == "scaled" else x * torch.nan for x in exact.chunk(8, 1)]
    result = found(values, exact, "b h/tp", on("tp", 8))
    assert result.first == "h"
    assert "alone" not in result.findings["h"].words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_missing_all_reduce_a_doubled_one_and_a_mean(dtype):
    summands = [drawn(16, 32, seed=k) for k in range(8)]
    exact = torch.stack(summands).double().sum(0).float()
    right = [exact.to(dtype)] * 8
    for values, words in (
        (right, ""),
        ([x.to(dtype) for x in summands], "and their sum is the golden's: the all-reduce over tp is missing"),
        ([8.0 * x for x in right], "8 times the golden, and tp has 8 ranks: as if summed over tp once too often"),
        ([x / 8.0 for x in right], "1/8 times the golden, and tp has 8 ranks: as if divided by their number"),
    ):
        result = found(values, exact, "b h", on("tp", 8))
        assert (result.first is None) == (not words)
        assert result.findings["h"].words.endswith(words or "ok")
    doubled = [exact.to(dtype)] * 8
    assert "once too often" in found(doubled, exact, "b h +tp", on("tp", 8)).findings["h"].words


def test_replicas_that_differ_are_a_finding_although_the_first_is_right():
    exact = drawn(16, 32)
    noise = exact.nextafter(torch.tensor(torch.inf))
    assert found([exact, noise], exact, "b h", on("tp", 2)).first is None, "the order of a sum"
    wrong = exact.clone()
    wrong[3, 4] += 0.01
    result = found([exact, exact, wrong], exact, "b h", on("tp", 3))
    assert (result.first, result.findings["h"].wrong) == ("h", True)
    assert result.findings["h"].words == "replicas differ: rank 2 of tp from rank 0 of tp"
    lost = [exact, exact, wrong.masked_fill(wrong > 1.0, torch.nan)]
    assert found(lost, exact, "b h", on("tp", 3)).first == "h"


def test_a_rank_is_not_blamed_for_what_it_inherits():
    w = drawn(8, 8, seed=1)

    def reference(x):
        h = x @ w.double()
        return {"h": h, "out": h * 3.0}

    x = drawn(4, 8)
    golden = whywrong.golden(reference, x=x.double())
    h = [part.clone() for part in (x @ w).chunk(2, 1)]
    h[1] += 0.5
    out = [3.0 * part for part in h]
    out[0] = out[0] * (1.0 + 1e-3)
    steps = {"x": lambda: x, "h": held(h, "b h/tp", on("tp", 2)), "out": held(out, "b h/tp", on("tp", 2))}
    findings = localise(Trace.lazy(steps, {}, "", True), golden).findings
    assert findings["h"].words.endswith("; wrong in rank 1 of tp alone")
    assert findings["out"].wrong
    assert "rank" not in findings["out"].words, "rank 1's part is off by more, and inherits it"


def test_the_command_takes_dims_from_options_and_files(tmp_path, capsys):
    exact = drawn(4, 8)
    Trace({"h": exact, "b": exact[0]}).save(tmp_path / "golden.safetensors")
    for rank, part in enumerate(exact.chunk(2, 1)):
        folder = tmp_path / "run" / f"rank{rank}"
        folder.mkdir(parents=True)
        torch.save(part.clone() + rank, folder / "h.pt")
        torch.save(exact[0], folder / "b.pt")
    files = ["diff", str(tmp_path / "golden.safetensors"), str(tmp_path / "run")]
    (tmp_path / "dims.yaml").write_text('# shards\n"h": "t h/tp"\n')
    (tmp_path / "dims.json").write_text('{"h*": "t h/tp"}')
    for dims in ("h: t h/tp", str(tmp_path / "dims.yaml"), str(tmp_path / "dims.json")):
        assert main([*files, "--dims", dims]) == 1
        assert "wrong in rank 1 of tp alone" in " ".join(capsys.readouterr().out.split())
    for dims, message in (
        ("h: t h/", "dims: h: expected a word a dimension"),
        ("hh*: t h/tp", "dims: hh*: expected the name of a step or a pattern of some, got none of b, h\n"),
        ("none.yaml", "--dims: none.yaml cannot be read (No such file or directory); expected JSON or YAML"),
    ):
        assert main([*files, "--dims", dims]) == 2
        assert message in capsys.readouterr().err
    assert main([*files, "--dims", "x: t h/tp", "--propose-names", str(tmp_path / "names.yaml")]) == 2
    assert "dims: x: expected the name of a step" in capsys.readouterr().err
    assert main(files) == 2
    assert "h: 2 ranks hold different values; expected --dims 'h: b s h/tp'" in capsys.readouterr().err


def layer(rank, folder, fault, ranks, device):
    """A row-parallel and a column-parallel product on several ranks, as each holds it; written by its own process."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)  # no port
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    x, w1, w2 = (value.to(place) for value in weights())
    for run, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        own = slice(32 // ranks * rank, 32 // ranks * (rank + 1))
        h = x.to(dtype) @ w1[:, own].to(dtype)
        if fault == "shard" and rank == ranks - 1:
            h = h.flip(1)
        y = h @ w2[own].to(dtype)
        for _ in range({"missing": 0, "doubled": 2}.get(fault, 1)):
            dist.all_reduce(y)
        target = folder / run / f"rank{(ranks - 1 - rank) if fault == 'order' else rank}"
        target.mkdir(parents=True)
        for name, value in (("1_h", h), ("2_y", y)):
            torch.save(value, target / f"{name}.pt")
    dist.destroy_process_group()


def weights():
    """An input, and the weights of two products."""
    return drawn(16, 64), drawn(64, 32, seed=1), drawn(32, 64, seed=2)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU for each rank")],
        ),
    ],
)
@pytest.mark.parametrize(
    ("fault", "step", "words"),
    [
        ("none", None, "ok"),
        ("shard", "1_h", "wrong in rank {last} of tp alone"),
        ("missing", "2_y", "and their sum is the golden's: the all-reduce over tp is missing"),
        ("doubled", "2_y", "{ranks} times the golden, and tp has {ranks} ranks: as if summed over tp once too often"),
        ("order", "1_h", "it holds what is of rank {last} of tp"),
    ],
)
def test_ranks_that_compute(tmp_path, fault, step, words, device):
    """Eight processes on a CPU, or one on each GPU."""
    ranks = 8 if device == "cpu" else torch.cuda.device_count()
    torch.multiprocessing.spawn(layer, (tmp_path, fault, ranks, device), ranks)
    x, w1, w2 = weights()
    for run, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        x64, a, b = (value.to(dtype).double() for value in (x, w1, w2))
        golden = Trace({"1_h": x64 @ a, "2_y": x64 @ a @ b})
        dump = open_dump(tmp_path / run, {"1_h": "t h/tp", "2_y": "t d", "ranks": f"tp={ranks}"})
        result = localise(dump, golden)
        assert result.first == step, result
        assert words.format(last=ranks - 1, ranks=ranks) in result.findings[step or "2_y"].words


MEMORY = """
import re, sys, threading, time, whywrong
from whywrong.reporting.command import main
def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
whywrong.localise({"x": [1.0]}, {"x": [1.0]})
before, most, done = held(), [0.0], threading.Event()
def watch():
    while not done.wait(0.005):
        most[0] = max(most[0], held())
thread = threading.Thread(target=watch)
thread.start()
code = main(["diff", *sys.argv[1:]])
done.set()
thread.join()
print(code, int(most[0] - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["files", "shards"])
def test_memory_is_bounded_by_the_largest_tensor_and_not_by_their_number(layout, tmp_path):
    """8 MiB each: the peak of what is no page of a file, over that before, in MiB."""
    peaks = {}
    for count in (3, 12):
        for side in ("golden", "observed"):
            folder = tmp_path / str(count) / side
            for k in range(count):
                x = drawn(2048, 1024, seed=k)
                parts = [x] if layout == "files" else x.chunk(2, 1)
                for rank, part in enumerate(parts):
                    place = folder / f"rank{rank}" if layout == "shards" else folder
                    place.mkdir(parents=True, exist_ok=True)
                    torch.save(part.clone(), place / f"{k:02d}_h.pt")
        arguments = [str(tmp_path / str(count) / side) for side in ("golden", "observed")]
        command = [sys.executable, "-c", MEMORY, *arguments, "--dims", "*: t h/tp"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        code, peaks[count] = map(int, run.stdout.splitlines()[-1].split())
        assert code == 0
    assert peaks[12] < 1.25 * peaks[3] + 8, peaks
    assert peaks[12] < 20 * 8, peaks
