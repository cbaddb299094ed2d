"""A race in compiled code: the kernel that had it, the compiler's text, and what its repeats give."""
