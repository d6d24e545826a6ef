"""Kernels in torch, for any device: the truth that the others equal."""
