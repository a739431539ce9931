"""What dropping can cost at most (paper Eq. 6 and 12).

If dropped tokens carry mass m of one softmax row, and the kept weights are renormalised, the row's output moves by
    |sum_kept w_j v_j / (1 - m) - sum_all w_j v_j| <= m V_max + m V_max = 2 m V_max,
with V_max the largest value norm in play: the kept part grows by the factor 1 / (1 - m), which adds mass m, and the
dropped part is lost, mass m. The paper writes (1 - p) V_max for the unnormalised form.

The cut is made on the mass averaged over heads and window rows, so m <= 1 - p is certain for that average only, not
for each row; rows before the window are not bounded at all.
"""

from collections.abc import Mapping


def attention_output_bound(discarded_mass: float, max_value_norm: float) -> float:
    """Largest change of one attention row's output when `discarded_mass` of its softmax is dropped."""
    return 2.0 * discarded_mass * max_value_norm


def accumulated_bound(discarded_mass: Mapping[int, float], max_value_norm: Mapping[int, float]) -> float:
    """Sum of the layers' bounds: how far attention outputs move in total over the drop layers, to first order."""
    return sum(attention_output_bound(mass, max_value_norm[layer]) for layer, mass in discarded_mass.items())
