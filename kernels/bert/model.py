"""A BERT masked language model, every difference between the report's model and Hugging Face's under a switch.

Shapes: ids [B, S] int64, hidden states [B, S, H], attention [B, heads, S, S], logits [B, S, V]. Sources: Devlin et al.
2019 (BERT), Vaswani et al. 2017, and for the report's model its own code (README.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from whywrong import step
from whywrong.errors import UsageError

Tensor = torch.Tensor
IGNORED = -100
"""The label of a position that the loss leaves out."""

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
SWITCH_CHOICES = {
    "positions": ("learned", "sinusoidal"),
    "activation": tuple(ACTIVATIONS),
    "norm": ("post", "pre"),
    "initial": ("normal", "xavier"),
}


@dataclass(frozen=True)
class Config:
    """Sizes. The defaults are those of bert-base-uncased, which the report's two models share."""

    vocabulary: int = 30522
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 0
    """Width of the feed-forward layers; 0 means 4 hidden."""
    positions: int = 512
    """The longest input."""
    types: int = 2
    padding: int = 0
    """The id whose embedding gets no gradient as an input."""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "hidden", "layers", "heads", "positions", "types"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected 1 at least, got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise UsageError(f"heads: expected a divisor of hidden, {self.hidden}, got {self.heads}")
        if self.inner < 0:
            raise UsageError(f"inner: expected 0 (4 hidden) or more, got {self.inner}")
        if not 0 <= self.padding < self.vocabulary:
            raise UsageError(f"padding: expected an id below {self.vocabulary}, got {self.padding}")

    @property
    def width(self) -> int:
        """Width of the feed-forward layers."""
        return self.inner or 4 * self.hidden


@dataclass(frozen=True)
class Switches:
    """How the model is built: one field for each difference. The defaults are Hugging Face's BERT."""

    embedding_norm: bool = True
    """LayerNorm on the sum of the embeddings."""
    embedding_dropout: float = 0.1
    positions: str = "learned"
    """`learned`, or `sinusoidal` as in Vaswani et al. 2017, section 3.5."""
    position_factor: float = 1.0
    scale_tokens: bool = False
    """Token embeddings times sqrt(hidden), as in Vaswani et al. 2017, section 3.4."""
    token_types: bool = True
    activation: str = "gelu"
    """`gelu` (exact), `gelu_tanh` or `relu`."""
    dropout: float = 0.1
    """After attention and after the feed-forward layers."""
    attention_dropout: float = 0.1
    """On the attention probabilities."""
    eps: float = 1e-12
    """Of every LayerNorm."""
    norm: str = "post"
    """`post`: LayerNorm after each residual sum. `pre`: before each sublayer, and once more after the last layer."""
    head_transform: bool = True
    """A dense layer, the activation and a LayerNorm before the tied decoder."""
    initial: str = "normal"
    """Weights are drawn from N(0, 0.02^2); for `xavier`, all but the embeddings from Glorot's uniform distribution."""

    def __post_init__(self) -> None:
        for name, choices in SWITCH_CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("embedding_dropout", "dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UsageError(f"{name}: expected a number from 0, below 1, got {getattr(self, name)}")
        if not self.eps >= 0.0:
            raise UsageError(f"eps: expected a number from 0, got {self.eps}")


BERT = Switches()
REPORT = Switches(
    embedding_norm=False,
    embedding_dropout=0.0,
    positions="sinusoidal",
    position_factor=0.1,
    token_types=False,
    activation="relu",
    attention_dropout=0.0,
    eps=1e-5,
    norm="pre",
    head_transform=False,
    initial="xavier",
)
AUTHOR_FIX = replace(REPORT, scale_tokens=True, position_factor=1.0, activation="gelu", attention_dropout=0.1)
VASWANI = Switches(
    embedding_norm=False,
    positions="sinusoidal",
    scale_tokens=True,
    token_types=False,
    activation="relu",
    attention_dropout=0.0,
    eps=1e-6,
    head_transform=False,
    initial="xavier",
)
OPTION_B = replace(BERT, norm="pre", head_transform=False, initial="xavier")
"""The report's recommendation without its optional last step, Post-LN; what it does not list is as in its model."""
PRESETS = {
    "report": REPORT, "vaswani": VASWANI, "bert": BERT, "author_fix": AUTHOR_FIX, "option_b": OPTION_B,
    "option_b_post": replace(OPTION_B, norm="post"),
}  # fmt: skip

DIFFERENCES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "embedding_norm": ({"embedding_norm": True}, {"embedding_norm": False}),
    "embedding_dropout": ({"embedding_dropout": 0.1}, {"embedding_dropout": 0.0}),
    "positions": ({"positions": "learned", "position_factor": 1.0}, {"positions": "sinusoidal"}),
    "position_factor": ({"position_factor": 1.0}, {"position_factor": 0.1}),
    "scale_tokens": ({"scale_tokens": True}, {"scale_tokens": True}),
    "scaling": ({"scale_tokens": True, "position_factor": 1.0}, {"position_factor": 0.1, "positions": "sinusoidal"}),
    "token_types": ({"token_types": True}, {"token_types": False}),
    "activation": ({"activation": "gelu"}, {"activation": "relu"}),
    "attention_dropout": ({"attention_dropout": 0.1}, {"attention_dropout": 0.0}),
    "eps": ({"eps": 1e-12}, {"eps": 1e-5}),
    "norm": ({"norm": "post"}, {"norm": "pre"}),
    "head_transform": ({"head_transform": True}, {"head_transform": False}),
    "initial": ({"initial": "normal"}, {"initial": "xavier"}),
}
"""By name, what mends the report's model and what breaks BERT. `scaling` is the report's section 3 as a whole.

sqrt(H) mends the report's model as Vaswani et al. have it, and breaks BERT, which has none.
"""


