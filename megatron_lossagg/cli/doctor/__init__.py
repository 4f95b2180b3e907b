"""`megatron-lossagg doctor`: which factors meet a loss here."""
