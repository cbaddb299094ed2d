"""A sweep over sizes: where each fault of a kernel shows, and which faults that tells apart."""
