"""llama.cpp's vectors of texts: ``python peer_encoder.py MODEL.gguf --slots 32 --length 256 --threads 2``.

Needs ``pip install xllamacpp``. A line that comes in is JSON, lists of token ids; one with their vectors goes out.
"""

from __future__ import annotations

import argparse
import json
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--slots", type=int, default=32, help="texts at a time")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.embedding = True
    params.n_parallel = args.slots
    params.n_ctx = args.slots * args.length
    params.n_batch = params.n_ubatch = max(2048, args.length)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.port = 0
    server = xllamacpp.Server(params)
    for line in sys.stdin:
        answer = server.handle_embeddings({"input": json.loads(line), "encoding_format": "float"})
        found = sorted(answer["data"], key=lambda entry: entry["index"])
        print(json.dumps([entry["embedding"] for entry in found]), flush=True)


if __name__ == "__main__":
    main()