def preset(name: str) -> Switches:
    """A name of :data:`PRESETS`; `report+NAME` has that difference mended, `bert-NAME` has it broken.

    Raises UsageError for other names.
    """
    if name in PRESETS:
        return PRESETS[name]
    for start, base, at in (("report+", REPORT, 0), ("bert-", BERT, 1)):
        if name.startswith(start) and name.removeprefix(start) in DIFFERENCES:
            return replace(base, **DIFFERENCES[name.removeprefix(start)][at])
    wanted = f"{', '.join(PRESETS)}, or report+NAME or bert-NAME with NAME one of {', '.join(DIFFERENCES)}"
    raise UsageError(f"preset: expected {wanted}, got {name!r}")


def sinusoids(length: int, hidden: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[length, hidden]: sin (even columns) and cos (odd) of s / 10000^(2 floor(c / 2) / hidden), made in float64."""
    s = torch.arange(length, dtype=torch.float64)[:, None]
    c = torch.arange(hidden)[None, :]
    angle = s / 10000.0 ** (2 * (c // 2).double() / hidden)
    return torch.where(c % 2 == 0, angle.sin(), angle.cos()).to(dtype)


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a factor; x itself for 1."""
    return x if factor == 1.0 else x * factor


class Embeddings(nn.Module):
    """Tokens, positions and token types, summed; LayerNorm and dropout where the switches say so."""

    def __init__(self, config: Config, switches: Switches, fused: bool) -> None:
        super().__init__()
        self.config, self.switches, self.fused = config, switches, fused
        self.tokens = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        if switches.positions == "learned":
            self.positions: Tensor = nn.Parameter(torch.empty(config.positions, config.hidden))
        else:
            self.register_buffer("positions", sinusoids(config.positions, config.hidden), persistent=False)
        self.types = nn.Parameter(torch.empty(config.types, config.hidden)) if switches.token_types else None
        self.norm = nn.LayerNorm(config.hidden, eps=switches.eps) if switches.embedding_norm else None

    def forward(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """[B, S, H] of ids [B, S] and, where there are token types, types [B, S] (None: all 0)."""
        rate = self.switches.embedding_dropout if self.training else 0.0
        scale = math.sqrt(self.config.hidden) if self.switches.scale_tokens else 1.0
        if self.fused and self.norm is not None and self.types is not None and ids.is_cuda:
            from kernels.bert import embedding  # kernels are imported where they run: on a CPU this model needs none

            return embedding.embed(
                ids,
                types,
                scaled(self.tokens, scale),
                scaled(self.positions, self.switches.position_factor),
                self.types,
                self.norm.weight,
                self.norm.bias,
                eps=self.switches.eps,
                dropout=rate,
                padding=self.config.padding,
            )
        x = scaled(functional.embedding(ids, self.tokens, padding_idx=self.config.padding), scale)
        if self.types is not None:
            x = x + functional.embedding(torch.zeros_like(ids) if types is None else types, self.types)
        x = step("embeddings.sum", x + scaled(self.positions[: ids.shape[1]], self.switches.position_factor))
        if self.norm is not None:
            x = self.norm(x)
        return step("embeddings.output", functional.dropout(x, rate))


class Layer(nn.Module):
    """Self-attention and feed-forward layers, each with a residual sum."""

    def __init__(self, config: Config, switches: Switches, fused: bool, name: str) -> None:
        super().__init__()
        self.config, self.switches, self.fused, self.name = config, switches, fused, name
        h = config.hidden
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, config.width), nn.Linear(config.width, h)
        self.norm1, self.norm2 = nn.LayerNorm(h, eps=switches.eps), nn.LayerNorm(h, eps=switches.eps)

    def forward(self, x: Tensor, attend: Tensor | None = None) -> Tensor:
        """[B, S, H] of the same; attend [B, 1, 1, S] is False where no position may look."""
        rate = self.switches.dropout if self.training else 0.0
        pre = self.switches.norm == "pre"
        y = functional.dropout(self.attention(self.norm1(x) if pre else x, attend), rate)
        x = step(f"{self.name}.middle", x + y if pre else self.norm1(x + y))
        y = functional.dropout(self.feed_forward(self.norm2(x) if pre else x), rate)
        return step(f"{self.name}.output", x + y if pre else self.norm2(x + y))

    def attention(self, x: Tensor, attend: Tensor | None) -> Tensor:
        """softmax(q k^T / sqrt(d)) v for every head, and the dense layer after it: [B, S, H]."""
        rate = self.switches.attention_dropout if self.training else 0.0
        qkv = step(f"{self.name}.qkv", self.qkv(x))
        q, k, v = (part.unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=attend, dropout_p=rate)
        else:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if attend is not None:
                scores = scores.masked_fill(~attend, torch.finfo(scores.dtype).min)
            probabilities = torch.softmax(step(f"{self.name}.scores", scores), -1)
            y = functional.dropout(step(f"{self.name}.probabilities", probabilities), rate) @ v
        y = step(f"{self.name}.context", y.transpose(1, 2).flatten(2))
        return step(f"{self.name}.attention", self.out(y))

    def feed_forward(self, x: Tensor) -> Tensor:
        """down(activation(up(x))): [B, S, H]."""
        inner = step(f"{self.name}.inner", self.up(x))
        active = step(f"{self.name}.active", ACTIVATIONS[self.switches.activation](inner))
        return step(f"{self.name}.feed_forward", self.down(active))


class Head(nn.Module):
    """From hidden states to logits: the transform where there is one, and the decoder that is tied to the tokens."""

    def __init__(self, config: Config, switches: Switches) -> None:
        super().__init__()
        self.switches = switches
        self.dense = nn.Linear(config.hidden, config.hidden) if switches.head_transform else None
        self.norm = nn.LayerNorm(config.hidden, eps=switches.eps) if switches.head_transform else None
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """[.., V] of x [.., H] and the token embeddings [V, H]."""
        if self.dense is not None and self.norm is not None:
            x = self.norm(ACTIVATIONS[self.switches.activation](self.dense(x)))
        return step("logits", functional.linear(step("head", x), tokens, self.bias))


class MaskedLM(nn.Module):
    """The model. `fused` takes the Triton embedding (on a GPU, with its LayerNorm) and torch's fused attention; without
    it every step is computed by its formula, and :func:`whywrong.step` names them all."""

    def __init__(self, config: Config, switches: Switches = BERT, fused: bool = False) -> None:
        super().__init__()
        self.config, self.switches = config, switches
        self.embeddings = Embeddings(config, switches, fused)
        self.layers = nn.ModuleList(Layer(config, switches, fused, f"layers.{i}") for i in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=switches.eps) if switches.norm == "pre" else None
        self.head = Head(config, switches)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Initial weights from torch's global generator: biases 0, gains 1, all else as `initial` says."""
        normal = self.switches.initial == "normal"
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue
            if normal or name.startswith("embeddings."):
                p.normal_(0.0, 0.02)
            else:
                for part in p.chunk(3) if ".qkv." in name else (p,):
                    nn.init.xavier_uniform_(part)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.bias.zero_()
        self.embeddings.tokens[self.config.padding] = 0.0

    def hidden(self, ids: Tensor, types: Tensor | None = None, attend: Tensor | None = None) -> Tensor:
        """The encoder's result [B, S, H]. ids and types [B, S]; attend [B, S], 0 where a position is padding.

        Raises UsageError for wrong shapes and types and an input beyond `positions`; and for ids outside the
        vocabulary, except while training on a GPU, where the look would have to wait for it.
        """
        self.check(ids, types, attend)
        mask = None if attend is None else attend.bool()[:, None, None, :]
        x = self.embeddings(ids, types)
        for layer in self.layers:
            x = layer(x, mask)
        return x if self.norm is None else step("norm", self.norm(x))

    def forward(self, ids: Tensor, types: Tensor | None = None, attend: Tensor | None = None) -> Tensor:
        """Logits [B, S, V], of arguments as in :meth:`hidden`."""
        return self.head(self.hidden(ids, types, attend), self.embeddings.tokens)

    def loss(self, ids: Tensor, labels: Tensor, types: Tensor | None = None, attend: Tensor | None = None) -> Tensor:
        """Mean cross-entropy over the positions whose label is not -100; 0, its gradients too, where there is none."""
        if labels.shape != ids.shape:
            raise UsageError(f"labels: expected that of ids, {tuple(ids.shape)}, got shape {tuple(labels.shape)}")
        return step("loss", cross_entropy(self(ids, types, attend).flatten(0, 1), labels.flatten()))

    def loss_at(self, ids: Tensor, at: Tensor, labels: Tensor) -> Tensor:
        """The same loss with logits computed where they are wanted alone: at [N] are places in ids, flattened."""
        x = self.hidden(ids).flatten(0, 1)[at]
        return cross_entropy(self.head(x, self.embeddings.tokens), labels)

    def check(self, ids: Tensor, types: Tensor | None, attend: Tensor | None) -> None:
        """Raises the errors of :meth:`hidden`."""
        if ids.ndim != 2 or ids.dtype != torch.int64:
            raise UsageError(f"ids: expected torch.int64 [B, S], got {ids.dtype} {tuple(ids.shape)}")
        if ids.shape[1] > self.config.positions:
            raise UsageError(f"ids: {ids.shape[1]} tokens are too many; expected {self.config.positions} at most")
        for name, given in (("types", types), ("attend", attend)):
            if given is not None and given.shape != ids.shape:
                raise UsageError(f"{name}: expected {tuple(ids.shape)}, got shape {tuple(given.shape)}")
        if types is not None and self.embeddings.types is None:
            raise UsageError("types: this model has no token types; expected None")
        if torch.compiler.is_compiling() or (ids.is_cuda and self.training):
            return
        for name, given, count in (("ids", ids, self.config.vocabulary), ("types", types, self.config.types)):
            if given is not None and given.numel() and not 0 <= int(given.min()) <= int(given.max()) < count:
                bad = given[(given < 0) | (given >= count)][0]
                raise UsageError(f"{name}: expected 0 to {count - 1}, got {int(bad)}")


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels [N] that are not -100 of logits [N, V], in float32 at least; 0 where there is none."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = functional.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def count(config: Config, switches: Switches) -> dict[str, int]:
    """Parameters by part of the model, as they are counted for a comparison of two models."""
    with torch.device("meta"):
        model = MaskedLM(config, switches)
    parts = {
        "tokens": ("embeddings.tokens",),
        "positions": ("embeddings.positions",),
        "types": ("embeddings.types",),
        "embedding norm": ("embeddings.norm.",),
        "layers": ("layers.",),
        "final norm": ("norm.",),
        "head transform": ("head.dense.", "head.norm."),
        "decoder bias": ("head.bias",),
    }
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return {
        part: sum(size for name, size in sizes.items() if name.startswith(starts)) for part, starts in parts.items()
    }
