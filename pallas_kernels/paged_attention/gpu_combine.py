"""Partial results of decode attention become outputs on Hopper GPUs (Mosaic GPU).

A request's items follow one another, so one program a request and key head goes along them with a running maximum, in
an order that the lengths alone decide. Spelled in XLA the same takes eight small kernels, in every layer.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.gpu_work import BEGIN, END, count_items, item_stretch

LOWEST = -1e30  # what a running maximum starts from: finite, so that nothing becomes NaN
TINY = 1e-30  # below any sum of weights, the largest of which is 1


def combine(
    partial: Float[Array, "items KV d G"],
    maximum: Float[Array, "items KV G"],
    total: Float[Array, "items KV G"],
    requests: Int32[Array, "B columns"],
    stretches: int,
) -> Float[Array, "B KV d G"]:
    """Outputs of every request, float32, from undivided partial ones with their maxima (in log2) and sums of weights.

    Items that no request owns may hold anything. A request without items gets 0.
    """
    _, kv_heads, head_dim, columns = partial.shape
    batch = requests.shape[0]
    layout = mgpu.Layout.WGMMA

    def body(partial_gmem, maximum_gmem, total_gmem, requests_gmem, out_gmem):
        request, kv_head = lax.axis_index("request"), lax.axis_index("kv_head")
        steps = requests_gmem[batch - 1, END]
        begin, end = requests_gmem[request, BEGIN], requests_gmem[request, END]

        def load_columns(ref):
            return mgpu.load(ref, layout=layout.reduce(0), optimized=False)

        def add(number, carry):
            highest, divisor, result = carry
            item = item_stretch(number, begin, steps, stretches) + request
            own_highest = load_columns(maximum_gmem.at[item, kv_head])
            own = mgpu.load(partial_gmem.at[item, kv_head], layout=layout, optimized=False)
            higher = jnp.maximum(highest, own_highest)
            shrink, weight = jnp.exp2(highest - higher), jnp.exp2(own_highest - higher)
            divisor = divisor * shrink + load_columns(total_gmem.at[item, kv_head]) * weight
            result = result * lax.broadcast_in_dim(shrink, own.shape, [1])
            return higher, divisor, result + own * lax.broadcast_in_dim(weight, own.shape, [1])

        def vector(value):
            return mgpu.layout_cast(jnp.full((columns,), value, jnp.float32), layout.reduce(0))

        empty = mgpu.layout_cast(jnp.zeros((head_dim, columns), jnp.float32), layout)
        items = count_items(begin, end, steps, stretches)
        _, divisor, result = lax.fori_loop(0, items, add, (vector(LOWEST), vector(0.0), empty))
        # Without items the result is 0, and must not be divided by 0.
        divisor = jnp.maximum(divisor, TINY)
        out_gmem[request, kv_head] = result / lax.broadcast_in_dim(divisor, result.shape, [1])

    return mgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, head_dim, columns), jnp.float32),
        grid=(batch, kv_heads),
        grid_names=("request", "kv_head"),
        compiler_params=mgpu.CompilerParams(approx_math=True),
    )(partial, maximum, total, requests)
