"""Causal attention where every row of a packed axis sees a range of rows that ends with itself."""

from pallas_kernels.causal_attention.api import causal_attention as causal_attention
from pallas_kernels.causal_attention.api import choose_backend as choose_backend
