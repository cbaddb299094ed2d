"""Hostile kernels and hacks: each is a failure in one line, the next case is tried, and no process is left."""

import gc
import os
import re
import signal

import pytest
import torch

import whywrong
from tests.whywrong.test_child import descendants
from tools.hostile_kernels import BLIND, CALLERS, HACKS, HANGS, HOSTILE, reference
from whywrong import child

pytestmark = pytest.mark.skipif(not child.available(), reason="children are for Linux without a GPU")
EXAMPLE = {"x": torch.arange(12.0).view(4, 3)}


@pytest.fixture(autouse=True)
def collected():
    """What tests/conftest.py froze is seen by the garbage collector again, by which kernels here find the reference."""
    gc.unfreeze()


def fuzzed(kernel, seconds=120.0):
    before = set(descendants(os.getpid()))
    how = {"examples": 5, "most": 64, "progress": lambda line: None, "refuses": ()}
    found = whywrong.fuzz(kernel, reference, EXAMPLE, seconds=seconds, **how)
    assert set(descendants(os.getpid())) <= before
    return found


def test_a_kernel_that_kills_itself_does_so_where_the_caller_handles_the_signal():
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        assert "died: Hangup" in fuzzed(HOSTILE["kills itself, SIGHUP"][0]).failure.words
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_kernel_is_a_failure_in_one_line(name, monkeypatch):
    kernel, words = HOSTILE[name]
    monkeypatch.setattr("whywrong.fuzzing.fuzz.HANGING_SECONDS", 0.5 if words == HANGS else 30.0)
    monkeypatch.setattr("whywrong.fuzzing.running.MEMORY", 1 << 29)
    found = fuzzed(kernel)
    assert re.search(words, found.failure.words), found.failure.words
    assert "\n" not in found.failure.words
    assert fuzzed(reference).failure is None, "another is fuzzed afterwards"


@pytest.mark.long(cases=3)
@pytest.mark.parametrize("name", HACKS)
def test_a_hack_is_caught(name):
    assert fuzzed(HACKS[name]).found


@pytest.mark.long
@pytest.mark.parametrize("name", CALLERS)
def test_a_kernel_that_calls_the_reference_is_said_to(name):
    note = "the kernel calls the reference, whose numbers are right whatever it does"
    found = fuzzed(CALLERS[name])
    assert (found.failure, found.notes) == (None, [note])
    assert fuzzed(lambda x: x + x).notes == fuzzed(reference).notes == []


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("name", BLIND)
def test_what_is_not_caught_is_named(name):
    assert fuzzed(BLIND[name][0]).failure is None
