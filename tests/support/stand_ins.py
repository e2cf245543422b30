"""Models that see and have no class in transformers, as their authors describe them: towers and language models of
transformers on the authors' tensors, and in plain torch what stands between. Oracles: nothing of ours is in them.

Each takes every tensor of a checkpoint by its name there, so that one too many or too few fails.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from toolkit.models.registry import get

Tensors = dict[str, Tensor]
NOT_OF_TEXT = ("architectures", "model_type", "torch_dtype", "image_token_id", "bias", "img_size", "_name_or_path")
NOT_OF_TEXT += ("plora_rank", "plora_qkv_rank")


def take(tensors: Tensors, begin: str) -> Tensors:
    """Those whose names begin so, without that; they are gone from ``tensors``."""
    return {name.removeprefix(begin): tensors.pop(name) for name in list(tensors) if name.startswith(begin)}


def loaded(module: Any, tensors: Tensors, allow: tuple[str, ...] = ()) -> Any:
    """``module`` with exactly these weights; ``allow``: how names begin that it may lack."""
    own = module.state_dict()
    if not set(own) & set(tensors) and all(f"vision_model.{name}" in own for name in tensors):
        tensors = {f"vision_model.{name}": tensor for name, tensor in tensors.items()}
    missing, more = module.load_state_dict(tensors, strict=False)
    assert not more and not [name for name in missing if not name.startswith(allow or "-")], (missing, more)
    return module.eval()


def normed(image: Any, mean: Any, std: Any) -> Tensor:
    """[3, height, width]."""
    pixels = torch.from_numpy(np.array(image, np.float32) / 255).permute(2, 0, 1)
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


class StandIn:
    """A checkpoint at ``path``. Subclasses: ``open`` its tensors, ``tiles`` of a picture, their ``rows``, ``places`` of
    tokens."""

    token_field = "image_token_id"

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.whole = dict(self.config)
        self.token = self.image_token()
        self.given = json.loads((path / "preprocessor_config.json").read_text())
        tensors = load_file(path / "model.safetensors")
        self.text: Any = None
        self.open(tensors)
        assert not tensors, f"nobody took {sorted(tensors)[:5]}"

    def image_token(self) -> int:
        found: int = self.config[self.token_field]
        return found

    def open(self, tensors: Tensors) -> None:
        raise NotImplementedError

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        raise NotImplementedError

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        raise NotImplementedError

    def language(self, model: Any, config: Any, tensors: Tensors, **fields: Any) -> None:
        own = {name: value for name, value in self.config.items() if name not in NOT_OF_TEXT}
        settings = config(**{**own, **fields, "attn_implementation": "eager"})
        self.text = loaded(model(settings).float(), {name: tensors.pop(name) for name in list(tensors)})

    @torch.inference_mode()
    def logits(self, ids: list[int], files: tuple[bytes, ...] = ()) -> np.ndarray:
        inputs = self.text.get_input_embeddings()(torch.tensor([ids]))
        self.seen = torch.zeros(len(ids), dtype=torch.bool)  # which tokens are of pictures: answers have none
        if files:
            images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
            rows = torch.cat([self.rows(self.tiles(self.whole, self.given, image), image) for image in images])
            where = (torch.tensor(ids) == self.token).nonzero()[: len(rows), 0]
            inputs[0, where], self.seen[where] = rows, True
        places = torch.tensor([self.places(ids if files else [-1] * len(ids))])
        mask = torch.full((1, 1, len(ids), len(ids)), -torch.inf).triu(1)  # places that repeat would make it several
        found = self.text(inputs_embeds=inputs, position_ids=places, attention_mask=mask, use_cache=False)
        return found.logits[0].numpy()

    def places(self, ids: list[int]) -> list[int]:
        return list(range(len(ids)))


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class Phi3V(StandIn):
    def open(self, tensors: Tensors) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3Config, Phi3ForCausalLM

        own = take(tensors, "model.vision_embed_tokens.")
        self.tower = loaded(
            CLIPVisionModel(CLIPVisionConfig(**self.config["img_processor"])), take(own, "img_processor.vision_model.")
        )
        self.newline, self.separator = own.pop("sub_GN").flatten(), own.pop("glb_GN").flatten()
        width = len(self.newline)
        hidden = self.config["hidden_size"]
        linears = torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden)
        self.project = loaded(torch.nn.Sequential(*linears), take(own, "img_projection."))
        assert not own
        rope = {**self.config.pop("rope_scaling"), "rope_type": "longrope", "rope_theta": self.config["rope_theta"]}
        self.language(Phi3ForCausalLM, Phi3Config, tensors, rope_parameters=rope, rope_scaling=None)

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        side, most = config["img_processor"]["image_size"], given["num_crops"]
        tall = image.width < image.height
        if tall:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        ratio, scale = image.width / image.height, 1
        while scale * math.ceil(scale / ratio) <= most:
            scale += 1
        width = (scale - 1) * side
        height = int(width / ratio)
        pixels = np.asarray(image.resize((width, max(height, 1)), Image.Resampling.BILINEAR))
        missing = -len(pixels) % side
        pixels = np.pad(pixels, ((missing // 2, missing - missing // 2), (0, 0), (0, 0)), constant_values=255)
        whole = normed(pixels.swapaxes(0, 1) if tall else pixels, CLIP_MEAN, CLIP_STD)
        small = functional.interpolate(whole[None], (side, side), mode="bicubic")[0]
        return [small, *(tile for line in whole.split(side, 1) for tile in line.split(side, 2))]

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        found = self.tower(torch.stack(tiles), output_hidden_states=True).hidden_states[-2][:, 1:]
        side = math.isqrt(found.shape[1])
        # 2 by 2 patches one row: upper left, upper right, lower left, lower right
        corners = [found.view(len(found), side, side, -1)[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        grids = torch.cat(corners, -1)
        tall = image.width < image.height
        ratio = max(image.size) / min(image.size)
        columns = max(n for n in range(1, 100) if n * math.ceil(n / ratio) <= self.given["num_crops"])
        rows = (len(tiles) - 1) // columns
        rows, columns = (columns, rows) if tall else (rows, columns)
        lines = torch.cat([torch.cat(list(grids[1 + i * columns : 1 + (i + 1) * columns]), 1) for i in range(rows)])
        ended = [torch.cat([line, self.newline[None]]) for line in (*lines, *grids[0])]
        ended.insert(len(lines), self.separator[None])
        return self.project(torch.cat(ended))


class XComposer(StandIn):
    """A language model of transformers; what leaves its linears is raised for tokens of pictures."""

    def open(self, tensors: Tensors) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

        config, vision = self.config, CLIPVisionConfig(**self.sized(self.config))
        config.pop("vision_config")
        self.tower = loaded(CLIPVisionModel(vision), take(tensors, "vit.vision_tower.vision_model."))
        hidden, width = config["hidden_size"], vision.hidden_size
        self.scales = {"wqkv": 2.0 if "4khd" in config.get("_name_or_path", "") else 1.0}
        if "img_size" not in config:
            self.newline, self.separator = (tensors.pop(f"plora_{x}_GN").flatten() for x in ("sub", "glb"))
            width = len(self.newline)
        linears = torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden)
        self.project = loaded(torch.nn.Sequential(*linears), take(tensors, "vision_proj."))
        heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
        names = {"attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj"}
        names |= {"feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj"}
        added = {}
        named = {
            "model.embed_tokens.weight": tensors.pop("model.tok_embeddings.weight"),
            "lm_head.weight": tensors.pop("output.weight"),
            "model.norm.weight": tensors.pop("model.norm.weight"),
        }

        def thirds(rows: Tensor) -> list[Tensor]:
            groups = rows.view(kv, heads // kv + 2, hidden // heads, -1)
            return [x.flatten(0, -2) for x in groups.split([heads // kv, 1, 1], 1)]

        for i in range(config["num_hidden_layers"]):
            layer, begin = take(tensors, f"model.layers.{i}."), f"model.layers.{i}."
            a, b = (layer.pop(f"attention.wqkv.Plora_{x}.weight") for x in "AB")
            rows = zip("qkv", thirds(layer.pop("attention.wqkv.weight")), thirds(b), strict=True)
            for x, own, more in rows:
                named[f"{begin}self_attn.{x}_proj.weight"] = own
                added[f"{begin}self_attn.{x}_proj"] = a, more * self.scales["wqkv"]
            for theirs, ours in names.items():
                named[f"{begin}{ours}.weight"] = layer.pop(f"{theirs}.weight")
                added[f"{begin}{ours}"] = layer.pop(f"{theirs}.Plora_A.weight"), layer.pop(f"{theirs}.Plora_B.weight")
            for theirs, ours in (("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
                named[f"{begin}{ours}.weight"] = layer.pop(f"{theirs}.weight")
            assert not layer
        self.language(LlamaForCausalLM, LlamaConfig, named)
        for name, pair in added.items():
            self.text.get_submodule(name).register_forward_hook(
                lambda module, given, out, pair=pair: (
                    out + (given[0] @ pair[0].T @ pair[1].T) * self.seen[None, :, None]
                )
            )

    @staticmethod
    def sized(config: dict[str, Any]) -> dict[str, Any]:
        return {"image_size": config.get("img_size"), **config["vision_config"]}

    @classmethod
    def tiles(cls, config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        side, most = cls.sized(config)["image_size"], given["num_crops"]
        if "img_size" in config:
            return [normed(image.resize((side, side), Image.Resampling.BICUBIC), CLIP_MEAN, CLIP_STD)]
        fine = "4khd" in config.get("_name_or_path", "")
        tall = image.width < image.height
        if tall:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        ratio, scale = image.width / image.height, 1
        while scale * math.ceil(scale / ratio) <= most:
            scale += 1
        width = (scale - 1 if fine else min(math.ceil(image.width / side), scale - 1)) * side
        small = image.resize((width, max(int(width / ratio), 1)), Image.Resampling.BILINEAR)
        missing = -small.height % side
        above = missing // 2 if fine else 0
        white = ((above, missing - above), (0, 0), (0, 0))
        pixels = np.pad(np.asarray(small), white, constant_values=255)
        whole = normed(pixels.swapaxes(0, 1) if tall else pixels, CLIP_MEAN, CLIP_STD)
        first = functional.interpolate(whole[None], (side, side), mode="bicubic")[0]
        return [first, *(tile for line in whole.split(side, 1) for tile in line.split(side, 2))]

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        found = self.tower(torch.stack(tiles), output_hidden_states=True).hidden_states[-1][:, 1:]
        if "img_size" in self.whole:
            return self.project(found[0])
        side = math.isqrt(found.shape[1])
        corners = [found.view(len(found), side, side, -1)[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        grids = torch.cat(corners, -1)
        tall = image.width < image.height
        long, ratio = max(image.size), max(image.size) / min(image.size)
        columns = max(n for n in range(1, 100) if n * math.ceil(n / ratio) <= self.given["num_crops"])
        if "4khd" not in self.whole.get("_name_or_path", ""):
            columns = min(columns, math.ceil(long / self.whole["vision_config"]["image_size"]))
        rows = (len(tiles) - 1) // columns
        rows, columns = (columns, rows) if tall else (rows, columns)
        lines = torch.cat([torch.cat(list(grids[1 + i * columns : 1 + (i + 1) * columns]), 1) for i in range(rows)])
        ended = [torch.cat([line, self.newline[None]]) for line in (*grids[0], *lines)]
        ended.insert(side // 2, self.separator[None])
        return self.project(torch.cat(ended))


class MiniCPMV(StandIn):
    def open(self, tensors: Tensors) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
        from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionConfig, Idefics2VisionTransformer

        vision = dict(self.config.pop("vision_config"))
        vision["num_hidden_layers"] -= self.config.pop("drop_vision_last_layer", False)
        tower = Idefics2VisionTransformer(Idefics2VisionConfig(**vision, attn_implementation="eager"))
        self.tower, self.side = loaded(tower, take(tensors, "vpm.")), vision["patch_size"]
        own = take(tensors, "resampler.")
        self.query, self.project, hidden = own.pop("query"), own.pop("proj"), self.config["hidden_size"]
        heads = max(hidden // 128, 1)
        self.attend = loaded(torch.nn.MultiheadAttention(hidden, heads, batch_first=True), take(own, "attn."))
        self.kv = own.pop("kv_proj.weight")
        self.norms = {
            name: loaded(torch.nn.LayerNorm(hidden, eps=1e-6), take(own, f"{name}."))
            for name in ("ln_q", "ln_kv", "ln_post")
        }
        assert not own
        later = float(self.config.pop("version")) > 2.5
        kinds: Any = (Qwen2ForCausalLM, Qwen2Config) if later else (LlamaForCausalLM, LlamaConfig)
        self.language(*kinds, take(tensors, "llm."))

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        side, patch, most = given["scale_resolution"], given["patch_size"], given["max_slice_nums"]
        half = (0.5, 0.5, 0.5)

        def near(length: float, unit: int) -> int:
            return max(round(length / unit) * unit, unit)

        def fitting(width: float, height: float, grow: bool) -> tuple[int, int]:
            if grow or width * height > side * side:
                ratio = width / height
                height = int(side / math.sqrt(ratio))
                width = int(height * ratio)
            return near(width, patch), near(height, patch)

        def made(picture: Any, size: tuple[int, int]) -> Any:
            return picture.resize(size, Image.Resampling.BICUBIC)

        ideal = min(math.ceil(image.width * image.height / side**2), most)
        if ideal <= 1:
            return [normed(made(image, fitting(*image.size, True)), half, half)]
        best, least = (1, 1), math.inf
        for count in (ideal - 1, ideal, ideal + 1):
            for columns in range(1, count + 1) if 1 < count <= most else ():
                error = abs(math.log(image.width / image.height) - math.log(columns * columns / count))
                if count % columns == 0 and error < least:
                    best, least = (columns, count // columns), error
        columns, rows = best
        width, height = fitting(near(image.width, columns) / columns, near(image.height, rows) / rows, True)
        large = normed(made(image, (width * columns, height * rows)), half, half)
        slices = [tile for line in large.split(height, 1) for tile in line.split(width, 2)]
        return [normed(made(image, fitting(*image.size, False)), half, half), *slices]

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        return torch.cat([self._asked(tile) for tile in tiles])

    def _asked(self, tile: Tensor) -> Tensor:
        found = self.tower(tile[None]).last_hidden_state[0]
        rows, columns = tile.shape[1] // self.side, tile.shape[2] // self.side
        x = self.norms["ln_kv"](found @ self.kv.T)
        quarter = x.shape[1] // 4
        places = torch.zeros(rows, columns, 4, quarter)
        for i in range(quarter):
            slow = 10_000.0 ** (-i / quarter)
            across, down = torch.arange(columns) * slow, torch.arange(rows)[:, None] * slow
            places[..., 0, i], places[..., 1, i] = across.sin(), across.cos()
            places[..., 2, i], places[..., 3, i] = down.sin(), down.cos()
        keys = x + places.flatten(2).flatten(0, 1)
        out = self.attend(self.norms["ln_q"](self.query)[None], keys[None], x[None])[0][0]
        return self.norms["ln_post"](out) @ self.project


class DeepseekVL2(StandIn):
    def open(self, tensors: Tensors) -> None:
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

        vision, self.config["hidden_size"] = self.config["vision_config"], self.config["language_config"]["hidden_size"]
        own, width = take(tensors, "vision."), vision["width"]
        self.side = vision["image_size"] // vision["patch_size"]
        settings = SiglipVisionConfig(
            hidden_size=width,
            intermediate_size=int(width * vision["mlp_ratio"]),
            num_hidden_layers=vision["layers"],
            num_attention_heads=vision["heads"],
            image_size=vision["image_size"],
            patch_size=vision["patch_size"],
            vision_use_head=False,
        )
        named = {
            "embeddings.position_embedding.weight": own.pop("pos_embed")[0],
            **{f"embeddings.patch_embedding.{x}": own.pop(f"patch_embed.proj.{x}") for x in ("weight", "bias")},
            **{f"post_layernorm.{x}": own.pop(f"norm.{x}") for x in ("weight", "bias")},
        }
        for i in range(vision["layers"]):
            for x in ("weight", "bias"):
                thirds = own.pop(f"blocks.{i}.attn.qkv.{x}").chunk(3)
                layer = f"encoder.layers.{i}"
                named |= {f"{layer}.self_attn.{y}_proj.{x}": part for y, part in zip("qkv", thirds, strict=True)}
                named[f"{layer}.self_attn.out_proj.{x}"] = own.pop(f"blocks.{i}.attn.proj.{x}")
                for theirs, ours in (
                    ("norm1", "layer_norm1"),
                    ("norm2", "layer_norm2"),
                    ("mlp.fc1",) * 2,
                    ("mlp.fc2",) * 2,
                ):
                    named[f"{layer}.{ours}.{x}"] = own.pop(f"blocks.{i}.{theirs}.{x}")
        assert not own
        self.tower = loaded(SiglipVisionModel(settings), named)
        self.newline, self.separator = tensors.pop("image_newline"), tensors.pop("view_seperator")
        hidden = len(self.newline)
        linears = torch.nn.Linear(4 * width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden)
        self.project = loaded(torch.nn.Sequential(*linears), take(tensors, "projector.layers."))
        language = self.config["language_config"]
        settings = DeepseekV2Config(**{**language, "attn_implementation": "eager"})
        self.text = DeepseekV2ForCausalLM(settings).float()
        own = take(tensors, "language.")
        for i in range(language["num_hidden_layers"]):  # experts are stacked in its class
            begin = f"model.layers.{i}.mlp.experts"
            each = [take(own, f"{begin}.{e}.") for e in range(language["n_routed_experts"])]
            if each[0]:
                both = [torch.cat([one["gate_proj.weight"], one["up_proj.weight"]]) for one in each]
                own[f"{begin}.gate_up_proj"] = torch.stack(both)
                own[f"{begin}.down_proj"] = torch.stack([one["down_proj.weight"] for one in each])
        loaded(self.text, own)

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any, many: bool = False) -> list[Tensor]:
        from PIL import ImageOps

        side = config["vision_config"]["image_size"]
        best, most, least = (side, side), 0, math.inf
        for width, height in config["candidate_resolutions"] if not many else ():
            scale = min(width / image.width, height / image.height)
            kept = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
            if kept > most or (kept == most and width * height - kept < least):
                best, most, least = (width, height), kept, width * height - kept
        half = (0.5, 0.5, 0.5)
        whole, large = (
            normed(ImageOps.pad(image, size, color=(127,) * 3), half, half) for size in ((side, side), best)
        )
        return [whole, *(tile for line in large.split(side, 1) for tile in line.split(side, 2))]

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        found = (
            self.tower(torch.stack(tiles)).last_hidden_state.unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)
        )
        found = functional.pad(found, (0, self.side % 2, 0, self.side % 2))
        grids = self.project(functional.unfold(found, 2, stride=2).transpose(1, 2))
        side = math.isqrt(grids.shape[1])
        grids = grids.unflatten(1, (side, side))
        columns = self._columns(len(tiles) - 1, image)
        lines = [torch.cat(list(grids[i : i + columns]), 1) for i in range(1, len(tiles), columns)]
        ended = [torch.cat([line, self.newline[None]]) for line in (*grids[0], *torch.cat(lines))]
        ended.insert(side, self.separator[None])
        return torch.cat(ended)

    def _columns(self, count: int, image: Any) -> int:
        side = self.config["vision_config"]["image_size"]
        sizes = [(w // side, h // side) for w, h in self.config["candidate_resolutions"] if w * h // side**2 == count]
        return min(sizes, key=lambda size: abs(math.log(size[0] / size[1] * image.height / image.width)))[0]


def eva(own: Tensors, vision: dict[str, Any]) -> Any:
    """EVA-CLIP's tower of CogVLM and GLM-4V, from a picture [3, height, width] to patches [patches, hidden]."""
    heads, patch, eps = vision["num_heads"], vision["patch_size"], vision["layer_norm_eps"]
    conv, bias = own.pop("patch_embedding.proj.weight"), own.pop("patch_embedding.proj.bias")
    first, places = own.pop("patch_embedding.cls_embedding"), own.pop("patch_embedding.position_embedding.weight")
    layers = [take(own, f"transformer.layers.{i}.") for i in range(vision["num_hidden_layers"])]

    def linear(layer: Tensors, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, layer[f"{name}.weight"], layer[f"{name}.bias"])

    def norm(layer: Tensors, name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], layer[f"{name}.weight"], layer[f"{name}.bias"], eps)

    def run(pixels: Tensor) -> Tensor:
        x = functional.conv2d(pixels[None], conv, bias, stride=patch)[0].flatten(1).T
        x = torch.cat([first, x]) + places
        for layer in layers:
            q, k, v = linear(layer, "attention.query_key_value", x).view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
            scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
            attended = linear(layer, "attention.dense", scores.transpose(0, 1).flatten(1))
            x = x + norm(layer, "input_layernorm", attended)
            inner = functional.gelu(linear(layer, "mlp.fc1", x))
            x = x + norm(layer, "post_attention_layernorm", linear(layer, "mlp.fc2", inner))
        return x[1:]

    return run


