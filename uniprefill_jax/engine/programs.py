"""The engine's compiled programs of one model, shared by all engines over it."""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import jax
from flax import nnx

from uniprefill_jax.llm import LLM

_BY_MODEL: "WeakKeyDictionary[LLM, StepPrograms]" = WeakKeyDictionary()


class StepPrograms:
    """Keeps jitted functions by a key that says all that is static about them; shapes are jit's own affair."""

    def __init__(self, llm: LLM):
        """Use `StepPrograms.of`."""
        self._graph, self._parameters = llm.programs.graph, llm.programs.parameters
        self._precision = llm.programs.precision
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    @classmethod
    def of(cls, llm: LLM) -> "StepPrograms":
        """The programs of a model."""
        if llm not in _BY_MODEL:
            _BY_MODEL[llm] = cls(llm)
        return _BY_MODEL[llm]

    @property
    def count(self) -> int:
        """Functions made so far."""
        return len(self._compiled)

    def get(self, key: Hashable, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """The jitted function of this key."""
        if key not in self._compiled:
            compiled = jax.jit(function, donate_argnums=donate)

            def call(*arguments: Any) -> Any:
                with jax.default_matmul_precision(self._precision):
                    return compiled(*arguments)

            self._compiled[key] = call
        return self._compiled[key]

    def with_model(
        self, key: Hashable, function: Callable[..., Any], donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """The same of a function whose first argument is the model; `donate` counts it, the caller leaves it out."""
        graph = self._graph

        def merged(parameters: nnx.State, *arguments: Any) -> Any:
            return function(nnx.merge(graph, parameters), *arguments)

        program = self.get(key, merged, donate)
        return lambda *arguments: program(self._parameters, *arguments)
