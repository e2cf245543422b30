"""Folded but unquantized equals the original, for every family; our layer forward equals transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.models.sites import RowFold, layer_sites
from toolkit.quant.layers.forward import embed, head_logits, layer_forward
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.selection import select
from toolkit.runners.weights.folding import Folded, expand, fold_site, storable

CPU = torch.device("cpu")


def logits(source: LayerSource, ids: torch.Tensor, scale_seed: int | None = None, dtype: Any = None) -> torch.Tensor:
    """Logits by our forward; with ``scale_seed`` random scales from 1/4 to 4 are folded into every site."""
    outer = source.outer_weights(CPU)
    hidden = embed(source.spec, outer[source.spec.embed], ids)
    generator = torch.Generator().manual_seed(scale_seed or 0)
    for i, layer in enumerate(source.spec.layers):
        weights = source.layer(i, CPU)
        if scale_seed is not None:
            weights = Folded(weights)
            for site in layer_sites(layer):
                assert site.fold is not None
                count = site.size // site.fold.repeat if isinstance(site.fold, RowFold) else site.size
                wanted = 4 ** (torch.rand(count, generator=generator) * 2 - 1)
                fold_site(site, weights, storable(site, weights, wanted, dtype or torch.float32))
        hidden = layer_forward(layer, weights, hidden)
    return head_logits(source.spec, outer, hidden)


def test_folding_changes_nothing(family: str, tiny_models: Any) -> None:
    source = LayerSource(tiny_models(family))
    ids = torch.randint(3, source.spec.vocab_size, (2, 48), generator=torch.Generator().manual_seed(5))
    plain = logits(source, ids)
    folded = logits(source, ids, scale_seed=1)
    assert (folded - plain).abs().max() < 1e-5 * plain.abs().max()
    half = logits(source, ids, scale_seed=1, dtype=torch.bfloat16)
    assert (half - plain).abs().max() < 1e-5 * plain.abs().max()


def test_forward_equals_transformers(family: str, tiny_models: Any) -> None:
    from transformers import AutoModelForCausalLM

    source = LayerSource(tiny_models(family))
    ids = torch.randint(3, source.spec.vocab_size, (2, 60), generator=torch.Generator().manual_seed(6))
    model = AutoModelForCausalLM.from_pretrained(
        tiny_models.twin(family), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = model(ids).logits
    ours = logits(source, ids)
    assert (ours - theirs).abs().max() < 2e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", ["cogvlm", "internlmxcomposer2"])
def test_what_pictures_have_linears_of_their_own_for_takes_no_scale(name: str, tiny_models: Any) -> None:
    source = LayerSource(tiny_models(name))
    sites = [site for layer in source.spec.layers for site in select(source).sites(layer)]
    assert sites and all(site.fold is None for site in sites)


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_latent_attention_folds_at_all_its_sites(name: str, tiny_models: Any) -> None:
    """Of what makes keys and values, the rows of values take the scale of what reads them, those of keys stay."""
    test_forward_equals_transformers(name, tiny_models)
    test_folding_changes_nothing(name, tiny_models)


def test_storable_scales_fold_into_bfloat16_norms_without_rounding(tiny_models: Any) -> None:
    source = LayerSource(tiny_models("gemma2", dtype="bfloat16"))
    layer, weights = source.spec.layers[0], source.layer(0, CPU)
    site = layer_sites(layer)[0]
    scale = storable(site, weights, 4 ** (torch.rand(site.size) * 2 - 1), torch.bfloat16)
    folded = Folded(weights)
    fold_site(site, folded, scale)
    norm = folded[site.fold.norm.name]  # type: ignore[union-attr]
    torch.testing.assert_close(norm.to(torch.bfloat16).float(), norm, rtol=1e-6, atol=1e-7)


def test_expand_repeats_kv_channels_over_their_query_heads() -> None:
    from toolkit.models.spec import LinearSpec

    fold = RowFold(LinearSpec("v", 8, 4), width=2, repeat=3)
    assert expand(fold, torch.tensor([1.0, 2, 3, 4])).tolist() == [1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]
