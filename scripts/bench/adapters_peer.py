"""llama.cpp's server with LoRA adapters, for adapters.py, and the adapters in its form."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
from llama_server import server
from numpy.typing import NDArray

from toolkit.models.spec import AttentionSpec, DecoderSpec

# What a request of it gives: when its first tokens came, when the last one, how many came between them.
Decoded = tuple[float, float, int]
Ask = Callable[[str | None], Decoded]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(adapter: Path, spec: DecoderSpec, file: Path) -> Path:
    """A PEFT adapter of a Llama, all of whose linears it changes, as llama.cpp reads it."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((adapter / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    attention = next(mixer for _, mixer in spec.mixers() if isinstance(mixer, AttentionSpec))
    heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        _, _, layer, linear = module.split(".", 3)
        theirs, rows = NAMES[linear], tensor.to(torch.float16).numpy()
        if side == "lora_B" and theirs in heads:
            rows = _in_pairs(rows, heads[theirs])
        writer.add_tensor(f"blk.{layer}.{theirs}.weight.{side.lower()}", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _in_pairs(rows: NDArray[np.float16], heads: int) -> NDArray[np.float16]:
    """Rows of queries or keys in the order in which llama.cpp rotates them: the two of a pair side by side."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))


@contextmanager
def peer(python: str, gguf_file: str, adapters: dict[str, Path], prompt: str, tokens: int) -> Iterator[Ask]:
    """A server in the environment of ``python`` with a slot for each adapter."""
    more = ["--slots", str(len(adapters)), "--lora", *map(str, adapters.values())]
    numbers = {name: i for i, name in enumerate(adapters)}
    with server(python, gguf_file, *more) as running:

        def ask(name: str | None) -> Decoded:
            chosen = [{"id": i, "scale": float(i == numbers.get(name or ""))} for i in numbers.values()]
            fields = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
            fields |= {"cache_prompt": False, "timings_per_token": True, "lora": chosen}
            request = urllib.request.Request(f"{running.url}/completion", json.dumps(fields).encode())
            request.add_header("Content-Type", "application/json")
            first, begun, count = 0, 0.0, 0
            with urllib.request.urlopen(request, timeout=600) as reply:
                for line in reply:
                    if line.startswith(b"data: {"):
                        count = max(count, json.loads(line[6:]).get("timings", {}).get("predicted_n", 0))
                        if not first and count:
                            first, begun = count, time.perf_counter()
            return begun, time.perf_counter(), count - first

        yield ask
