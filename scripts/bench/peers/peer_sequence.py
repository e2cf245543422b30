"""llama.cpp's saved sequences: ``python peer_sequence.py MODEL.gguf save|restore FOLDER --threads 2``.

Needs ``pip install llama-cpp-python``. Standard input is JSON, lists of token ids. "save": computes each and writes its
sequence to a file; "restore": reads the files and computes the last token alone, as the server's slots do. One line a
list: seconds to the first token, and the token.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from typing import Any


def forget(path: str) -> None:
    """Take a file out of the system's memory."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("what", choices=["save", "restore"])
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    import llama_cpp

    rows = json.load(sys.stdin)
    longest = max(map(len, rows))
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    llama: Any = llama_cpp.Llama(args.model, n_ctx=longest + 64, flash_attn=True, verbose=False, **threads)
    context = llama._ctx.ctx
    for i, row in enumerate(rows):
        file = f"{args.folder}/{i}.sequence"
        llama.reset()
        llama._ctx.kv_cache_clear()
        begun = time.perf_counter()
        if args.what == "restore":
            ids, count = (llama_cpp.llama_token * longest)(), ctypes.c_size_t()
            if not llama_cpp.llama_state_seq_load_file(context, file.encode(), 0, ids, longest, ctypes.byref(count)):
                raise SystemExit(f"{file}: cannot be restored")
            llama.n_tokens = count.value - 1
            llama.input_ids[: count.value] = list(ids[: count.value])
        llama.eval(row[llama.n_tokens :])
        token = llama.sample(temp=0.0)
        print(json.dumps({"seconds": time.perf_counter() - begun, "token": token}), flush=True)
        if args.what == "save":
            ids = (llama_cpp.llama_token * len(row))(*row)
            llama_cpp.llama_state_seq_save_file(context, file.encode(), 0, ids, len(row))
            forget(file)


if __name__ == "__main__":
    main()
