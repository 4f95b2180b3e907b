"""The paths that others import from stay, and every module can be the first that is imported."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_lossagg"

PUBLIC = {
    "megatron_lossagg": """
        GlobalCounts LossAggConfig LossAggError LossAggregator LossTerm ParallelGroups
        ScheduleContract agg_loss count_global_batch log_probs_and_entropy_from_logits
        log_probs_from_logits register_mode slice_for_cp token_weights valid_tokens __version__
    """,
    "megatron_lossagg.agg_loss": "agg_loss",
    "megatron_lossagg.aggregator": "LossAggregator",
    "megatron_lossagg.cli": "main",
    "megatron_lossagg.config": "LossAggConfig read_dataclass set_option",
    "megatron_lossagg.counts": """
        FINGERPRINT_BITS GlobalCounts LocalCounts NUM_HELD NUM_MASK_SLOTS PendingCounts
        VECTOR_LENGTH check_given_counts count_global_batch count_local held_counts held_place
        start_reduction sum_local
    """,
    "megatron_lossagg.errors": "LossAggError",
    "megatron_lossagg.groups": """
        ParallelGroups all_reduce_extremes all_reduce_max all_reduce_sum broadcast_from_first
        broadcast_from_last communication_device current_groups
    """,
    "megatron_lossagg.modes": """
        AggregationMode IMPORT_VARIABLE ModeInputs ModeSpec NORM_SEMANTICS OWN_MODES_HINT
        SEQUENCE_COUNTS check_loss_scale_factor check_norm_semantics get_mode import_named_modules
        mode_names reciprocal_or_zero register_mode registered_by registered_names undivided_counts
    """,
    "megatron_lossagg.schedule": """
        CONTRACTS CP_GRADIENTS DENOMINATORS MAX_NUM_TOKENS_R3 RETURNS ScheduleContract
        check_model_config check_options regime_of
    """,
    "megatron_lossagg.testing": """
        GlobalBatch Layout PackedBatch RankFailure RankPool RunResult StepContext StepPlan
        SumLossPlan TinyGPT build_model_chunks check_p2p_is_safe cpu_shim_installed
        initialize_model_parallel install_cpu_shim model_output pack_batch pack_rows
        packed_seq_params ragged_batch reference_gradient reference_loss reference_run
        relative_error run_global_batch token_log_probs uninstall_cpu_shim whole_model_gradient
        whole_model_parameters
    """,
    "megatron_lossagg.token_losses": """
        cispo entropy_bonus gmpo gspo kl_penalty policy_gradient ppo_clip sapo sequence_ids_of
        sft_nll truncated_importance_weights value_loss
    """,
    "megatron_lossagg.weights": """
        SequenceWeights WEIGHT_DTYPES check_weight_dtype sequence_weights token_weights
        weights_of_sequences
    """,
    "megatron_lossagg_plugin.megatron_lm": """
        broadcast_batch make_forward_step make_loss_func skip_empty_steps
    """,
}

# Imports each module as the first of the package, whose own __init__ is left out: a module must
# find what it needs by itself, in whatever order modules come.
IMPORT_EACH_FIRST = """
import importlib, sys, types

root, folder, *modules = sys.argv[1:]
import torch

for module in modules:
    for name in [name for name in sys.modules if name.partition(".")[0] == root]:
        del sys.modules[name]
    sys.modules[root] = types.ModuleType(root)
    sys.modules[root].__path__ = [folder]
    try:
        importlib.import_module(module)
    except ImportError as error:
        sys.exit(f"{module} cannot be imported first: {error}")
print("done", len(modules))
"""


@pytest.mark.parametrize("path", PUBLIC)
def test_public_names(path):
    """Each promised path has its names; `from path import name` works."""
    importlib.import_module(path)
    module = sys.modules[path]  # a function hides megatron_lossagg.agg_loss as an attribute
    assert [name for name in PUBLIC[path].split() if not hasattr(module, name)] == []
    assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []


def test_every_module_imports_first():
    """None needs another one to have been imported before, nor meets a half-initialised package."""
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.startswith("__")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    assert len(modules) > 100
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH_FIRST, PACKAGE.name, str(PACKAGE), *modules],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"done {len(modules)}\n"


def test_no_module_imports_from_the_root():
    """As above, for imports inside functions, which an import of the module does not run."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == PACKAGE.name:
                names = [a.name for a in node.names if not (PACKAGE / f"{a.name}.py").exists()]
                found += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in names]
    assert found == []


def test_examples_import_public_names_alone():
    """They show what users write, so they need nothing that may move."""
    found = []
    for path in sorted((ROOT / "examples").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("megatron_lossagg"):
                names = {alias.name for alias in node.names} - set(PUBLIC.get(module, "").split())
                private = sorted(name for name in names if f"{module}.{name}" not in PUBLIC)
                found += [f"{path.relative_to(ROOT)}: {module}.{name}" for name in private]
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names} - set(PUBLIC)
                found += [name for name in names if name.startswith("megatron_lossagg")]
    assert found == []
