"""The command `labkit`: list, run, bench, record, diff, doctor."""

import sys

# jsonschema would build the grammar of URIs with it whenever nbformat is imported: a second of each run, for nothing.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
