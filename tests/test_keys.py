"""Verdicts under every choice and blind fault of a notebook, against a key of what the truth of each fault settles.

A key, tests/keys/<notebook>.yaml, was derived from the definitions of the faults; its head says what had been read.
"""

import json

import pytest
import yaml

from kernels.bert import blind as bert
from kernels.mhc import blind as mhc
from kernels.start_here import faulty as start_here
from labkit.cli.main import main
from labkit.session.catalogue import ROOT, notebooks

SEEDS = range(20)
SAMPLE = {
    "attention_matmul": [{"defect": "blind", "seed": 0}],
    "bert_embeddings": [{"defect": "blind", "seed": 7}],
    "d2h_sizing": [],
    "dalpha_atomics": [{"defect": "blind", "seed": 3}],
    "start_here": [{"fault": "blind", "seed": 2}],
    "sweep_atlas": [{"n": 1}],
}
"""Of a notebook's runs, those that are made each time: of dalpha hc_eps, which rounding hides in the sum."""
NEED_A_GPU = ("device", "compute", "model")
"""Parameters whose other choices need a GPU."""


def fault_of_dalpha(given):
    """The name of the fault in a run of dalpha_atomics, and which of its kinds holds: the second at one stream."""
    name = mhc.sample(given["seed"], given["tile"]).name if given["defect"] == "blind" else given["defect"]
    return name, given["n"] == 1


FAULT = {
    "attention_matmul": lambda given: (given["defect"], 0),
    "bert_embeddings": lambda given: (bert.hidden(given["defect"], given["seed"])[0], 0),
    "d2h_sizing": lambda given: ("sampled", 0),
    "dalpha_atomics": fault_of_dalpha,
    "start_here": lambda given: (start_here.chosen(given["fault"], given["seed"]), 0),
    "sweep_atlas": lambda given: ("as recorded", 0),
}
"""By notebook, from a run's parameters: its fault's name in the key, and which of its kinds holds if it has several."""
KEYS = {name: yaml.safe_load((ROOT / f"tests/keys/{name}.yaml").read_text(encoding="utf-8")) for name in FAULT}


def settled_by(name, given):
    """The fault of a run, and what it settles: claims, or metrics.NAME, each with the verdicts that are right."""
    fault, which = FAULT[name](given)
    kind = KEYS[name]["faults"][fault]
    return fault, KEYS[name].get("always", {}) | (kind[which] if isinstance(kind, list) else kind)


def verdicts(result):
    """A run's claims by id, and its metrics by metrics.NAME."""
    metrics = {f"metrics.{name}": value for name, value in result["metrics"].items()}
    return metrics | {claim: settled["verdict"] for claim, settled in result["claims"].items()}


def runs(name):
    """Every choice of every parameter that has choices, with the fault as committed and blind, and the blind seeds.

    Where the faults are no choices of the parameter but free text, each fault of the key is one.
    """
    parameters = notebooks()[name].parameters
    choices = {p: value.choices for p, value in parameters.items() if p not in NEED_A_GPU and value.choices}
    blind = [{"seed": seed} for seed in SEEDS] if KEYS[name].get("sampled") else []
    for hides in {"defect", "fault"} & {*parameters}:
        choices = {hides: KEYS[name]["faults"]} | choices
        blind = [{hides: "blind", "seed": seed} for seed in SEEDS]
        blind += [{hides: "blind", p: choice} for p, several in choices.items() if p != hides for choice in several]
    others = [{p: choice} for p, several in choices.items() for choice in several]
    return list({ids(run): run for run in blind + others}.values())


def ids(run):
    return "-".join(f"{name}={value}" for name, value in run.items())


CASES = [
    pytest.param(name, run, id=f"{name}-{ids(run)}", marks=() if run in SAMPLE[name] else pytest.mark.slow)
    for name in KEYS
    for run in runs(name)
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "run"), CASES)
def test_no_verdict_is_against_what_the_fault_settles(name, run, tmp_path):
    given = KEYS[name].get("parameters", {}) | run
    defaults = {p: value.default for p, value in notebooks()[name].parameters.items()}
    fault, settled = settled_by(name, defaults | given)
    options = [f"-p{parameter}={value}" for parameter, value in given.items()]
    assert main(["run", name, *options, "--device", "cpu", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob(f"{name}/*/result.json")
    reached = verdicts(json.loads(path.read_text(encoding="utf-8")))
    assert {what: reached[what] for what, right in settled.items() if reached[what] not in right} == {}, fault


def test_every_notebook_with_choices_has_a_key():
    parameters = {name: book.parameters for name, book in notebooks().items()}
    chosen = {name for name, by in parameters.items() if any(v.choices for p, v in by.items() if p not in NEED_A_GPU)}
    assert chosen <= set(KEYS)
