"""The CUDA C++ TinyLLM against float64, its Tensor, the host runtime, and the Tensor under investigation."""

import ctypes

import numpy as np
import pytest

from kernels.corpus import corpus
from kernels.tinyllm import evidence, faulty, golden, tinyllm
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
        count, lines = faulty.sanitized(p, faulty.switches(), where, tool)
        assert count == 0, lines


def test_every_switch_changes_an_outcome_and_the_right_program_is_right(where, rng):
    p = faulty.program(0.1, rng, width=32, vocabulary=16)
    rows = faulty.combinations((1,))
    o = faulty.run(p, rows, where)
    assert len(o) == len(rows)
    assert (o["status"] != faulty.LOST).all()
    assert faulty.right(o, p)[0]
    for column, name in enumerate(faulty.SWITCHES):
        assert evidence.changes(rows, o, column) > 0, name
    accused = faulty.switches("resize_by_size", way=1)
    assert faulty.right(o, p)[(rows == accused).all(1)][0]


@pytest.mark.parametrize("world", faulty.FRESH)
def test_an_outcome_does_not_depend_on_what_ran_before(where, rng, world):
    p = faulty.program(0.1, rng, width=64, vocabulary=32)
    if world not in (faulty.FILLED if where.is_cuda else faulty.FRESH):
        with pytest.raises(UsageError, match=r"fresh: .* is not right; wanted one of NaN, zeros"):
            faulty.run(p, faulty.switches()[None], where, fresh=world)
        return
    rows = rng.permutation(faulty.combinations())[:400]
    there = faulty.run(p, rows, where, fresh=world, jobs=2)
    back = faulty.run(p, rows[::-1], where, fresh=world, jobs=1)[::-1]
    assert not there["strays"].any()
    for name in there.dtype.names:
        np.testing.assert_array_equal(there[name], back[name], err_msg=name)


def test_putting_one_switch_right_mends_the_sets_that_it_alone_spoils(where, rng):
    p = faulty.program(0.1, rng, width=32, vocabulary=16)
    rows = faulty.combinations((1,))
    o = faulty.run(p, rows, where)
    right, names = faulty.right(o, p), list(faulty.SWITCHES)
    zero = faulty.observations(o, p)["logits all 0"]
    spoilt = (rows == faulty.switches("no_d2h", "zero_host", way=1)).all(1)
    assert (zero & spoilt).any()
    assert evidence.mended(rows, spoilt, right, "no_d2h").all()
    assert not evidence.mended(rows, spoilt, right, "resize_by_size").any()
    for switch in names:
        assert not faulty.has(faulty.corrected(rows, switch), switch).any()
    # Where `size` counts elements, the accused line is right, and the other is wrong.
    assert faulty.has(
        np.stack([faulty.switches("resize_by_size"), faulty.switches("size_in_elements")]), "resize_by_size"
    ).all()
    assert not faulty.has(faulty.switches("size_in_elements", "resize_by_size")[None], "resize_by_size").any()


def test_the_sets_that_show_most_are_counted():
    rows = faulty.combinations((1,))
    column = list(faulty.SWITCHES).index("no_d2h")
    zero, tiny = rows[:, column] == 1, (rows[:, 0] == 0) & (rows[:, column] == 1)
    seen = {"logits all 0": zero, "x[0:2] near 1e-32": tiny, evidence.LOSS: rows[:, 0] == 1}
    right = rows[:, column] == 0
    assert evidence.fullest(rows, seen, right, "no_d2h") == (2, 512, 512, 512)
    assert evidence.fullest(rows, seen, right, "unchecked") == (2, 512, 256, 0)
    assert evidence.fullest(rows, seen | {"logits all 0": np.zeros_like(zero)}, right, "no_d2h") == (0, 0, 0, 0)


def test_zeros_that_are_never_filled_are_enough(where, rng):
    p = faulty.program(0.1, rng, width=32, vocabulary=16)
    rows = np.stack([faulty.switches("no_d2h", "zero_host", way=way) for way in range(4)])
    seen = faulty.observations(faulty.run(p, rows, where), p)
    assert seen["logits all 0"].all()
    assert seen["only <pad>"].all()


def test_kernels_for_another_gpu_never_run(where, rng):
    p = faulty.program(0.1, rng, width=32, vocabulary=16)
    o = faulty.run(p, faulty.switches()[None], where, no_launch=True)[0]
    assert (o["status"], o["first_error"]) == (faulty.REPORTED, 209)  # cudaErrorNoKernelImageForDevice


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 1)])
def test_the_other_gpus_code_is_of_another_generation(capability):
    assert int(faulty.foreign(capability).removeprefix("sm_")[:-1]) != capability[0]


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


def test_minimal_sets_hold_no_smaller_one():
    rows = faulty.combinations((0,))
    shows = (rows[:, 0] & rows[:, 2]) | rows[:, 5]
    names = list(faulty.SWITCHES)
    assert set(faulty.minimal(rows, shows.astype(bool))) == {frozenset({names[0], names[2]}), frozenset({names[5]})}


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
        faulty.switches("speed")


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
