"""Which step is wrong: tolerances by simulated rounding, each step by itself, one run against another."""
