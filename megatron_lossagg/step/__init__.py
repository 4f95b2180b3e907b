"""One optimizer step: planned, run, checked, reported."""
