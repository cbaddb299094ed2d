"""A BERT training step with the fused embedding beside PyTorch's own, and beside Hugging Face's model."""
