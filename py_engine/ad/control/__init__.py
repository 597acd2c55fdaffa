"""Ops made of functions: loops, checkpoints, custom rules."""
