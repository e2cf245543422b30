"""Triton kernels for NVIDIA GPUs. Each room holds ops of one kind, registered under "triton"; what they all
stand on lies beside the rooms.

The same functions run in three ways: launched on a GPU, interpreted on CPU tensors (TRITON_INTERPRET=1, for tests), and
recorded on meta tensors, from which ``ahead_of_time`` compiles them without a GPU.
"""
