"""llama.cpp measured by the definitions of ``tool profile generation``. Runs in an environment of its own:

pip install llama-cpp-python
python peer_llama_cpp.py MODEL.gguf --concurrency 1,8,32 --prompt-tokens 512 --completion-tokens 128 --threads 2
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from gguf_rounds import Peer, main


class Engine(Peer):
    def __init__(self, path: Path, sequences: int, length: int, threads: int) -> None:
        import llama_cpp as lib

        self.lib, self.silent = lib, lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self.silent, ctypes.c_void_p(0))
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * length
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        params.flash_attn_type = 1
        self.ctx = lib.llama_init_from_model(self.model, params)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.sampler = lib.llama_sampler_init_greedy()
        self.batch = lib.llama_batch_init(max(512, sequences), 0, 1)

    def forget(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.ctx), True)

    def best(self, row: int) -> int:
        return self.lib.llama_sampler_sample(self.sampler, self.ctx, row)


if __name__ == "__main__":
    main(__doc__, Engine)
