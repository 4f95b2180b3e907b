"""Settings of the property tests: the same examples in every run, no deadline on a busy machine."""

from hypothesis import settings

settings.register_profile(
    "reproducible", deadline=None, derandomize=True, database=None, max_examples=50
)
settings.load_profile("reproducible")
