"""Automatic differentiation on numpy arrays: tensors, the op table, planning and replay."""
