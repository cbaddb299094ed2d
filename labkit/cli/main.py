"""The command `labkit`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from labkit.errors import UsageError, extra
from labkit.session.catalogue import CHECKOUT, ROOT, Notebook, notebook, notebooks, read_json
from labkit.session.secrets import hidden
from labkit.tables import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 where a run or a check failed, 2 for bad input."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if "\0".join(words).encode("utf-8", "replace").decode() != "\0".join(words):
            raise UsageError("an argument has bytes that are no UTF-8; wanted text")
        options, unknown = _parser(words).parse_known_args(words)
        if unknown:
            _Parser(prog=options.called).error(f"unrecognized arguments: {' '.join(unknown)}")
        if not (CHECKOUT or options.command in (_diff, _doctor)):
            raise UsageError(f"{options.called} needs a checkout of the workbook; diff and doctor do not")
        with extra(options.called), warnings.catch_warnings(action="ignore"):  # of libraries, with what files say
            code = options.command(options)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # as of `labkit list | head`; nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UsageError as error:
        _show(f"labkit: {' '.join(str(error).split())}", sys.stderr)
        return 2
    except Exception as error:
        if os.environ.get("LABKIT_TRACEBACK"):
            raise
        first = (str(error).strip().splitlines() or [""])[0][:300]
        _show(f"labkit: {type(error).__name__}: {first} (LABKIT_TRACEBACK=1 shows where)", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("labkit: interrupted; finished runs are kept, the same command takes up the rest", file=sys.stderr)
        return 130


def _show(text: object, file: TextIO | None = None) -> None:
    """Print what came from files, names and people: nothing that steers a terminal, and no secret."""
    print(printable(hidden(str(text))), file=file, flush=True)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help shows what there is")


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="labkit", description="Find out why a kernel's or a model's numbers are wrong, and prove it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, does: Callable[[argparse.Namespace], int | None], *examples: str) -> Any:
        about = str(does.__doc__)[0].lower() + str(does.__doc__)[1:].rstrip(".")
        lines = [f"  labkit {name} {example}".rstrip() for example in examples or ("",)]
        if {"-h", "--help"} & {*words} and name in words[:1]:  # with the notebooks that were named
            lines += [f"\n{_block(book)}" for book in notebooks().values() if book.name in words]
        raw, text = argparse.RawDescriptionHelpFormatter, "\n".join(["examples:", *lines])
        sub = commands.add_parser(name, help=about, description=about, epilog=text, formatter_class=raw)
        sub.set_defaults(command=does, called=sub.prog)
        return sub.add_argument

    device = {"default": "auto", "choices": ("auto", "cpu", "cuda"), "help": "where kernels run"}
    folder = {"type": Path, "metavar": "DIR"}

    command("list", _list)

    examples = "attention_matmul -p heads=3 -p n=37", "--jobs 2 --timeout 600", "attention_matmul --help"
    option = command("run", _run, *examples)
    option("names", nargs="*", metavar="NAME", help="a notebook's name")
    option("-p", action="append", default=[], type=_pair, metavar="name=value", help="a parameter, repeatable")
    option("--device", **device)
    option("--out", **folder, default=ROOT / "runs", help="where runs go (runs/)")
    option("--jobs", type=_positive, default=1, metavar="N", help="how many at a time (1)")
    option("--force", action="store_true", help="run again what is finished")
    option("--timeout", type=_positive, metavar="SECONDS", help="end a run that takes longer")

    drawn = "attention_matmul -p heads=1..16 -p n=1..4096 --sample 100 --cluster slurm --settings slurm.yaml"
    option = command("sweep", _sweep, "dalpha_atomics -p tile=8,16,32 -p seed=0..9 --workers 2", drawn)
    option("name", metavar="NAME", help="a notebook's name")
    spans = "values of a parameter, repeatable: heads=1..16, tile=8,16,32, level=0..1..0.25"
    option("-p", action="append", default=[], type=_pair, metavar="name=values", help=spans)
    option("--sample", type=_positive, metavar="N", help="draw so many points of the grid; always the same")
    option("--cluster", default="local", metavar="WHERE", help="local, slurm, pbs, or tcp://HOST:PORT (local)")
    option("--workers", type=_positive, metavar="N", help="processes or jobs (local: one a core or GPU)")
    option("--gpus", action="store_true", help="give each local worker a GPU of its own")
    option("--settings", type=Path, metavar="FILE", help="YAML: keyword arguments of Dask's cluster")
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

    option = command("diff", _diff, "golden.safetensors observed.safetensors --explain --html page.html")
    steps = "steps: safetensors, .npy, .npz, .pt, a folder"
    option("golden", type=Path, metavar="GOLDEN", help=f"a recorded golden; or {steps}")
    option("observed", type=Path, nargs="+", metavar="OBSERVED", help=f"{steps}; several are runs of one program")
    promised = "what the observed were promised: storage, products, accumulate, eager, flush (else what the files say)"
    option("--precision", metavar="name=value,...", help=promised)
    option("--names", type=Path, metavar="FILE", help="JSON: the golden's names to the observed's, where they differ")
    option("--explain", action="store_true", help="look for the break of the recorded golden that gives these numbers")
    option("--step", metavar="NAME", help="explain this wrong step, not the first")
    option("--seconds", type=_positive, metavar="S", help="about how long --explain may take (20)")
    option("--json", action="store_true", help="print JSON")
    option("--plot", **folder, help="write pictures of the error there")
    option("--html", type=Path, metavar="PAGE", help="write one page with all of it, for a pull request or a colleague")

    option = command("new", _new, "softmax_rows")
    option("name", metavar="NAME", help="its name, a Python name in small letters")

    command("doctor", _doctor)
    return parser


def _positive(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not right; wanted a whole number from 1")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not right; wanted name=value")
    return name, value


def _list(options: argparse.Namespace) -> int:
    """Investigations, their question and their parameters."""
    wrong = 0
    for book in notebooks().values():
        try:
            _show(f"{_block(book)}\n")
        except UsageError as error:
            wrong = 2
            _show(f"labkit: {error}", sys.stderr)
    return wrong


def _block(book: Notebook) -> str:
    """A notebook in lines of 80 characters: question, answer, what runs cost and found, parameters."""
    from labkit.session.record import outcomes

    def lines(first: str, text: object) -> str:
        rest = " " * len(first)
        return textwrap.fill(" ".join(str(text).split()), 80, initial_indent=first, subsequent_indent=rest)

    shown = [book.name]
    shown += [lines(f"  {part:8}  ", book.about[part]) for part in ("question", "answer") if book.about.get(part)]
    shown += [lines(f"  {when:8}  ", said) for when, said in outcomes(book.name)]
    rows = [(one.name, str(one.default) or "none", f"{one.allowed}: {one.help}") for one in book.parameters.values()]
    first, second = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    shown += [lines(f"    {name:{first}}  {default:{second}}  ", words) for name, default, words in rows]
    return "\n".join(shown)


def _run(options: argparse.Namespace) -> int:
    """Run notebooks headless; all of them without a name."""
    from labkit.cli import pages, run
    from labkit.session.record import writable

    names = [name for name, _ in options.p]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"-p {twice[0]}: it is given twice; wanted each parameter once")
    runs = run.plan(options.names, dict(options.p), options.device, options.out)
    writable(options.out, "--out")
    run.run(runs, options.jobs, options.force, _show, partial(run.execute, timeout=options.timeout))
    _show(f"\n{run.table(runs)}\n\n{run.pages(runs)}\n")
    try:
        _show(f"Runs: {os.path.relpath(pages.gallery(options.out))}")
    except UsageError as error:  # a disk that is full: what the runs gave stays what it is
        print(f"labkit: {printable(str(error))}", file=sys.stderr)
    return 0 if all(one.result for one in runs) else 1


def _sweep(options: argparse.Namespace) -> int:
    """Run a notebook at each point of a grid of parameters, on Dask."""
    from labkit.cli import sweep
    from labkit.session.record import writable

    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: it ends the workers, and jobs on a cluster
        if signal.getsignal(number) == signal.SIG_DFL:  # and not ignored, as under nohup
            signal.signal(number, signal.default_int_handler)
    points = sweep.grid(options.name, options.p, options.sample)
    with sweep.cluster(options.cluster, options.workers, options.gpus, options.settings, options.retries) as connected:
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
    from labkit.cli.new import new

    _show("\n".join(f"written: {os.path.relpath(path)}" for path in new(options.name)))
    _show("Read the notebook top to bottom and replace it cell by cell; CONTRIBUTING.md says what its tests ask.")


def _diff(options: argparse.Namespace) -> int:
    """Where a trace, or a tensor, leaves its golden; exit 0 nowhere, 1 somewhere."""
    from labkit.numerics.precision import from_words
    from labkit.session.record import writable
    from labkit.trace.diff import report

    precision = from_words(options.precision) if options.precision is not None else None
    names = read_json(options.names, "--names") if options.names else {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UsageError(f"--names: {options.names} is not right; wanted a JSON object of names")

    if (options.step or options.seconds) and not options.explain:
        raise UsageError("--step, --seconds: are for --explain; wanted that beside them")
    say = partial(_show, file=sys.stderr)
    found = report(options.golden, options.observed, precision, say, names, elements=bool(options.html or options.plot))
    why = _explained(found, options, precision, names) if options.explain and found.alarm else None
    if options.json:
        print(json.dumps(found.as_json() | ({"explain": why.as_json()} if why else {}), indent=1, allow_nan=False))
    else:
        _show("\n".join(map(str, [found, *(["", why] if why else [])])))
    if options.plot:
        from labkit.cli.diff_plots import pictures

        say("\n".join(f"picture: {path}" for path in pictures(found, writable(options.plot, "--plot"))))
    if options.html:
        from labkit.cli.html import page

        say(f"page: {page(found, options.html)}")
    if options.explain and found.alarm and why is None:
        record = "labkit.golden(reference, *inputs).save(FILE) writes one, which any step can be run again from"
        say(f"--explain: {options.golden} has steps alone; wanted a recorded golden: {record}")
    return 1 if found.alarm else 0


def _explained(found: Any, options: argparse.Namespace, precision: Any, names: dict[str, str]) -> Any:
    """Why the run that is shown diverges; of several that differ between each other, that. None without a program."""
    from labkit.causes.explain import explain
    from labkit.trace.diff import open_golden
    from labkit.trace.dumps import open_dump
    from labkit.trace.golden import Golden

    if not isinstance(golden := open_golden(options.golden), Golden):
        return None
    runs = [open_dump(Path(run)) for run in dict.fromkeys([found.run, *found.runs])]
    how = {"step": options.step, "seconds": options.seconds or 20.0, "report": found.shown}
    return explain(runs, golden, precision or found.shown.precision, names, **how)


def _doctor(options: argparse.Namespace) -> int:
    """What is installed, what runs where, what is missing."""
    from labkit.cli.doctor import report

    return 0 if report() else 1
