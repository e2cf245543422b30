"""llama.cpp's mtmd on a picture, as a peer that waits: each line on standard input is one more encoding, answered by
the seconds that it took.

    PYTHON scripts/bench/peers/peer_mtmd.py model.gguf mmproj.gguf picture.npy rows.npy THREADS

PYTHON has llama-cpp-python. ``picture.npy``: uint8 [height, width, 3]; ``rows.npy``: written, what comes of it, tile
after tile where it has several.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time

import numpy as np

IMAGE = 1  # kind of a chunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "mmproj", "picture", "rows"):
        parser.add_argument(name)
    parser.add_argument("threads", type=int)
    args = parser.parse_args()
    import llama_cpp
    import llama_cpp.mtmd_cpp as mtmd

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(args.model.encode(), llama_cpp.llama_model_default_params())
    options = mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads, options.print_timings = False, args.threads, False
    context = mtmd.mtmd_init_from_file(args.mmproj.encode(), model, options)
    assert context, f"{args.mmproj}: mtmd cannot read it"
    pixels = np.ascontiguousarray(np.load(args.picture))
    buffer = (ctypes.c_uint8 * pixels.size).from_buffer_copy(pixels.tobytes())
    bitmap = mtmd.mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], buffer)
    mark = mtmd.mtmd_default_marker()
    text = mtmd.mtmd_input_text(text=mark, text_len=len(mark), add_special=False, parse_special=True)
    chunks = mtmd.mtmd_input_chunks_init()
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1) == 0
    found = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
    pictures = [chunk for chunk in found if mtmd.mtmd_input_chunk_get_type(chunk) == IMAGE]
    width = llama_cpp.llama_model_n_embd_inp(model)  # more than that of texts where inner layers read rows too
    for _ in sys.stdin:
        rows, seconds = [], 0.0
        for chunk in pictures:
            begin = time.perf_counter()
            assert mtmd.mtmd_encode_chunk(context, chunk) == 0
            seconds += time.perf_counter() - begin
            tokens = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
            rows.append(np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(context), (tokens, width)).copy())
        np.save(args.rows, np.concatenate(rows))
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
