"""On which input a kernel fails: cases that are sampled, and shrunk."""
