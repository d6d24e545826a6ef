"""Adapters for training frameworks: one module each, imported by nobody but its users.

An adapter attaches where the framework makes its model, keeps every rank's state beside the framework's
checkpoints, and hands figures to its loggers. Averaging itself does not belong here.
"""
