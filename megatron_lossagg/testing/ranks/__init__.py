"""The real Megatron on CPU ranks: processes, groups, releases."""
