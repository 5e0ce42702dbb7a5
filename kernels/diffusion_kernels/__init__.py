"""Triton-language kernels and their torch references; nothing about serving."""
