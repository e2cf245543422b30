"""Tokens a second of an encoder of BERT-base's shape with random weights, beside llama.cpp.

    python scripts/bench/encoders.py                                    # ours: bf16, 8 and 4 bits
    python scripts/bench/encoders.py --llama-python PYTHON --rounds 5   # beside llama.cpp's Q8_0 and Q4_0

PYTHON has xllamacpp. Every engine computes the mean vectors of the same texts, all at once, in turns; the ratio is the
median of each round's beside llama.cpp's of as many bits, with its lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import gguf
import numpy as np
from native import need_native

from toolkit import TurbomindEngineConfig, pipeline
from toolkit.commands.output import stdout, table, write_json

PEER = Path(__file__).parent / "peers" / "peer_encoder.py"
OURS = {"bf16": "auto", "8 bits": "int8", "4 bits": "int4"}
THEIRS = {"8 bits": gguf.GGMLQuantizationType.Q8_0, "4 bits": gguf.GGMLQuantizationType.Q4_0}
LINEARS = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
EMBEDDINGS = {
    "token_embd": "word_embeddings",
    "token_types": "token_type_embeddings",
    "position_embd": "position_embeddings",
    "token_embd_norm": "LayerNorm",
}


def words(count: int) -> list[str]:
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(count - 5))]


def write_model(folder: Path) -> Path:
    """BERT-base as transformers makes it, and a vocabulary."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(0)
    model = BertModel(BertConfig(dtype="bfloat16"), add_pooling_layer=False).bfloat16()
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words(model.config.vocab_size)))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def write_gguf(folder: Path, kind: gguf.GGMLQuantizationType, file: Path) -> Path:
    """The same for llama.cpp, its matrices but the small embeddings in ``kind``."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    tensors = {k: v.float().numpy() for k, v in load_file(folder / "model.safetensors").items()}
    w = gguf.GGUFWriter(file, "bert")
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_head_count(config["num_attention_heads"])
    w.add_layer_norm_eps(config["layer_norm_eps"])
    w.add_causal_attention(False)
    w.add_pooling_type(gguf.PoolingType.MEAN)
    tokens = words(config["vocab_size"])
    w.add_tokenizer_model("bert")
    w.add_tokenizer_pre("default")
    w.add_token_list([t if t.startswith("[") else f"\u2581{t}" for t in tokens])
    w.add_token_types([gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL] * (len(tokens) - 5))
    w.add_token_type_count(config["type_vocab_size"])
    w.add_pad_token_id(0)
    w.add_unk_token_id(1)
    w.add_bos_token_id(2)
    w.add_sep_token_id(3)
    w.add_mask_token_id(4)
    named = {theirs: f"embeddings.{ours}" for theirs, ours in EMBEDDINGS.items()}
    for i in range(config["num_hidden_layers"]):
        named |= {f"blk.{i}.{theirs}": f"encoder.layer.{i}.{ours}" for theirs, ours in LINEARS.items()}
    for theirs, ours in named.items():
        for part in ("weight", "bias"):
            found = tensors.get(f"{ours}.{part}")
            if found is None:
                continue
            rounded = found.ndim == 2 and theirs not in ("token_types", "position_embd")
            data = gguf.quants.quantize(found, kind) if rounded else found
            w.add_tensor(f"{theirs}.{part}", data, raw_dtype=kind if rounded else gguf.GGMLQuantizationType.F32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return file


@contextmanager
def peer(python: str, file: Path, texts: list[list[int]], threads: int) -> Iterator[Callable[[], np.ndarray]]:
    """llama.cpp in an environment of its own: the vectors of all texts."""
    command = [python, str(PEER), str(file), "--slots", str(len(texts)), "--length", str(len(texts[0]))]
    process = subprocess.Popen(
        [*command, "--threads", str(threads)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    given, told = process.stdin, process.stdout

    def ask() -> np.ndarray:
        given.write(json.dumps(texts) + "\n")
        given.flush()
        answer = next((line for line in told if line.startswith("[")), None)
        if answer is None:
            raise SystemExit(f"{python}: llama.cpp ended without an answer: pip install --no-deps xllamacpp there")
        return np.array(json.loads(answer))

    try:
        yield ask
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-python", help="a Python that has xllamacpp: measure llama.cpp beside ours")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    need_native()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_model(Path(folder) / "bert")
        g = np.random.default_rng(0)
        texts = [[2, *(int(x) for x in g.integers(5, 30000, args.tokens - 2)), 3] for _ in range(args.texts)]
        engines: dict[str, Callable[[], np.ndarray]] = {}
        for name, form in OURS.items():
            config = TurbomindEngineConfig(load_format=form, enable_prefix_caching=False, max_batch_size=args.texts)
            pipe = stack.enter_context(pipeline(str(model), backend_config=config))
            engines[f"ours, {name}"] = lambda pipe=pipe: pipe.get_embeddings(texts, pooling="mean")
        for name, kind in THEIRS.items() if args.llama_python else ():
            file = write_gguf(model, kind, Path(folder) / f"{kind.name}.gguf")
            engines[f"llama.cpp, {name}"] = stack.enter_context(peer(args.llama_python, file, texts, args.threads))
        vectors = {name: engine() for name, engine in engines.items()}
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.rounds):
            for name, engine in engines.items():
                begun = time.perf_counter()
                engine()
                speeds[name].append(args.texts * args.tokens / (time.perf_counter() - begun))
    exact = vectors["ours, bf16"]
    rows = []
    for name, found in speeds.items():
        alike = float(np.mean(np.sum(exact * vectors[name], axis=1)))
        theirs = speeds.get(name.replace("ours", "llama.cpp"), []) if name.startswith("ours") else []
        ratios = sorted(mine / other for mine, other in zip(found, theirs, strict=False))
        shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})" if ratios else ""
        rows.append([name, f"{statistics.median(found):,.0f}", f"{alike:.4f}", shown])
    title = f"{args.texts} texts of {args.tokens} tokens"
    stdout().print(table(title, ["engine", "tokens/s", "cosine with bf16", "x llama.cpp"], rows))
    write_json(args.json, {"texts": args.texts, "tokens": args.tokens, "speeds": speeds})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
