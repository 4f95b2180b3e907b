"""A small GPT, its chunks and its parameters."""
