"""What the words of an operation say of how it treats errors: the regular expressions of the allowances."""

import re
from collections.abc import Sequence

SHIFTED = re.compile(
    r"norm|x_?hat|softmax|\b[lbg]n\d*\b|(?<!running_)var|cent(er|re)|logsumexp|lse|log_?prob|\blog\b", re.IGNORECASE
)
EXPONENTIAL = re.compile(
    r"exp|d_?logit|softmax|prob|sigmoid|sinkhorn|silu|lse|logsumexp|(?<![a-z])(cos(?:ine)?|sine?)(?![a-z])|(?:^|[^a-z])p$",
    re.IGNORECASE,
)
ACTIVATION = re.compile(r"relu|gelu|silu|tanh|sigmoid|swish", re.IGNORECASE)
QUOTIENT = re.compile(r"/|divide|normali[sz]e|quotient", re.IGNORECASE)
ONE_HOT = re.compile(r"-\s*(one.?hot|y\b|label|target)", re.IGNORECASE)
MINUS = re.compile(r"\s-\s|minus|nll|subtract|difference", re.IGNORECASE)
CANCELS = re.compile(r"\s-\s|minus|backward|nll|subtract|difference", re.IGNORECASE)
MOMENT = re.compile(
    r"\bema\b|moment|moving average|exp_avg|beta|bias.?correct|[mv]_?hat|(?:\bt\d+|it\w*\d+|adam\w*)[._/ ]*[mv]\b",
    re.IGNORECASE,
)
WHOLE = re.compile(
    r"norm|softmax|prob|sum|mean|reduce|max|var|matmul|linear|@|conv|sinkhorn|lse|attention", re.IGNORECASE
)
TURNED = re.compile(r"(?<![a-z])(cos(?:ine)?|sine?)(?![a-z])", re.IGNORECASE)
LOGIT_GRADIENT = re.compile(r"(d|grad)_?logit", re.IGNORECASE)
PICKED = re.compile(r"gather|select|index|take|lookup|pick|embed|nll", re.IGNORECASE)
DIFFERENCE = re.compile(r"delta|diff", re.IGNORECASE)
INDEX = re.compile(r"arg_?(max|min|sort)|top.?k|\bind(ex|ices)\b|\bpred|largest logit", re.IGNORECASE)
UNTRANSFORMED = re.compile(r"gemm|im2col|matmul|direct", re.IGNORECASE)
QUANTISED = re.compile(r"quant|u?int[48]\b|nf4|\bq4|\bq8", re.IGNORECASE)
AVERAGED = re.compile(r"averaged$")
SUMMED = re.compile(r"\bsum|reduce|mean|@|matmul|linear|conv", re.IGNORECASE)


def without_names(op: str, inputs: Sequence[str]) -> str:
    """The text of an operation without the names of its inputs: `lse - mean(logits)` takes no logarithm."""
    for name in sorted({part for one in inputs for part in (one, re.split(r"[./:]", one)[-1])}, key=len, reverse=True):
        if name:
            op = re.sub(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", "x", op)
    return op


def stem(name: str) -> str:
    """The letters of a step's name."""
    return re.sub(r"[\W\d_]+", "", name)
