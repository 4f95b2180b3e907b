"""Global batches, padded and packed."""
