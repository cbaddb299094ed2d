"""Files of names: which step is which of the golden's, and how steps in shards are put together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from whywrong.errors import UsageError, first_line, needs
from whywrong.files import write_text, writing
from whywrong.recording.golden import load
from whywrong.recording.naming import Proposal, propose_names
from whywrong.recording.shards import check_patterns
from whywrong.recording.steps import Trace
from whywrong.tables import number

HEADING = """\
# Golden names and observed ones, proposed: confirm each row, delete what is wrong, then use the file with --names.
# A row by "place" has nothing but its shape and its neighbours for it; confirm those above all.
"""


def read_map(path: Path, what: str) -> dict[str, str]:
    """Names mapped to texts, from a JSON or a YAML file. Raises UsageError, which begins with `what`, for any other."""
    try:
        text = path.read_text(encoding="utf-8")
        pairs = json.loads(text, object_pairs_hook=list) if text.lstrip().startswith("{") else _yaml(text, what)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{what}: {path} cannot be read ({why}); expected JSON or YAML") from None
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) and isinstance(pair[1], str) for pair in pairs):
        raise UsageError(f"{what}: expected names mapped to texts, got {path}")
    if len({name for name, _ in pairs}) < len(pairs):
        names = [name for name, _ in pairs]
        raise UsageError(f"{what}: {path}: expected each name once, got {max(names, key=names.count)!r} twice")
    return dict(pairs)


def _yaml(text: str, what: str) -> list[tuple[str, str]]:
    """The pairs of a YAML mapping, as they are written: a name such as 1 or null is a text too."""
    with needs(f"{what} with a YAML file"):
        import yaml
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{error}".replace("\n", " ")) from None
    pairs = node.value if isinstance(node, yaml.MappingNode) else [] if node is None else [(node, node)]
    if not all(isinstance(item, yaml.ScalarNode) for pair in pairs for item in pair):
        raise ValueError("no mapping of names to texts")
    return [(name.value, value.value) for name, value in pairs]


def write_proposal(golden: Path, observed: Path, path: Path, dims: dict[str, str]) -> Proposal:
    """Propose names for two dumps, and write them as YAML with shapes and a reason in each row.

    Raises UsageError where no name can be proposed, and none is needed or none fits.
    """
    reference, steps = load(golden, dims), load(observed, dims)
    if not isinstance(steps, Trace):
        raise UsageError(f"{observed}: expected the steps of an implementation, got a recorded golden")
    check_patterns(dims, [*steps.names, *reference.names])
    proposal = propose_names(steps, reference)
    if not proposal.partners:
        raise UsageError(f"--propose-names: expected steps alike under other names, got none in {observed}")
    shapes = {name: list(steps.read(name).shape) for name in steps.names}
    with writing(path, "--propose-names"):
        write_text(path, HEADING + "".join(f"{row}\n" for row in _rows(proposal, shapes)))
    return proposal


def _rows(proposal: Proposal, shapes: dict[str, list[int]]) -> Iterator[str]:
    for name, (partner, difference, reason) in proposal.partners.items():
        about = f"{shapes[partner]}, by {reason}, relative difference {number(difference)}"
        yield f"{json.dumps(name)}: {json.dumps(partner)}  # {about}"
    yield from (f"# {json.dumps(name)}: of the golden, without a partner" for name in proposal.golden)
    yield from (f"# {json.dumps(x)}: of the observed, without a partner, {shapes[x]}" for x in proposal.observed)
