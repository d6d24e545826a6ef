"""Kernels in torch, for any device and dtype: they define the results of all others."""
