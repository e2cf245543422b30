"""ik_llama.cpp measured by the definitions of ``tool profile generation``. Runs in an environment of its own:

    pip install ik-llama-cpp-python
    python peer_ik_llama_cpp.py MODEL.gguf --concurrency 1,8,32 --prompt-tokens 512 --completion-tokens 128 --threads 2

Weights are repacked when they are loaded, which is its fastest way for many tokens.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from gguf_rounds import Peer, main


class Engine(Peer):
    def __init__(self, path: Path, sequences: int, length: int, threads: int) -> None:
        from ik_llama_cpp import _ctypes_api as lib

        self.lib = lib
        model = lib.llama_model_default_params()
        model.repack_tensors = True
        self.model = lib.llama_model_load_from_file(str(path).encode(), model)
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * length
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = True
        self.ctx = lib.llama_init_from_model(self.model, params)
        self.vocab = lib._lib.llama_n_vocab(ctypes.c_void_p(self.model))
        self.batch = lib.llama_batch_init(max(512, sequences), 0, 1)

    def forget(self) -> None:
        self.lib.llama_kv_cache_clear(self.ctx)

    def best(self, row: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.ctx, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())


if __name__ == "__main__":
    main(__doc__, Engine)
