"""The kernels of the fast VAE decode and their torch references; nothing about serving.

One module a kernel in Triton's language, for GPUs; ``cpu`` has those in C++, and needs no triton. The package itself
imports neither torch nor triton.
"""
