"""Whether float32 rounding explains that two runs of a model differ, by the plain float64 model.

Two things make a tiny random hybrid sensitive. A router may score two experts almost alike, so that another order of
summation chooses the other one. And a recurrent head whose output nearly cancels is scaled up by its norm, rounding
errors with it. Both are looked for in float64, with the kept sets that the runs agreed on: near ties are reversed, one
or two at a time, and every product and norm is disturbed by as much as float32 may.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

import uniprefill_jax as up
from tests.parity.compare import LOGIT_TOLERANCE, relative_error
from tests.parity.plain_model import PlainModel
from tests.sparsify.rule import Rule

# Half the error bound of a sum of 32 float32 products, which is how long the sums of the tiny models are.
ROUNDING = 16 * 2.0**-24
RUNS = 8


class NearTie(NamedTuple):
    """A router's last chosen and first rejected expert, closer than rounding moves them; `row` of the layer's rows."""

    layer: int
    row: int
    margin: float


class Explanation(NamedTuple):
    """What float64 says of two runs of one request.

    Attributes:
        spread: how far rounding moves the logits, relative, with all choices of experts as they are.
        near_ties: of all routers.
        errors: of each run, relative to the float64 model with those near ties reversed that bring it closest.
        reversed: these near ties, for each run.
    """

    spread: float
    near_ties: list[NearTie]
    errors: tuple[float, float]
    reversed: tuple[list[NearTie], list[NearTie]]

    @property
    def holds(self) -> bool:
        """Whether both runs are the float64 model's, but for rounding and near ties."""
        return max(self.errors) <= max(LOGIT_TOLERANCE, self.spread)


class RoundingModel(PlainModel):
    """The plain model with disturbed products and norms, and with some routers' near ties reversed."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._random: np.random.Generator | None = None
        self._reversed: Sequence[NearTie] = ()
        self._routers: list[np.ndarray] = []
        self._exact_routers: list[np.ndarray] = []

    def logits(
        self,
        tokens: list[int],
        config: up.UniPrefillConfig,
        kept: Mapping[int, np.ndarray],
        reverse: Sequence[NearTie] = (),
        disturb: np.random.Generator | None = None,
    ) -> np.ndarray:
        """The last token's logits, with near ties reversed, or disturbed with the experts as they last were without."""
        self._random, self._reversed, self._routers = disturb, reverse, []
        rule = Rule(**{name: getattr(config, name) for name in Rule.__dataclass_fields__})
        positions = {layer: np.asarray(own) for layer, own in kept.items()}
        logits = self.forward(np.asarray(tokens), len(tokens), rule, positions).logits[0]
        if disturb is None:
            self._exact_routers = self._routers
        return logits

    def explain(
        self,
        tokens: list[int],
        config: up.UniPrefillConfig,
        kept: Mapping[int, np.ndarray],
        runs: tuple[np.ndarray, np.ndarray],
    ) -> Explanation:
        """The logits of two runs of one request, which kept the same tokens."""

        def run(seed: int | None = None, reverse: Sequence[NearTie] = ()) -> np.ndarray:
            return self.logits(tokens, config, kept, reverse, None if seed is None else np.random.default_rng(seed))

        exact = run()
        routers = self._routers
        spread, moved = 0.0, [np.zeros(len(scores)) for scores in routers]
        margins = [self._margins(scores, scores) for scores in routers]
        for seed in range(RUNS):
            spread = max(spread, relative_error(run(seed), exact))
            for layer, scores in enumerate(self._routers):
                moved[layer] = np.maximum(moved[layer], np.abs(self._margins(scores, routers[layer]) - margins[layer]))
        near_ties = [
            NearTie(layer, int(row), float(margins[layer][row]))
            for layer in range(len(routers))
            for row in np.flatnonzero(margins[layer] <= moved[layer])
        ]
        choices = [chosen for count in range(3) for chosen in combinations(near_ties, count)]
        outcomes = [(chosen, run(reverse=chosen)) for chosen in choices]
        # Reversals that change nothing are not counted in.
        best = [min((relative_error(own, result), len(ties), ties) for ties, result in outcomes) for own in runs]
        (ours, _, our_ties), (theirs, _, their_ties) = best
        return Explanation(spread, near_ties, (ours, theirs), (list(our_ties), list(their_ties)))

    def _margins(self, scores: np.ndarray, order_of: np.ndarray) -> np.ndarray:
        """By how much every row prefers the last expert that it chooses, by other scores, to the first it does not."""
        chosen, rejected = self._at_the_cut(order_of)
        rows = np.arange(len(scores))
        return scores[rows, chosen] - scores[rows, rejected]

    def _at_the_cut(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order, count = np.argsort(-scores, axis=1, kind="stable"), self.config["num_experts_per_tok"]
        return order[:, count - 1], order[:, count]

    def _disturbed(self, values: np.ndarray) -> np.ndarray:
        if self._random is None:
            return values
        return values * (1 + ROUNDING * self._random.uniform(-1, 1, values.shape))

    def _linear(self, name: str, rows: np.ndarray) -> np.ndarray:
        result = self._disturbed(super()._linear(name, rows))
        if name.endswith("mlp.gate"):
            layer = len(self._routers)
            self._routers.append(result)
            rows = np.array([tie.row for tie in self._reversed if tie.layer == layer], int)
            order_of = result
            if self._random is not None:
                # Rounding is to move the logits by itself, not by another choice of experts.
                order_of = self._exact_routers[layer]
                rows = np.flatnonzero(self._margins(result, order_of) < 0)
            chosen, rejected = self._at_the_cut(order_of)
            result = result.copy()
            result[rows, chosen[rows]], result[rows, rejected[rows]] = (
                result[rows, rejected[rows]],
                result[rows, chosen[rows]],
            )
        return result

    def _norm(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self._disturbed(super()._norm(name, rows))
