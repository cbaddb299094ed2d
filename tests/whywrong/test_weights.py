"""`whywrong weights`: what its page shows, each fault of a conversion by its name, and correct ones without a row."""

import json
import re
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import whywrong
from whywrong import Trace, UsageError
from whywrong.reporting.command import main
from whywrong.reporting.weights import weights

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text(encoding="utf-8")
CODE, GRAFTS = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE)
SHOWN = re.findall(r"(?ms)^    \$ whywrong weights (.*?)\n(.*?)^    exit (\d)", PAGE)
LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files that the page's code makes."""
    folder = tmp_path_factory.mktemp("weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(CODE, {})
    return folder


@pytest.fixture(scope="module")
def llama(made):
    return load_file(made / "llama.safetensors")


def words(text):
    """A text without its numbers, rules and line breaks."""
    return re.sub(r"[-\d.e+]*\d[-\d.e+]*|-{3,}|\s+", " ", text).split()


@pytest.mark.parametrize(("arguments", "output", "status"), SHOWN, ids=[shown[0].split()[-1] for shown in SHOWN])
def test_the_page_shows_what_the_command_prints(made, arguments, output, status, monkeypatch, capsys):
    monkeypatch.chdir(made)
    assert main(["weights", *arguments.split()]) == int(status)
    assert words(capsys.readouterr().out) == words(output)


def test_the_page_shows_what_grafts_print(capsys):
    exec(GRAFTS, {"torch": torch})
    shown = PAGE.partition("prints\n\n")[2].partition("\n\n")[0]
    assert words(capsys.readouterr().out) == words(shown)


def test_each_kind_is_on_the_page():
    source = Path(whywrong.__file__).parent
    code = "".join((source / path).read_text() for path in ("comparing/relation.py", "reporting/weights.py"))
    kinds = set(re.findall(r'Relation\((?:kind|[A-Z]+|"(\w+)")', code)) | {"tied", "joined", "fused", "another's"}
    table = PAGE.partition("| relation |")[2].partition("\n\n")[0]
    assert kinds - {""} <= set(re.findall(r"[\w']+", table))


def test_the_page_shows_a_correct_conversion_and_five_faults():
    assert [status for *_, status in SHOWN] == ["0", "1", "1"]
    assert len(SHOWN[0][1].splitlines()) == 1
    assert all(kind in SHOWN[1][1] for kind in ("regrouped", "transposed", "quantised", "differs", "scale"))


def correct(folder, llama):
    """Conversions in which nothing is lost, as files, and names where they differ."""
    save_file({name: x.half() for name, x in llama.items()}, folder / "half.safetensors")
    yield folder / "half.safetensors", {}
    torch.save({"state_dict": {f"module.{name}": x for name, x in llama.items()}, "step": 3}, folder / "wrapped.pt")
    np.savez(folder / "arrays.npz", **{name: x.numpy() for name, x in llama.items()})
    yield folder / "arrays.npz", {}
    short = {name: re.sub(r"^model\.|self_|\.weight$", "", name) for name in llama}
    torch.save({short[name]: x for name, x in llama.items()}, folder / "short.bin")
    yield folder / "short.bin", short
    for suffix, write in ((".safetensors", save_file), (".bin", torch.save)):
        shards = folder / f"shards{suffix}"
        shards.mkdir()
        names = list(llama)
        for k in range(3):
            write({name: llama[name] for name in names[k::3]}, shards / f"model-0000{k + 1}-of-00003{suffix}")
        (shards / "model.index.json").write_text("{}")
        yield shards, {}


def test_correct_conversions_have_no_row(tmp_path, llama, made, capsys):
    for path, names in correct(tmp_path, llama):
        (tmp_path / "names.json").write_text(json.dumps(names))
        options = ["--names", str(tmp_path / "names.json")] * bool(names)
        assert main(["weights", str(made / "llama.safetensors"), str(path), *options]) == 0, path
        out, err = capsys.readouterr()
        assert (out.count("\n"), err) == (1, ""), path
        assert out.startswith(f"{len(llama)} tensors: {len(llama)} the same"), out


def test_a_prefix_is_ignored_with_a_note(llama):
    found = weights(llama, {f"module.{name}": x for name, x in llama.items()})
    assert not found.alarm
    assert "'module.'" in found.note
    assert found.note in str(found)


UP = f"{LAYER}mlp.up_proj.weight"


def put(name, change):
    """A change of one tensor to what `change` makes of all."""
    return lambda w: w.update({name: change(w)})


FAULTS = {
    "another layer's": (
        put(UP, lambda w: w["model.layers.0.mlp.up_proj.weight"]),
        "another's",
        "the golden's model.layers.0.mlp.up_proj.weight",
    ),
    "gate as up": (
        put(UP, lambda w: w[f"{LAYER}mlp.gate_proj.weight"]),
        "another's",
        f"the golden's {LAYER}mlp.gate_proj.weight",
    ),
    "lost": (lambda w: w.pop(UP), "missing", "not in the observed"),
    "scaled": (put(UP, lambda w: 0.125 * w[UP]), "scaled", "times 0.125"),
    "a head of zeros": (
        lambda w: w[UP][16:32].zero_(),
        "partly",
        "slices 0 to 15, 32 to 95 of dimension 0 are the golden's; the others, 16 to 31: zero",
    ),
    "flipped": (put(UP, lambda w: w[UP].flip(1)), "flipped", "dimension 1: 64 slices in reverse"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_row(llama, name, dtype):
    change, kind, says = FAULTS[name]
    wrong = {key: x.clone() for key, x in llama.items()}
    change(wrong)
    found = weights(llama, {key: x.to(dtype) for key, x in wrong.items()})
    ((tensor, row_kind, row_words),) = [
        (key, x.kind, x.words) for key, x in found.relations.items() if x.kind not in ("same", "tied")
    ]
    assert (tensor, row_kind, row_words) == (UP, kind, says)
    assert found.alarm


def test_tensors_that_are_tied_and_not(llama):
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    alone = {name: x for name, x in llama.items() if name != head}
    assert weights(llama, alone).relations[head].words == f"stored once: {head} is {embedding}"
    assert weights(alone, llama).relations[head].words == f"stored twice: {head} is {embedding}"
    assert not weights(llama, alone).alarm
    assert not weights(alone, llama).alarm
    other = torch.randn(llama[head].shape, generator=torch.Generator().manual_seed(5))
    lost = weights(llama, llama | {head: other}).relations[head]
    assert lost.kind == "differs"
    assert lost.words.endswith(f"in the golden it is tied with {embedding}")
    assert weights(alone, alone | {head: other}).relations[head].kind == "extra"
    wrongly = weights(llama | {head: other}, llama).relations[head]
    assert (wrongly.kind, wrongly.words) == ("another's", f"the golden's {embedding}")
    assert weights(llama | {head: other}, alone).relations[head].kind == "missing"


def test_scales_that_are_and_are_not_those_of_the_weight(llama):
    name = f"{LAYER}mlp.down_proj.weight"
    scale = llama[name].abs().amax(1, keepdim=True) / 127.0
    port = llama | {name: (llama[name] / scale).round().to(torch.int8)}
    for extra, kind in ((scale, "scale"), (1.0 / scale, "scale"), (scale.flatten(), "scale"), (1.1 * scale, "extra")):
        found = weights(llama, port | {f"{LAYER}mlp.down_proj.scales": extra}).relations
        assert found[name].kind == "quantised"
        assert found[f"{LAYER}mlp.down_proj.scales"].kind == kind


def test_projections_that_are_fused_in_either_direction(llama, made):
    fused = load_file(made / "fused.safetensors")
    fused["model.norm.weight"] = llama["model.norm.weight"]
    for golden, observed in ((llama, fused), (fused, llama)):
        found = weights(golden, observed)
        assert not found.alarm
        kinds = [x.kind for x in found.relations.values()]
        assert (kinds.count("joined"), kinds.count("fused")) == (10, 4)
    heads = [llama[f"model.layers.0.self_attn.{x}_proj.weight"].view(2, -1, 64) for x in "qkv"]
    fused["model.layers.0.self_attn.qkv_proj.weight"] = torch.cat(heads, 1).reshape(-1, 64)  # as GPT-NeoX has them
    whole = weights(llama, fused).relations["model.layers.0.self_attn.qkv_proj.weight"]
    assert "k_proj.weight: slices 0 to 31 of dimension 0 are its 32 to 47, 96 to 111 of 128" in whole.words
    fused["model.layers.0.self_attn.qkv_proj.weight"][3] = 0.0
    found = weights(llama, fused)
    assert found.relations["model.layers.0.self_attn.q_proj.weight"].kind == "missing"
    assert found.alarm


def test_the_json_has_each_tensor(made, capsys):
    assert main(["weights", str(made / "llama.safetensors"), str(made / "wrong.safetensors"), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["alarm"]
    assert len(said["tensors"]) == 22
    row = said["tensors"][f"{LAYER}self_attn.o_proj.weight"]
    assert (row["kind"], row["ok"], row["words"], row["dtype"]) == ("transposed", False, "transposed", "bfloat16")
    assert said["tensors"]["model.norm.weight"]["ok"]


def test_a_pair_is_in_memory_at_a_time():
    alive, most = weakref.WeakSet(), []

    def reader(seed):
        def read():
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
            alive.add(x)
            most.append(len(alive))
            return x

        return read

    def checkpoint(first):
        return Trace.lazy({f"w{k}": reader(first + k) for k in range(20)}, {}, "", False)

    found = weights(checkpoint(0), checkpoint(1))  # each is the next one's
    kinds = [x.kind for x in found.relations.values()]
    assert kinds == ["another's"] * 19 + ["differs"]
    assert max(most) <= 3


def save(path, tensors):
    save_file(tensors, path)
    return path


def shards(path, *names):
    path.mkdir()
    for k, name in enumerate(names):
        save(path / f"{k}.safetensors", {name: torch.ones(2)})
    return path


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])
    return path


def pickled(path):
    torch.save({"w": torch.nn.Linear(2, 2)}, path)
    return path


def folder(path):
    path.mkdir()
    return path


def lying(path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


BAD = {
    "nothing there": (lambda f: f / "none", "a path that is not there"),
    "no name in common": (
        lambda f: save(f / "o.safetensors", {"x": torch.ones(2)}),
        "expected names of the golden, or --names",
    ),
    "two shards with one name": (lambda f: shards(f / "s", "w", "w"), "expected a tensor in one shard, got 'w'"),
    "a cut file": (lambda f: cut(save(f / "o.safetensors", {"w": torch.ones(200)})), "is cut, damaged"),
    "code": (lambda f: pickled(f / "o.pt"), "torch.load(weights_only=True) refuses"),
    "an empty folder": (lambda f: folder(f / "empty"), "expected one tensor a file"),
    "a header that lies": (lambda f: lying(f / "o.safetensors"), "is cut, damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line(name, tmp_path, capsys):
    make, says = BAD[name]
    golden = save(tmp_path / "golden.safetensors", {"w": torch.ones(200)})
    assert main(["weights", str(golden), str(make(tmp_path))]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err, err


def test_names_that_nobody_has_and_a_subject_that_is_none(llama):
    with pytest.raises(UsageError, match="the golden has no step 'q'"):
        weights(llama, llama, names={"q": "k"})
    with pytest.raises(UsageError, match="observed: expected a Trace, a dict"):
        weights(llama, 3)


def test_a_folder_of_one_tensor_a_file_is_a_checkpoint(tmp_path, llama):
    for name, x in llama.items():
        np.save(tmp_path / f"{name}.npy", x.numpy())
    assert not weights(llama, tmp_path).alarm


def test_a_model_of_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100, "head_dim": 16}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    found = whywrong.weights(tmp_path / "model", {name: x.bfloat16() for name, x in model.state_dict().items()})
    assert not found.alarm
    assert found.relations["lm_head.weight"].kind == "tied"
    shutil.rmtree(tmp_path / "model")
