"""Triton kernels and their launchers. Nothing outside this folder imports triton."""
