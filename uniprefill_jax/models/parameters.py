"""One declaration per parameter: shape, logical axes, checkpoint tensor and initialiser.

A model is built abstractly: every `nnx.Param` holds a `jax.ShapeDtypeStruct` and its `ParameterSpec`. Loading, random
initialisation and sharding all walk over these declarations, so nothing about a parameter is said twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


def normal(standard_deviation: float) -> Initializer:
    """Gaussian initialiser with the given standard deviation."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return _draw_normal(key, jnp.float32(standard_deviation), shape, dtype)

    return init


@partial(jax.jit, static_argnums=(2, 3))
def _draw_normal(key: jax.Array, standard_deviation: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    # One program per shape, whatever the deviation: compiling takes longer than drawing for all but large models.
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * standard_deviation).astype(dtype)

    if len(shape) < 3:
        return draw(key, shape)
    # Layer by layer: the random bits of one layer are all that lies whole on a device, on a mesh too.
    return jax.lax.map(lambda key: draw(key, shape[1:]), jax.random.split(key, shape[0]))


def constant(value: float) -> Initializer:
    """Initialiser that fills with one value."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        del key
        return jnp.full(shape, value, dtype)

    return init


@dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is, in this library and in a Hugging Face checkpoint.

    Attributes:
        shape: shape of one layer's (and one expert's) array here.
        axes: logical axis name of every dimension of `shape`.
        checkpoint: tensor name, with `{layer}` and `{expert}` where the parameter is stacked over them.
        file_shape: shape of the tensor in the checkpoint.
        file_view: the array is `file.reshape(file_view).transpose(permutation)`.
        permutation: see `file_view`.
        init: random initialiser.
        num_inputs: leading dimensions of `shape` that a product sums over; 0 for what is no matrix.
        layers: layer numbers stacked on the leading axis, or None for a single array.
        experts: number of experts stacked after the layers, or None.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    checkpoint: str
    file_shape: tuple[int, ...]
    file_view: tuple[int, ...]
    permutation: tuple[int, ...]
    init: Initializer
    num_inputs: int = 0
    layers: tuple[int, ...] | None = None
    experts: int | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the stacked array: (layers,) + (experts,) + shape, as they apply."""
        layers = () if self.layers is None else (len(self.layers),)
        experts = () if self.experts is None else (self.experts,)
        return layers + experts + self.shape

    @property
    def full_axes(self) -> tuple[str, ...]:
        """Logical axes of the stacked array."""
        layers = () if self.layers is None else ("layers",)
        experts = () if self.experts is None else ("experts",)
        return layers + experts + self.axes


@dataclass(frozen=True)
class ParameterScope:
    """Where a module's parameters live in a checkpoint: a name prefix and the layers stacked together."""

    dtype: jnp.dtype
    prefix: str = ""
    layers: tuple[int, ...] | None = None
    experts: int | None = None

    def child(self, name: str, experts: int | None = None) -> "ParameterScope":
        """The scope of a submodule called `name` in the checkpoint."""
        return ParameterScope(self.dtype, f"{self.prefix}{name}.", self.layers, experts or self.experts)

    def declare(
        self,
        name: str,
        shape: Sequence[int],
        axes: Sequence[str],
        *,
        init: Initializer,
        permutation: Sequence[int] | None = None,
        file_shape: Sequence[int] | None = None,
        num_inputs: int = 0,
    ) -> nnx.Param:
        """Declare one parameter; by default the file holds the same array in the same order.

        `permutation` takes the axes of the file's view to `shape`; `file_shape` is given where the file flattens that
        view.
        """
        shape = tuple(shape)
        permutation = tuple(range(len(shape)) if permutation is None else permutation)
        file_view = tuple(shape[permutation.index(axis)] for axis in range(len(shape)))
        spec = ParameterSpec(
            shape=shape,
            axes=tuple(axes),
            checkpoint=self.prefix + name,
            file_shape=file_view if file_shape is None else tuple(file_shape),
            file_view=file_view,
            permutation=permutation,
            init=init,
            num_inputs=num_inputs,
            layers=self.layers,
            experts=self.experts,
        )
        if len(spec.axes) != len(shape) or int(np.prod(spec.file_shape)) != int(np.prod(shape)):
            raise AssertionError(f"inconsistent declaration of {spec.checkpoint}: {spec}")
        return nnx.Param(jax.ShapeDtypeStruct(spec.full_shape, self.dtype), spec=spec)

    def linear(
        self,
        name: str,
        inputs: tuple[tuple[int, str], ...],
        outputs: tuple[tuple[int, str], ...],
    ) -> nnx.Param:
        """A projection, here [*inputs, *outputs], in the file a matrix [prod(outputs), prod(inputs)]."""
        shape = tuple(size for size, _ in inputs + outputs)
        axes = tuple(axis for _, axis in inputs + outputs)
        count = len(inputs)
        fan_in = int(np.prod(shape[:count]))
        # The file's view is (*outputs, *inputs); here the inputs come first.
        permutation = tuple(range(len(outputs), len(shape))) + tuple(range(len(outputs)))
        file_shape = (int(np.prod(shape[count:])), fan_in)
        return self.declare(
            name,
            shape,
            axes,
            init=normal(fan_in**-0.5),
            permutation=permutation,
            file_shape=file_shape,
            num_inputs=count,
        )


ChooseSharding = Callable[[str, ParameterSpec], Sharding | None]


def parameter_specs(model: nnx.Module) -> dict[str, ParameterSpec]:
    """Every parameter's declaration by its dotted path in the model."""
    return {path: variable.get_metadata()["spec"] for path, variable in _parameters(model)}


def initialise(model: nnx.Module, seed: int, sharding: ChooseSharding | None = None) -> dict[str, jax.Array]:
    """Random arrays for every parameter, by path: what `load_parameters` gives for a checkpoint.

    `sharding` gives each parameter's placement (None: the default device) and does not change its values.
    """
    parameters = {}
    key = jax.random.key(seed, impl="rbg")  # compiles and draws several times faster than the default generator
    for number, (path, variable) in enumerate(_parameters(model)):
        spec: ParameterSpec = variable.get_metadata()["spec"]
        dtype = variable.get_value().dtype
        own = jax.random.fold_in(key, number)
        if sharding is None:
            parameters[path] = spec.init(own, spec.full_shape, dtype)
        else:
            draw = jax.jit(spec.init, static_argnums=(1, 2), out_shardings=sharding(path, spec))
            parameters[path] = draw(own, spec.full_shape, dtype)
    return parameters


def with_parameters(model: nnx.Module, parameters: dict[str, jax.Array]) -> nnx.State:
    """The model's state with arrays in place of the abstract declarations."""
    state = nnx.state(model, nnx.Param)
    flat = nnx.to_flat_state(state)
    filled = [(path, variable.replace(parameters[".".join(map(str, path))])) for path, variable in flat]
    return nnx.from_flat_state(filled)


def _parameters(model: nnx.Module) -> list[tuple[str, nnx.Variable]]:
    return [(".".join(map(str, path)), variable) for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))]
