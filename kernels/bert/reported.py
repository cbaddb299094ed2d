"""The figures of the report and of its source's public repository, neet/attentif, one training each."""

from __future__ import annotations

import math

OWN, THEIRS, REPAIRED = "own, as reported", "Hugging Face", "own, repaired"
LOSSES: dict[str, dict[str, float]] = {
    OWN: {"epoch 1": 6.965, "epoch 2": 5.535, "epoch 3": 4.918, "all steps": 5.806},
    THEIRS: {"epoch 1": 6.765, "epoch 2": 5.799, "epoch 3": 4.754, "all steps": 5.758, "last logged": 4.602},
    REPAIRED: {"epoch 1": 6.012, "epoch 2": 4.577, "epoch 3": 4.197, "all steps": 4.929, "last logged": 4.1},
}
"""Mean training losses in nats; the repaired model's last one is given as "about 4.1". Hugging Face's epochs are put
together from means of 500 steps, and so are slightly off: their average is 5.773."""
FINAL = ("epoch 3", "all steps", "last logged")
"""What may be called a final loss."""
LIKELIEST = {
    THEIRS: {"rights": 7.6069, "##s": 7.1869, "groups": 6.8359, "studies": 6.6711, "issues": 6.4997},
    OWN: {".": 6.5330, "he": 6.2388, "other": 5.7639, "money": 5.7295, "love": 5.6699},
}
"""The five likeliest words for the report's sentence, with their logits."""
RIGHT_WORD = {THEIRS: 3.69, OWN: -0.70}
"""The logit of "beings", the word that was there."""


def distances() -> list[tuple[str, float, float, float, float]]:
    """A row a model: the likeliest word's logit, the right word's, the difference, and the largest probability that
    the right word can then have, which is e to minus the difference."""
    rows = []
    for model, words in LIKELIEST.items():
        best, right = max(words.values()), RIGHT_WORD[model]
        rows.append((model, best, right, best - right, math.exp(right - best)))
    return rows
