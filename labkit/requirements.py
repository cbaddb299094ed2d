"""The packages that the workbook needs in addition to whywrong, and the command that installs them."""

from collections.abc import Iterator
from contextlib import contextmanager

from whywrong.errors import UsageError

WORKBOOK: tuple[str, ...] = ("IPython", "fastjsonschema", "filelock", "ipykernel", "jinja2", "math_core", "matplotlib")
WORKBOOK += ("nbconvert", "nbformat", "papermill", "psutil", "pygments", "triton", "yaml")
SWEEP = ("bokeh", "dask", "dask_jobqueue", "distributed", "pandas", "pyarrow")


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Raise UsageError with the command that installs it if a package that `what` needs is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name).split(".")[0]
        if name not in (*WORKBOOK, *SWEEP):
            raise
        raise UsageError(f"{what} needs {name}: `make setup` in the checkout installs it") from None
