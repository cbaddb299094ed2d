"""The command line: `python -m kernels.lm train | preflight | validate | evaluate | profile CONFIG`, `analyse FILE`,
`sample FOLDER`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from whywrong.errors import UsageError


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; 0 where all is well, 1 for contradictions that `analyse` finds, 2 for wrong input."""
    given = _parser().parse_args(arguments)
    try:
        return given.command(given)
    except UsageError as error:
        print("\n".join(f"kernels.lm: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    except OSError as error:  # a disk that is full, say
        print(f"kernels.lm: {error.filename or 'folder'}: {error.strerror or error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.lm", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, command, about in (
        ("train", _train, "preflight, then train from the last checkpoint on; under torchrun on all its processes"),
        ("preflight", _preflight, "all that would fail later; silent where there is nothing"),
        ("validate", _validate, "bits per byte of the last checkpoint"),
        ("evaluate", _evaluate, "the last checkpoint on the tasks of the configuration, by lm-eval"),
    ):
        one = commands.add_parser(name, help=about)
        one.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
        one.add_argument("overrides", nargs="*", metavar="key=value", help="in place of what the file has")
        one.set_defaults(command=command)
    profile = commands.add_parser("profile", help="where a training step's time goes, by kind of kernel")
    profile.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    profile.add_argument("overrides", nargs="*", metavar="key=value", help="in place of what the file has")
    profile.add_argument(
        "--model", choices=("ours", "plain", "stronger"), default="ours", help="as in kernels/lm/bench.py"
    )
    profile.add_argument("--steps", type=int, choices=range(1, 101), default=3, metavar="1..100", help="3 unless given")
    profile.set_defaults(command=_profile)
    analyse = commands.add_parser("analyse", help="recompute every derived figure of a metrics.jsonl or a report")
    analyse.add_argument(
        "file", type=Path, metavar="FILE", help="metrics.jsonl (ours or Lingua's), or a report's figures (YAML)"
    )
    analyse.set_defaults(command=_analyse)
    sample = commands.add_parser("sample", help="a small data folder, of Python's own documentation")
    sample.add_argument("folder", type=Path, metavar="FOLDER")
    sample.set_defaults(command=_sample)
    return parser


def _train(given: argparse.Namespace) -> int:
    from kernels.lm import config as configs
    from kernels.lm import training
    from kernels.lm.preflight import refuse

    processes = training.ranks()
    if training.is_first():  # torchrun stops the others where this one refuses
        config = refuse(given.config, given.overrides, processes)
    else:
        try:
            config = configs.load(given.config, given.overrides)
        except UsageError:  # the first process says why, once it has looked for secrets
            return 2
    path = training.train(config, progress=sys.stderr.isatty())
    if training.is_first():
        print(path)
    return 0


def _preflight(given: argparse.Namespace) -> int:
    from kernels.lm.preflight import refuse

    refuse(given.config, given.overrides)
    return 0


def _validate(given: argparse.Namespace) -> int:
    from kernels.lm import training, validation
    from kernels.lm.preflight import refuse

    config = refuse(given.config, given.overrides)
    if config.validation is None:
        raise UsageError("validation: expected a folder to validate on, got 'none'")
    with training.joined(config) as device:
        model, step = training.trained(config, device)
        print(json.dumps({"step": step, **validation.score(model, config)}))
    return 0


def _evaluate(given: argparse.Namespace) -> int:
    from kernels.lm import evaluation, training
    from kernels.lm.preflight import refuse

    config = refuse(given.config, given.overrides)
    if config.evaluation is None:
        raise UsageError("evaluation: expected tasks to evaluate on, got 'none'")
    with training.joined(config) as device:
        model, step = training.trained(config, device)
        found = evaluation.evaluate(model, config.evaluation, config.data.length)
        print(json.dumps({"step": step, "ran_on": device.type, **found}, indent=1))
    return 0


def _profile(given: argparse.Namespace) -> int:
    from kernels.lm.preflight import refuse
    from kernels.lm.profile import profile

    print(profile(refuse(given.config, given.overrides), given.steps, given.model))
    return 0


def _analyse(given: argparse.Namespace) -> int:
    from kernels.lm import analyse

    found = analyse.analyse(given.file)
    print(analyse.table(found))
    return 1 if any(one.agrees is False for one in found) else 0


def _sample(given: argparse.Namespace) -> int:
    from kernels.corpus import corpus
    from kernels.lm import jsonl

    texts = [text for text in corpus().text.decode("utf-8", errors="replace").split("\n\n\n") if text.strip()]
    jsonl.write(given.folder, texts)
    print(given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
