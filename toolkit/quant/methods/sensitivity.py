"""What an error in a linear's weights does to the model's predictions, told by gradients.

The KL divergence of the next token, original ‖ changed, is 0 where nothing is changed, and so is its slope. A small
change δ of a linear's outputs at a token makes it ½ δᵀFδ, where F is the mean of g·gᵀ over gradients g, by these
outputs, of the log-likelihood of tokens that the model itself predicts. A little text that goes through the model
forwards and back once gives g of all linears. Of F what is kept is how large it is, not its directions: over so little
text these would be chance.

Sources: Martens, "New Insights and Perspectives on the Natural Gradient Method" (2020), for F; Dong et al., "HAWQ-V2:
Hessian Aware trace-Weighted Quantization of Neural Networks" (2020), for its trace as what a layer's error costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.sites import layer_sites
from toolkit.models.spec import DecoderSpec
from toolkit.quant.layers.forward import head_logits, in_bf16, layer_forward, narrow
from toolkit.quant.layers.forward_parts import Called, Weights
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.spill import Spill, Tensors
from toolkit.quant.layers.statistics import Gram

SAMPLES = 4  # of the text that go through the model
ROWS, LOGITS = 256, 1 << 24  # positions whose logits are held at once; logits held at once


@dataclass
class Passed:
    """What went through a linear: sums over ``rows`` of the squared inputs [in] and, of what came back, of the squared
    gradient in the mean over outputs."""

    inputs: Tensor
    gradient: Tensor
    rows: int = 0


@dataclass
class Felt:
    """Of one layer, while a text of so many ``tokens`` passes it. ``grams``: by site, the inputs' mean sizes alone."""

    tokens: int
    grams: dict[str, Gram] = field(default_factory=dict)
    passed: dict[str, Passed] = field(default_factory=dict)

    def costs(self, name: str) -> Tensor | None:
        """KL in nats a token that a squared error of 1 costs in each column of a linear, in any row; None where no
        token reached it. The mean gradient counts for every input: which come together is chance in so little text."""
        found = self.passed.get(name)
        return None if found is None else found.inputs * (found.gradient / (2 * found.rows * self.tokens))

    def observe(self, site: str, x: Tensor) -> None:
        sizes = x.detach().float().abs().sum(0)
        gram = self.grams.setdefault(site, Gram(torch.zeros(0, 0), torch.zeros_like(sizes), sizes))
        gram.abs_sum += sizes
        gram.rows += len(x)

    def linear(self, name: str, weights: Weights) -> Callable[[Tensor], Tensor]:
        def seen(x: Tensor, g: Tensor) -> None:
            squares = x.square().sum(0)
            found = self.passed.setdefault(name, Passed(torch.zeros_like(squares), torch.zeros((), device=x.device)))
            found.inputs += squares
            found.gradient += g.square().sum() / g.shape[1]
            found.rows += len(x)

        return passing(name, weights, seen)


class Listener(Protocol):
    """What looks at one layer. ``linear``: the linear called so, which tells what passes (``passing``)."""

    def observe(self, site: str, x: Tensor) -> None: ...
    def linear(self, name: str, weights: Weights) -> Callable[[Tensor], Tensor]: ...


Looks = TypeVar("Looks", bound=Listener)


def passing(name: str, weights: Weights, seen: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor], Tensor]:
    """The linear as it is. ``seen`` gets each time its inputs [tokens, in] and the gradients by its outputs [tokens,
    out], float32, once these are there."""
    weight, bias = weights[name], weights.get(f"{name}.bias")

    def call(x: Tensor) -> Tensor:
        rows = x.detach().reshape(-1, x.shape[-1])
        y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        y.register_hook(lambda g: seen(rows.float(), g.reshape(-1, g.shape[-1]).float()))
        return y

    return call


def feel(
    source: LayerSource,
    ids: Tensor,
    device: torch.device,
    spill: Spill,
    told: Callable[[int, int], None],
    begin: Callable[[], Looks],
    seed: int = 0,
) -> Iterator[tuple[int, Weights, Looks]]:
    """For every layer, the last first: its index, its weights, and what has looked at it (``begin`` makes it) while the
    text ``ids`` [samples, length] passed there and back. ``spill``: where the text is held as it is before each layer;
    ``told``: of layers gone through, both ways;
    ``seed``: of the tokens that are drawn.
    """
    layers, count = source.spec.layers, len(source.spec.layers)
    outer = source.outer_weights(device)
    table, one_by_one = outer[source.spec.embed], ids.to(device).split(1)
    before = [Tensors((source.embed(table, x).cpu() for x in one_by_one), spill)]
    for i, layer in enumerate(layers):
        told(i, 2 * count)
        narrowed = narrow(source.layer(i, device), device)
        with in_bf16(device):
            behind = (layer_forward(layer, narrowed, x.to(device), along=source.along(i)) for x in before[-1])
            before.append(Tensors((y.float().cpu() for y in behind), spill))
    draw = torch.Generator(device).manual_seed(seed)
    gradients = Tensors((_drawn(source.spec, outer, x.to(device), draw).cpu() for x in before.pop()), spill)
    for i in reversed(range(count)):
        told(2 * count - 1 - i, 2 * count)
        weights, looks = source.layer(i, device), begin()
        narrowed = narrow(weights, device)
        names = [x.name for site in layer_sites(layers[i]) for x in site.linears]
        called = Called(narrowed, {name: looks.linear(name, narrowed) for name in names})
        for j, x in enumerate(before.pop()):
            leaf = x.clone().to(device).requires_grad_()
            with torch.enable_grad(), in_bf16(device):
                y = layer_forward(layers[i], called, leaf, looks.observe, along=source.along(i)).float()
            y.backward(gradients[j].to(device))
            assert leaf.grad is not None
            gradients[j] = leaf.grad.cpu()
        yield i, weights, looks


def _drawn(spec: DecoderSpec, outer: Weights, hidden: Tensor, draw: torch.Generator) -> Tensor:
    """A gradient by ``hidden`` [1, length, hidden], behind the last layer, whose products g·gᵀ are F in the mean over
    draws. By the logits it is √p·ξ − p·Σ√p·ξ with normal ξ, its products diag(p) − p·pᵀ: as for tokens drawn from p,
    but steadier."""
    leaf = hidden.clone().requires_grad_()
    step = min(ROWS, max(16, LOGITS // spec.vocab_size))
    for a in range(0, leaf.shape[1], step):
        with torch.enable_grad(), in_bf16(leaf.device):
            logits = head_logits(spec, outer, leaf[0, a : a + step])
        p = logits.detach().float().softmax(-1)
        noise = torch.randn(p.shape, generator=draw, device=p.device).mul_(p.sqrt())
        logits.backward((noise - p * noise.sum(-1, keepdim=True)).to(logits.dtype))
    assert leaf.grad is not None
    return leaf.grad
