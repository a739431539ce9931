"""Top-p selection of blocks, with forced sink and window rows."""

from pallas_kernels.top_p_select.api import Selection as Selection
from pallas_kernels.top_p_select.api import choose_backend as choose_backend
from pallas_kernels.top_p_select.api import top_p_select as top_p_select
