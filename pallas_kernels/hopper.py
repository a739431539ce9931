"""What kernels have to know of an H100 or H200 (SXM)."""

MULTIPROCESSORS = 132
SHARED_MEMORY = 227 * 1024  # bytes, of one multiprocessor