def between(own: Tensors) -> Any:
    """The gated projector of CogVLM and GLM-4V."""
    x1, x2, x3, x4 = (own.pop(f"{n}.weight") for n in ("linear_proj", "gate_proj", "dense_h_to_4h", "dense_4h_to_h"))
    weight, bias = own.pop("norm1.weight"), own.pop("norm1.bias")

    def run(x: Tensor) -> Tensor:
        x = functional.gelu(functional.layer_norm(x @ x1.T, (len(x1),), weight, bias))
        return (functional.silu(x @ x2.T) * (x @ x3.T)) @ x4.T

    return run


def shared_places(ids: list[int], token: int, size: int) -> list[int]:
    """Of the ``size`` tokens of a picture only the first two and the last are further on than those before."""
    found: list[int] = []
    seen = 0  # tokens of pictures so far
    for one in ids:
        inner = one == token and 1 < seen % size < size - 1
        found.append((found[-1] if found else -1) + (not inner))
        seen += one == token
    return found


class Glm4v(StandIn):
    token_field = "boi_token_id"

    def open(self, tensors: Tensors) -> None:
        from transformers import GlmConfig, GlmForCausalLM

        own, vision = take(tensors, "transformer.vision."), self.config["vision_config"]
        self.tower = eva(own, vision)
        self.conv, self.bias = own.pop("conv.weight"), own.pop("conv.bias")
        self.project, self.scale = between(take(own, "linear_proj.")), vision["scaling_factor"]
        self.ends, self.side = (own.pop("boi")[0], own.pop("eoi")[0]), vision["image_size"] // vision["patch_size"]
        assert not own
        config = self.config
        settings = GlmConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["multi_query_group_num"],
            head_dim=config["kv_channels"],
            rms_norm_eps=1e-5,
            attention_bias=True,
            pad_token_id=0,
            attn_implementation="eager",
        )
        named = {
            "model.embed_tokens.weight": tensors.pop("transformer.embedding.word_embeddings.weight"),
            "model.norm.weight": tensors.pop("transformer.encoder.final_layernorm.weight"),
            "lm_head.weight": tensors.pop("transformer.output_layer.weight"),
        }
        q, kv = (config[n] * config["kv_channels"] for n in ("num_attention_heads", "multi_query_group_num"))
        for i in range(config["num_layers"]):
            layer, begin = take(tensors, f"transformer.encoder.layers.{i}."), f"model.layers.{i}."
            for x in ("weight", "bias"):
                parts = layer.pop(f"self_attention.query_key_value.{x}").split([q, kv, kv])
                named |= {f"{begin}self_attn.{y}_proj.{x}": part for y, part in zip("qkv", parts, strict=True)}
            named |= {
                f"{begin}self_attn.o_proj.weight": layer.pop("self_attention.dense.weight"),
                f"{begin}mlp.gate_up_proj.weight": layer.pop("mlp.dense_h_to_4h.weight"),
                f"{begin}mlp.down_proj.weight": layer.pop("mlp.dense_4h_to_h.weight"),
            }
            named |= {f"{begin}{name}": tensor for name, tensor in layer.items()}
        self.text = loaded(GlmForCausalLM(settings).float(), named)

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        side = config["vision_config"]["image_size"]
        return [normed(image.resize((side, side), Image.Resampling.BICUBIC), CLIP_MEAN, CLIP_STD)]

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        found = self.tower(tiles[0]).T.unflatten(1, (self.side, self.side))
        found = functional.conv2d(found[None], self.conv, self.bias, stride=2)[0].flatten(1).T
        return torch.cat([self.ends[0], self.project(found), self.ends[1]]) / self.scale

    def places(self, ids: list[int]) -> list[int]:
        return shared_places(ids, self.token, (self.side // 2) ** 2 + 2)


class CogVLM(StandIn):
    """Every linear twice; tokens of pictures but the last of each go through the second ones."""

    def open(self, tensors: Tensors) -> None:
        own, config = take(tensors, "model.vision."), self.config
        vision = config["vision_config"]
        self.tower, self.side = eva(own, vision), vision["image_size"] // vision["patch_size"]
        self.conv, self.bias = own.pop("conv.weight", None), own.pop("conv.bias", None)
        self.project, self.ends = between(take(own, "linear_proj.")), (own.pop("boi")[0], own.pop("eoi")[0])
        assert not own
        self.layers = [take(tensors, f"model.layers.{i}.") for i in range(config["num_hidden_layers"])]
        names = ("model.embed_tokens", "model.norm", "lm_head")
        self.table, self.final, self.head = (tensors.pop(f"{name}.weight") for name in names)
        self.kv_heads = config.get("num_multi_query_heads", config["num_attention_heads"])

    tiles = staticmethod(Glm4v.tiles)

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        found = self.tower(tiles[0])
        if self.conv is not None:
            found = found.T.unflatten(1, (self.side, self.side))
            found = functional.conv2d(found[None], self.conv, self.bias, stride=2)[0].flatten(1).T
        return torch.cat([self.ends[0], self.project(found), self.ends[1]])

    @torch.inference_mode()
    def logits(self, ids: list[int], files: tuple[bytes, ...] = ()) -> np.ndarray:
        x, ids_seen = self.table[ids], ids if files else [-1] * len(ids)
        seen = torch.tensor(ids_seen) == self.token
        if files:
            images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
            x[seen] = torch.cat([self.rows(self.tiles(self.config, self.given, image), image) for image in images])
        count = (self.side // (1 if self.conv is None else 2)) ** 2 + 2
        other = seen & (seen.cumsum(0) % count != 0)
        places, heads = torch.tensor(shared_places(ids_seen, self.token, count)), self.config["num_attention_heads"]
        size = x.shape[1] // heads
        theta = 500_000.0 if "num_multi_query_heads" in self.config else 10_000.0
        angle = torch.outer(places, theta ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)[:, None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

        for layer in self.layers:

            def both(x: Tensor, text: str, picture: str, layer: Tensors = layer) -> Tensor:
                one = x @ layer[f"{text}.weight"].T
                two = functional.linear(x, layer[f"{picture}.weight"], layer.get(f"{picture}.bias"))
                return torch.where(other[:, None], two, one)

            expert = "self_attn.{}_expert_{}"
            names = [[expert.format(x, y) for x in ("language", "vision")] for y in ("query_key_value", "dense")]
            q, k, v = both(norm(x, layer["input_layernorm.weight"]), *names[0]).split(
                [heads * size, self.kv_heads * size, self.kv_heads * size], 1
            )
            q, k, v = (y.unflatten(1, (-1, size)) for y in (q, k, v))
            k, v = (y.repeat_interleave(heads // self.kv_heads, 1).transpose(0, 1) for y in (turned(k), v))
            scores = turned(q).transpose(0, 1) @ k.transpose(1, 2) / size**0.5 + mask
            x = x + both((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), *names[1])
            y = norm(x, layer["post_attention_layernorm.weight"])
            pairs = {n: [f"mlp.{kind}_mlp.{n}_proj" for kind in ("language", "vision")] for n in ("gate", "up", "down")}
            x = x + both(functional.silu(both(y, *pairs["gate"])) * both(y, *pairs["up"]), *pairs["down"])
        return (norm(x, self.final) @ self.head.T).numpy()


class Molmo(StandIn):
    def open(self, tensors: Tensors) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, Qwen2Config, Qwen2ForCausalLM

        own, vision = take(tensors, "model.vision_backbone."), dict(self.config.pop("vision_config"))
        self.layers, self.side = vision.pop("vit_layers"), vision["image_size"] // vision["patch_size"]
        self.patch, self.pad, n = vision["patch_size"], own.pop("pad_embed"), vision["hidden_size"]
        self.tower = loaded(CLIPVisionModel(CLIPVisionConfig(**vision)), self._named(take(own, "image_vit."), vision))
        pool = take(own, "image_pooling_2d.")
        self.ask = loaded(torch.nn.Linear(2 * n, n), take(pool, "wq."))
        heads = vision["num_attention_heads"]
        attend = {
            "q_proj_weight": torch.eye(n),
            "k_proj_weight": pool.pop("wk.weight"),
            "v_proj_weight": pool.pop("wv.weight"),
            "in_proj_bias": torch.cat([torch.zeros(n), pool.pop("wk.bias"), pool.pop("wv.bias")]),
            **{f"out_proj.{kind}": pool.pop(f"wo.{kind}") for kind in ("weight", "bias")},
        }
        self.attend = loaded(torch.nn.MultiheadAttention(n, heads, kdim=2 * n, vdim=2 * n, batch_first=True), attend)
        self.gate, self.down, self.up = (own.pop(f"image_projector.w{i}.weight") for i in (1, 2, 3))
        assert not own and not pool
        self.new = tensors.pop("model.transformer.wte.new_embedding")
        width, kv = self.config["intermediate_size"] // 2, self.config["num_key_value_heads"]
        size = self.config["hidden_size"] // self.config["num_attention_heads"]
        named = {
            "model.embed_tokens.weight": tensors.pop("model.transformer.wte.embedding"),
            "model.norm.weight": tensors.pop("model.transformer.ln_f.weight"),
            "lm_head.weight": tensors.pop("model.transformer.ff_out.weight"),
        }
        for i in range(self.config["num_hidden_layers"]):
            layer, begin = take(tensors, f"model.transformer.blocks.{i}."), f"model.layers.{i}."
            for kind in ("weight", "bias"):
                parts = layer.pop(f"att_proj.{kind}").split([self.config["hidden_size"], kv * size, kv * size])
                named |= {f"{begin}self_attn.{x}_proj.{kind}": part for x, part in zip("qkv", parts, strict=True)}
            up, gate = layer.pop("ff_proj.weight").split(width)
            named |= {f"{begin}mlp.up_proj.weight": up, f"{begin}mlp.gate_proj.weight": gate}
            ends = {"attn_out": "self_attn.o_proj", "ff_out": "mlp.down_proj"}
            ends |= {"attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm"}
            named |= {f"{begin}{ours}.weight": layer.pop(f"{theirs}.weight") for theirs, ours in ends.items()}
            assert not layer
        self.config["intermediate_size"] = width
        self.language(Qwen2ForCausalLM, Qwen2Config, named, rms_norm_eps=self.config["layer_norm_eps"])

    def _named(self, vit: Tensors, vision: dict[str, Any]) -> Tensors:
        """Its tower's tensors as CLIP's are called."""
        n = vision["hidden_size"]
        patch = vit.pop("patch_embedding.weight").view(n, self.patch, self.patch, 3).permute(0, 3, 1, 2)
        named = {
            "embeddings.class_embedding": vit.pop("class_embedding"),
            "embeddings.position_embedding.weight": vit.pop("positional_embedding"),
            "embeddings.patch_embedding.weight": patch.contiguous(),
            "post_layernorm.weight": torch.ones(n),
            "post_layernorm.bias": torch.zeros(n),
        }
        spelled = {"attention_norm": "layer_norm1", "ffn_norm": "layer_norm2"}
        spelled |= {"feed_forward.w1": "mlp.fc1", "feed_forward.w2": "mlp.fc2", "attention.wo": "self_attn.out_proj"}
        spelled |= {f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkv"}
        for kind in ("weight", "bias"):
            named[f"pre_layrnorm.{kind}"] = vit.pop(f"pre_ln.{kind}")
            for i in range(vision["num_hidden_layers"]):
                for theirs, ours in spelled.items():
                    value = vit.pop(f"transformer.resblocks.{i}.{theirs}.{kind}")
                    named[f"encoder.layers.{i}.{ours}.{kind}"] = value
        assert not vit
        return named

    @staticmethod
    def tiling(config: dict[str, Any], given: dict[str, Any], image: Any) -> tuple[int, int]:
        vision = config["vision_config"]
        margin = 8 * vision["patch_size"]
        window, sizes = vision["image_size"] - margin, range(1, given["max_crops"] + 1)
        grids = [(i, j) for i in sizes for j in sizes if i * j <= given["max_crops"]]
        grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
        free = [np.float32(length - margin) for length in (image.height, image.width)]
        with np.errstate(divide="ignore"):
            scales = [min(np.float32(n * window) / length for n, length in zip(g, free, strict=True)) for g in grids]
        if all(scale < 1 for scale in scales):
            return grids[scales.index(max(scales))]
        return grids[scales.index(min(scale for scale in scales if scale >= 1))]

    @staticmethod
    def fitted(image: Any, height: int, width: int) -> tuple[Tensor, Tensor]:
        """In the middle of black, and where it is."""
        scale = min(np.float32(height) / np.float32(image.height), np.float32(width) / np.float32(image.width))
        size = [max(int(np.float32(length) * scale), 1) for length in (image.height, image.width)]
        pixels = torch.from_numpy(np.array(image, np.float32) / 255).permute(2, 0, 1)
        pixels = functional.interpolate(pixels[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
        top, left = (height - size[0]) // 2, (width - size[1]) // 2
        edges = (left, width - size[1] - left, top, height - size[0] - top)
        framed = functional.pad(pixels.clip(0, 1), edges).permute(1, 2, 0) * 255
        return normed(framed, CLIP_MEAN, CLIP_STD), functional.pad(torch.ones(size), edges)

    @classmethod
    def cut(cls, config: dict[str, Any], given: dict[str, Any], image: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The whole and its tiles, and where in the tiles the picture is."""
        vision, (rows, columns) = config["vision_config"], cls.tiling(config, given, image)
        side, margin = vision["image_size"], 8 * vision["patch_size"]
        step = side - margin
        large, real = cls.fitted(image, rows * step + margin, columns * step + margin)
        places = [(i * step, j * step) for i in range(rows) for j in range(columns)]
        tiles = [large[:, y : y + side, x : x + side] for y, x in places]
        return [cls.fitted(image, side, side)[0], *tiles], [real[y : y + side, x : x + side] for y, x in places]

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        return Molmo.cut(config, given, image)[0]

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        states = self.tower(torch.stack(tiles), output_hidden_states=True).hidden_states[1:]
        found = torch.cat([states[i][:, 1:] for i in self.layers], -1)
        rows, columns = self.tiling(self.whole, self.given, image)
        p = self.patch
        real = self.cut(self.whole, self.given, image)[1]
        shares = [part.unfold(0, p, p).unfold(1, p, p).mean((2, 3)).flatten() for part in real]
        told = torch.stack([*shares, torch.full_like(shares[0], -1)])[..., None]  # as the authors pad the list
        found = found + (told == 0) * self.pad[0] + ((told < 1) & (told != 0)) * self.pad[1]
        grid, half = found.unflatten(1, (self.side, self.side)), self.side // 2
        near = torch.stack([grid[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], 3).flatten(0, 2)
        pooled = self.attend(self.ask(near.mean(1, keepdim=True)), near, near)[0]
        pooled = (functional.silu(pooled @ self.gate.T) * (pooled @ self.up.T)) @ self.down.T
        grids = pooled.view(len(tiles), half, half, -1)
        begin, end, patch, column = self.new[:4]

        def spelled(lines: list[Tensor]) -> list[Tensor]:
            return [begin, *(x for line in lines for x in (*(line + patch), column)), end]

        high = []
        for i in range(rows):
            for y in range(2 if i else 0, half if i == rows - 1 else half - 2):
                cells = [
                    grids[1 + i * columns + j][y, 2 if j else 0 : half if j == columns - 1 else half - 2]
                    for j in range(columns)
                ]
                high.append(torch.cat(cells))
        return torch.stack([*spelled(list(grids[0])), *spelled(high)])


class QwenVL(StandIn):
    def image_token(self) -> int:
        return int(self.whole["visual"]["image_start_id"]) + 2

    def open(self, tensors: Tensors) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        own, visual = take(tensors, "transformer.visual."), self.config.pop("visual")
        self.patch, self.heads = visual["patch_size"], visual["heads"]
        self.conv, self.learned = own.pop("conv1.weight"), own.pop("positional_embedding")
        self.blocks = [take(own, f"transformer.resblocks.{i}.") for i in range(visual["layers"])]
        hidden = self.config["hidden_size"]
        names = {"ln_pre": visual["width"], "ln_post": hidden, "attn_pool.ln_q": hidden, "attn_pool.ln_kv": hidden}
        self.norms = {
            name: loaded(torch.nn.LayerNorm(width, eps=1e-6), take(own, f"{name}.")) for name, width in names.items()
        }
        self.asked, self.near = own.pop("attn_pool.query"), own.pop("attn_pool.pos_embed")
        self.kv, self.project = own.pop("attn_pool.kv_proj.weight"), own.pop("proj")
        self.attend = torch.nn.MultiheadAttention(hidden, max(hidden // 128, 1), batch_first=True)
        loaded(self.attend, take(own, "attn_pool.attn."))
        assert not own, own.keys()
        ends = {"wte": "model.embed_tokens", "ln_f": "model.norm"}
        named = {f"{ours}.weight": tensors.pop(f"transformer.{theirs}.weight") for theirs, ours in ends.items()}
        named["lm_head.weight"] = tensors.pop("lm_head.weight")
        inside = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj"}
        inside |= {"mlp.w2": "mlp.gate_proj", "mlp.w1": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
        for i in range(self.config["num_hidden_layers"]):
            layer = take(tensors, f"transformer.h.{i}.")
            for kind in ("weight", "bias"):
                thirds = layer.pop(f"attn.c_attn.{kind}").chunk(3)
                pairs = zip("qkv", thirds, strict=True)
                named |= {f"model.layers.{i}.self_attn.{x}_proj.{kind}": part for x, part in pairs}
            named |= {
                f"model.layers.{i}.{ours}.weight": layer.pop(f"{theirs}.weight") for theirs, ours in inside.items()
            }
            assert not layer
        self.config["intermediate_size"] //= 2
        self.language(Qwen2ForCausalLM, Qwen2Config, named, num_key_value_heads=self.config["num_attention_heads"])

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        side = config["visual"]["image_size"]
        return [normed(image.resize((side, side), Image.Resampling.BICUBIC), CLIP_MEAN, CLIP_STD)]

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        def resized(table: Tensor, side: int) -> Tensor:
            old = math.isqrt(len(table))
            grid = table.T.unflatten(1, (old, old))[None]
            return functional.interpolate(grid, (side, side), mode="bicubic", align_corners=False)[0].flatten(1).T

        x = functional.conv2d(tiles[0][None], self.conv, stride=self.patch)[0].flatten(1).T
        side = math.isqrt(len(x))
        x = self.norms["ln_pre"](x + resized(self.learned, side))

        def linear(block: Tensors, name: str, y: Tensor) -> Tensor:
            return functional.linear(y, block[f"{name}.weight"], block[f"{name}.bias"])

        def norm(block: Tensors, name: str, y: Tensor) -> Tensor:
            return functional.layer_norm(y, y.shape[-1:], block[f"{name}.weight"], block[f"{name}.bias"], 1e-6)

        for block in self.blocks:
            heads = linear(block, "attn.in_proj", norm(block, "ln_1", x)).unflatten(1, (self.heads, 3, -1))
            q, k, v = heads.permute(2, 1, 0, 3)
            found = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
            x = x + linear(block, "attn.out_proj", found.transpose(0, 1).flatten(1))
            inner = functional.gelu(linear(block, "mlp.c_fc", norm(block, "ln_2", x)))
            x = x + linear(block, "mlp.c_proj", inner)
        x = self.norms["attn_pool.ln_kv"](x @ self.kv.T)
        asked = self.norms["attn_pool.ln_q"](self.asked) + self.near
        out = self.attend(asked[None], (x + resized(self.near, side))[None], x[None])[0][0]
        return self.norms["ln_post"](out) @ self.project


class YiVL(StandIn):
    token_field = "image_token_index"

    def open(self, tensors: Tensors) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

        settings = CLIPVisionConfig(**{"hidden_act": "gelu", **self.config.pop("vision_config")})
        hidden = self.config["hidden_size"]
        self.tower = loaded(CLIPVisionModel(settings), take(tensors, "model.vision_tower.vision_tower.vision_model."))
        linears = torch.nn.Linear(settings.hidden_size, hidden), torch.nn.Linear(hidden, hidden)
        norms = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        stages = linears[0], norms[0], torch.nn.GELU(), linears[1], norms[1]
        self.project = loaded(torch.nn.Sequential(*stages), take(tensors, "model.mm_projector."))
        self.language(LlamaForCausalLM, LlamaConfig, tensors)

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        side, long = config["vision_config"]["image_size"], max(image.size)
        square = Image.new("RGB", (long, long), tuple(int(255 * x) for x in CLIP_MEAN))
        square.paste(image, ((long - image.width) // 2, (long - image.height) // 2))
        return [normed(square.resize((side, side), Image.Resampling.BICUBIC), CLIP_MEAN, CLIP_STD)]

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        found = self.tower(torch.stack(tiles), output_hidden_states=True)
        return self.project(found.hidden_states[self.whole["mm_vision_select_layer"]][0, 1:])


class MonoInternVL(StandIn):
    """A language model of transformers; tokens of pictures go through other feed-forward parts."""

    token_field = "img_context_token_id"

    def open(self, tensors: Tensors) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        text = self.config["llm_config"]
        hidden, heads, kv = (text[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        own = take(tensors, "vision_model.embeddings.")
        self.conv, self.bias = own.pop("patch_embedding.weight"), own.pop("patch_embedding.bias")
        self.learned = own.pop("position_embedding")[0, 1:]
        del own["class_embedding"]  # nobody reads what becomes of it
        width = 4 * len(self.conv)
        stages = torch.nn.LayerNorm(width), torch.nn.Linear(width, hidden), torch.nn.GELU()
        self.project = torch.nn.Sequential(*stages, torch.nn.Linear(hidden, hidden))
        loaded(self.project, take(tensors, "mlp1."))
        own = take(tensors, "language_model.")
        named = {
            "model.embed_tokens.weight": own.pop("model.tok_embeddings.weight"),
            "lm_head.weight": own.pop("output.weight"),
            "model.norm.weight": own.pop("model.norm.weight"),
        }
        names = {
            "attention.wo": "self_attn.o_proj",
            "feed_forward.w1": "mlp.gate_proj",
            "feed_forward.w3": "mlp.up_proj",
        }
        names |= {"feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm"}
        names |= {"ffn_norm": "post_attention_layernorm"}
        others = []
        for i in range(text["num_hidden_layers"]):
            layer, begin = take(own, f"model.layers.{i}."), f"model.layers.{i}."
            groups = layer.pop("attention.wqkv.weight").view(kv, heads // kv + 2, hidden // heads, hidden)
            parts = zip("qkv", groups.split([heads // kv, 1, 1], 1), strict=True)
            named |= {f"{begin}self_attn.{x}_proj.weight": part.flatten(0, 2) for x, part in parts}
            named |= {f"{begin}{ours}.weight": layer.pop(f"{theirs}.weight") for theirs, ours in names.items()}
            others.append([layer.pop(f"feed_forward_ve.w{k}.weight") for k in (1, 3, 2)])
            assert not layer
        assert not own
        settings = {name: value for name, value in text.items() if name not in NOT_OF_TEXT}
        self.text = loaded(LlamaForCausalLM(LlamaConfig(**settings, attn_implementation="eager")).float(), named)
        for layer, (gate, up, down) in zip(self.text.model.layers, others, strict=True):

            def other(module: Any, given: Any, out: Tensor, gate: Any = gate, up: Any = up, down: Any = down) -> Tensor:
                x = given[0]
                return torch.where(self.seen[None, :, None], functional.silu(x @ gate.T) * (x @ up.T) @ down.T, out)

            layer.mlp.register_forward_hook(other)

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        x = functional.conv2d(torch.stack(tiles), self.conv, self.bias, stride=self.conv.shape[-1])
        x = (x + self.learned.T.view(1, *x.shape[1:])).permute(0, 2, 3, 1)
        corners = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return self.project(torch.cat(corners, -1)).flatten(0, 2)

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        import transformers

        given = dict(given)
        made = getattr(transformers, f"{given.pop('image_processor_type')}Pil")(**given)
        return list(made(images=[image], return_tensors="pt", crop_to_patches=True)["pixel_values"])


class MiniGemini(StandIn):
    """CLIP and ConvNeXt of transformers, the second one's tensors as timm spells them."""

    token_field = "image_token_index"

    def open(self, tensors: Tensors) -> None:
        from transformers import (
            CLIPVisionConfig,
            CLIPVisionModel,
            ConvNextConfig,
            ConvNextModel,
            LlamaConfig,
            LlamaForCausalLM,
        )

        vision, hidden = CLIPVisionConfig(**self.config.pop("vision_config")), self.config["hidden_size"]
        self.tower = loaded(CLIPVisionModel(vision), take(tensors, "model.vision_tower.vision_tower.vision_model."))
        fine, wide = self.config.pop("vision_config_aux"), vision.hidden_size
        cells = sum(fine["hidden_sizes"])
        own = {}
        for name, tensor in take(tensors, "model.vision_tower_aux.").items():
            name = name.replace("vision_stem.0", "embeddings.patch_embeddings")
            name = name.replace("vision_stem.1", "embeddings.layernorm").replace("vision_stages", "encoder.stages")
            name = name.replace("downsample", "downsampling_layer").replace("blocks", "layers")
            name = name.replace("conv_dw", "dwconv").replace(".norm.", ".layernorm.").replace("mlp.fc", "pwconv")
            own[name.replace("gamma", "layer_scale_parameter")] = tensor
        self.fine = loaded(ConvNextModel(ConvNextConfig(**fine)), own, allow=("layernorm",))
        linears = torch.nn.Linear(wide, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden)
        self.project = loaded(torch.nn.Sequential(*linears), take(tensors, "model.mm_projector."))
        self.asks = {}
        for part, width in (("query", wide), ("aux", cells), ("val", cells)):
            made = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, wide))
            self.asks[part] = loaded(made, take(tensors, f"model.vlm_uni_{part}_projector."))
        self.language(LlamaForCausalLM, LlamaConfig, tensors)

    @staticmethod
    def tiles(config: dict[str, Any], given: dict[str, Any], image: Any) -> list[Tensor]:
        from transformers import CLIPImageProcessorPil

        side, grid = config["vision_config"]["image_size"], config.get("image_grid", 1)
        if config["image_aspect_ratio"] == "pad":
            long = max(image.size)
            square = Image.new("RGB", (long, long), tuple(int(255 * x) for x in CLIP_MEAN))
            square.paste(image, ((long - image.width) // 2, (long - image.height) // 2))
            image = square
        high = config["image_size_aux"]
        processor = CLIPImageProcessorPil(size={"shortest_edge": high}, crop_size={"height": high, "width": high})
        large = processor(images=[image], return_tensors="pt")["pixel_values"]
        small = functional.interpolate(large, (grid * side, grid * side), mode="bilinear", align_corners=False)
        parts = [part for line in small[0].split(side, 1) for part in line.split(side, 2)]
        if config.get("image_global"):
            parts.insert(0, functional.interpolate(small, (side, side), mode="bilinear", align_corners=False)[0])
        return [*parts, large[0]]

    def rows(self, tiles: list[Tensor], image: Any) -> Tensor:
        layer, grid = self.whole["mm_vision_select_layer"], self.whole.get("image_grid", 1)
        low = self.tower(torch.stack(tiles[:-1]), output_hidden_states=True).hidden_states[layer][:, 1:]
        stages = self.fine(tiles[-1][None], output_hidden_states=True).hidden_states[1:]
        size = stages[0].shape[2:]
        grown = [functional.interpolate(x, size, mode="bilinear", align_corners=False) for x in stages]
        cells = torch.cat(grown, 1)
        maps = [part for line in cells.split(size[0] // grid, 2) for part in line.split(size[1] // grid, 3)]
        if self.whole.get("image_global"):
            maps.insert(0, functional.interpolate(cells, scale_factor=1 / grid, mode="bilinear", align_corners=False))
        found, side = [], math.isqrt(low.shape[1])
        for one, near in zip(low, maps, strict=True):
            each = near.shape[-1] // side
            for number, row in enumerate(one):
                y, x = divmod(number, side)
                own = near[0, :, y * each : (y + 1) * each, x * each : (x + 1) * each].flatten(1).T
                asked = self.asks["query"](row) @ self.asks["aux"](own).T / math.sqrt(len(row))
                found.append(row + asked.softmax(-1) @ self.asks["val"](own))
        return self.project(torch.stack(found))


class Llama4Pixels:
    """Llama 4's processor, which transformers has for torchvision alone: resizing by Pillow, numbers in bfloat16."""

    model_input_names = ("pixel_values",)

    def __init__(self, size: dict[str, int], max_patches: int) -> None:
        self.side, self.most = size["height"], max_patches

    def __call__(self, images: list[Any], return_tensors: str, **extra: Any) -> dict[str, Any]:
        found = torch.cat([self.tiles(image.convert("RGB")) for image in images]).float()
        return {"pixel_values": found if return_tensors == "pt" else found.numpy()}

    def tiles(self, image: Any) -> Tensor:
        side, counts = self.side, range(1, self.most + 1)
        scales = {
            (y, x): min(y * side / image.height, x * side / image.width)
            for y in counts
            for x in counts
            if x * y <= self.most
        }
        larger = [scale for scale in scales.values() if scale >= 1]
        scale = min(larger) if larger else max(scales.values())
        rows, columns = min((n for n in scales if scales[n] == scale), key=lambda n: n[0] * n[1])
        most = [min(max(length, side), n * side) for length, n in ((image.height, rows), (image.width, columns))]
        down, across = most[0] / image.height, most[1] / image.width
        fits = (
            (math.floor(image.height * across), most[1]) if across < down else (most[0], math.floor(image.width * down))
        )
        height, width = (max(min(length, limit), 1) for length, limit in zip(fits, most, strict=True))
        small = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
        black = ((0, rows * side - height), (0, columns * side - width), (0, 0))
        parts = [part for line in self.numbers(np.pad(small, black)).split(side, 1) for part in line.split(side, 2)]
        if len(parts) > 1:
            parts.append(self.numbers(np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))))
        return torch.stack(parts)

    @staticmethod
    def numbers(pixels: np.ndarray) -> Tensor:
        half = torch.tensor(0.5, dtype=torch.bfloat16)
        return (torch.tensor(pixels).permute(2, 0, 1).bfloat16() * (1 / 255) - half) / half


def hybrid_pixels(**given: Any) -> Any:
    """What DeepSeek-VL 7B's authors prepare, as transformers' own conversion of its preprocessor does."""
    from transformers import DeepseekVLHybridImageProcessorPil

    own = dict(get("deepseek_vl_hybrid").tiny[0].preprocessor) | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    own.pop("image_processor_type")
    return DeepseekVLHybridImageProcessorPil(**own, resample=Image.Resampling.BILINEAR)


class UnifiedPixels:
    """Gemma 4 12B's processor, which transformers has for torchvision alone: Gemma 4's patches, those of a token's
    square put together pixel by pixel."""

    model_input_names = ("pixel_values", "image_position_ids")

    def __init__(self, **given: Any) -> None:
        from transformers import Gemma4ImageProcessorPil

        self.side, self.factor = given["patch_size"], given["pooling_kernel_size"]
        self.processor = Gemma4ImageProcessorPil(**given)

    def __call__(self, images: list[Any], return_tensors: str, **extra: Any) -> dict[str, Any]:
        made = self.processor(images=images, return_tensors="np", **extra)
        merged = [
            self.merged(*picture) for picture in zip(made["pixel_values"], made["image_position_ids"], strict=True)
        ]
        most = max(len(places) for _, places in merged)
        pad = [((0, most - len(places)), (0, 0)) for _, places in merged]
        pixels = np.stack([np.pad(x, width) for (x, _), width in zip(merged, pad, strict=True)])
        places = np.stack([np.pad(x, width, constant_values=-1) for (_, x), width in zip(merged, pad, strict=True)])
        found = {"pixel_values": pixels, "image_position_ids": places}
        return found if return_tensors == "np" else {name: torch.from_numpy(x) for name, x in found.items()}

    def merged(self, patches: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of each token's square and its (column, row)."""
        squares: dict[tuple[int, int], np.ndarray] = {}
        side, factor = self.side, self.factor
        for patch, (x, y) in zip(patches, places.tolist(), strict=True):
            if x < 0:
                continue
            square = squares.setdefault((y // factor, x // factor), np.zeros((side * factor, side * factor, 3)))
            top, left = y % factor * side, x % factor * side
            square[top : top + side, left : left + side] = patch.reshape(side, side, 3)
        order = sorted(squares)
        numbers = np.stack([squares[at].reshape(-1) for at in order]).astype(np.float32)
        return numbers, np.array([at[::-1] for at in order])


PROCESSORS = {
    "Llama4ImageProcessor": Llama4Pixels,
    "VLMImageProcessor": hybrid_pixels,
    "Gemma4UnifiedImageProcessor": UnifiedPixels,
}
STAND_INS: dict[str, type[StandIn]] = {  # by family and the number of the tiny model
    "cogvlm-0": CogVLM,
    "cogvlm-1": CogVLM,
    "deepseek_vl_v2-0": DeepseekVL2,
    "glm4v_9b-0": Glm4v,
    "internlmxcomposer2-0": XComposer,
    "internlmxcomposer2-1": XComposer,
    "internlmxcomposer2-2": XComposer,
    "internvl_chat-2": MonoInternVL,
    "llava_llama-2": YiVL,
    "mgm-0": MiniGemini,
    "mgm-1": MiniGemini,
    "minicpmv-0": MiniCPMV,
    "minicpmv-1": MiniCPMV,
    "molmo-0": Molmo,
    "phi3_v-0": Phi3V,
    "qwen_vl-0": QwenVL,
}
