"""Softmax mass of the last queries on each block of keys."""

from pallas_kernels.block_score.api import BlockScores as BlockScores
from pallas_kernels.block_score.api import block_score as block_score
from pallas_kernels.block_score.api import choose_backend as choose_backend
