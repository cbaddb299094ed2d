"""Every test runs where kernels run here: a GPU if there is one, else Triton's interpreter and the host's BLAS."""

import numpy as np
import pytest

from labkit.device import choose, has_cuda

DEVICE = choose("auto")  # before any kernel is imported


def pytest_collection_modifyitems(items):
    if not has_cuda():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def device():
    return DEVICE.kind


@pytest.fixture
def rng():
    return np.random.default_rng(20250525)
