"""Attention of one query per request over keys and values that lie in pages."""

from pallas_kernels.paged_attention.api import choose_backend as choose_backend
from pallas_kernels.paged_attention.api import paged_attention as paged_attention
