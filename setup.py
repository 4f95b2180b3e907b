"""Packaging of megatron_lossagg; the settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Read `__version__` from the source: importing the package would need torch."""
    source = (ROOT / "megatron_lossagg" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('megatron_lossagg/version.py has no line like __version__ = "1.2.3"')
    return match.group(1)


MEGATRON = ["megatron-core>=0.12"]
CONFIG = ["PyYAML>=6"]
CLI = [*CONFIG, "rich>=13", "typer>=0.12"]
EXPLAIN = [*CLI, "matplotlib>=3.8", "numpy"]
EXAMPLES = [*MEGATRON, *CLI, "matplotlib>=3.8", "numpy", "psutil"]
TENSORBOARD = ["tensorboard>=2.14"]

setup(
    name="megatron_lossagg",
    version=read_version(),
    description="The loss plugin for RL on Megatron-Core: exact global-batch losses in any layout",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=["torch>=2.4"],
    extras_require={
        "megatron": MEGATRON,
        "config": CONFIG,
        "cli": CLI,
        "explain": EXPLAIN,
        "parquet": ["pyarrow>=14"],
        "examples": EXAMPLES,
        "tensorboard": TENSORBOARD,
        "test": [*EXAMPLES, *TENSORBOARD, "einops", "hypothesis>=6.100", "pytest>=8"],
        "dev": ["import-linter>=2.15", "mypy>=1.11", "pydoclint>=0.6", "ruff>=0.6", "types-PyYAML"],
    },
    # The folder plugin/ is installed under a name that cannot clash with another project's.
    package_dir={"megatron_lossagg_plugin": "plugin"},
    packages=[
        *find_packages(include=["megatron_lossagg", "megatron_lossagg.*"]),
        "megatron_lossagg_plugin",
        *(f"megatron_lossagg_plugin.{name}" for name in find_packages("plugin")),
    ],
    package_data={"megatron_lossagg": ["py.typed"], "megatron_lossagg_plugin": ["py.typed"]},
    entry_points={"console_scripts": ["megatron-lossagg = megatron_lossagg.cli:main"]},
    zip_safe=False,
    keywords=["megatron", "reinforcement-learning", "loss", "pipeline-parallel"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
