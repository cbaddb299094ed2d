"""Why: hypotheses held against what was observed."""
