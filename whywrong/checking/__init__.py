"""Which step is wrong: tolerances by simulated rounding, each step checked by itself, runs compared with each other."""
