"""Kernels in numba, for fp32 values in host memory; each runs on one thread, without the GIL."""
