"""All benchmarks on record, side by side."""
