"""llama.cpp's server until it is ended: ``python peer_llama_server.py MODEL.gguf --slots 64 --length 512 --threads 2``.

Needs ``pip install xllamacpp``, which has that server in the process. Prints its URL.
"""

from __future__ import annotations

import argparse
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of a request")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--speculative", help="how it guesses: ngram_simple, ngram_cache, draft_simple …")
    parser.add_argument("--draft", default="", help="the model (.gguf) that guesses for draft_simple")
    parser.add_argument("--lora", nargs="+", default=[], help="adapters (.gguf), for requests that ask for them")
    args = parser.parse_args()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.n_parallel = args.slots
    params.n_ctx = args.slots * args.length
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.port = 0
    if args.speculative is not None:
        name = f"COMMON_SPECULATIVE_TYPE_{args.speculative.upper()}"
        params.speculative.types = [xllamacpp.common_speculative_type[name]]
        params.speculative.draft.mparams.path = args.draft
        params.speculative.draft.cpuparams.n_threads = args.threads
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 0.0) for path in args.lora]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
