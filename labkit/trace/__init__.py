"""Many tensors: a recorded golden, traces and their files, capture, the first wrong step, run against run."""
