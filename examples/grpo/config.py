"""What a run is made of: the options of a YAML file as dataclasses, checked when they are built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import inf
from typing import Any

from grpo.task import CountTask
from grpo.terms import KL, POLICY, POLICY_METRICS, TERMS
from megatron_lossagg import LossAggConfig
from megatron_lossagg.testing import Layout

# The field of a microbatch that carries the weights: the one that Megatron-LM scripts broadcast.
WEIGHTS_KEY = "loss_mask"
# Options of the aggregator that follow from how this example is written.
_FIXED = {
    "denominators": "counted",
    "masks_are_cp_sliced": False,
    "cp_gradient": "local",
    "contract": "detect",
}


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Sizes of the parallel groups; their product is the number of ranks."""

    tp: int = 1
    pp: int = 2
    vpp: int = 1
    """Model chunks per pipeline rank."""
    dp: int = 2
    cp: int = 1

    def __post_init__(self) -> None:
        _check_positive("layout", self)

    def with_num_microbatches(self, num_microbatches: int) -> Layout:
        """The layout as the model is built for it; raises ValueError if Megatron cannot run it."""
        return Layout(**dataclasses.asdict(self), num_microbatches=num_microbatches)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp * self.dp * self.cp


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A small GPT."""

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    init_std: float = 0.02

    def __post_init__(self) -> None:
        _check_positive("model", self)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How many responses are sampled in a step, over all ranks."""

    prompts_per_step: int = 64
    group_size: int = 8
    """Responses per prompt; advantages compare them with each other."""

    def __post_init__(self) -> None:
        _check_positive("rollout", self)
        if self.group_size < 2:
            raise ValueError(
                "rollout.group_size=1 gives every response the advantage 0: there is nothing to "
                "compare it with. Choose 2 or more."
            )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """GRPO."""

    updates_per_step: int = 2
    """Optimizer steps on each batch of responses."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalize_by_std: bool = True
    """Divide advantages by their group's standard deviation; Dr.GRPO does not."""

    def __post_init__(self) -> None:
        _check_positive("algorithm", self, names=("updates_per_step", "clip_high"))
        if not 0 < self.clip_low < 1:
            raise ValueError(f"algorithm.clip_low={self.clip_low} must be between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam, as Megatron-Core builds it."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""

    def __post_init__(self) -> None:
        _check_positive("optimizer", self, names=("lr",))
        for name in ("lr", "beta1", "beta2", "weight_decay", "clip_grad"):
            value, limit = getattr(self, name), 1 if name.startswith("beta") else inf
            if not 0 <= value < limit:
                raise ValueError(f"optimizer.{name}={value} must be at least 0 and below {limit}.")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What online and offline training have in common."""

    name: str
    """Names the run's folder."""
    seed: int = 1
    steps: int
    micro_batch_size: int
    """Sequences in a microbatch."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves only at the end, and when the run is stopped."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss_agg: LossAggConfig

    def __post_init__(self) -> None:
        _check_positive("", self, names=("steps", "micro_batch_size"))
        if self.save_every < 0:
            raise ValueError(f"save_every={self.save_every} must not be negative.")
        self._check_terms()
        if self.loss_agg.weights_key != WEIGHTS_KEY:
            raise ValueError(
                f"loss_agg.weights_key={self.loss_agg.weights_key!r} does not work here: weights "
                f"travel in {WEIGHTS_KEY!r}, which Megatron-LM scripts broadcast. Leave it out."
            )
        # Raises where Megatron cannot run the layout.
        self.layout.with_num_microbatches(self.num_microbatches)
        stages = self.layout.pp * self.layout.vpp
        if self.model.num_layers % stages:
            raise ValueError(
                f"model.num_layers={self.model.num_layers} cannot be spread over PP x VPP = "
                f"{stages} stages. Change model.num_layers, layout.pp or layout.vpp."
            )
        if self.model.hidden_size % self.model.num_heads or (self.model.num_heads % self.layout.tp):
            raise ValueError(
                f"model.num_heads={self.model.num_heads} must divide hidden_size="
                f"{self.model.hidden_size} and be a multiple of layout.tp={self.layout.tp}."
            )

    def _check_terms(self) -> None:
        if not self.loss_agg.terms:  # one mode, or a preset: the policy loss alone
            object.__setattr__(self, "loss_agg", _as_term(self.loss_agg))
        for name, value in _FIXED.items():
            if getattr(self.loss_agg, name) != value:
                raise ValueError(
                    f"loss_agg.{name}={getattr(self.loss_agg, name)!r} does not work in this "
                    "example. Leave it out."
                )
        names = [term.name for term in self.loss_agg.terms]
        unknown = [name for name in names if name not in TERMS]
        if POLICY not in names or unknown or len(set(names)) < len(names):
            raise ValueError(
                f"loss_agg.terms needs one term named {POLICY!r}, and may have one "
                f"{' and one '.join(name for name in TERMS if name != POLICY)}; it has "
                f"{', '.join(names) or 'none'}."
            )
        for term in self.loss_agg.terms:
            if term.metrics or term.mask_key != WEIGHTS_KEY:
                raise ValueError(
                    f"loss_agg.terms.{term.name}: metrics and mask_key are this example's own; "
                    "leave them out."
                )
            if term.spec.needs_units:
                raise ValueError(
                    f"loss_agg.terms.{term.name}: {term.loss_agg_mode} counts units, and this "
                    "example's sequences belong to none. Choose another mode."
                )

    @property
    def loss_terms(self) -> LossAggConfig:
        """`loss_agg` with what the term functions of this example report besides."""
        terms = [
            dataclasses.replace(term, metrics=POLICY_METRICS) if term.name == POLICY else term
            for term in self.loss_agg.terms
        ]
        return dataclasses.replace(self.loss_agg, terms=tuple(terms))

    @property
    def policy_mode(self) -> str:
        """How the policy loss is aggregated."""
        return next(t.loss_agg_mode for t in self.loss_agg.terms if t.name == POLICY)

    @property
    def needs_reference(self) -> bool:
        """Whether a term compares the policy with the model before training."""
        return any(term.name == KL for term in self.loss_agg.terms)

    @property
    def sequences_per_step(self) -> int:
        """Sequences of the global batch."""
        raise NotImplementedError

    @property
    def num_microbatches(self) -> int:
        """M of a rank's schedule; raises ValueError if the batch does not divide."""
        per_pass = self.layout.dp * self.micro_batch_size
        if self.sequences_per_step % per_pass:
            raise ValueError(
                f"A step's {self.sequences_per_step} sequences do not divide into microbatches of "
                f"{self.micro_batch_size} on {self.layout.dp} data-parallel ranks (multiples of "
                f"{per_pass}). Change micro_batch_size, layout.dp or the sequences per step."
            )
        return self.sequences_per_step // per_pass

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML writes them."""
        return dataclasses.asdict(self) | {"loss_agg": self.loss_agg.to_dict()}


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(TrainingConfig):
    """Online training: responses are sampled from the model that is trained."""

    task: CountTask = field(default_factory=CountTask)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout.prompts_per_step % self.layout.dp:
            raise ValueError(
                f"rollout.prompts_per_step={self.rollout.prompts_per_step} is no multiple of "
                f"layout.dp={self.layout.dp}: a group must not straddle two replicas."
            )

    @property
    def sequences_per_step(self) -> int:
        """Prompts times responses per prompt."""
        return self.rollout.prompts_per_step * self.rollout.group_size


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which part of each recorded response is trained on, and how many in a step."""

    path: str = ""
    """A JSONL file; usually named on the command line."""
    sequences_per_step: int = 176
    sequence_length: int = 768
    """Tokens (bytes) of prompt, response and EOS; what is longer is cut at the end."""
    max_prompt_length: int = 384
    """Of a longer prompt the last so many bytes are kept."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("data.path is missing: name the JSONL file of recorded responses.")
        sizes = ("sequences_per_step", "sequence_length", "max_prompt_length")
        _check_positive("data", self, names=sizes)
        if self.max_prompt_length >= self.sequence_length - 1:
            raise ValueError(
                f"data.max_prompt_length={self.max_prompt_length} leaves no room for a response in "
                f"data.sequence_length={self.sequence_length}."
            )


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(TrainingConfig):
    """Offline training on recorded responses."""

    data: DataConfig

    @property
    def sequences_per_step(self) -> int:
        """As `data` says."""
        return self.data.sequences_per_step


def _as_term(loss_agg: LossAggConfig) -> LossAggConfig:
    """One mode as a configuration with one term, the policy's."""
    names = ("loss_agg_mode", "loss_scale_factor", "norm_semantics", "sequence_count")
    term = {"name": POLICY} | {name: getattr(loss_agg, name) for name in names}
    rest = {key: value for key, value in loss_agg.to_dict().items() if key not in names}
    return LossAggConfig.from_dict({**rest, "terms": [term]})


def _check_positive(section: str, config: Any, names: tuple[str, ...] | None = None) -> None:
    names = tuple(f.name for f in dataclasses.fields(config)) if names is None else names
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            where = f"{section}.{name}" if section else name
            raise ValueError(f"{where}={value} must be greater than 0.")
