"""Products of sorted rows with the weights of their groups (the experts of a mixture, the layers of a stack)."""

from pallas_kernels.grouped_matmul.api import choose_backend as choose_backend
from pallas_kernels.grouped_matmul.api import grouped_gated_matmul as grouped_gated_matmul
from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from pallas_kernels.grouped_matmul.api import grouped_matmul_each as grouped_matmul_each
from pallas_kernels.grouped_matmul.reference import ACTIVATIONS as ACTIVATIONS
