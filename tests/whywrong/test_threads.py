"""Several threads at once: each has its own steps, and what torch keeps for the process is afterwards as it was."""

import logging
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import whywrong
from whywrong import capture, golden, localise

TIMES = 500


def in_threads(*functions):
    """What each function returns, run in threads that begin together; what one raises is raised here."""
    begin, results = threading.Barrier(len(functions)), {}

    def run(k, function):
        begin.wait()
        try:
            results[k] = function()
        except BaseException as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[k] for k in range(len(functions))]


def program(word, steps):
    """A function with `steps` steps that nobody else names so."""

    def run(x):
        for k in range(steps):
            x = whywrong.step(f"{word}{k}", torch.sin(x + k))
        return x

    return run


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("record", [capture, golden])
def test_no_thread_has_a_step_of_another(record):
    x = torch.linspace(0.0, 1.0, 5)
    alone = {word: record(program(word, steps), x).names for word, steps in (("a", 3), ("b", 5))}
    times = TIMES if record is capture else TIMES // 5

    def names(word, steps):
        return lambda: [record(program(word, steps), x).names for _ in range(times)]

    for word, found in zip("ab", in_threads(names("a", 3), names("b", 5)), strict=True):
        assert found == [alone[word]] * times


def test_a_capture_sees_float32_while_another_thread_records_in_float64():
    x = torch.ones(4)

    def captured():
        return [capture(lambda x: x + torch.zeros(4), x)["output"].dtype for _ in range(200)]

    dtypes, _ = in_threads(captured, lambda: [golden(lambda x: x.exp().sum(), x) for _ in range(60)])
    assert set(dtypes) == {torch.float32}


def test_a_step_of_a_backward_is_kept():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2.0 * x

        @staticmethod
        def backward(ctx, g):
            return 2.0 * whywrong.step("inside", g.clone())

    assert "inside" in capture(lambda x: Doubled.apply(x).sum(), torch.ones(3)).names


class Dropped(torch.nn.Module):
    """A module that samples, and that writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(5, 5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1.0
        return torch.nn.functional.dropout(self.inner(x)) * self.count


def test_captures_of_a_module_that_samples_at_once_are_as_one_alone():
    x, module = torch.ones(3, 5), Dropped()
    alone = capture(module, x)

    def captured():
        return [capture(module, x) for _ in range(40)]

    for trace in (trace for traces in in_threads(captured, captured) for trace in traces):
        assert trace.names == alone.names
        assert trace.about["observer"] == "none"
        assert torch.equal(trace["output"], alone["output"])
    assert module.count == 0.0


def test_goldens_at_once_leave_attention_and_random_numbers_as_they_were():
    x = torch.ones(1, 2, 4, 8)
    backends = torch.backends.cuda

    def process():
        return backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), torch.get_rng_state().tolist()

    def attention(x):
        return torch.nn.functional.dropout(torch.nn.functional.scaled_dot_product_attention(x, x, x), 0.5)

    def outputs():
        return [golden(attention, x)["output"] for _ in range(20)]

    before, alone = process(), golden(attention, x)["output"]
    for several in in_threads(outputs, outputs, outputs):
        assert all(torch.equal(output, alone) for output in several)
    assert process() == before


def softmax(x, dim=-1):
    return {"p": torch.softmax(x, dim)}


def test_threads_find_what_each_finds_alone():
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    recorded = golden(softmax, x=x)
    right, wrong = ({"x": x, "p": softmax(x, dim)["p"]} for dim in (-1, 0))

    def found(observed):
        return lambda: [repr(localise(observed, recorded)) for _ in range(20)]

    for observed, several in zip((right, wrong), in_threads(found(right), found(wrong)), strict=True):
        assert set(several) == {repr(localise(observed, recorded))}


def test_a_thread_keeps_its_number_of_threads_while_another_checks_small_steps():
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    recorded, counts = golden(softmax, x=x), []

    def counted(number):
        def run():
            torch.get_num_threads()  # a thread has its own number from the first time that torch needs it
            torch.set_num_threads(number)
            for _ in range(5):
                localise({"x": x, "p": softmax(x)["p"]}, recorded)
                counts.append((number, torch.get_num_threads()))

        return run

    before = torch.get_num_threads()
    in_threads(counted(2), counted(3))
    assert sorted(counts) == [(2, 2)] * 5 + [(3, 3)] * 5
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)  # for threads to come, which begin with the last number that was set


def state():
    default, mode = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    return default, mode, logging.root.manager.disable, list(warnings.filters), torch.get_num_threads()


def doubled(x):
    return 2.0 * x


def tripled(x):
    return 3.0 * x


@pytest.mark.long
def test_fuzzings_at_once_leave_the_process_as_it_was():
    pytest.importorskip("hypothesis")
    before, x = state(), (torch.ones(4, 8),)

    def fuzzed(kernel):
        return lambda: whywrong.fuzz(kernel, doubled, x, examples=6).found

    assert in_threads(*map(fuzzed, [doubled, tripled] * 4)) == [None, True] * 4
    assert state() == before


@pytest.mark.long
@pytest.mark.parametrize(("command", "kept"), [("", False), ("keep_freed_memory()", True)])
def test_a_command_keeps_the_memory_that_it_frees(command, kept):
    """Pages that 20 arrays of 32 MiB take from the system, one after the other, when 20 were there before."""
    pytest.importorskip("resource")
    code = f"""
import resource, torch
from whywrong.process_state import keep_freed_memory
{command}
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(1 << 22, dtype=torch.float64)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages()
print(pages() * resource.getpagesize() / 2**25)
"""
    arrays = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert arrays < 2.0 if kept else arrays > 10.0
