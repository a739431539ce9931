"""Causal attention over the blocks, and the single columns, that each query head is told to see."""

from pallas_kernels.block_sparse_attention.api import block_sparse_attention as block_sparse_attention
from pallas_kernels.block_sparse_attention.api import choose_backend as choose_backend
