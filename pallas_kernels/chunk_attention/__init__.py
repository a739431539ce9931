"""Attention of the rows of a prefill's chunk over the pages of their requests."""

from pallas_kernels.chunk_attention.api import ChunkRows as ChunkRows
from pallas_kernels.chunk_attention.api import choose_backend as choose_backend
from pallas_kernels.chunk_attention.api import chunk_attention as chunk_attention
