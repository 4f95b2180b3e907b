"""Modes of one's own, registered when this module is imported, and a step that uses one."""

from __future__ import annotations

from megatron_lossagg import register_mode

# A token of a long sequence weighs less, but not as little as under a per-sequence mean.
register_mode("sqrt-length", lambda n_s, c: 1 / (c.num_seqs * n_s.sqrt()))


def sqrt_length_objective(losses, mask):
    """The mode by loops over sequences, for losses and masks [b, s] of the whole batch."""
    valid = [
        (row_losses[row_mask > 0], int(row_mask.sum()))
        for row_losses, row_mask in zip(losses, mask, strict=True)
        if row_mask.sum() > 0
    ]
    return sum(chosen.sum() / n**0.5 for chosen, n in valid) / len(valid)


def steps_on_rank(gpt, batch, case, plans):
    """As `case_on_rank`; importing this module registers the mode on the rank."""
    from megatron_lossagg.verification.case_runs import case_on_rank

    return case_on_rank(gpt, batch, case, plans)


def reference_on_rank(gpt, batch):
    """J and its whole-model gradient."""
    from megatron_lossagg.testing import reference_gradient
    from megatron_lossagg.verification.aggregator_plan import policy_gradient_losses

    return reference_gradient(
        gpt,
        batch,
        lambda logits, rows: sqrt_length_objective(
            policy_gradient_losses(logits, rows), rows["loss_mask"]
        ),
    )
