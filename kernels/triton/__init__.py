"""Triton kernels for NVIDIA GPUs. Each module holds one family of ops and registers it under "triton".

The same functions run in three ways: launched on a GPU, interpreted on CPU tensors (TRITON_INTERPRET=1, for tests), and
recorded on meta tensors, from which ``manifest`` and ``build`` compile them ahead of time without a GPU.
"""
