"""The command line: `python -m kernels.bert corpus | facts | train | ablation | keep`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kernels import native
from kernels.bert import ablation, corpus, experiments, scheduling, training
from labkit.session.device import choose
from whywrong.errors import UsageError

ROWS = Path("runs/bert/ablation.jsonl")
OWN = ("preset", "seed", "compiled", "device")
"""Fields of a run that have an option of another form."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; 0 where it did all, 1 where trainings are left, 2 for wrong input."""
    given = _parser().parse_args(arguments)
    try:
        return given.command(given)
    except UsageError as error:
        print(f"kernels.bert: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.bert", description=__doc__)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("corpus", help="make the frozen corpus from the packages in a folder, into the cache")
    made.add_argument("folder", type=Path, metavar="FOLDER")
    made.set_defaults(command=_corpus)
    about = commands.add_parser(
        "facts", help="what the plan's text holds, and what its tokens' frequencies alone guess"
    )
    about.set_defaults(command=_facts)
    train = commands.add_parser("train", help="train, resuming what is unfinished, and append a row a run")
    train.add_argument(
        "--presets", default="bert", help="names, parted by commas: bert, report+eps, bert-norm, hugging_face"
    )
    train.add_argument("--seeds", default="0", help="numbers, parted by commas")
    train.add_argument("--compiled", action="store_true", help="through torch.compile")
    for field in fields(training.Run):
        if field.name not in OWN:
            train.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    train.set_defaults(command=_train)
    compared = commands.add_parser("ablation", help="make the trainings of the plan that have no row yet, in its order")
    compared.add_argument("--plan", type=Path, default=ablation.PLAN)
    compared.add_argument(
        "--parts", default="first,then", help=f"some of {', '.join(ablation.PARTS)}, parted by commas"
    )
    compared.set_defaults(command=_ablation)
    for command in (train, compared):
        command.add_argument("--rows", type=Path, default=ROWS, help="the file of JSON lines that rows are added to")
        command.add_argument("--states", type=Path, default=ROWS.with_name("states"), help="what unfinished runs keep")
        command.add_argument(
            "--seconds", type=float, default=float("inf"), help="stop in time, to go on in a later call"
        )
        command.add_argument("--jobs", type=int, default=1, help="trainings at a time; they share the GPU")
        command.add_argument("--device", default="auto", help="auto, cpu or cuda")
    kept = commands.add_parser("keep", help=f"put the rows of files into {ablation.RECORDED_ROWS.name}, each once")
    kept.add_argument("files", type=Path, nargs="+", metavar="FILE")
    kept.add_argument("--into", type=Path, default=ablation.RECORDED_ROWS)
    kept.set_defaults(command=_keep)
    return parser


def _corpus(given: argparse.Namespace) -> int:
    made = corpus.build(given.folder)
    if made.facts["sha256"] != corpus.DIGESTS["english"]:
        raise UsageError(f"corpus: has SHA-256 {made.facts['sha256']}; expected {corpus.DIGESTS['english']}")
    path = native.cache() / "bert" / corpus.ENGLISH
    corpus.keep(made, path)
    print(f"{path}: {made.facts}")
    return 0


def _facts(given: argparse.Namespace) -> int:
    plan = ablation.plan()
    data = training.Data(training.Run(**plan.run))
    text = " ".join(data.corpus.training.split()).lower()
    print(f"{data.epoch} steps an epoch, {plan.run['steps'] / data.epoch:.2f} epochs a training")
    print(f"held-out loss of the tokens' frequencies alone: {experiments.frequency_loss(data):.3f} nats")
    for phrase in ("human beings", "equal in dignity", "dignity and rights"):
        print(f"{phrase!r} stands in the text {text.count(phrase)} times")
    return 0


def _train(given: argparse.Namespace) -> int:
    options: dict[str, Any] = {f.name: getattr(given, f.name) for f in fields(training.Run) if f.name not in OWN}
    try:
        seeds = [int(seed) for seed in given.seeds.split(",")]
    except ValueError:
        raise UsageError(f"seeds: expected numbers, parted by commas, got {given.seeds!r}") from None
    base = replace(training.Run(**options), compiled=given.compiled, device=choose(given.device).kind)
    return _make(training.grid(base, given.presets.split(","), seeds), given)


def _ablation(given: argparse.Namespace) -> int:
    settings, device = ablation.plan(given.plan), choose(given.device).kind
    return _make([run for part in given.parts.split(",") for run in settings.runs(part, device)], given)


def _keep(given: argparse.Namespace) -> int:
    rows = ablation.keep((row for path in given.files for row in training.rows(path)), given.into)
    print(f"{given.into}: {len(rows)} rows")
    return 0


def _make(wanted: list[training.Run], given: argparse.Namespace) -> int:
    done, count = scheduling.make(wanted, given.rows, ablation.RECORDED_ROWS, given.states, given.seconds, given.jobs)
    print(f"{done} of {count} trainings finished in this call; rows in {given.rows}")
    return 0 if done == count else 1


if __name__ == "__main__":
    sys.exit(main())
