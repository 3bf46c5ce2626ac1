"""Variants that depend on the configuration, the environment or the failure.

A rule returns the fields of ``Variant`` it fills in, or None where there is nothing to do.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from mlm_recipe.guard.flags import format_flags, parse_flags
from mlm_recipe.guard.variants import Context, config_value

Fields = dict[str, Any] | None

OPTIMISATION_PASSES = frozenset(
    """
    algsimp all-gather-dynamic-slice-simplifier all-gather-optimizer all-reduce-folder
    all-reduce-reassociate all-reduce-simplifier associative-scan-rewriter
    batch-dot-simplification broadcast_canonicalizer collective-permute-combiner
    collective-permute-motion collective-pipeliner-forward computation-deduplicator
    conditional-to-select constant_folding convert-mover copy_fusion cpu-all-reduce-combiner
    cse cublas-gemm-broadcast-folding-rewriter cublas-pad-for-gemms
    cudnn-fused-convolution-rewriter dot-library-rewriter dot-merger dot-strength-reduction
    dus-accumulator-zero-init-elimination dynamic-slice-fusion-rewriter
    dynamic-slice-fusion-rewriter-v2 fusion fusion-block-level-rewriter gather_simplifier
    gemm-fusion gemm-fusion-swap-operands gemv-rewriter gpu-all-gather-combiner
    gpu-all-reduce-combiner gpu-reduce-scatter-combiner hoist-fused-bitcasts
    horizontal-input-fusion horizontal-loop-fusion latency-hiding-scheduler move_copy_to_users
    multi_output_fusion permutation_sort_simplifier priority-fusion reduce-scatter-creator
    reduce-scatter-reassociate reduce-window-rewriter reduction-splitter reshape-mover
    scatter-slice-simplifier scatter_simplifier simplify-conditional simplify-fp-conversions
    simplify-sorts simplify-while-loops slice-sinker small-while-loop-hoisting sort-iota-fusion
    sort-rewriter splitk-rewriter topk-splitter transpose-folding tree-reduction-rewriter
    tree_reduction_rewriter triton-gemm-rewriter triton-softmax-rewriter
    while-loop-all-reduce-code-motion while-loop-constant-sinking
    while-loop-invariant-code-motion windowed-einsum-handler
    """.split()
)
"""HLO passes a program is correct without, as jaxlib 0.11.2 prints them. Expanders,
legalisation, layout assignment, partitioning and copy insertion are not among them."""

_SMALLEST_FRACTION = 0.5
_DEFAULT_AXES = {"data": -1, "replica": 1, "model": 1}
_DEFAULT_PARAMETERS = {"embed": "data"}
_BATCH_AXES = ("replica", "data")


def drop_unknown_flags(context: Context) -> Fields:
    """The user's flags without those that XLA said it does not know."""
    unknown = {name.lstrip("-").partition("=")[0] for name in _unknown(context)}
    env = {}
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        flags = parse_flags(context.environ.get(variable, ""))
        kept = {name: value for name, value in flags.items() if name not in unknown}
        if kept != flags:
            env[variable] = format_flags(kept)
    return {"env": env} if env else None


def _unknown(context: Context) -> tuple[str, ...]:
    return context.failure.flags if context.failure else ()


def fresh_cache(context: Context) -> Fields:
    """An empty compilation cache, or none."""
    if context.fresh_cache_dir is None:
        return {"env": {"JAX_ENABLE_COMPILATION_CACHE": "false"}}
    return {"env": {"JAX_COMPILATION_CACHE_DIR": context.fresh_cache_dir}}


def lower_gpu_memory_fraction(context: Context) -> Fields:
    """0.15 less for XLA's pool: NCCL, cuDNN and CUDA graphs allocate outside it."""
    variable = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    default = config_value(context.config, "guard.gpu_memory_fraction", 0.75)
    try:
        now = float(context.environ.get(variable, default))
    except ValueError:
        return None
    lower = max(_SMALLEST_FRACTION, min(0.75, round(now - 0.15, 2)))
    return {"env": {variable: f"{lower:g}"}} if lower < now else None


def disable_last_pass(context: Context) -> Fields:
    """Without the pass that ran when the compiler died, if programs are correct without it."""
    last = context.failure.last_pass if context.failure else None
    if last not in OPTIMISATION_PASSES:
        return None
    return {"xla_flags": {"xla_disable_hlo_passes": last}, "cost": f"HLO pass {last} is left out"}


