"""Who computes attention and products on which machine, and how the work follows the number of rows that are left."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.causal_attention import choose_backend as attention_backend
from pallas_kernels.grouped_matmul import choose_backend as product_backend
from uniprefill_jax.models.batch import Execution
from uniprefill_jax.models.config import ModelConfig

LengthsBy = Literal["auto", "loops", "ladder", "kernels"]


def choose_execution(
    model: ModelConfig,
    dtype: jnp.dtype,
    num_requests: int,
    lengths_by: LengthsBy,
    on_mesh: bool,
    platform: str | None,
) -> tuple[LengthsBy, Execution]:
    """What "auto" means here, and the backends that go with it; see `PrefillPlan.for_batch`."""
    platform = platform or jax.default_backend()
    if lengths_by == "auto":
        on_kernels = not on_mesh and platform == "gpu" and _kernels_take(model, dtype)
        lengths_by = "loops" if platform == "cpu" else "kernels" if on_kernels else "ladder"
    if lengths_by == "kernels":
        return lengths_by, Execution("kernel", "kernel", skip_padding=True)
    if platform == "tpu" and _tpu_attention_takes(model, dtype):
        return lengths_by, Execution("kernel", "kernel", skip_padding=False)
    cudnn = platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and num_requests == 1
    return lengths_by, Execution("cudnn" if cudnn else "xla", "xla", skip_padding=False)


def _kernels_take(model: ModelConfig, dtype: jnp.dtype) -> bool:
    """Whether attention and every large product of the model run on the Hopper kernels here."""
    width = model.num_heads * model.head_dim
    products = [(model.hidden_size, width), (width, model.hidden_size)]
    if any(layer.feed_forward == "dense" for layer in model.layers):
        products += [(model.hidden_size, model.intermediate_size), (model.intermediate_size, model.hidden_size)]
    attention = attention_backend(head_dim=model.head_dim, dtype=str(jnp.dtype(dtype)))
    chosen = [product_backend(inner=inner, columns=columns, dtype=str(jnp.dtype(dtype))) for inner, columns in products]
    return {attention, *chosen} == {"mosaic_gpu"}


def _tpu_attention_takes(model: ModelConfig, dtype: jnp.dtype) -> bool:
    """Whether attention runs on the TPU kernel; its reference holds all scores, the plain path does not."""
    return "mosaic_tpu" == attention_backend(
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=str(jnp.dtype(dtype)),
        platform="tpu",
    )
