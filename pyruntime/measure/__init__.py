"""Measuring on a GPU, and judging what was measured: the parts behind wall, ab and lever."""
