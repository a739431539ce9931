"""Compiles every kernel for an accelerator that is not there: python -m tests.kernels.ahead_of_time TARGET [--all].

TARGET is "sm_90a" or a TPU topology such as "v6e:2x2". Prints one line per program; runs in an environment that has the
compiler plugin (requirements/aot-gpu.txt, requirements/aot-tpu.txt).
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.block_score import block_score
from pallas_kernels.block_score import shapes as score_shapes
from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.block_sparse_attention import shapes as sparse_shapes
from pallas_kernels.block_sparse_attention.blocks import count_blocks
from pallas_kernels.causal_attention import causal_attention
from pallas_kernels.causal_attention import shapes as attention_shapes
from pallas_kernels.chunk_attention import ChunkRows, chunk_attention
from pallas_kernels.chunk_attention import shapes as chunk_shapes
from pallas_kernels.compact_rows import compact_rows
from pallas_kernels.compact_rows import shapes as compact_shapes
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.gated_delta_rule import shapes as delta_shapes
from pallas_kernels.grouped_matmul import grouped_gated_matmul, grouped_matmul, grouped_matmul_each
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.row_norms import add_rows, norm_rows
from pallas_kernels.row_norms import shapes as row_shapes
from pallas_kernels.top_p_select import shapes as select_shapes
from pallas_kernels.top_p_select import top_p_select


def programs(every_shape: bool):
    """Name, function of a backend, and argument shapes of everything to compile."""
    which = "SHAPES" if every_shape else "DISTINCT_SHAPES"
    for shape in getattr(score_shapes, which):
        heads, kv_heads, head_dim = shape.heads

        def score(backend, queries, keys, cu, shape=shape, head_dim=head_dim):
            return block_score(
                queries,
                keys,
                cu,
                num_blocks=shape.num_blocks,
                block_size=shape.block_size,
                scale=head_dim**-0.5,
                peak=True,
                backend=backend,
            )

        queries = ((shape.batch, shape.window, heads, head_dim), "bfloat16")
        keys = ((shape.rows, kv_heads, head_dim), "bfloat16")
        yield f"block_score {shape}", score, (queries, keys, ((shape.batch + 1,), "int32"))
    for width in row_shapes.WIDTHS if every_shape else row_shapes.WIDTHS[:1]:

        def normed_sum(backend, x, delta, weight, count):
            added = add_rows(x, delta, count, weight=weight, eps=1e-6, zero_centred=True, backend=backend)
            return norm_rows(add_rows(added, x, count, backend=backend), weight, count, eps=1e-6, backend=backend)

        row = ((row_shapes.ROWS, width), "bfloat16")
        yield f"row_norms {width}", normed_sum, (row, row, ((width,), "bfloat16"), ((), "int32"))
    for shape in (*select_shapes.SHAPES, select_shapes.LARGEST) if every_shape else select_shapes.DISTINCT_SHAPES:
        for cut in ("crossing", "below") if every_shape else ("crossing",):

            def select(backend, scores, cu, top_p, shape=shape, cut=cut):
                return top_p_select(
                    scores,
                    cu,
                    top_p,
                    num_rows=min(shape.rows, 1 << 20),
                    block_size=shape.block_size,
                    sink_tokens=128,
                    window_tokens=128,
                    cut=cut,
                    backend=backend,
                )

            scores = ((shape.batch, shape.num_blocks), "float32")
            yield f"top_p_select {shape} {cut}", select, (scores, ((shape.batch + 1,), "int32"), ((), "float32"))
    for shape in getattr(compact_shapes, which):

        def compact(backend, array, indices, count, shape=shape):
            return compact_rows((array,), indices, count, out_rows=shape.rows, backend=backend)

        array = ((shape.rows, shape.width), shape.dtype)
        yield f"compact_rows {shape}", compact, (array, ((shape.rows,), "int32"), ((), "int32"))
    for shape in getattr(attention_shapes, which):
        heads, kv_heads, head_dim = shape.heads

        def attend(backend, queries, keys, values, row_start, count, head_dim=head_dim):
            return causal_attention(
                queries, keys, values, row_start, count, scale=head_dim**-0.5, return_lse=True, backend=backend
            )

        queries, keys = (((shape.rows, h, head_dim), "bfloat16") for h in (heads, kv_heads))
        yield f"causal_attention {shape}", attend, (queries, keys, keys, ((shape.rows,), "int32"), ((), "int32"))

    for shape in getattr(delta_shapes, which):
        value_heads, key_heads, key_dim, value_dim = shape.heads

        def delta(backend, *arrays):
            return gated_delta_rule(*arrays, backend=backend)

        keys = ((shape.rows, key_heads, key_dim), "bfloat16")
        gates = ((shape.rows, value_heads), "float32")
        values = ((shape.rows, value_heads, value_dim), "bfloat16")
        arrays = (keys, keys, values, gates, gates, ((shape.batch + 1,), "int32"))
        yield f"gated_delta_rule {shape}", delta, arrays
    for shape in getattr(grouped_shapes, which):

        def group(backend, rows, sizes, first, *weights, gated=shape.gated):
            if gated:
                return grouped_gated_matmul(
                    rows, *weights, sizes, activation="silu", first_group=first, backend=backend
                )
            return grouped_matmul(rows, *weights, sizes, first_group=first, backend=backend)

        rows = ((shape.rows, shape.inner), "bfloat16")
        weights = [((shape.stacked, shape.inner, shape.columns), "bfloat16")] * (1 + shape.gated)
        yield f"grouped_matmul {shape}", group, (rows, ((shape.groups,), "int32"), ((), "int32"), *weights)
    for number, inner, all_columns, stacked in grouped_shapes.JOINT_SHAPES:

        def group_each(backend, rows, sizes, first, *weights):
            return grouped_matmul_each(rows, weights, sizes, first_group=first, backend=backend)

        weights = [((stacked, inner, columns), "bfloat16") for columns in all_columns]
        arrays = ((number, inner), "bfloat16"), ((1,), "int32"), ((), "int32"), *weights
        yield f"grouped_matmul_each {number} x {inner} x {all_columns}", group_each, arrays
    for shape in getattr(paged_shapes, which):
        heads, kv_heads, head_dim = shape.heads

        def decode(backend, *arrays, head_dim=head_dim):
            return paged_attention(*arrays, scale=head_dim**-0.5, backend=backend)

        queries = ((shape.batch, heads, head_dim), "bfloat16")
        pages = ((shape.num_pages, kv_heads, shape.page, head_dim), "bfloat16")
        table, lengths = ((shape.batch, shape.max_pages), "int32"), ((shape.batch,), "int32")
        yield f"paged_attention {shape}", decode, (queries, pages, pages, table, lengths, lengths)
    for shape in getattr(chunk_shapes, which):
        heads, kv_heads, head_dim = shape.heads

        def prefill(backend, *arrays, head_dim=head_dim):
            return chunk_attention(*arrays[:5], ChunkRows(*arrays[5:]), scale=head_dim**-0.5, backend=backend)

        queries = ((shape.batch * shape.rows, heads, head_dim), "bfloat16")
        pages = ((shape.batch * shape.max_pages, kv_heads, shape.page, head_dim), "bfloat16")
        table, starts = ((shape.batch, shape.max_pages), "int32"), ((shape.batch * shape.rows,), "int32")
        yield (
            f"chunk_attention {shape}",
            prefill,
            (queries, pages, pages, table, starts, *[((shape.batch,), "int32")] * 3),
        )
    for shape in getattr(sparse_shapes, which):
        heads, kv_heads, head_dim = shape.heads

        def attend_sparsely(backend, *arrays, block_size=shape.block_size, head_dim=head_dim):
            return block_sparse_attention(*arrays, block_size=block_size, scale=head_dim**-0.5, backend=backend)

        queries, keys = (((shape.rows, h, head_dim), "bfloat16") for h in (heads, kv_heads))
        count = count_blocks(shape.rows, shape.batch, shape.block_size)
        columns = [((heads, shape.batch, shape.columns), "int32")] if shape.columns else []
        arrays = (queries, keys, keys, ((shape.batch + 1,), "int32"), ((heads, count, count), "bool"), *columns)
        yield f"block_sparse_attention {shape}", attend_sparsely, arrays


def device_of(target: str):
    """A device of the target that is not there, its platform, and the kernels' backend for it."""
    if target == "sm_90a":
        description = Path(__file__).with_name("h200_target.txtpb").read_text()
        topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=description)
        return SingleDeviceSharding(topology.devices[0]), "cuda", "mosaic_gpu"
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
    return SingleDeviceSharding(topology.devices[0]), "tpu", "mosaic_tpu"


def main(target: str, every_shape: bool) -> None:
    """Compile all programs for `target`; the first that does not compile raises."""
    device, platform, backend = device_of(target)
    for name, function, arguments in programs(every_shape):
        if platform == "tpu" and name.startswith("row_norms"):
            continue  # there is no such kernel for TPUs, and no need of one
        shapes = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=device) for shape, dtype in arguments]
        traced = jax.jit(lambda *a, function=function: function(backend, *a)).trace(*shapes)
        program = traced.lower(lowering_platforms=(platform,)).compile()
        text = program.as_text()
        if text is None or not ("mosaic_gpu" in text or "tpu_custom_call" in text):
            raise SystemExit(f"{name}: compiled without the kernel")
        print(f"compiled {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "--all" in sys.argv[2:])
