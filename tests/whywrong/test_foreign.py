"""Dumps of other tools: the samples of data/dumps, each of which is what the tool wrote, and what is refused."""

import json
import os
import pickle
import re
import shutil
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import whywrong
from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError
from whywrong.recording.dumps import open_dump
from whywrong.reporting.command import main
from whywrong.reporting.names import read_map

DUMPS = ROOT / "data" / "dumps"
SAMPLES = ("sglang/golden", "msprobe/golden", "dcp/golden", "megatron/golden", "jax/golden.npz", "onnxruntime/golden")


class Runs:
    """What a pickle runs when it is loaded by whoever runs it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return eval, (f"open({str(self.path)!r}, 'w')",)


def steps():
    """The values of the program of data/dumps/make.py, as they are recorded."""
    golden = whywrong.load(DUMPS / "golden.safetensors")
    return {name: golden[name].float() for name in golden.names}


def copied(tmp_path, sample):
    return shutil.copytree(DUMPS / sample, tmp_path / "dump")


def refused(path, dims=None):
    """The one line that opening and reading a dump ends with."""

    def read():
        dump = open_dump(path, dims)
        return [dump.read(name) for name in dump.names]

    with pytest.raises(UsageError) as raised:
        read()
    assert str(raised.value).isprintable()
    return str(raised.value)


def test_sglang_s_shards_are_put_together_by_the_dims_in_the_files():
    dump, exact = open_dump(DUMPS / "sglang/golden"), steps()
    assert dump.names == [f"layer_id=0.{name}" for name in ("x", "h", "a", "partial", "y", "p")]
    assert dump.ordered
    for name in dump.names:
        torch.testing.assert_close(dump.read(name), exact[name.split(".")[1]], rtol=1e-5, atol=1e-5)


def test_msprobe_s_calls_are_steps_in_their_order():
    dump, exact = open_dump(DUMPS / "msprobe/golden"), steps()
    assert dump.names[:2] == ["Functional.linear.0.forward.input.0", "Functional.linear.0.forward.input.1"]
    assert (dump.names[-1], len(dump.names), dump.ordered) == ("Tensor.softmax.0.forward.output.0", 11, True)
    torch.testing.assert_close(dump.read(dump.names[-1]), exact["p"])
    assert open_dump(DUMPS / "msprobe/golden/step0/proc0/dump.json").names == dump.names


def test_a_distributed_checkpoint_is_read_a_tensor_at_a_time_by_torch_s_reader():
    dump, exact = open_dump(DUMPS / "dcp/golden"), steps()
    assert dump.texts == {"not read": "step, note"}
    for name in ("w1", "w2", "b"):
        assert torch.equal(dump.read(f"model.{name}"), exact[name])


def test_megatron_s_ranks_are_put_together_as_it_is_declared():
    dims = {"*h_to_4h.weight": "f/tp d", "*4h_to_h.weight": "d f/tp"}
    dump, exact = open_dump(DUMPS / "megatron/golden", dims), steps()
    assert dump.texts == {"not read": "args, checkpoint_version, iteration, rng_state"}
    assert torch.equal(dump.read("model.dense_h_to_4h.weight"), exact["w1"].T)
    assert torch.equal(dump.read("model.dense_4h_to_h.weight"), exact["w2"].T)
    assert torch.equal(dump.read("model.dense_4h_to_h.bias"), exact["b"]), "which all ranks hold"
    assert "--dims 'model.dense_h_to_4h.weight: b s h/tp'" in refused(DUMPS / "megatron/golden")


def test_bfloat16_of_jax_has_its_type_again():
    dump, exact = open_dump(DUMPS / "jax/golden.npz"), steps()
    for name in dump.names:
        assert dump.read(name).dtype == torch.bfloat16
        torch.testing.assert_close(dump.read(name).float(), exact[name], rtol=2.0**-7, atol=1e-6)
    single = np.load(DUMPS / "jax/golden.npz")["y"]
    assert whywrong.compare(single, steps()["y"].double()).observed_dtype == "bfloat16"


def test_onnx_runtime_s_files_are_read_with_onnx():
    pytest.importorskip("onnx")
    dump, exact = open_dump(DUMPS / "onnxruntime/golden"), steps()
    assert dump.names == ["_layer_a", "_layer_h", "_layer_p", "_layer_y"]
    for name in dump.names:
        torch.testing.assert_close(dump.read(name), exact[name[-1]])


def test_without_onnx_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert refused(DUMPS / "onnxruntime/golden").endswith(", of ONNX Runtime, needs onnx: pip install onnx")


def test_a_log_of_hashes_says_what_it_can_tell():
    message = refused(DUMPS / "debug_mode/golden.txt")
    assert "a log of DebugMode with a hash of each call and no tensors: the first line that differs" in message


@pytest.mark.parametrize("sample", SAMPLES[:2])
def test_a_correct_run_is_silent(sample, capsys):
    assert main(["diff", str(DUMPS / "golden.safetensors"), str(DUMPS / "sglang/golden")]) == 0
    assert main(["diff", str(DUMPS / sample), str(DUMPS / sample)]) == 0
    assert "no divergence" in capsys.readouterr().out


def test_what_is_no_tensor_is_named_and_not_made(tmp_path):
    folder = copied(tmp_path, "sglang/golden")
    first = next(folder.glob("*rank=0*name=x*"))
    torch.save({"value": Runs(tmp_path / "run"), "meta": {}}, folder / first.name.replace("name=x", "name=batch"))
    dump = open_dump(folder)
    assert dump.texts == {"not read": "layer_id=0.batch"}
    assert "layer_id=0.batch" not in dump
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sample", ["megatron/golden", "dcp/golden"])
def test_nothing_of_a_checkpoint_is_run(tmp_path, sample):
    folder = copied(tmp_path, sample)
    if sample.startswith("dcp"):
        about = pickle.loads((folder / ".metadata").read_bytes())
        about.planner_data = Runs(tmp_path / "run")
        (folder / ".metadata").write_bytes(pickle.dumps(about))
        assert len(open_dump(folder).names) == 3
    else:
        for file in folder.rglob("*.pt"):
            torch.save({"args": Runs(tmp_path / "run"), "model": {"b": torch.ones(3)}}, file)
        assert open_dump(folder).read("model.b").tolist() == [1.0, 1.0, 1.0]
    assert not (tmp_path / "run").exists()


def edited(tmp_path, change):
    """The sample of a distributed checkpoint with other metadata."""
    folder = copied(tmp_path, "dcp/golden")
    about = pickle.loads((folder / ".metadata").read_bytes())
    change(about)
    (folder / ".metadata").write_bytes(pickle.dumps(about))
    return folder


def relocated(about):
    for entry in about.storage_data.values():
        entry.relative_path = "../golden/" + entry.relative_path


def grown(about):
    x = about.state_dict_metadata["model.b"]
    x.size = x.chunks[0].sizes = torch.Size([10**12])


def halved(about):
    del about.state_dict_metadata["model.w1"].chunks[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (relocated, "it names '../golden/__0_0.distcp', which is missing"),
        (grown, "model.b: expected 1000000000000 elements in its files"),
        (halved, "model.w1: expected 96 elements in its files, got 48"),
        (lambda about: about.__dict__.pop("storage_data"), "is cut, damaged or of another kind"),
    ],
)
def test_metadata_of_a_checkpoint_that_lie_are_one_line(tmp_path, change, message):
    assert message in refused(edited(tmp_path, change))


def test_a_checkpoint_that_is_cut_or_lacks_a_file_is_one_line(tmp_path):
    folder = copied(tmp_path, "dcp/golden")
    part = folder / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:2000])
    assert "is cut, damaged or of another kind" in refused(folder)
    part.unlink()
    assert "it names '__1_0.distcp', which is missing" in refused(folder)
    (folder / ".metadata").write_bytes(b"no pickle")
    assert ".metadata: is cut, damaged or of another kind" in refused(folder)
    (folder / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\x7f.")  # a memo of 2^31 entries
    assert ".metadata: is cut, damaged or of another kind" in refused(folder)


def test_dumps_of_msprobe_that_lie_are_one_line(tmp_path):
    folder = copied(tmp_path, "msprobe/golden") / "step0/proc0"
    about = json.loads((folder / "dump.json").read_text())

    def said(data):
        (folder / "dump.json").write_text(data if isinstance(data, str) else json.dumps(data))
        return refused(folder)

    assert "names '../x.pt', which is missing" in said({"data": {"a": {"data_name": "../x.pt"}}})
    assert "expected tensors, got none" in said({"data": [1, None, "text"]})
    assert "expected tensors, got none" in said("[]")
    assert "expected tensors, got statistics without a tensor" in said({"data": {"a": {"type": "torch.Tensor"}}})
    assert "is cut, damaged" in said('{"data": ' + "[" * 100_000)
    (folder / "dump_tensor_data/Functional.silu.0.forward.output.0.pt").unlink()
    assert "names 'Functional.silu.0.forward.output.0.pt', which is missing in" in said(about)


def test_two_parts_of_one_rank_and_a_missing_rank_are_one_line(tmp_path):
    for name, value in (("rank0", 0.0), ("rank_0", 1.0)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "h.npy", np.full((2, 3), value))
    assert "h: expected one part a rank, got two of rank 0" in refused(tmp_path)
    (tmp_path / "rank_0").rename(tmp_path / "rank2")
    assert "expected --dims 'h: b s h/tp'" in refused(tmp_path)
    folder = copied(tmp_path / "other", "sglang/golden")
    for file in folder.glob("*rank=1*name=h*"):
        file.unlink()
    assert "layer_id=0.h: rank 1 of tp is missing; expected all 2" in refused(folder)


def test_a_rank_beyond_its_axis_and_other_dims_are_one_line(tmp_path):
    folder = copied(tmp_path, "sglang/golden")
    file = next(folder.glob("*rank=1*name=h*"))
    held = torch.load(file)
    for change, message in (
        ({"meta": held["meta"] | {"sglang_parallel_info": {"tp_rank": 7, "tp_size": 2}}}, "got rank 7 of tp"),
        ({"value": torch.ones(6, 5, 1)}, "expected 2 dimensions (t f[tp]), got [6, 5, 1]"),
        ({"value": torch.ones(5, 6)}, "expected parts that fit (t f[tp]), got [6, 6], [5, 6]"),
    ):
        torch.save(held | change, file)
        assert message in refused(folder)


def test_tensors_that_lie_about_their_size_are_one_line(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"x": torch.ones(1).expand(1 << 40)}, path)
    assert "x: expected no more bytes than its file has, got 4398046511104" in refused(path)
    torch.save({"x": torch.ones(1).to_sparse()}, path)
    assert "expected dense numbers, got float32, torch.sparse_coo, cpu" in refused(path)
    np.save(tmp_path / "x.npy", np.ones(4))
    raw = (tmp_path / "x.npy").read_bytes().replace(b"(4,)", b"(9" + b"9" * 9 + b",)")
    (tmp_path / "x.npy").write_bytes(raw)
    assert "is cut, damaged or of another kind" in refused(tmp_path / "x.npy")


def test_a_folder_of_too_many_steps_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("whywrong.recording.dumps.MOST_STEPS", 4)
    assert "expected 4 steps at most, got 6" in refused(DUMPS / "sglang/golden")


@pytest.mark.long
def test_a_million_names_and_nested_containers_are_one_line(tmp_path):
    start = time.perf_counter()
    path = tmp_path / "x.pt"
    torch.save(dict.fromkeys(range(1_000_000), 1.0), path)
    assert "expected 100000 tensors at most" in refused(path)
    nested = 1.0
    for _ in range(60):
        nested = [nested, nested]
    torch.save(nested, path)
    assert "expected 100000 tensors at most, in 100 containers" in refused(path)
    loop = []
    loop.append(loop)
    torch.save(loop, path)
    assert "in 100 containers at most" in refused(path)
    assert time.perf_counter() - start < 60.0


@pytest.mark.long
def test_too_many_names_of_one_file_are_one_line_before_they_are_put_in_order(tmp_path):
    count, start = 120_000, time.perf_counter()
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = {f"n{k}": entry | {"data_offsets": [4 * k, 4 * k + 4]} for k in range(count)}
    words = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(words).to_bytes(8, "little") + words + bytes(4 * count))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name in header:
            archive.writestr(f"{name}.npy", b"")
    for file in ("x.safetensors", "x.npz"):
        assert f"{file}: expected 100000 steps at most, got 120000" in refused(tmp_path / file)
    assert time.perf_counter() - start < 60.0, "a search of a list for each name takes minutes"


def test_folders_in_folders_and_links_in_a_circle_are_one_line(tmp_path):
    deep = tmp_path / "/".join(["step0"] * 400)
    deep.mkdir(parents=True)
    assert "cannot be read" in refused(tmp_path) or "expected one tensor a file" in refused(tmp_path)
    circle = tmp_path / "circle"
    circle.mkdir()
    (circle / "step0").symlink_to(circle)
    assert "cannot be read (" in refused(circle)


def test_onnx_runtime_s_files_that_lie_are_one_line(tmp_path):
    onnx = pytest.importorskip("onnx")
    proto = onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), "x")
    path = tmp_path / "x.tensorproto"
    proto.dims[0] = 10**12
    path.write_bytes(proto.SerializeToString())
    assert "x.tensorproto: is cut, damaged or of another kind" in refused(tmp_path)
    proto.dims[0], proto.data_location = 2, onnx.TensorProto.EXTERNAL
    path.write_bytes(proto.SerializeToString())
    assert "its numbers are in another file" in refused(tmp_path)
    path.write_bytes(os.urandom(100))
    assert "is cut, damaged or of another kind" in refused(tmp_path)


SHOWN = re.findall(
    r"(?ms)^    \$ whywrong diff (.*?)\n(.*?)^    exit (\d)", (ROOT / "docs" / "dumps.md").read_text(encoding="utf-8")
)
"""The arguments, the output and the exit status of each command that the page shows."""


def words(text):
    """A text without its numbers, rules and line breaks, which the width of a column moves."""
    return re.sub(r"[-\d.e+]*\d[-\d.e+]*|-{3,}|\s+", " ", text).split()


@pytest.mark.parametrize(("arguments", "output", "status"), SHOWN, ids=[shown[0] for shown in SHOWN])
def test_the_page_shows_what_the_command_says(arguments, output, status, tmp_path, monkeypatch, capsys):
    if "onnxruntime" in arguments:
        pytest.importorskip("onnx")
    monkeypatch.chdir(shutil.copytree(DUMPS, tmp_path / "dumps"))
    assert main(["diff", *arguments.split()]) == int(status)
    said = capsys.readouterr()
    assert words(said.out + said.err) == words(output)


def test_the_page_shows_the_file_of_proposed_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(shutil.copytree(DUMPS, tmp_path / "dumps"))
    main(["diff", "golden.safetensors", "msprobe/observed", "--propose-names", "names.yaml"])
    capsys.readouterr()
    page = " ".join(words((ROOT / "docs" / "dumps.md").read_text(encoding="utf-8")))
    rows = Path("names.yaml").read_text(encoding="utf-8").splitlines()[2:]
    assert len(rows) == 12
    assert all(" ".join(words(row)) in page for row in rows)
    assert main(["diff", "golden.safetensors", "msprobe/observed", "--names", "names.yaml"]) == 1
    assert "the inputs differ: w1, w2" in capsys.readouterr().out, "which a reader would have deleted"
    for more in (["--names", "names.yaml"], ["msprobe/golden"]):
        assert main(["diff", "golden.safetensors", "msprobe/observed", *more, "--propose-names", "other.yaml"]) == 2
        assert "--propose-names: expected one OBSERVED, and no --names" in capsys.readouterr().err
    assert main(["diff", "dcp/golden", "dcp/observed", "--propose-names", "other.yaml"]) == 2
    assert "expected steps alike under other names, got none in dcp/observed" in capsys.readouterr().err
    assert not Path("other.yaml").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: x\na: y\n", "expected each name once, got 'a' twice"),
        ('{"a": "x", "a": "y"}', "expected each name once, got 'a' twice"),
        ("a: [x]\n", "no mapping of names to texts"),
        ("- a\n", "no mapping of names to texts"),
        ("a: x: y", "cannot be read (mapping values are not allowed here"),
        ("a: &x y\nb: *z\n", "cannot be read (found undefined alias"),
        ("a: !!python/object/apply:os.system [exit]\n", "no mapping of names to texts"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_files_of_names_that_are_none_are_one_line(text, message, tmp_path, capsys):
    (tmp_path / "names.yaml").write_text(text)
    files = [str(DUMPS / "golden.safetensors"), str(DUMPS / "msprobe/observed")]
    assert main(["diff", *files, "--names", str(tmp_path / "names.yaml")]) == 2
    said = capsys.readouterr()
    assert (message in said.err, said.err.count("\n"), said.out) == (True, 1, ""), said.err


def test_a_name_in_yaml_is_a_text_whatever_it_looks_like(tmp_path):
    (tmp_path / "names.yaml").write_text('1: "on"\nnull: 0x10  # a comment\n')
    assert read_map(tmp_path / "names.yaml", "--names") == {"1": "on", "null": "0x10"}
    (tmp_path / "names.yaml").write_text("# nothing\n")
    assert read_map(tmp_path / "names.yaml", "--names") == {}


def test_sglang_s_names_have_their_tags_and_each_dump_of_a_name_its_number(tmp_path):
    """The files' names are those of dumper.py, with its parallel ranks and a recomputed forward pass."""
    for index, name in enumerate(
        (
            "step=0___rank=0___dump_index={}___name=x___recompute_status=disabled",
            "step=0___rank=0___dump_index={}___name=x___recompute_status=recompute",
            "step=0___rank=0___dump_index={}___name=param__layers.0.w___recompute_status=disabled___tp_rank=0___layer_id=3",
            "step=0___rank=0___dump_index={}___name=grad__x",
            "step=0___rank=0___dump_index={}___name=grad__x",
            "step=1___rank=0___dump_index={}___name=x___recompute_status=disabled",
        )
    ):
        torch.save({"value": torch.full((2,), index), "meta": {}}, tmp_path / f"{name.format(9 + index)}.pt")
    dump = open_dump(tmp_path)
    assert dump.names == [
        "step=0.x",
        "step=0.recompute_status=recompute.x",
        "step=0.layer_id=3.param__layers.0.w",
        "step=0.grad__x",
        "step=0.grad__x#2",
        "step=1.x",
    ]
    assert [int(dump.read(name)[0]) for name in dump.names] == list(range(6))
