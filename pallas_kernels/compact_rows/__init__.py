"""Gather the rows that stay to the front of their buffers."""

from pallas_kernels.compact_rows.api import choose_backend as choose_backend
from pallas_kernels.compact_rows.api import compact_rows as compact_rows
