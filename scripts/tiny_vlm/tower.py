"""The tower and the projector: a small ViT that learns to write the rows of ``words.py`` for what it sees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

from tiny_vlm.drawings import Scene, draw
from tiny_vlm.words import ROWS, Words
from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import clip_recipe
from toolkit.runners.tensor.devices.find import bf16_is_native
from toolkit.vision.recipes import prepare

IMAGE, PATCH = 64, 16  # ROWS patches
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": IMAGE},
    "crop_size": {"height": IMAGE, "width": IMAGE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
}
assert (IMAGE // PATCH) ** 2 == ROWS
BATCH = 64
DRAWN = 10_000  # pictures that all steps share
SHIFT = 2  # pixels by which they are moved at most whenever they are shown


class Eye(torch.nn.Module):
    """Parameters are named as in LLaVA's checkpoints."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        config = CLIPVisionConfig(**{k: v for k, v in VISION.items() if k != "model_type"}, attn_implementation="eager")
        self.vision_tower = CLIPVisionModel(config)
        for name, parameter in self.vision_tower.named_parameters():
            if name.endswith("position_embedding.weight"):  # as large as what it is added to
                torch.nn.init.normal_(parameter, std=0.3)
        wide = VISION["hidden_size"]
        parts = {"linear_1": torch.nn.Linear(wide, hidden), "linear_2": torch.nn.Linear(hidden, hidden)}
        self.multi_modal_projector = torch.nn.ModuleDict(parts)

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, 3, IMAGE, IMAGE] to [pictures, ROWS, hidden of the language model]."""
        seen = self.vision_tower(pixels, output_hidden_states=True).hidden_states[-1][:, 1:]
        return self.multi_modal_projector["linear_2"](functional.gelu(self.multi_modal_projector["linear_1"](seen)))


def drawn(count: int, seed: int) -> tuple[list[Scene], Tensor]:
    """Scenes and their drawings, prepared as the toolkit prepares pictures."""
    recipe, rng = clip_recipe(Fields(VISION), Fields(PREPROCESSOR)), np.random.default_rng(seed)
    scenes = [Scene.draw_lots(rng) for _ in range(count)]
    pixels = np.stack([prepare(recipe, draw(scene, rng)).pixels[0] for scene in scenes])
    return scenes, torch.from_numpy(pixels)


def learn_to_see(words: Words, steps: int, say: Callable[[str], None], rate: float = 2e-3) -> Eye:
    """Rows are to be near those of the scene, and nearer to them than to those of any other value of a trait."""
    torch.manual_seed(0)
    scenes, pictures = drawn(DRAWN, seed=1)
    say(f"tower: {DRAWN} pictures drawn")
    rng, eye = np.random.default_rng(2), Eye(next(iter(words.tables.values())).shape[-1])
    optimizer = torch.optim.AdamW(eye.parameters(), lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        chosen = rng.choice(DRAWN, BATCH, replace=False)
        shift = tuple(int(x) for x in rng.integers(-SHIFT, SHIFT + 1, 2))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16_is_native()):
            rows = eye(pictures[chosen].roll(shift, (2, 3)))
        loss, right = row_loss(words, rows.float(), [scenes[i] for i in chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(eye.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            told = ", ".join(f"{kind} {share:.0%}" for kind, share in right.items())
            say(f"tower: step {step + 1} of {steps}, loss {loss.item():.3f}, {told}")
    return eye.eval()


def row_loss(words: Words, rows: Tensor, scenes: list[Scene]) -> tuple[Tensor, dict[str, float]]:
    """The loss, and the share of pictures whose rows are nearest to the right value, by kind of trait."""
    losses, right = [], {}
    for mine, (kind, numbers) in zip(rows.chunk(len(words.tables), 1), words.numbers(scenes).items(), strict=True):
        table, target = words.tables[kind], torch.tensor(numbers)
        away = (mine[:, None] - table[None]).pow(2).flatten(2).mean(-1) / table.var()  # [pictures, values]
        losses.append(functional.cross_entropy(-8 * away, target) + away.gather(1, target[:, None]).mean())
        right[kind] = float((away.argmin(1) == target).float().mean())
    return torch.stack(losses).sum(), right
