"""``tool lite draft``: a head that guesses a model's next tokens, trained on text that the model writes itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.drafts.draft_head import HeadSpec, usual_layers, write_head
from toolkit.artifacts.manifest import describe_parent
from toolkit.artifacts.output.replace import check_directory_target
from toolkit.artifacts.output.room import check_room
from toolkit.artifacts.output.stage import Stage, open_stage
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base import extras
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import DecoderSpec, RopeSpec
from toolkit.quant.draft.features import States
from toolkit.quant.draft.plot import plot_curve
from toolkit.quant.draft.text import LENGTH, Writer
from toolkit.quant.draft.train import BATCH, Part, Teacher, Text, Training
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.opening import open_source
from toolkit.quant.options import Common, DraftHead
from toolkit.quant.run import Result
from toolkit.quant.text.calibration import check_seed
from toolkit.quant.text.calibration_text import Progress
from toolkit.runners.tensor.devices.find import find_device

PART = 128  # samples that are written and gone through the model together
HELD = 32  # samples that are held back, at most
CURVE = "acceptance.png"


def draft(
    model: str,
    work_dir: Path | str,
    options: DraftHead = DraftHead(),
    *,
    overwrite: bool = False,
    device: str = "auto",
    progress: Progress = lambda what, done, total: None,
    notice: Callable[[str], None] = lambda line: None,
) -> Result:
    """Train a head for MODEL and write it to ``work_dir``. Raises UsageError or ToolkitError, one line."""
    _check(options)
    source = open_source(model, Common(), "draft")
    spec, work_dir = source.spec, Path(work_dir)
    if spec.encodes or spec.mask_token is not None:
        raise ToolkitError(f"{source.path}: a model that writes its text from left to right is needed")
    check_directory_target(work_dir, [source.path], overwrite)
    place = find_device(device)
    length = min(LENGTH, spec.max_position)
    samples = -(-options.tokens // length)
    head = _head_of(spec, options)
    room = (samples + HELD) * length * (len(head.layers) + 1) * spec.hidden_size * 2 + 16 * _parameters(head)
    check_room(work_dir, room, overwrite)
    progress("reading the model", 0, 1)
    parent = describe_parent(source.path)
    told = asdict(options) | {"device": place.type}
    with open_stage(
        work_dir, kind="draft", stage="lite draft", parent=parent, options=told, overwrite=overwrite
    ) as stage:
        if (found := stage.earlier) is not None:
            return Result(work_dir, told, found.quality, True)
        if stage.saved():
            notice("going on where an earlier run was")
        source.check_finite()
        text, held = _prepare(source, stage, head, options, samples, place, progress)
        quality = _train(source, stage, head, options, text, held, place, progress)
        if find_spec("matplotlib") is None:
            notice(f"no {CURVE} without matplotlib; for one: {extras.command('plot')}")
        else:
            plot_curve(quality["acceptance"], stage.dir / CURVE)
        stage.finish(quality)
    return Result(work_dir, told, quality, False)


def _check(options: DraftHead) -> None:
    for name, low in (("tokens", LENGTH), ("steps", 1), ("draft_vocab_size", 16), ("num_draft_tokens", 1)):
        if (found := getattr(options, name)) < low:
            raise UsageError(f"--{name.replace('_', '-')}: expected {low} or more, found {found}")
    if options.num_draft_tokens > 16:
        raise UsageError(f"--num-draft-tokens: expected 1 to 16, found {options.num_draft_tokens}")
    check_seed(options.seed)


def _head_of(spec: DecoderSpec, options: DraftHead) -> HeadSpec:
    """A layer like the model's own, as far as those are such, but for a narrow MLP: it guesses as well as one that is
    three times as wide, and is read for every token of a guess."""
    attention = next((a for _, a in spec.attention_layers()), None)
    hidden = spec.hidden_size
    head_dim = 64 if attention is None else attention.head_dim
    heads = max(1, hidden // head_dim) if attention is None else attention.heads
    rope = None if attention is None else attention.rope
    return HeadSpec(
        hidden_size=hidden,
        intermediate_size=hidden,
        heads=heads,
        kv_heads=heads if attention is None else attention.kv_heads,
        head_dim=head_dim,
        vocab_size=spec.vocab_size,
        draft_vocab_size=min(options.draft_vocab_size, spec.vocab_size),
        eps=spec.final_norm.eps,
        rope=RopeSpec(head_dim, 10000.0 if rope is None else rope.theta, max_position=spec.max_position),
        layers=usual_layers(len(spec.layers)),
        norm_before_residual=True,
    )


def _parameters(head: HeadSpec) -> int:
    return sum(torch.Size(shape).numel() for shape in head.shapes(len(head.layers)).values())


def _prepare(
    source: LayerSource,
    stage: Stage,
    head: HeadSpec,
    options: DraftHead,
    samples: int,
    device: torch.device,
    progress: Progress,
) -> tuple[Text, Text]:
    """The text and what the model's layers make of it, part by part; what ``stage`` has is not made again."""
    tokenizer = Tokenizer.open(source.checkpoint.tokenizer_dir)
    length = min(LENGTH, source.spec.max_position)
    parts = [(i, min(PART, samples - a)) for i, a in enumerate(range(0, samples, PART))]
    parts.insert(0, (-1, max(1, min(HELD, samples // 8))))
    whole = sum(count for _, count in parts) * length
    behind = 0
    with Writer(source.path, tokenizer, options.seed, min(1024, source.spec.max_position)) as writer:
        for number, count in parts:
            if not stage.done(f"text.{number}"):
                written = lambda done: progress("writing text", behind + done, whole)  # noqa: B023, E731
                made = writer.part(number, count, length, written)
                source.check_tokens(made)
                stage.save(f"text.{number}", {"ids": made})
            behind += count * length
            progress("writing text", behind, whole)
    behind = 0
    with States(source.path, (*head.layers, len(source.spec.layers)), length, str(device)) as taken:
        for number, count in parts:
            if not stage.done(f"states.{number}"):
                told = lambda done: progress("taking hidden states", behind + done * length, whole)  # noqa: B023, E731
                states = taken.of(stage.load(f"text.{number}")["ids"], told)
                stage.save(f"states.{number}", {str(i): states[i] for i in range(count)})
            behind += count * length
            progress("taking hidden states", behind, whole)
    parts_of = [Part(stage.load(f"text.{n}")["ids"], stage.load(f"states.{n}")) for n, _ in parts]
    return Text(parts_of[1:]), Text(parts_of[:1])


def _train(
    source: LayerSource,
    stage: Stage,
    head: HeadSpec,
    options: DraftHead,
    text: Text,
    held: Text,
    device: torch.device,
    progress: Progress,
) -> dict[str, Any]:
    """Train, write the head's files, and return the figures for the manifest."""
    spec, outer = source.spec, source.outer_weights(device)
    kept, covered = _vocabulary(text, head)
    teacher = Teacher(spec, outer, kept.to(device))
    rows = outer[spec.head][kept.to(device)].float() * spec.head_scale
    norm = outer.get(spec.final_norm.name)
    first = rows.new_ones(head.hidden_size) if norm is None else norm.float() + spec.final_norm.weight_offset
    training = Training(head, teacher, first, rows, options.seed, options.num_draft_tokens)
    training.run(text, held, options.steps, options.seed, stage, lambda done: progress("training", done, options.steps))
    progress("writing", 0, 1)
    _write(source, stage, head, options, training, kept)
    return {
        "acceptance": training.curve,
        "accepted": training.curve[-1]["accepted"],
        "tokens_a_guess": round(_expected(training.curve[-1]["accepted"]), 3),
        "held_out_tokens": held.tokens,
        "trained_tokens": options.steps * BATCH * text.tokens // len(text),
        "draft_vocab_covers": round(covered, 4),
        "parameters": _parameters(head),
    }


def _expected(shares: list[float]) -> float:
    """Tokens of a guess that come true."""
    total, alive = 0.0, 1.0
    for share in shares:
        alive *= share
        total += alive
    return total


def _vocabulary(text: Text, head: HeadSpec) -> tuple[Tensor, float]:
    """The most frequent ids of a text, as many as the head has, ascending, and the share of the text that they are."""
    counts = torch.zeros(head.vocab_size, dtype=torch.int64)
    for part in text.parts:
        counts += torch.bincount(part.ids.flatten(), minlength=head.vocab_size)
    order = torch.argsort(counts, descending=True, stable=True)[: head.draft_vocab_size]
    return order.sort().values, float(counts[order].sum() / counts.sum())


def _write(
    source: LayerSource, stage: Stage, head: HeadSpec, options: DraftHead, training: Training, kept: Tensor
) -> None:
    spec = source.spec
    stored = source.outer_weights(torch.device("cpu"))[spec.embed].dtype
    dtype = stored if stored in (torch.bfloat16, torch.float16) else torch.float32
    tensors: dict[str, Tensor] = {n: w.detach().cpu().to(dtype).contiguous() for n, w in training.weights.items()}
    tensors["embed_tokens.weight"] = training.teacher.embed[: head.vocab_size].cpu().to(dtype).contiguous()
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    write_head(
        stage.dir,
        head,
        tensors,
        verifier=str(stage.parent["path"]),
        architectures=list(source.checkpoint.config.get("architectures") or []),
        layer_config={
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": head.vocab_size,
            "hidden_size": head.hidden_size,
            "intermediate_size": head.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": head.heads,
            "num_key_value_heads": head.kv_heads,
            "head_dim": head.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": head.eps,
            "rope_theta": head.rope.theta,
            "max_position_embeddings": spec.max_position,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        tokens=options.num_draft_tokens,
    )
