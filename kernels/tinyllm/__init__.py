"""A TinyLLM in CUDA C++, its Tensor class, and the faults of one report."""
