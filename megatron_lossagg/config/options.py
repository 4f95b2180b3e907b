"""`LossAggOptions`: the options of `LossAggregator`, each declared and checked in one place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from megatron_lossagg.modes.options import ModeOptions
from megatron_lossagg.schedule.options import ContractSource, CPGradient, Denominators, Returns
from megatron_lossagg.typed_fields import check_flags
from megatron_lossagg.weights.microbatch import check_weights_key
from megatron_lossagg.weights.token_weights import WEIGHT_DTYPES, check_weight_dtype
from megatron_lossagg.words import Word, plain_values, read_option

T = TypeVar("T")


class Checks(Word):
    """Whether `Step.validate` runs on every wrapped step."""

    REQUIRED = "required"
    SKIPPED = "skipped"


_WORDS: dict[str, type[Word]] = {
    "cp_gradient": CPGradient,
    "returns": Returns,
    "contract": ContractSource,
    "denominators": Denominators,
    "checks": Checks,
}


@dataclass(frozen=True, kw_only=True)
class LossAggOptions(ModeOptions):
    """Options of `LossAggregator`, which takes them as keywords; checked when built.

    Those of the mode (`loss_scale_factor`, `norm_semantics`, `sequence_count`) are declared by
    `ModeOptions`.

    Raises:
        ValueError: an option has a value that does not exist.
        TypeError: a flag is not a bool, or `weight_dtype` cannot hold weights.
    """

    loss_agg_mode: str | None = None
    """One of `modes.mode_names()`; with `terms` each term has its own."""

    cp_gradient: str = "local"
    """Where token losses come from under context parallelism: "local", "replicated-value" or
    "gathered", see `ScheduleContract`."""

    returns: str = "auto"
    """What `loss_func` returns: "loss" (two values), "loss_and_num_tokens" (three) or "auto", by
    the flag of the model's config."""

    weights_key: str = "loss_weights"
    """The field of a microbatch that carries the weights. With "loss_mask" they replace the mask
    and travel wherever a trainer broadcasts and slices it."""

    weight_dtype: str | torch.dtype = "float32"
    """dtype of the weights, by name or itself: "float32" (exact to 6e-8), "float64" or
    "bfloat16"; kept as the name."""

    masks_are_cp_sliced: bool = False
    """Whether microbatches hold this context-parallel rank's part of each mask; then planning takes
    one more all-reduce, of n_s over the cp group, and `slice_for_cp` is not to be called."""

    contract: str = "detect"
    """"detect" reads the regime from the config; "measure" also drives a one-parameter model
    through the schedule at the first `begin_step` or `wrap`, which every rank must then call, and
    raises if anything scales otherwise."""

    denominators: str = "counted"
    """"counted" counts the step before its first microbatch; "deferred" divides when gradients are
    finalized, for a `wrap`ped stream whose step is not complete when it begins."""

    checks: str = "required"
    """"required" runs the checks of `Step.validate` on every wrapped step when its gradients are
    finalized; "skipped" runs none: for a comparison that must find the fault itself."""

    report_counts: bool = False
    """Whether reports tell num_tokens, num_seqs, response_length and masked_fraction."""

    compile: bool = False
    """Run `loss_fn` (or those of `terms`), metrics and sums of a microbatch through
    `torch.compile`, once per family of shapes, with the gradient in the same pass where outputs are
    numbers per token. A `loss_fn` beside `terms` stays outside. Where it fails, for want of a C++
    compiler or at a `loss_fn` that cannot be traced, a warning says so and they run as without."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, words in _WORDS.items():
            object.__setattr__(self, name, read_option(words, name, getattr(self, name)))
        check_weights_key(self.weights_key)
        check_flags(
            masks_are_cp_sliced=self.masks_are_cp_sliced,
            report_counts=self.report_counts,
            compile=self.compile,
        )
        if isinstance(self.weight_dtype, str):
            if self.weight_dtype not in WEIGHT_DTYPES:
                raise ValueError(
                    f"weight_dtype={self.weight_dtype!r} does not exist; expected one of "
                    f"{', '.join(WEIGHT_DTYPES)}."
                )
        else:
            check_weight_dtype(self.weight_dtype)
            names = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}
            object.__setattr__(self, "weight_dtype", names[self.weight_dtype])

    @classmethod
    def of_keywords(cls, keywords: Mapping[str, Any]) -> LossAggOptions:
        """From the keywords of `LossAggregator`; raises TypeError on one that is no option."""
        known = option_names()
        unknown = [name for name in keywords if name not in known]
        if unknown:
            raise TypeError(
                f"LossAggregator has no option {', '.join(unknown)}; its options are "
                f"{', '.join(known)}."
            )
        return cls(**keywords)

    def aggregator_arguments(self) -> dict[str, Any]:
        """The options by name as plain values, as `LossAggregator` takes them."""
        return plain_values({name: getattr(self, name) for name in option_names()})

    @property
    def torch_weight_dtype(self) -> torch.dtype:
        """The dtype of the weights itself."""
        return WEIGHT_DTYPES[str(self.weight_dtype)]


def option_names() -> tuple[str, ...]:
    """The names of all options, the mode first."""
    names = [field.name for field in fields(LossAggOptions)]
    return ("loss_agg_mode", *(name for name in names if name != "loss_agg_mode"))


def show_options(cls: type[T]) -> type[T]:
    """A class decorator: `**options` of a constructor, listed in the signature that is shown.

    For `help()`, notebooks and `inspect.signature`; the options stay declared in one place.
    """
    signature = inspect.signature(cls)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    defaults = {field.name: field.default for field in fields(LossAggOptions)}
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name])
        for name in option_names()
    ]
    type.__setattr__(cls, "__signature__", signature.replace(parameters=parameters))
    return cls
