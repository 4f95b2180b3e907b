"""TRL's own `_compute_loss` on given log-probs: no model, no trainer."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace


def load_trl_loss():
    """A function of log-probs, old ones, advantages and mask, from TRL as installed.

    Its options: `loss_type`, `num_items`, `accumulation`, `num_processes`, `max_length`, bounds.
    It also means entropies, here zeros, and gathers metrics over processes, here of one.
    """
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    def compute(x, old, advantages, mask, *, ref=None, beta=0.0, level="token", **options):
        args = SimpleNamespace(
            delta=options.get("delta"),
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.2,
            sapo_temperature_neg=1.7,
            steps_per_generation=options.get("accumulation", 1),
        )
        loss_type, zero = options["loss_type"], x.new_zeros(())
        trainer = SimpleNamespace(
            args=args,
            loss_type="grpo" if loss_type == "gmpo" else loss_type,
            importance_sampling_level=level,
            epsilon_low=options.get("low", 0.2),
            epsilon_high=options.get("high", 0.28),
            beta=beta,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=options.get("accumulation", 1),
            max_completion_length=options.get("max_length"),
            accelerator=SimpleNamespace(
                num_processes=options.get("num_processes", 1),
                reduce=lambda t, reduction: t,
                gather=lambda t: t,
            ),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (x, zero.expand_as(x), None),
        )
        inputs = {
            "prompt_ids": mask[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": advantages[:, 0],
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
            "num_items_in_batch": options.get("num_items", mask.sum()),
        }
        owner = GMPOTrainer if loss_type == "gmpo" else GRPOTrainer
        return owner._compute_loss(trainer, None, inputs)

    return compute
