"""The reference as a recorded program, and what was observed: traces, files of them, capture, names."""
