"""The engine's compiled programs of one model, shared by all engines over it."""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import jax
from flax import nnx

from uniprefill_jax.llm import LLM
from uniprefill_jax.parallel.mesh import TENSOR

_BY_MODEL: "WeakKeyDictionary[LLM, StepPrograms]" = WeakKeyDictionary()


class StepPrograms:
    """Keeps jitted functions by a key that says all that is static about them; shapes are jit's own affair."""

    def __init__(self, llm: LLM):
        """Use `StepPrograms.of`."""
        # A list of arrays: modules are taken apart in Python, for every call anew.
        self._parameters, parameters = jax.tree.flatten(llm.programs.parameters)
        graph = llm.programs.graph
        self._model_of = lambda arrays: nnx.merge(graph, jax.tree.unflatten(parameters, arrays))
        self._precision = llm.programs.precision
        self._rules = llm.programs.rules
        self._put = llm.programs.put
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    @classmethod
    def of(cls, llm: LLM) -> "StepPrograms":
        """The programs of a model."""
        if llm not in _BY_MODEL:
            _BY_MODEL[llm] = cls(llm)
        return _BY_MODEL[llm]

    def put(self, arrays: Any) -> Any:
        """Arrays of the host (a pytree) on every device that the programs run on."""
        return self._put(arrays)

    @property
    def count(self) -> int:
        """Functions made so far."""
        return len(self._compiled)

    def get(self, key: Hashable, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """The jitted function of this key."""
        if key not in self._compiled:
            self._compiled[key] = self._jitted(function, donate)
        return self._compiled[key]

    @property
    def shards(self) -> int:
        """Tensor shards of the model."""
        return 1 if self._rules is None else self._rules.mesh.shape[TENSOR]

    def make[Tree](self, function: Callable[[], Tree]) -> Tree:
        """What `function` makes, placed as programs return it: no device ever holds the pools of all shards."""
        return function() if self._rules is None else self._jitted(function)()

    def with_model(
        self, key: Hashable, function: Callable[..., Any], donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """The same of a function whose first argument is the model; `donate` counts it, the caller leaves it out."""
        model_of = self._model_of

        def merged(parameters: list[jax.Array], *arguments: Any) -> Any:
            return function(model_of(parameters), *arguments)

        program = self.get(key, merged, donate)
        return lambda *arguments: program(self._parameters, *arguments)

    def _jitted(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        rules, precision = self._rules, self._precision

        def placed(*arguments: Any) -> Any:
            with jax.default_matmul_precision(precision):
                outputs = function(*arguments)
            return outputs if rules is None else rules.constrain_steps(outputs)

        compiled = jax.jit(placed, donate_argnums=donate)
        if rules is None:
            return compiled

        def call(*arguments: Any) -> Any:
            # The mesh in force while a program is traced decides what runs per shard (parallel/shards.py).
            with jax.set_mesh(rules.mesh):
                return compiled(*arguments)

        return call
