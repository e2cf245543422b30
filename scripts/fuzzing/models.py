"""Good inputs to begin with: a tiny model and everything that the tool makes of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from testing.modules import of_tests


@dataclass(frozen=True)
class Models:
    """Directories of artifacts; ``gguf``, ``pickled``: files, these of torch.save in both of its layouts."""

    checkpoint: Path
    quantized: Path
    native: Path
    torch: Path
    torch_quantized: Path
    adapter: Path
    statistics: Path
    gguf: list[Path]
    pickled: list[Path]


def make_models(work: Path) -> Models:
    """Write them below ``work``, where they are not made again if they are there."""
    from toolkit.convert.convert import convert
    from toolkit.convert.formats import rewrite
    from toolkit.convert.options import Packing
    from toolkit.quant.calibrate import calibrate
    from toolkit.quant.options import Common

    found = Models(
        *(
            work / name
            for name in ("checkpoint", "quantized", "native", "torch", "torch_quantized", "adapter", "stats")
        ),
        [work / f"{kind}.gguf" for kind in ("f32", "q4_0", "q4_k_m")],
        [work / f"{kind}.bin" for kind in ("zip", "old")],
    )
    if (work / "whole").exists():
        return found
    shutil.rmtree(work, ignore_errors=True)
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    _plain_weights(of_tests("tiny").tiny_checkpoint("llama", found.checkpoint, **small))
    for file in found.pickled:
        _pickle_weights(found.checkpoint, file, zipped=file.stem == "zip")
    rewrite(str(found.checkpoint), found.quantized, to="w8a8", quiet=True)
    convert(str(found.checkpoint), found.native, Packing(target="cpu"), quiet=True)
    convert(str(found.checkpoint), found.torch, Packing(target="torch"), quiet=True)
    wide = of_tests("tiny").tiny_checkpoint("llama", work / "wide", **small | {"hidden_size": 256, "head_dim": 64})
    _plain_weights(wide)
    for file, kind in zip(found.gguf, ("f32", "q4_0", "q4_k_m"), strict=True):
        rewrite(str(wide), file, to="gguf", gguf_type=kind, quiet=True)
    convert(str(found.gguf[2]), found.torch_quantized, Packing(target="torch"), quiet=True)
    of_tests("adapters").write_adapter(found.adapter, found.checkpoint, "q_proj|v_proj")
    (work / "text.txt").write_text("All happy families are alike. " * 200, encoding="utf-8")
    common = Common(calib_dataset=str(work / "text.txt"), calib_samples=2, calib_seqlen=32, batch_size=2)
    calibrate(str(found.checkpoint), found.statistics, common=common)
    (work / "whole").touch()
    return found


def _plain_weights(model: Path) -> None:
    """Seven values in turn, so that what is kept of the files is small."""
    import torch
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    waves = {name: (torch.arange(w.numel()) % 7 - 3).view(w.shape) * 0.02 for name, w in load_file(file).items()}
    save_file(waves, file, {"format": "pt"})


def _pickle_weights(model: Path, target: Path, zipped: bool) -> None:
    """The tensors as torch.save has them: some shared, one turned round, one a parameter."""
    import torch
    from safetensors.torch import load_file

    found = load_file(model / "model.safetensors")
    name = next(name for name, tensor in found.items() if tensor.dim() == 2)
    found |= {"turned": found[name].t(), "shared": found[name][1:], "one": torch.nn.Parameter(torch.ones(3))}
    torch.save(found, target, _use_new_zipfile_serialization=zipped)
