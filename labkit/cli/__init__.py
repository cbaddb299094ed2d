"""The command `labkit`: list, run, bench, record, diff, doctor."""
