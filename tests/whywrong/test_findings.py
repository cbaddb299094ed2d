"""Which rows the table of a localisation has: all of a short one, of a long one those around what is wrong."""

import json
import re
import subprocess
import sys

import pytest
import torch

import whywrong
from labkit.session.catalogue import ROOT
from whywrong import Precision, Trace, golden, localise, step
from whywrong.checking.findings import SHORT_TABLE
from whywrong.reporting.command import main

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FLOAT32 = Precision("float32")
WEIGHTS = {f"weight.{k}": w for k, w in enumerate(torch.linspace(0.5, 1.5, 9))}
X = torch.linspace(0.1, 1.0, 40)


def steps(count=26, wrong="", weights=WEIGHTS):
    """The inputs, and a chain of steps of which those that are named are off."""
    x, made = X, {"x": X, **weights}
    for k, letter in enumerate(LETTERS[:count]):
        x = torch.tanh(x) + weights[f"weight.{k % len(weights)}"]
        x = x + 0.01 if letter in wrong else x
        made[letter] = step(letter, x)
    return made


def recorded(count=26):
    def chain(x, **weights):
        made = steps(count, weights={name.replace("_", "."): w for name, w in weights.items()})
        return {letter: made[letter] for letter in LETTERS[:count]}

    return golden(lambda x, **weights: chain(X.double(), **weights), x=X, **WEIGHTS)
