"""`megatron-lossagg verify`: the loss against the reference, on this machine."""
