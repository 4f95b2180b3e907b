"""Token losses times weights: the sums of a microbatch.

terms           `LossTerm`: a loss with its mode, mask, coefficient and metrics
objective       the terms and metrics together, as data
evaluation      S = sum of w * l of each term on a microbatch, without a schedule
loss_fn_result  checks of what a `loss_fn` returned
metric_values   sums, minima and maxima of metrics
compile/        the same through `torch.compile`
"""
