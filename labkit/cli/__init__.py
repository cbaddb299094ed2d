"""The command `labkit`: list, run, bench, record, diff, doctor; and the pages that a run leaves."""
