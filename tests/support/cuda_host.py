"""The CUDA kernels' own source, built by g++ and run on CPU tensors lane by lane."""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_int, c_uint

import torch

from toolkit.kernels.cuda import build
from toolkit.kernels.cuda.plan import LinearArguments, Machine


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build.build_host()))
    lib.tk_host_shared.argtypes = [c_char_p]
    lib.tk_host_run.argtypes = [c_char_p, ctypes.POINTER(LinearArguments), c_int, c_int, c_int, c_uint, c_int]
    return lib


def host(
    *,
    multiprocessors: int = 4,
    shared_limit: int = 227 * 1024,
    seed: int = 0,
    log: list | None = None,
    dependent: bool = False,
    ahead: bool = False,
) -> Machine:
    """A machine that is this process. ``seed``: order of blocks and lanes; ``log`` collects (kernel, grid); ``ahead``:
    it prefers the kernels of this name.
    """

    def launch(kernel: str, grid: tuple[int, int, int], arguments: LinearArguments, dependent: bool) -> None:
        assert library().tk_host_shared(kernel.encode()) <= shared_limit, kernel
        if log is not None:
            log.append((kernel, grid))
        code = library().tk_host_run(kernel.encode(), byref(arguments), *grid, seed, dependent)
        assert code == 0, (kernel, grid, code)

    return Machine(launch, multiprocessors, shared_limit, dependent, ahead=lambda tile: ahead)


def fragments(dtype: torch.dtype, bits: int, words: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Operands [N, 4, 2] as float32 of int32 ``words`` [N] or [N, 2], with the zeros of the two rows."""
    out = torch.empty(words.shape[0], 4, dtype=torch.int32)
    words = words.contiguous()
    kind = int(dtype == torch.bfloat16)
    pointer = ctypes.c_void_p
    library().tk_host_fragments(
        kind, bits, pointer(words.data_ptr()), words.shape[0], first, second, pointer(out.data_ptr())
    )
    return out.view(torch.int16).view(-1, 4, 2).view(dtype).float()
