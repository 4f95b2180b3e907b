"""The same sums through `torch.compile`, with the gradient in one pass."""
