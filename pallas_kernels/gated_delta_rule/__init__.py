"""The gated delta rule of linear-attention layers: whole prompts, and one token at a time."""

from pallas_kernels.gated_delta_rule.api import choose_backend as choose_backend
from pallas_kernels.gated_delta_rule.api import gated_delta_rule as gated_delta_rule
from pallas_kernels.gated_delta_rule.equal_lengths import (
    gated_delta_rule_equal_lengths as gated_delta_rule_equal_lengths,
)
from pallas_kernels.gated_delta_rule.reference import gated_delta_step as gated_delta_step
