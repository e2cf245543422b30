#!/usr/bin/env python
"""What rounding a row that is key and value at once would lose, as of latent attention (DeepSeek-V2): a stand-in, for
no model that keeps such rows is small.

    python scripts/bench/latent_rows.py

In the demo the keys of a token before they are turned by its position, and its values, make one row (each half scaled
to the same size, which weights would take up). It is turned by a Hadamard matrix and rounded with one scale and offset,
as ``--quant-policy`` rounds rows. KL divergence and perplexity on held-out text, in float32, against the model itself.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from torch import Tensor, nn

from toolkit.artifacts.demo import ensure_demo
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.kernels.reference.cache import dequantize_heads, hadamard, quantize_heads
from toolkit.measure.text import heldout_text

WINDOW = 1024


class Row(nn.Module):
    """``k_proj`` or ``v_proj`` of one layer: its part of the row of both, rounded."""

    def __init__(self, pair: tuple[nn.Linear, nn.Linear], which: int, bits: list[int], turned: bool) -> None:
        super().__init__()
        self.pair, self.which, self.bits, self.turned = pair, which, bits, turned

    def forward(self, x: Tensor) -> Tensor:
        parts = [linear(x) for linear in self.pair]
        if not self.bits:
            return parts[self.which]
        sizes = [part.pow(2).mean().sqrt() for part in parts]
        row = torch.cat([part / size for part, size in zip(parts, sizes, strict=True)], -1)
        row = hadamard(row) if self.turned else row
        back = dequantize_heads(*quantize_heads(row, self.bits[0]), self.bits[0], torch.float32)
        back = hadamard(back) if self.turned else back
        return back.split([part.shape[-1] for part in parts], -1)[self.which] * sizes[self.which]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens")
    windows = parser.parse_args().windows
    ids = torch.tensor(Tokenizer.open(ensure_demo()).encode(heldout_text())[: windows * WINDOW]).view(-1, WINDOW)
    model = transformers.AutoModelForCausalLM.from_pretrained(ensure_demo(), dtype=torch.float32).eval()
    bits: list[int] = []
    rows = []
    for layer in model.model.layers:
        attention = layer.self_attn
        pair = attention.k_proj, attention.v_proj
        made = [Row(pair, which, bits, True) for which in (0, 1)]
        attention.k_proj, attention.v_proj = made
        rows += made
    exact: list[Tensor] = []
    for count, turned in ((0, True), (8, True), (6, True), (4, True), (4, False)):
        bits[:] = [count] if count else []
        for row in rows:
            row.turned = turned
        loss = divergence = 0.0
        for i, window in enumerate(ids):
            with torch.inference_mode():
                logits = model(window[None]).logits[0, :-1].log_softmax(-1)
            loss -= float(logits.gather(1, window[1:, None]).mean()) / len(ids)
            if not count:
                exact.append(logits.half())
            else:
                before = exact[i].float()
                divergence += float((before.exp() * (before - logits)).sum(-1).mean()) / len(ids)
        told = f"{count} bits{', turned' if turned else ''}" if count else "as it is"
        print(f"{told:16} perplexity {torch.tensor(loss).exp():.3f}  KL {divergence:.4f}", flush=True)


if __name__ == "__main__":
    main()
