"""SmolVLM 1 and 2: Idefics 3 in small. Source: transformers ``SmolVLMForConditionalGeneration``, arXiv 2504.05299."""

from __future__ import annotations

from toolkit.models.families.idefics3 import FIELDS, MMPROJ, build, recipe
from toolkit.models.family import Family, Tiny

FAMILY = Family(
    "smolvlm",
    "SmolVLM, SmolVLM2",
    ("SmolVLMForConditionalGeneration",),
    build,
    (
        Tiny(
            FIELDS,
            preprocessor=dict(
                image_processor_type="SmolVLMImageProcessor",
                size={"longest_edge": 84},
                max_image_size={"longest_edge": 28},
            ),
            tokens=("<image>", "<fake_token_around_image>", "<global-img>"),
        ),
    ),
    MMPROJ,
    recipe=recipe,
)
