"""Kernels in numba, for fp32 values in host memory; one thread, without the GIL."""
