"""Every test runs where kernels run here: a GPU if there is one, else Triton's interpreter and the host's BLAS."""

import os

# As in `make test`, however pytest is called: the arrays are small, and threads that wait for each other burn a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

from labkit.session.catalogue import ROOT
from labkit.session.device import choose
from labkit.session.record import WORDS, hash_of, made_by

DEVICE = choose("auto")  # before any kernel is imported


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long forms of the tests, and nothing else")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "gpu" in item.keywords and not DEVICE.is_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if ("long" in item.keywords) != config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="the other form: with --long, or without it"))


@pytest.fixture(scope="session", autouse=True)
def provenance(record_testsuite_property):
    """What a JUnit file was made by: hashes of labkit and of what the tests of each kernels' folder use; the device."""
    record_testsuite_property("device", DEVICE.name)
    for package in ("labkit", "whywrong"):
        record_testsuite_property(package, hash_of(package))
    for name in sorted(path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")):
        texts = [path.read_text() for path in (ROOT / "tests" / "kernels").glob(f"test_{name}*.py")]
        record_testsuite_property(f"kernels/{name}", made_by(*texts, without=WORDS))


@pytest.fixture(autouse=True)
def memory_is_given_back():
    """What torch keeps of a GPU's memory after a test, so that another process may have it."""
    yield
    if DEVICE.is_cuda:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def device():
    return DEVICE.kind


@pytest.fixture
def rng():
    return np.random.default_rng(20250525)
