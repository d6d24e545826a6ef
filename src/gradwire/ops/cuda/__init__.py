"""Kernels in Triton, for values in CUDA memory."""
