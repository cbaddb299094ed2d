"""Every test runs where kernels run here: a GPU if there is one, else Triton's interpreter and the host's BLAS."""

import gc
import os
import re
import time
from collections import Counter
from types import SimpleNamespace

# As in `make test`, however pytest is called: the arrays are small, and threads that wait for each other burn a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from _pytest.junitxml import xml_key

import labkit.cli  # noqa: F401  before nbformat: see there
from labkit.session.catalogue import ROOT
from labkit.session.device import choose
from labkit.session.record import WORDS, hash_of, made_by
from whywrong.tables import EVERY_ROW

DEVICE = choose("auto")  # before any kernel is imported


def pytest_collection():
    gc.disable()  # what is imported and collected stays to the end: the search for garbage took a third of the time


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_addoption(parser):
    parser.addoption("--runlong", action="store_true", help="run the tests marked long too: half an hour")
    parser.addoption(
        "--runslow", action="store_true", help="run the tests marked slow too, and those marked long: hours"
    )


def pytest_collection_modifyitems(config, items):
    slow, taken = config.getoption("--runslow"), Counter()
    # All run where a test is asked for by its name, and where there is a GPU: what takes long on a CPU is short there.
    long = slow or config.getoption("--runlong") or DEVICE.is_cuda or any("::" in name for name in config.args)
    for item in items:
        if "gpu" in item.keywords and not DEVICE.is_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if "slow" in item.keywords:
            if not slow:
                item.add_marker(pytest.mark.skip(reason="slow: pass --runslow"))
        elif (marker := item.get_closest_marker("long")) and not long:
            test = item.path, item.originalname
            taken[test] += 1
            if taken[test] > marker.kwargs.get("cases", 0):
                item.add_marker(pytest.mark.skip(reason="long: pass --runlong"))
    items.sort(key=lambda item: "first" not in item.keywords)  # or one worker of several would end with them


LONGEST_ID = 24
"""Characters of one argument's part of a test's name: a name has two or three of these, and stays below 60."""


def pytest_make_parametrize_id(config, val, argname):
    """``heads3``, ``dtypefloat32``, ``shape40x24``: the argument's name, then its value; None leaves it to pytest."""
    if isinstance(val, str):
        words = re.sub(r"[^\w.+=<>-]+", "_", val).strip("_")
        return words[:LONGEST_ID] if words else None
    if isinstance(val, (bool, int, float, torch.dtype)):
        return f"{argname}{str(val).removeprefix('torch.')}"
    fields = getattr(val, "_fields", None) or getattr(val, "__dataclass_fields__", ())
    if sizes := [f"{name}{n}" for name in fields if isinstance(n := getattr(val, name), int)]:
        return "-".join(sizes)[: 2 * LONGEST_ID]
    if isinstance(val, tuple) and val and all(isinstance(n, int) for n in val):
        return f"{argname}{'x'.join(map(str, val))}"[:LONGEST_ID]
    name = getattr(val, "__name__", None)
    return name if name is None or name.isidentifier() else argname  # a lambda is its argument


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Adds to a JUnit file what it was made by: hashes of labkit and of what the tests of each kernels' folder use.

    pytest's own fixture for such properties runs in each worker of `pytest -n`, and none writes the file.
    """
    xml = config.stash.get(xml_key, None)
    if xml is None:
        return
    xml.add_global_property("device", DEVICE.name)
    for package in ("labkit", "whywrong"):
        xml.add_global_property(package, hash_of(package))
    for name in sorted(path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")):
        texts = [path.read_text() for path in (ROOT / "tests" / "kernels").glob(f"test_{name}*.py")]
        xml.add_global_property(f"kernels/{name}", made_by(*texts, without=WORDS))


@pytest.fixture(autouse=True)
def memory_is_given_back():
    """What torch keeps of a GPU's memory after a test, so that another process may have it."""
    yield
    if DEVICE.is_cuda:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def seconds_of_the_processor(monkeypatch):
    """A search for a cause in this process has its seconds for itself, whatever else runs on the machine.

    A test of the time that it takes sets the clock back.
    """
    monkeypatch.setattr("whywrong.explaining.search.time", SimpleNamespace(monotonic=time.process_time))


@pytest.fixture(autouse=True)
def short_tables():
    """A test of a table is the same under -vv."""
    before = EVERY_ROW.set(False)
    yield
    EVERY_ROW.reset(before)


@pytest.fixture(scope="session")
def device():
    return DEVICE.kind


@pytest.fixture
def rng():
    return np.random.default_rng(20250525)
