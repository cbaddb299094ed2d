"""start_here: a reference of five steps, the right Triton kernel of them, and seven ways in which it could be wrong."""
