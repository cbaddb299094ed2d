"""The command `labkit`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from labkit.requirements import needs
from labkit.session.catalogue import ROOT, Notebook, notebook, notebooks
from labkit.session.secrets import hidden
from whywrong import console
from whywrong.console import Parser, positive
from whywrong.errors import UsageError
from whywrong.tables import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 where a run or a check failed, 2 for bad input."""
    hint = "interrupted; finished runs are kept, the same command takes up the rest"
    return console.run("labkit", sys.argv[1:] if arguments is None else list(arguments), _main, hint, _show)


def _main(words: Sequence[str]) -> int | None:
    options, unknown = _parser(words).parse_known_args(words)
    if unknown:
        Parser(prog=options.called).error(f"unrecognized arguments: {' '.join(unknown)}")
    with needs(options.called):
        return options.command(options)


def _show(text: object, file: TextIO | None = None) -> None:
    """Print text from files and people without secrets and without control characters."""
    console.show(hidden(str(text)), file)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(prog="labkit", description="Find out why a kernel's or a model's numbers are wrong, and prove it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, does: Callable[[argparse.Namespace], int | None], *examples: str) -> Any:
        about = str(does.__doc__)[0].lower() + str(does.__doc__)[1:].rstrip(".")
        lines = [f"  labkit {name} {example}".rstrip() for example in examples or ("",)]
        if {"-h", "--help"} & {*words} and name in words[:1]:  # with the notebooks on the command line
            lines += [f"\n{_block(book, full=True)}" for book in notebooks().values() if book.name in words]
        raw, text = argparse.RawDescriptionHelpFormatter, "\n".join(["examples:", *lines])
        sub = commands.add_parser(name, help=about, description=about, epilog=text, formatter_class=raw)
        sub.set_defaults(command=does, called=sub.prog)
        return sub.add_argument

    device = {"default": "auto", "choices": ("auto", "cpu", "cuda"), "help": "where kernels run"}
    folder = {"type": Path, "metavar": "DIR"}

    option = command("list", _list, "attention_matmul")
    option("names", nargs="*", metavar="NAME", help="whose answer, records and parameters are shown too")

    examples = "attention_matmul -p heads=3 -p n=37", "--jobs 2 --timeout 600", "attention_matmul --help"
    option = command("run", _run, *examples)
    option("names", nargs="*", metavar="NAME", help="a notebook's name")
    option("-p", action="append", default=[], type=_pair, metavar="name=value", help="a parameter, repeatable")
    option("--device", **device)
    option("--out", **folder, default=ROOT / "runs", help="where runs go (runs/)")
    option("--jobs", type=positive, default=1, metavar="N", help="how many at a time (1)")
    option("--force", action="store_true", help="run again what is finished")
    option("--timeout", type=positive, metavar="SECONDS", help="end a run that takes longer")

    sampled = "attention_matmul -p heads=1..16 -p n=1..4096 --sample 100 --cluster slurm --settings slurm.yaml"
    option = command("sweep", _sweep, "dalpha_atomics -p tile=8,16,32 -p seed=0..9 --workers 2", sampled)
    option("name", metavar="NAME", help="a notebook's name")
    spans = "values of a parameter, repeatable: heads=1..16, tile=8,16,32, level=0..1..0.25"
    option("-p", action="append", default=[], type=_pair, metavar="name=values", help=spans)
    option("--sample", type=positive, metavar="N", help="sample so many points of the grid; always the same")
    option("--cluster", default="local", metavar="WHERE", help="local, slurm, pbs, or tcp://HOST:PORT (local)")
    option("--workers", type=positive, metavar="N", help="processes or jobs (local: one a core or GPU)")
    option("--gpus", action="store_true", help="give each local worker a GPU of its own")
    option("--settings", type=Path, metavar="FILE", help="YAML: keyword arguments of Dask's cluster")
    where = "where Dask's page of the sweep listens (127.0.0.1, any port); without a password"
    option("--dashboard", default="", metavar="HOST:PORT", help=where)
    option("--retries", type=int, choices=range(10), default=2, metavar="N", help="new attempts after a death (2)")
    option("--out", **folder, default=ROOT / "runs", help="where runs go (runs/)")

    option = command("table", _table, "dalpha_atomics --out runs.parquet")
    option("name", metavar="NAME", help="a notebook's name")
    option("--runs", **folder, default=ROOT / "runs", help="where its runs are (runs/)")
    option("--out", type=Path, metavar="FILE", help="write all columns as .parquet or .csv")

    option = command("bench", _bench, "attention", "mhc/reductions --device cpu --out /tmp")
    option("name", metavar="NAME", help="a notebook or a folder under kernels/")
    option("--device", **device)
    option("--out", **folder, default=ROOT / "data" / "benchmarks", help="where the CSV goes")

    option = command("record", _record, "runs/attention_matmul/0123456789ab")
    option("run_dir", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a finished run")

    option = command("new", _new, "softmax_rows")
    option("name", metavar="NAME", help="its name, a Python name in small letters")
    option("--kernel", action="store_true", help="one notebook for a kernel that may be wrong, lab/NAME.ipynb")

    command("doctor", _doctor)
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"expected name=value, got {text[:80]!r}")
    return name, value


def _by_name(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise UsageError(f"-p {name}: it is given twice; expected each parameter once")
    return dict(pairs)


def _interrupt_on_termination() -> None:
    """Handle SIGTERM and SIGHUP, unless they are ignored as under nohup, like an interrupt from the keyboard."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))


def _list(options: argparse.Namespace) -> int:
    """Investigations, their question and their parameters."""
    code = 0
    for book in [notebook(name) for name in options.names] or notebooks().values():
        try:
            _show(f"{_block(book, full=bool(options.names))}\n")
        except UsageError as error:
            code = 2
            _show(f"labkit: {error}", sys.stderr)
    return code


def _block(book: Notebook, full: bool) -> str:
    """A notebook in lines of 80 characters: its question; in `full` its answer, recorded results and parameters too."""
    from labkit.session.record import records, summary

    def lines(first: str, text: object) -> str:
        return textwrap.fill(" ".join(str(text).split()), 80, initial_indent=first, subsequent_indent=" " * len(first))

    shown = [book.name]
    shown += [lines(f"  {part:8}  ", book.about[part]) for part in ("question", "answer") if book.about.get(part)]
    for result in (record.result for record in records(f"{book.name}.*")):
        findings = "; ".join(filter(None, summary(result)))
        cost = "{date} on {device[name]}, {seconds:.0f} s: ".format(**result)
        shown.append(lines("  recorded  ", cost + findings))
    rows = [(p.name, str(p.default) or "none", f"{p.allowed}: {p.help}") for p in book.parameters.values()]
    first, second = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    shown += [lines(f"    {name:{first}}  {default:{second}}  ", help) for name, default, help in rows]
    return "\n".join(shown if full else [book.name, lines("  ", book.about.get("question", ""))])


def _run(options: argparse.Namespace) -> int:
    """Run notebooks headless; all of them without a name."""
    from labkit.cli import gallery, plan, run
    from whywrong.files import writable

    _interrupt_on_termination()
    runs = plan.plan(options.names, _by_name(options.p), options.device, options.out)
    writable(options.out, "--out")
    run.run(runs, options.jobs, options.force, _show, partial(run.execute, timeout=options.timeout))
    _show(f"\n{plan.table(runs)}\n\n{plan.answers(runs)}\n")
    try:
        _show(f"Runs: {os.path.relpath(gallery.gallery(options.out))}")
    except UsageError as error:  # a full disk does not change the runs' results
        print(f"labkit: {printable(str(error))}", file=sys.stderr)
    return 0 if all(run.result for run in runs) else 1


def _sweep(options: argparse.Namespace) -> int:
    """Run a notebook at each point of a grid of parameters, on Dask."""
    from labkit.cli import cluster, sweep
    from whywrong.files import writable

    _interrupt_on_termination()
    points = sweep.grid(options.name, _by_name(options.p), options.sample)
    given = (options.cluster, options.workers, options.gpus, options.settings, options.retries, options.dashboard)
    with cluster.connect(*given) as connected:
        writable(options.out, "--out")
        counts = sweep.sweep(*connected, options.name, points, options.out, options.retries, _show)
    folder = os.path.relpath(options.out)
    where = f" --runs {shlex.quote(folder)}" * (options.out != ROOT / "runs")
    print(f"Runs: {folder}; labkit table {options.name}{where} has them as a table")
    return 1 if counts["failed"] else 0


def _table(options: argparse.Namespace) -> None:
    """All runs of a notebook as one table."""
    from labkit.cli import table

    frame = table.runs(options.name, options.runs)
    _show(f"written: {table.write(frame, options.out)}" if options.out else table.printed(frame))


def _bench(options: argparse.Namespace) -> None:
    """Time the providers of a kernel side by side, correct ones only."""
    from labkit.bench.timing import bench

    is_folder = (ROOT / "kernels" / options.name / "__init__.py").is_file()
    folder = options.name if is_folder else notebook(options.name).about.get("kernels", options.name)
    _show(f"\nwritten: {os.path.relpath(bench(folder, options.device, options.out))}")


def _record(options: argparse.Namespace) -> None:
    """Keep a run's result as one flat file under data/results/."""
    from labkit.session.record import record

    for directory in options.run_dir:
        _show(f"recorded: {os.path.relpath(record(directory))}")


def _new(options: argparse.Namespace) -> None:
    """An investigation of one's own: notebook, kernels' folder, claims and tests."""
    from labkit.cli.new import new, new_kernel

    if options.kernel:
        _show(f"written: {os.path.relpath(new_kernel(options.name))}")
        return
    _show("\n".join(f"written: {os.path.relpath(path)}" for path in new(options.name)))
    _show("Read the notebook top to bottom and replace it cell by cell; CONTRIBUTING.md says what its tests ask.")


def _doctor(options: argparse.Namespace) -> int:
    """What is installed, what runs where, what is missing."""
    from labkit.cli.doctor import report

    return 0 if report() else 1
