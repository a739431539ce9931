"""Kernels for the three steps between prefill segments: score blocks, select them by top-p, compact the rows that stay.

Every operation is a package of the same shape: ``api.py`` picks a backend, ``reference.py`` is plain jnp and the
truth, ``gpu.py`` and ``tpu.py`` are Pallas kernels (Mosaic GPU, Mosaic TPU), ``shapes.py`` lists the workload shapes
that tests and benchmarks share.
"""
