"""The command `whywrong`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from whywrong.console import Parser, positive, run, show, without_collector
from whywrong.errors import UsageError, needs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for no divergence or failure, 1 for one, 3 if hardly searched, 2 for anything else."""
    code = run("whywrong", sys.argv[1:] if arguments is None else list(arguments), _run)
    if arguments is None:  # the process ends: a last search through all modules for garbage would take a second
        gc.freeze()
    return code


def _run(words: Sequence[str]) -> int | None:
    options = _parser().parse_args(words)
    with needs(options.called):
        for package in filter(None, (options.plot and "matplotlib", options.html and "jinja2")):
            import_module(package)  # before anything runs
        return options.command(options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="whywrong", description="Find out why a kernel's or a model's numbers are wrong.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('whywrong')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _diff_parser(commands)
    _weights_parser(commands)
    _fuzz_parser(commands)
    return parser


def _diff_parser(commands: Any) -> None:
    about = "find where a trace first diverges; exit 0 if nowhere, 2 if not all was checked"
    example = "example:\n  whywrong diff golden.safetensors observed.safetensors --explain --html a.html"
    raw = argparse.RawDescriptionHelpFormatter
    sub = commands.add_parser("diff", help=about, description=about, epilog=example, formatter_class=raw)
    sub.set_defaults(command=_diff, called=sub.prog)
    option = sub.add_argument
    steps = "steps: safetensors, .npy, .npz, .pt, a folder, or a dump of another tool (docs/dumps.md)"
    option("golden", type=Path, metavar="GOLDEN", help=f"a recorded golden; or {steps}")
    option("observed", type=Path, nargs="+", metavar="OBSERVED", help=f"{steps}; several are runs of one program")
    declared = "precision of OBSERVED: bf16, or storage=bf16,products=tf32 ... (else what the files declare)"
    option("--precision", metavar="name=value,...", help=declared)
    option("--names", type=Path, metavar="FILE", help="JSON or YAML: golden names mapped to observed ones")
    propose = "propose which step is which where names differ, write it there as YAML, and check nothing"
    option("--propose-names", type=Path, metavar="FILE", help=propose)
    shards = "how a step's shards are put together, as 'h: b s/sp h/tp'; or a JSON or YAML file of such; repeatable"
    option("--dims", action="append", default=[], metavar="NAME:DIMS", help=shards)
    option("--explain", action="store_true", help="find the mutation of the recorded golden that gives these numbers")
    option("--step", metavar="NAME", help="explain this wrong step, not the first")
    option("--seconds", type=positive, metavar="S", help="about how many seconds --explain may take (20)")
    option("--full", action="store_true", help="print a row for every step, not only those around what is wrong")
    option("--json", action="store_true", help="print JSON")
    option("--plot", type=Path, metavar="DIR", help="write pictures of the error there")
    option("--html", type=Path, metavar="PAGE", help="write all results as one page, for a pull request or a colleague")


def _fuzz_parser(commands: Any) -> None:
    about = "find inputs on which a kernel fails; exit 0 if there are none, 1 if there are, 3 if it was hardly searched"
    example = "example:\n  whywrong fuzz port.py::attention model.py::attention --example inputs.safetensors"
    raw = argparse.RawDescriptionHelpFormatter
    sub = commands.add_parser("fuzz", help=about, description=about, epilog=example, formatter_class=raw)
    sub.set_defaults(command=_fuzz, called="whywrong.fuzz", plot=None, html=None)
    option = sub.add_argument
    option("kernel", metavar="KERNEL", help="FILE.py::NAME of a function; its file is run")
    option("reference", metavar="REFERENCE", help="FILE.py::NAME of one in torch, which takes the same arguments")
    files = "safetensors, .npz, .pt, a folder, with a tensor for each argument"
    option("--example", metavar="INPUTS", required=True, help=f"{files}; or a function FILE.py::NAME that gives them")
    option("--precision", metavar="name=value,...", help="of the kernel: storage, products, accumulate, eager, flush")
    option("--examples", type=positive, default=50, metavar="N", help="about how many cases are tried (50)")
    option("--seconds", type=positive, metavar="S", help="how long it may take in all, shrinking a failure too")
    option("--seed", type=int, default=0, metavar="N", help="the same seed tries the same cases (0)")
    option("--most", type=int, default=0, metavar="N", help="elements of all inputs together, at most")
    sizes = "names, multiples and fixed lengths of an argument's axes: q=rows,heads*2,64"
    option("--sizes", action="append", default=[], metavar="ARGUMENT=SIZE,...", help=sizes)
    forms = "what is required of an argument: p='rows sum to 1', table='unique, below pages'"
    option("--forms", action="append", default=[], metavar="ARGUMENT=FORM,...", help=forms)
    option("--layouts", metavar="NAME,...", help="how inputs lie in memory; contiguous, if it promises no strides")
    option("--out", metavar="ARGUMENT,...", help="arguments that the kernel writes; the reference does not get them")
    option("--script", type=Path, metavar="FILE", help="write the smallest failure as a test for pytest")
    option("--json", action="store_true", help="print JSON")


def _weights_parser(commands: Any) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    about = "find what each tensor of a checkpoint is of the golden's, without a run; exit 0 if all are the same"
    example = "example:\n  whywrong weights llama/ port.safetensors --names names.json"
    sub = commands.add_parser("weights", help=about, description=about, epilog=example, formatter_class=raw)
    sub.set_defaults(command=_weights, called=sub.prog, plot=None, html=None)
    files = "safetensors, .npz, .pt, .bin, or a folder of shards"
    sub.add_argument("golden", type=Path, metavar="GOLDEN", help=f"the checkpoint that is right: {files}")
    sub.add_argument("observed", type=Path, metavar="OBSERVED", help="what was made of it, likewise")
    names = "JSON or YAML: golden names mapped to observed ones, where they differ"
    sub.add_argument("--names", type=Path, metavar="FILE", help=names)
    sub.add_argument("--json", action="store_true", help="print JSON")


def _weights(options: argparse.Namespace) -> int:
    with without_collector():
        from whywrong.process_state import keep_freed_memory
        from whywrong.reporting.names import read_map
        from whywrong.reporting.weights import weights

    keep_freed_memory()
    names = read_map(options.names, "--names") if options.names else {}
    result = weights(options.golden, options.observed, names=names)
    show(json.dumps(result.as_json(), indent=1, allow_nan=False) if options.json else result)
    return 1 if result.alarm else 0


def _diff(options: argparse.Namespace) -> int:
    with without_collector():
        from whywrong.comparing.precision import from_words
        from whywrong.files import writable
        from whywrong.process_state import keep_freed_memory
        from whywrong.reporting.diff import report
        from whywrong.reporting.names import read_map

    keep_freed_memory()
    precision = from_words(options.precision) if options.precision is not None else None
    dims = _dims(options.dims)
    if options.propose_names:
        return _propose(options, dims)
    names = read_map(options.names, "--names") if options.names else {}
    if (options.step or options.seconds) and not options.explain:
        raise UsageError("--step, --seconds: expected --explain too")
    progress = partial(show, file=sys.stderr)
    how: dict[str, Any] = {"precision": precision, "progress": progress, "names": names, "dims": dims}
    result = report(options.golden, options.observed, elements=bool(options.html or options.plot), **how)
    why = _explained(result, options, precision, names, dims) if options.explain and result.alarm else None
    if options.json:
        print(json.dumps(result.as_json() | ({"explain": why.as_json()} if why else {}), indent=1, allow_nan=False))
    else:
        result.full = options.full
        print("\n".join(map(str, [result, *(["", why] if why else [])])), flush=True)  # both printable, with colours
    if options.plot:
        from whywrong.reporting.pictures import pictures

        progress("\n".join(f"picture: {path}" for path in pictures(result, writable(options.plot, "--plot"))))
    if options.html:
        from whywrong.reporting.page import page

        progress(f"page: {page(result, options.html, why)}")
    if options.explain and result.alarm and why is None:
        record = "whywrong.golden(reference, *inputs).save(FILE) writes one"
        progress(f"--explain: {options.golden} has steps alone; expected a recorded golden: {record}")
    return 1 if result.alarm else 2 if result.unchecked else 0


def _fuzz(options: argparse.Namespace) -> int:
    from whywrong.reporting.fuzzed import command

    return command(options)


def _dims(given: Sequence[str]) -> dict[str, str]:
    """How shards are put together, by names of steps or patterns; "NAME: DIMS" or files of them."""
    from whywrong.recording.shards import RANKS, parse_dims
    from whywrong.reporting.names import read_map

    dims: dict[str, str] = {}
    for text in given:
        name, colon, value = text.partition(": ")
        dims |= {name: value} if colon else read_map(Path(text), "--dims")
    for name in dims.keys() - {RANKS}:
        parse_dims(name, dims[name])
    return dims


def _propose(options: argparse.Namespace, dims: dict[str, str]) -> int:
    from whywrong.reporting.names import write_proposal

    if len(options.observed) > 1 or options.names:
        raise UsageError("--propose-names: expected one OBSERVED, and no --names")
    show(write_proposal(options.golden, options.observed[0], options.propose_names, dims))
    show(f"written to {options.propose_names}, to be confirmed and used with --names; nothing was checked")
    return 0


def _explained(result: Any, options: argparse.Namespace, precision: Any, names: Any, dims: Any) -> Any:
    """The cause of the divergence of all runs, or of their difference from each other; None without a program."""
    from whywrong.explaining.search import explain
    from whywrong.recording.dumps import open_dump
    from whywrong.recording.golden import Golden, load

    if not isinstance(golden := load(options.golden), Golden):
        return None
    runs = [open_dump(Path(run), dims) for run in dict.fromkeys([result.run, *result.runs])]
    how = {"step": options.step, "seconds": options.seconds or 20.0, "report": result.shown}
    return explain(runs, golden, precision=precision or result.shown.precision, names=names, **how)
