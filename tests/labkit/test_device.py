import subprocess
import sys

import pytest

from labkit.session import device
from labkit.session.catalogue import ROOT
from whywrong.errors import UsageError


def test_an_unknown_device_is_refused():
    with pytest.raises(UsageError, match=r"device: expected one of auto, cpu, cuda.*got 'tpu'"):
        device.choose("tpu")


def test_what_needs_a_gpu_says_so_on_a_cpu():
    with pytest.raises(UsageError, match="TF32 needs a GPU"):
        device.Device("cpu", "x").needs_cuda("TF32", "ask for float32")


@pytest.mark.long
def test_kernels_imported_for_one_device_cannot_be_used_for_the_other():
    code = (
        "import os; os.environ['TRITON_INTERPRET'] = '0'\n"
        "import kernels.attention.elementwise\n"
        "from labkit.session.device import choose\n"
        "try: choose('cpu')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "restart the process" in done.stdout


@pytest.mark.long
def test_a_module_beside_kernels_that_has_none_sets_no_device():
    """Torch imports triton: a command of a kernels' folder that imports both has decorated nothing yet."""
    code = (
        "import os; os.environ.pop('TRITON_INTERPRET', None)\n"
        "import triton, kernels.bert.__main__\n"
        "from labkit.session.device import choose\n"
        "print(choose('cpu').kind)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "cpu\n"
