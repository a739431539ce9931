"""Norms and residual sums of packed rows that leave padding rows out."""

from pallas_kernels.row_norms.api import add_rows as add_rows
from pallas_kernels.row_norms.api import choose_backend as choose_backend
from pallas_kernels.row_norms.api import norm_rows as norm_rows
