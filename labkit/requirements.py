"""What the workbook needs beside whywrong, and the one command that installs all of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from whywrong.errors import UsageError

WORKBOOK = (
    "IPython", "fastjsonschema", "ipykernel", "jinja2", "math_core", "matplotlib", "nbconvert", "nbformat", "papermill",
    "pygments", "triton", "yaml",
)  # fmt: skip
SWEEP = ("bokeh", "dask", "dask_jobqueue", "distributed", "pandas", "pyarrow")


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Where one of these is not installed, raise UsageError with the command that installs it: `what` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name).split(".")[0]
        if name not in (*WORKBOOK, *SWEEP):
            raise
        raise UsageError(f"{what} needs {name}: `make setup` in the checkout installs it") from None
