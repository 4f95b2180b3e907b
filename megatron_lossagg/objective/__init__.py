"""Token losses times weights: the sums of a microbatch."""
