"""Scales and norms of a quantized model, tuned together so that it predicts what the original does; codes stay.

Rounding was chosen layer by layer; what the layers' errors do to the predictions together is seen here alone. The loss
is KL(original ‖ quantized) of the next token on the calibration text, a sample a step.

Sources: Chen et al., "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models" (2024), whose
second phase trains step sizes end to end; Hinton et al., "Distilling the Knowledge in a Neural Network" (2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Fp8, GroupInt, Trellis
from toolkit.artifacts.output.stage import Stage
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.measure.predictions import kl_divergence
from toolkit.models.spec import NormSpec
from toolkit.quant.layers.activations import round_tokens
from toolkit.quant.layers.along import width
from toolkit.quant.layers.forward import head_logits, in_bf16, layer_forward
from toolkit.quant.layers.forward_parts import Called, Weights
from toolkit.quant.layers.layerwise import Flow, load_head, load_layer, replace_layer
from toolkit.quant.layers.result import LayerResult
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.plan import layer_width
from toolkit.quant.text.calibration import CalibrationPlan

FEW_BITS = 3.5  # up to so many bits a weight tuning brings something behind gradients too
RATES = 1e-3, 3e-3  # of Adam, on scales and norms relative to what they were; the second with 2 bits
WARM_UP = 5  # steps
LARGEST_GRADIENT = 2.0  # its norm over all that is tuned
ROWS = 128  # positions whose logits are held at once: few enough that they fit what the heap keeps
HELD_BACK = 4  # samples, at most, that tell whether tuning helped
KEY = "tuned"  # the stage's key of what was found
Code = GroupInt | Trellis | ChannelInt8 | Fp8
"""Weights whose scales are tuned."""


def needed(source: LayerSource, seqlen: int, steps: int) -> int:
    """Bytes that tuning for ``steps`` takes beyond the model on disk: codes in 16 bits, the rest, one sample's
    activations, and the samples as the original leaves them."""
    linears = sum(x.in_features * x.out_features for x in source.quantizable())
    outer = (1 if source.spec.tied else 2) * 2 * source.spec.vocab_size * source.spec.hidden_size
    kept = sum(map(layer_width, source.spec.layers)) * seqlen * 4
    return 3 * linears + outer + kept + most_samples(steps) * seqlen * width(source.spec) * 4


def choose_steps(
    source: LayerSource,
    wanted: int | None,
    usual: int,
    plan: CalibrationPlan | None,
    cache_memory: float,
    hindrance: str | None,
    notice: Callable[[str], None],
) -> int:
    """How many steps to tune for: ``wanted``, or where that is None the ``usual`` if it fits ``cache_memory`` (GiB).

    ``plan``: of the text, None where none is read; ``hindrance``: why what is to be written cannot be tuned, or None.
    Raises UsageError for steps that are asked for and cannot be.
    """
    if wanted is not None and wanted < 0:
        raise UsageError(f"--tune-steps: expected 0 or more, found {wanted}")
    if plan is None:
        hindrance = "it reads calibration text, and --calibration gives statistics alone"
    if hindrance is not None and wanted:
        raise UsageError(f"--tune-steps: {hindrance}; leave the option out")
    if wanted is not None or hindrance is not None or plan is None or not usual:
        return wanted or 0
    text = plan.samples * plan.seqlen * width(source.spec) * 4  # held beside it
    gib = (needed(source, plan.seqlen, usual) + text) / (1 << 30)
    if gib <= cache_memory:
        return usual
    notice(
        f"scales are not tuned together: that takes {gib:.1f} GiB, --cache-memory is {cache_memory:g}; "
        f"--tune-steps {usual} does it all the same"
    )
    return 0


def most_samples(steps: int) -> int:
    """How many samples so many steps can use: one each, and those that are held back."""
    return steps + HELD_BACK


def tune(
    source: LayerSource,
    stage: Stage,
    flow: Flow,
    ids: Tensor,
    steps: int,
    *,
    seed: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Tune the layers saved in ``stage`` and save them again. ``ids`` int64 [samples, length]; ``flow``: the first
    ``most_samples`` of them at least, behind the last of the original layers (not read where an earlier run has tuned
    already: ``stage.done(KEY)``).

    Returns the figures for the manifest: steps and the KL (nats a token) before and after on samples that were not
    tuned on. Where it did not fall, everything stays as it was.
    """
    layers = range(len(source.spec.layers))
    if not stage.done(KEY):
        with torch.inference_mode(False), torch.no_grad():
            results = [load_layer(stage, i) for i in layers]
            rate = RATES[_bits(results) < 2.5]
            model = Student(source, results, load_head(stage), flow.device)
            del results
            held = max(1, min(HELD_BACK, len(ids) // 8))
            used = ids[: steps + held]
            exact = (row for batch in flow.hidden for row in batch.clone())
            samples = list(zip(used, islice(exact, len(used)), strict=True))
            figures = _train(model, samples[:-held] or samples, samples[-held:], steps, rate, seed, progress)
            better = figures["kl_after"] < figures["kl_before"]
            stage.save(KEY, model.found() if better else {}, figures | {"kept": better})
    found = stage.load(KEY)
    for i in layers if found else ():
        replace_layer(stage, i, _with(load_layer(stage, i), found))
    return stage.load_meta(KEY)


def _bits(results: Sequence[LayerResult]) -> float:
    """Bits a weight on average; codes that are no integers or trellis have 8."""
    codes = [w for result in results for w in result.weights.values() if isinstance(w, Code)]
    sizes = [w.shape[0] * w.shape[1] for w in codes]
    return sum(n * getattr(w, "bits", 8) for n, w in zip(sizes, codes, strict=True)) / max(sum(sizes), 1)


def _with(result: LayerResult, found: Mapping[str, Tensor]) -> LayerResult:
    """``result`` with what was found for it put in place."""
    weights = dict(result.weights)
    for name, value in result.weights.items():
        if name not in found:
            continue
        weights[name] = replace(value, scales=found[name]) if isinstance(value, Code) else found[name]
    return replace(result, weights=weights)


@dataclass(frozen=True)
class Linear:
    """A quantized linear whose scales are tuned. ``centred``: code − zero, bfloat16 [out, groups, size], columns in
    ``order`` where groups are not consecutive; ``scales`` float32 [out, groups], stored as ``dtype``; ``change``: the
    parameter, relative. ``inputs``: what its inputs are rounded to, token by token, if they are.
    """

    centred: Tensor
    scales: Tensor
    change: Tensor
    bias: Tensor | None
    order: Tensor | None
    dtype: torch.dtype
    inputs: torch.dtype | None = None

    @classmethod
    def of(cls, code: Code, bias: Tensor | None, device: torch.device) -> Linear:
        bias = None if bias is None else bias.to(device).float()
        code = code.integers() if isinstance(code, Trellis) else code
        if not isinstance(code, GroupInt):  # a scale a row; bfloat16 holds every int8 and float8
            scales = code.scales.to(device)[:, None]
            centred = code.weight.to(device).to(torch.bfloat16)[:, None]
            change = torch.zeros_like(scales, requires_grad=True)
            return cls(centred, scales, change, bias, None, scales.dtype, code.weight.dtype)
        assert code.zeros is not None, "tuned formats have zero points"
        order = None if code.group_index is None else torch.argsort(code.group_index, stable=True).to(device)
        codes = code.codes.to(device) if order is None else code.codes.to(device)[:, order]
        groups = codes.view(len(codes), -1, code.group_size).to(torch.bfloat16)
        scales = code.scales.to(device).float()
        return cls(
            groups - code.zeros.to(device).to(torch.bfloat16)[..., None],
            scales,
            torch.zeros_like(scales, requires_grad=True),
            bias,
            order,
            torch.float16,
        )

    def now(self) -> Tensor:
        return self.scales * (1 + self.change)

    def stored(self) -> Tensor:
        """The scales as the code holds them."""
        scales = self.now().detach().to(self.dtype).cpu()
        return scales if self.inputs is None else scales[:, 0]

    def __call__(self, x: Tensor) -> Tensor:
        if self.inputs is not None:  # the gradient passes as if nothing were rounded
            rows = x.detach().reshape(-1, x.shape[-1]).float()
            x = x + (round_tokens(rows, self.inputs) - rows).view_as(x)
        x = x if self.order is None else x[..., self.order]
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        y = _Product.apply(x.to(dtype), self.now(), self.centred)
        return y if self.bias is None else y + self.bias


class _Product(torch.autograd.Function):
    """x @ Wᵀ with W = centred · scale a group. W is made again in the backward pass, not kept between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Tensor, centred: Tensor) -> Tensor:
        ctx.save_for_backward(x, scales, centred)
        return F.linear(x, _weight(scales, centred, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scales, centred = ctx.saved_tensors
        g = grads[0].to(x.dtype)
        dw = g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return g @ _weight(scales, centred, x.dtype), (dw.view_as(centred) * centred).sum(-1, dtype=torch.float32), None


def _weight(scales: Tensor, centred: Tensor, dtype: torch.dtype) -> Tensor:
    return (centred * scales.to(dtype)[..., None]).view(len(centred), -1)


@dataclass(frozen=True)
class Gain:
    """A norm's weight under tuning: (weight + offset) · (1 + ``change``) − offset."""

    spec: NormSpec
    weight: Tensor
    change: Tensor
    dtype: torch.dtype

    def now(self) -> Tensor:
        offset = self.spec.weight_offset
        return (self.weight + offset) * (1 + self.change) - offset


class Student:
    """The quantized model with its parameters: one relative change a scale and a norm weight."""

    def __init__(
        self, source: LayerSource, results: Sequence[LayerResult], head: LayerResult | None, device: torch.device
    ) -> None:
        self.spec, self.device = source.spec, device
        self.source = source
        self.outer = source.outer_weights(device)
        self.own = dict(self.outer)  # final norm and head as they are after quantization
        if head is not None:
            self.own |= {k: v.to(device) for k, v in head.dense().items()}
        self.linears: list[dict[str, Linear]] = []
        self.gains: list[dict[str, Gain]] = []
        self.fixed: list[dict[str, Tensor]] = []
        for layer, result in zip(self.spec.layers, results, strict=True):
            codes = {n: w for n, w in result.weights.items() if isinstance(w, Code)}
            dense = {
                n: w if isinstance(w, Tensor) else w.dequantize() for n, w in result.weights.items() if n not in codes
            }
            self.linears.append({n: Linear.of(c, dense.get(f"{n}.bias"), device) for n, c in codes.items()})
            self.gains.append({n.name: _gain(n, dense[n.name], device) for n in layer.norms() if n.name in dense})
            self.fixed.append({n: w.to(device).float() for n, w in dense.items()})

    def parameters(self) -> list[Tensor]:
        steps = [x.change for group in self.linears for x in group.values()]
        return steps + [x.change for group in self.gains for x in group.values()]

    def found(self) -> dict[str, Tensor]:
        """Scales and norm weights as they are stored, by canonical name."""
        scales = {n: x.stored() for group in self.linears for n, x in group.items()}
        return scales | {n: x.now().detach().to(x.dtype).cpu() for group in self.gains for n, x in group.items()}

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states [1, length, hidden] before the final norm of ``ids`` [length]."""
        x = self.source.embed(self.outer[self.spec.embed], ids[None].to(self.device))
        parts = zip(self.spec.layers, self.linears, self.gains, self.fixed, strict=True)
        for i, (layer, linears, gains, fixed) in enumerate(parts):
            weights: Weights = fixed | {n: g.now() for n, g in gains.items()}
            x = layer_forward(layer, Called(weights, linears), x, along=self.source.along(i))
        return x

    @torch.no_grad()
    def gradient(self, hidden: Tensor, exact: Tensor) -> Tensor:
        """Of the mean of ``divergence`` by ``hidden``. By the logits it is what this model expects less what the
        original does, over the number of positions: neither logarithms nor their own backward pass are needed."""
        leaf = hidden.requires_grad_()
        for a in range(0, len(exact), ROWS):
            p = head_logits(self.spec, self.outer, exact[a : a + ROWS].to(self.device)).float().softmax(-1)
            with torch.enable_grad():
                logits = head_logits(self.spec, self.own, leaf[0, a : a + ROWS])
            more = logits.detach().float().softmax(-1).sub_(p).div_(len(exact))
            logits.backward(more.to(logits.dtype))
        assert leaf.grad is not None
        return leaf.grad

    def divergence(self, hidden: Tensor, exact: Tensor) -> Iterator[Tensor]:
        """KL(original ‖ this model) in nats, summed over some positions at a time. ``exact``: the original's hidden
        states [length, hidden], where ``hidden`` is this model's, [1, length, hidden]."""
        for a in range(0, len(exact), ROWS):
            with torch.no_grad():
                p = head_logits(self.spec, self.outer, exact[a : a + ROWS].to(self.device)).float().log_softmax(-1)
            q = head_logits(self.spec, self.own, hidden[0, a : a + ROWS]).float().log_softmax(-1)
            yield kl_divergence(p, q)


def _gain(norm: NormSpec, weight: Tensor, device: torch.device) -> Gain:
    w = weight.to(device).float()
    return Gain(norm, w, torch.zeros_like(w, requires_grad=True), weight.dtype)


def _train(
    model: Student,
    text: list[tuple[Tensor, Tensor]],
    held: list[tuple[Tensor, Tensor]],
    steps: int,
    rate: float,
    seed: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Adam with a cosine schedule over the samples of ``text`` (token ids, the original's hidden states); ``held``:
    those to judge by."""
    parameters = model.parameters()
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.99), eps=1e-12)
    draw = torch.Generator().manual_seed(seed)
    order: list[int] = []
    with in_bf16(model.device):
        before = _mean(model, held)
        for step in range(steps):
            progress(step, steps)
            order = order or torch.randperm(len(text), generator=draw).tolist()
            ids, exact = text[order.pop()]
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            with torch.enable_grad():
                hidden = model.hidden(ids)
                hidden.backward(model.gradient(hidden.detach(), exact))
            torch.nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
            optimizer.step()
        progress(steps, steps)
        return {"steps": steps, "kl_before": before, "kl_after": _mean(model, held)}


def _mean(model: Student, samples: list[tuple[Tensor, Tensor]]) -> float:
    """KL a token over ``samples``."""
    total = sum(float(part) for ids, exact in samples for part in model.divergence(model.hidden(ids), exact))
    return total / sum(len(ids) for ids, _ in samples)