def attention_plain(context: Context) -> Fields:
    """Plain attention, where training uses another: not on a CPU, nor with attention dropout."""
    backend = config_value(context.config, "model.attn_backend")
    if config_value(context.config, "model.attention_dropout", 0.1) > 0:
        return None
    if str(backend).lower() == "vanilla" or (backend is None and context.platform == "cpu"):
        return None
    return {"overrides": {"model.attn_backend": "vanilla"}}


def fsdp(context: Context) -> Fields:
    """Parameters sharded over ``data`` by their ``embed`` axis, where they are not."""
    if _parameter_mapping(context).get("embed") is not None:
        return None
    return _mesh(context, {"param_mapping": dict(_DEFAULT_PARAMETERS)})


def fsdp_other_axis(context: Context) -> Fields:
    """Parameters sharded over ``data``, but by ``mlp`` and ``vocab``."""
    if "embed" not in _parameter_mapping(context) or _size(context, "data") == 1:
        return None
    return _mesh(context, {"param_mapping": {"mlp": "data", "vocab": "data"}})


def pure_data_parallel(context: Context) -> Fields:
    """All devices along ``data``, every parameter whole on each."""
    mesh = config_value(context.config, "trainer.mesh", {})
    sharded = bool(_parameter_mapping(context)) or any(
        size not in (1, -1) for name, size in (mesh.get("axes") or {}).items() if name != "data"
    )
    if not sharded or context.devices == 1:
        return None
    kept = {key: mesh[key] for key in ("dcn_axes", "batch_axis_name") if key in mesh}
    plain = {**kept, "axes": dict(_DEFAULT_AXES), "param_mapping": {}}
    return {"overrides": {"trainer.mesh": plain}}


def _parameter_mapping(context: Context) -> Mapping[str, Any]:
    return config_value(context.config, "trainer.mesh.param_mapping", _DEFAULT_PARAMETERS)


def _mesh(context: Context, change: Mapping[str, Any]) -> Fields:
    """``trainer.mesh`` as a whole, so that mesh variants replace each other cleanly."""
    if context.devices == 1:
        return None
    mesh = config_value(context.config, "trainer.mesh", {})
    return {"overrides": {"trainer.mesh": {**mesh, **change}}}


def _size(context: Context, axis: str) -> int | None:
    """Devices along a mesh axis; None where that is not known."""
    axes = {**_DEFAULT_AXES, **config_value(context.config, "trainer.mesh.axes", {})}
    if sum(size == -1 for size in axes.values()) > 1:
        axes["data"] = 1  # Levanter's rule: the user's own absorber wins
    if axes.get(axis, 1) != -1:
        return axes.get(axis, 1)
    if context.devices is None:
        return None
    others = math.prod(size for size in axes.values() if size != -1)
    return context.devices // others if others and context.devices % others == 0 else None


def microbatches(parts: int) -> Callable[[Context], Fields]:
    """At least ``parts`` times as many microbatches, as the batch divides."""

    def rule(context: Context) -> Fields:
        batch = config_value(context.config, "trainer.train_batch_size")
        sizes = [_size(context, axis) for axis in _BATCH_AXES]
        if not isinstance(batch, int) or None in sizes:
            return None
        shards = math.prod(size for size in sizes if size is not None)
        now = config_value(context.config, "trainer.per_device_parallelism", -1)
        rows, left_over = divmod(batch, shards)
        if rows < 1 or left_over:
            return None
        now = rows if now == -1 else now
        fitting = [n for n in range(1, now // parts + 1) if rows % n == 0]
        if not fitting:
            return None
        return {"overrides": {"trainer.per_device_parallelism": fitting[-1]}}

    return rule


RULES: Mapping[str, Callable[[Context], Fields]] = {
    "drop_unknown_flags": drop_unknown_flags,
    "fresh_cache": fresh_cache,
    "lower_gpu_memory_fraction": lower_gpu_memory_fraction,
    "disable_last_pass": disable_last_pass,
    "attention_plain": attention_plain,
    "fsdp": fsdp,
    "fsdp_other_axis": fsdp_other_axis,
    "pure_data_parallel": pure_data_parallel,
    "more_microbatches": microbatches(2),
    "more_microbatches_4": microbatches(4),
    "more_microbatches_16": microbatches(16),
}
