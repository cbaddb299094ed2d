"""Attention with the scores by cuBLAS: Q K^T, scaled, softmax, times V, for independent heads. See README.md."""
