"""GRPO on Megatron-Core: the parts that `train_grpo.py` and `train_offline.py` share."""
