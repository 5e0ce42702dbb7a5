"""Triton-language kernels and their torch references; nothing about serving.

One module a kernel. The package itself imports neither torch nor triton, so that a process without a GPU pays nothing.
"""
