"""The command `labkit`: list, run, sweep, table, bench, record, new, doctor."""

import sys

# jsonschema would build the grammar of URIs with it whenever nbformat is imported: a second of each run, without need.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
