"""A notebook's session: checked parameters, seeded generators, the device, and result.json at the end."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.session import catalogue, device, record
from labkit.session.claims import Ledger, claims_file, plain
from labkit.session.secrets import hidden_json
from whywrong.errors import UsageError

if TYPE_CHECKING:
    from whywrong.explaining.hypotheses import Weighing


class Lab:
    """One execution of a notebook. `device`, `parameters`, `seed` and `directory` are set by :func:`start`."""

    def __init__(self, book: catalogue.Notebook, parameters: dict[str, Any], chosen: device.Device) -> None:
        self.name, self.parameters, self.device = book.name, parameters, chosen
        self.seed = int(parameters.get("seed", 0))
        # `labkit run` sets both; the second is a name that no cell knows until every cell has completed
        self.directory = Path(os.environ.get("LABKIT_RUN_DIR") or catalogue.ROOT / "runs" / book.name / "interactive")
        self._result = self.directory / os.environ.get("LABKIT_RESULT", "result.json")
        self._sources, self._started = record.sources(book), time.perf_counter()
        self._result.unlink(missing_ok=True)  # of an earlier run: this one has not succeeded yet

    def rng(self, *stream: int) -> np.random.Generator:
        """A generator that depends on the seed and on `stream` alone: the same numbers on every machine."""
        return np.random.default_rng([self.seed, *stream])

    @property
    def recorded(self) -> record.Record | None:
        """The record of this notebook on a GPU, for results that a CPU cannot have; None without a record."""
        return record.recorded(self.name)

    @property
    def caption(self) -> str:
        """The device, for the caption of a figure."""
        return f"run on {self.device.name}" if self.device.is_cuda else f"run on the CPU ({self.device.name})"

    def finish(
        self,
        *,
        verdict: Weighing | None,
        first_divergence: str | None = None,
        ledger: Ledger | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Write result.json, at the end of the notebook.

        `verdict` is the result of :func:`whywrong.weigh`; None if no hypotheses were weighed. `ledger` is that of the
        notebook's own claims file, if there is one, with every claim settled. Otherwise it raises UsageError and writes
        nothing.
        """
        if claims_file(self.name).exists() and (ledger is None or ledger.name != self.name):
            raise UsageError(f"ledger: expected labkit.claims({self.name!r}), got {ledger and ledger.name!r}")
        commit, dirty = record.commit()
        gpu, driver = (self.device.name, device.driver()) if self.device.is_cuda else (None, None)
        provenance: dict[str, Any] = {"commit": commit, "dirty": dirty, "versions": record.versions(), "gpu": gpu}
        provenance |= {"driver": driver, "seed": self.seed, "sources": self._sources}  # as they were when the run began
        cause, left, refuted = (verdict.cause, verdict.left, [*verdict.refuted]) if verdict else (None, [], [])
        result: dict[str, Any] = {
            "schema": record.SCHEMA,
            "notebook": self.name,
            "status": "ok",
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": round(time.perf_counter() - self._started, 2),
            "parameters": self.parameters,
            "device": {"kind": self.device.kind, "name": self.device.name},
            "verdict": {"cause": cause, "first_divergence": first_divergence, "explains": left, "refuted": refuted},
            "claims": ledger.as_json() if ledger else {},
            "metrics": plain(metrics or {}),
            "provenance": provenance,
        }
        record.write_json(self._result, hidden_json(result))
        print(f"result.json written: {len(result['claims'])} claims, cause {cause!r}")


def start(name: str, /, **parameters: Any) -> Lab:
    """Begin a notebook: check its parameters, seed, decide where kernels run, and print that.

    Call it before any kernel is imported (Triton reads TRITON_INTERPRET when a kernel is decorated). Raises
    UsageError for a parameter that is declared and not passed, or passed and not declared, of the wrong type or out of
    range, and for a GPU that is asked for and not there.
    """
    book = catalogue.notebook(name)
    if missing := [parameter for parameter in book.parameters if parameter not in parameters]:
        raise UsageError(f"labkit.start: {name} declares {', '.join(missing)} too; expected every parameter passed on")
    values = catalogue.resolve(name, book.parameters, parameters)
    lab = Lab(book, values, device.choose(values.get("device", "auto")))
    print(f"{name} on {lab.device.banner}; seed {lab.seed}")
    defaults = {name: parameter.default for name, parameter in book.parameters.items() if name != "device"}
    if changed := [f"{p} = {values[p]} ({default})" for p, default in defaults.items() if values[p] != default]:
        print(f"The answer above was reached for other parameters: here {', '.join(changed)}.")
    return lab
