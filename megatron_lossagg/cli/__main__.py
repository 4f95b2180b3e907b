"""`python -m megatron_lossagg.cli`."""

from megatron_lossagg.cli import main

main()
