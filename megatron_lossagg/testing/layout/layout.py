"""A parallel layout as a value: the sizes of the groups and the number of microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lossagg.typed_fields import check_flags

_KEYS = {
    "TP": "tp",
    "PP": "pp",
    "VPP": "vpp",
    "C": "cp",
    "EP": "ep",
    "D": "dp",
    "INST": "optimizer_instances",
    "SP": "sequence_parallel",
    "M": "num_microbatches",
}
_ALIASES = {"DP": "D", "CP": "C"}


@dataclass(frozen=True)
class Layout:
    """How a global batch and a model are spread over ranks.

    Attributes:
        dp: pure data-parallel size D (context parallel ranks not counted).
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        vpp: model chunks per pipeline rank; more than 1 needs `pp` > 1, `num_microbatches` >= pp.
        cp: context-parallel size C.
        ep: expert-parallel size. Its ranks are among the D * C * TP ranks of a pipeline stage, and
            with `ep` > 1 tensor parallelism does not split the matrices of an expert.
        optimizer_instances: groups of data x context parallel ranks, in each of which the
            distributed optimizer shards for itself (`num_distributed_optimizer_instances`).
        num_microbatches: microbatches M per data-parallel rank and step, of the rank with most.
        sequence_parallel: whether activations between tensor-parallel regions are sharded; needs
            `tp` > 1.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    optimizer_instances: int = 1
    num_microbatches: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        """Check the sizes, and what Megatron's schedules demand of them."""
        for name in _KEYS.values():
            if name == "sequence_parallel":
                continue
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"Layout: {name} must be an int of at least 1, got {size!r}")
        check_flags(sequence_parallel=self.sequence_parallel)
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"Layout: vpp={self.vpp} needs pp > 1, got pp=1; use vpp=1 or pp=2")
        if self.vpp > 1 and self.num_microbatches < self.pp:
            # The interleaved schedule refuses a last group of microbatches smaller than the
            # pipeline, and there is at least one group.
            raise ValueError(
                f"Layout: vpp={self.vpp} needs num_microbatches >= pp, got "
                f"num_microbatches={self.num_microbatches} and pp={self.pp}"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("Layout: sequence_parallel needs tp > 1, got tp=1")
        if self.dp * self.cp % self.optimizer_instances:
            raise ValueError(
                f"Layout: optimizer_instances must divide dp * cp = {self.dp * self.cp}, got "
                f"{self.optimizer_instances}"
            )
        ranks_per_stage = self.dp * self.cp * self.tp
        if ranks_per_stage % self.ep:
            raise ValueError(
                f"Layout: ep must divide dp * cp * tp = {ranks_per_stage}, the ranks of a pipeline "
                f"stage, got ep={self.ep}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: D * TP * PP * C."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def width_multiple(self) -> int:
        """What the width of a row must be a multiple of: 2C, times TP if activations are sharded.

        In packed data each sequence with its padding is such a row.
        """
        pieces = 2 * self.cp if self.cp > 1 else 1
        return pieces * (self.tp if self.sequence_parallel else 1)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout from text such as "PP=2 VPP=2 C=2 D=1 M=4".

        Args:
            text: ``key=number`` pairs, separated by spaces or commas; keys TP, PP, VPP, C, EP, D,
                M, and SP (0 or 1, sequence parallel), upper or lower case; DP and CP are D and C.
                What is not named is 1.

        Returns:
            The layout.

        Raises:
            ValueError: text that is no such pair, or a key that does not exist.
        """
        keys = f"{', '.join(_KEYS)} (or DP for D, CP for C)"
        expected = f"expected pairs like 'PP=2 VPP=2 C=2 D=1 M=4' with keys {keys}"
        sizes: dict[str, int] = {}
        for pair in text.replace(",", " ").split():
            key, equals, number = pair.partition("=")
            key = _ALIASES.get(key.upper(), key.upper())
            name = _KEYS.get(key)
            if name is None or not equals or not number.isdecimal():
                raise ValueError(f"Layout.parse: cannot read {pair!r} in {text!r}; {expected}")
            if name in sizes:
                raise ValueError(f"Layout.parse: {key} is given twice in {text!r}")
            sizes[name] = int(number)
        if not sizes:
            raise ValueError(f"Layout.parse: got {text!r}; {expected}")
        flag = sizes.pop("sequence_parallel", 0)
        if flag > 1:
            raise ValueError(f"Layout.parse: SP must be 0 or 1, got SP={flag} in {text!r}")
        return cls(**sizes, sequence_parallel=bool(flag))

    def __str__(self) -> str:
        """The text that `parse` reads, without the sizes that are 1; M is always there."""
        named = {
            key: int(getattr(self, name))
            for key, name in _KEYS.items()
            if name != "num_microbatches"
        }
        if not self.sequence_parallel:
            named.pop("SP")
        shown = [f"{key}={n}" for key, n in named.items() if n > 1 or key == "SP"] or ["D=1"]
        return " ".join([*shown, f"M={self.num_microbatches}"])
