"""Single kernels against their references, their rivals and the hardware: what `uniprefill bench kernels` runs."""

from collections.abc import Callable

from uniprefill_jax.bench.kernel_times import (
    block_sparse_attention,
    causal_attention,
    chunk_attention,
    drop,
    gated_delta_rule,
    grouped_matmul,
    paged_attention,
)
from uniprefill_jax.bench.kernel_times.conditions import Conditions, Report

# What can be measured, by the names of the command line.
BENCHMARKS: dict[str, Callable[[Conditions, Report], None]] = {
    "drop": drop.measure,
    "causal_attention": causal_attention.measure,
    "chunk_attention": chunk_attention.measure,
    "block_sparse_attention": block_sparse_attention.measure,
    "paged_attention": paged_attention.measure,
    "gated_delta_rule": gated_delta_rule.measure,
    "grouped_matmul": grouped_matmul.measure,
}
