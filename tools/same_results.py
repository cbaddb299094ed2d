"""Do two sets of runs say the same? Verdicts, claims and measured numbers of each notebook, before and after a change.

    python -m tools.same_results BEFORE AFTER        # folders that `labkit run --out` wrote

Prints what differs: verdict, the verdict of a claim, a metric or what a claim measured; reasons may differ in words.
Times and what depends on them are left out. Exits with 1 where anything differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMES = ("seconds", "time", "micro", "speed", "took", "rate of", "per_second", "_us", "_ms", "_s")
"""Parts of the names of what is measured anew in every run."""


def results(folder: Path) -> dict[str, Any]:
    """The newest result of each notebook."""
    paths = sorted(folder.glob("*/*/result.json"), key=lambda path: path.stat().st_mtime)
    return {path.parent.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Where two values of JSON differ, in lines; numbers in the last three of their digits may."""
    if any(part in where.rpartition("/")[2] for part in TIMES):
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from differences(before.get(key), after.get(key), f"{where}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{where}/{i}")
    elif isinstance(before, float) and isinstance(after, float):
        if abs(before - after) > 1e-12 * max(abs(before), abs(after)):
            yield f"{where}: {before!r} before, {after!r} after"
    elif before != after:
        yield f"{where}: {str(before)[:120]!r} before, {str(after)[:120]!r} after"


def main(before: Path, after: Path) -> int:
    """The command."""
    old, new = results(before), results(after)
    lines = [f"{name}: no result {'before' if name in new else 'after'}" for name in old.keys() ^ new.keys()]
    for name in old.keys() & new.keys():
        for part in ("parameters", "verdict", "metrics", "claims"):
            pair = [result[part] for result in (old[name], new[name])]
            if part == "claims":
                pair = [{k: {f: c[f] for f in ("verdict", "measured", "reported")} for k, c in p.items()} for p in pair]
            lines += [f"{name}: {part}{line}" for line in differences(*pair)]
    print(*sorted(lines), f"{len(lines)} differences in {len(old)} notebooks", sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
