"""Matrix products with a layer's weights, which may still lie in the stack of all layers of their kind.

Cutting one layer's matrices out of the stack copies them, and XLA's matrix products take no operand in the middle of
another array: at 4K tokens the copies of an 8B model are a twelfth of the prefill. The grouped product of
`pallas_kernels` reads the stack where it lies, and computes no more rows than are real.
"""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul import choose_backend, grouped_gated_matmul, grouped_matmul, grouped_matmul_each
from uniprefill_jax.models.parameters import ParameterSpec
from uniprefill_jax.parallel.shards import tensor_shards

# As functions of their own in the program, products of one shape are traced and lowered once, however many there are.
product = jax.jit(grouped_matmul, static_argnames="backend")
product_each = jax.jit(grouped_matmul_each, static_argnames="backend")
gated_product = jax.jit(grouped_gated_matmul, static_argnames=("activation", "backend"))


@struct.dataclass
class LayerOfStack:
    """One layer of a stacked parameter [layers, ...]."""

    stack: Array
    index: Int32[Array, ""]

    def cut(self) -> Array:
        """The layer's array on its own."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.index, 0, keepdims=False)


def matrix(weight: nnx.Param) -> Array:
    """A layer's weight as an array of the declared shape."""
    value = weight.get_value()
    return value.cut() if isinstance(value, LayerOfStack) else value


def stack_of(weight: nnx.Param) -> tuple[Array, Int32[Array, ""] | int]:
    """The stack that a layer's weight lies in and its place there; of a weight on its own a stack of one."""
    value = weight.get_value()
    return (value.stack, value.index) if isinstance(value, LayerOfStack) else (value[None], 0)


def project(
    x: Float[Array, "T ..."], weight: nnx.Param, bias: nnx.Param | None = None, count: Int32[Array, ""] | None = None
) -> Float[Array, "T ..."]:
    """x @ weight over the weight's input axes, plus bias.

    With `count`, the number of real rows, the product may run on the grouped kernel, where the machine has one that
    takes it: the rows from `count` on then come out as zero.
    """
    spec, value = _spec(weight), weight.get_value()
    inputs, outputs = spec.shape[: spec.num_inputs], spec.shape[spec.num_inputs :]
    if isinstance(value, LayerOfStack) and count is not None and _kernel_takes(spec, x.dtype, None):
        rows = x.reshape(x.shape[0], prod(inputs))
        result = product(rows, _flat(value.stack, spec), count[None], first_group=value.index)
        result = result.reshape(x.shape[0], *outputs)
    else:
        result = jnp.tensordot(x, matrix(weight), axes=spec.num_inputs)
    return result if bias is None else result + matrix(bias)


def project_each(
    x: Float[Array, "T ..."],
    weights: tuple[nnx.Param, ...],
    biases: tuple[nnx.Param | None, ...],
    count: Int32[Array, ""] | None = None,
) -> tuple[Float[Array, "T ..."], ...]:
    """`project` with each of several weights of the same layer and input axes; a few rows go through one kernel."""
    values = [weight.get_value() for weight in weights]
    specs = [_spec(weight) for weight in weights]
    stacked = all(isinstance(value, LayerOfStack) for value in values)
    if count is None or not stacked or not all(_kernel_takes(spec, x.dtype, None) for spec in specs):
        return tuple(project(x, weight, bias, count) for weight, bias in zip(weights, biases, strict=True))
    rows = x.reshape(x.shape[0], -1)
    stacks = tuple(_flat(value.stack, spec) for value, spec in zip(values, specs, strict=True))
    products = product_each(rows, stacks, count[None], first_group=values[0].index)
    results = []
    for result, spec, bias in zip(products, specs, biases, strict=True):
        result = result.reshape(x.shape[0], *spec.shape[spec.num_inputs :])
        results.append(result if bias is None else result + matrix(bias))
    return tuple(results)


def gated_project(
    x: Float[Array, "T D"],
    gate: nnx.Param,
    up: nnx.Param,
    activation: str,
    count: Int32[Array, ""] | None,
) -> Float[Array, "T F"] | None:
    """activation(x @ gate) * (x @ up) in one kernel, or None where `project` has to do it in parts."""
    first, second = gate.get_value(), up.get_value()
    spec = _spec(gate)
    if count is None or not isinstance(first, LayerOfStack) or not _kernel_takes(spec, x.dtype, activation):
        return None
    return gated_product(
        x,
        _flat(first.stack, spec),
        _flat(second.stack, spec),
        count[None],
        activation=activation,
        first_group=first.index,
    )


class StackedGroups(NamedTuple):
    """Matrices of many layers and experts, one after another; where those of the layer in hand begin, how many."""

    matrices: Float[Array, "groups K N"]
    first: Int32[Array, ""] | int
    count: int


def stacked_groups(weight: LayerOfStack | Array) -> StackedGroups:
    """A layer's expert matrices [experts, K, N], all of them or one shard's, without cutting them out of the stack."""
    if isinstance(weight, LayerOfStack):
        count, *matrix_shape = weight.stack.shape[1:]
        return StackedGroups(weight.stack.reshape(-1, *matrix_shape), weight.index * count, count)
    return StackedGroups(weight, 0, weight.shape[0])


def _spec(weight: nnx.Param) -> ParameterSpec:
    return weight.get_metadata()["spec"]


def _flat(stack: Array, spec: ParameterSpec) -> Float[Array, "groups K N"]:
    """The stack, experts included, as one matrix after another."""
    return stack.reshape(-1, prod(spec.shape[: spec.num_inputs]), prod(spec.shape[spec.num_inputs :]))


def _kernel_takes(spec: ParameterSpec, dtype: jnp.dtype, activation: str | None) -> bool:
    inner, columns = prod(spec.shape[: spec.num_inputs]), prod(spec.shape[spec.num_inputs :])
    if tensor_shards() > 1:
        return False
    # XLA's own products are as good on TPUs, where slices of operands fuse.
    return choose_backend(inner=inner, columns=columns, dtype=str(dtype), activation=activation) == "mosaic_gpu"
