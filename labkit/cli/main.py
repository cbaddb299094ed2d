"""The command `labkit`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from labkit.errors import UsageError
from labkit.session.catalogue import ROOT, kernels_of, notebook, notebooks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 where a run or a check failed, 2 for bad input."""
    try:
        options = _parser().parse_args(arguments)
        code = options.command(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as of `labkit list | head`; nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UsageError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if os.environ.get("LABKIT_TRACEBACK"):
            raise
        words = (str(error).strip().splitlines() or [""])[0][:300]
        print(f"labkit: {type(error).__name__}: {words} (LABKIT_TRACEBACK=1 shows where)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("labkit: interrupted; finished runs are kept, the same command takes up the rest", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help shows what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="labkit", description="Find out why the numbers of a kernel or a model are wrong, and prove it."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    sub = commands.add_parser("list", help="investigations, their question and their parameters")
    sub.set_defaults(command=_list)

    sub = commands.add_parser("run", help="run notebooks headless; all of them without a name")
    sub.add_argument("names", nargs="*", metavar="NAME", help="a notebook's name")
    sub.add_argument(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="name=value",
        help="a parameter, repeatable",
    )
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where kernels run")
    sub.add_argument("--out", type=Path, default=ROOT / "runs", metavar="DIR", help="where runs go (runs/)")
    sub.add_argument("--jobs", type=_positive, default=1, metavar="N", help="how many at a time (1)")
    sub.add_argument("--force", action="store_true", help="run again what is finished")
    sub.set_defaults(command=_run)

    sub = commands.add_parser("bench", help="time the providers of a kernel side by side, correct ones only")
    sub.add_argument("name", metavar="NAME", help="a notebook or a folder under kernels/")
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where kernels run")
    sub.add_argument("--out", type=Path, default=ROOT / "data" / "benchmarks", metavar="DIR", help="where the CSV goes")
    sub.set_defaults(command=_bench)

    sub = commands.add_parser("record", help="keep a run's result as one flat file under data/results/")
    sub.add_argument("run_dir", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a finished run")
    sub.set_defaults(command=_record)

    sub = commands.add_parser("diff", help="where a trace, or a tensor, leaves its golden; exit 0 nowhere, 1 somewhere")
    sub.add_argument(
        "golden",
        type=Path,
        metavar="GOLDEN",
        help="a recorded golden; or steps: safetensors, .npy, .npz, .pt, a folder",
    )
    sub.add_argument(
        "observed", type=Path, nargs="+", metavar="OBSERVED", help="the same; several are runs of one program"
    )
    sub.add_argument(
        "--precision",
        metavar="name=value,...",
        help="what the observed were promised: storage, products, accumulate, eager, flush (else what the files say)",
    )
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--plot", type=Path, metavar="DIR", help="write pictures of the error there")
    sub.set_defaults(command=_diff)

    sub = commands.add_parser("doctor", help="what is installed, what runs where, what is missing")
    sub.set_defaults(command=_doctor)
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not right; wanted a whole number from 1")
    return int(text)


def _list(options: argparse.Namespace) -> int:
    for book in notebooks().values():
        print(f"{book.name}: {book.about.get('question', '')}")
        for parameter in book.parameters.values():
            print(f"    {parameter.name:10} {parameter.default!s:20} {parameter.allowed:44} {parameter.help}")
        print()
    return 0


def _run(options: argparse.Namespace) -> int:
    for name in options.names:
        notebook(name)
    given = {}
    for item in options.parameters:
        name, sign, value = item.partition("=")
        if not (name and sign):
            raise UsageError(f"-p: {item!r} is not right; wanted name=value")
        given[name] = value
    from labkit.cli import run
    from labkit.cli.pages import write_index

    runs = run.plan(options.names, given, options.device, options.out)
    run.run(runs, options.jobs, options.force, say=lambda text: print(text, flush=True))
    print(f"\n{run.table(runs)}\n\nPages: {os.path.relpath(write_index(options.out))}")
    return 0 if all(one.ok for one in runs) else 1


def _bench(options: argparse.Namespace) -> int:
    from labkit.bench.timing import bench

    path = bench(kernels_of(options.name), options.device, options.out)
    print(f"\nwritten: {os.path.relpath(path)}")
    return 0


def _record(options: argparse.Namespace) -> int:
    from labkit.session.record import record

    for directory in options.run_dir:
        print(f"recorded: {os.path.relpath(record(directory))}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait must not take the cores of others
    from labkit.numerics.precision import from_words
    from labkit.trace.diff import report

    precision = from_words(options.precision) if options.precision else None
    found = report(options.golden, options.observed, precision, say=lambda text: print(text, file=sys.stderr))
    if options.plot:
        from labkit.cli.diff_plots import pictures

        drawn = pictures(found, options.golden, options.plot)
        print("\n".join(f"picture: {path}" for path in drawn), file=sys.stderr)
    if options.json:
        import json

        print(json.dumps(found.as_json(), indent=1, allow_nan=False))
    else:
        print(found)
    return 1 if found.alarm else 0


def _doctor(options: argparse.Namespace) -> int:
    from labkit.cli.doctor import report

    return 0 if report() else 1


if __name__ == "__main__":
    sys.exit(main())
