"""Which built-in template each family's models get where their files have none, and how it differs from their own.

``own_prompts.json`` holds what models' own templates, of the files on the hub, make of two conversations: "question"
and "conversation" as in ``test_builtin``, null where they refuse one. "why": where the built-in, which is LMDeploy's,
makes another prompt of it, or "end"s turns otherwise, the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat import builtin
from toolkit.chat.template import ChatTemplate
from toolkit.models.registry import get, names

OWN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "own_prompts.json").read_text(encoding="utf-8"))
QUESTION = [{"role": "user", "content": "Hello"}]
ANSWERED = [{"role": "system", "content": "Be brief."}, *QUESTION, {"role": "assistant", "content": "Hi there."}]
TALKS = {"question": QUESTION, "conversation": [*ANSWERED, {"role": "user", "content": "What is 2+2?"}]}
# Family → one of its chat models and the built-in of its name; None: their files have always had their own template,
# and what has none is a base model.
FAMILIES: dict[str, tuple[str, str | None]] = {
    "afmoe": ("arcee-ai/Trinity-Mini", None),
    "apertus": ("swiss-ai/Apertus-8B-Instruct-2509", None),
    "arcee": ("arcee-ai/AFM-4.5B", None),
    "axk1": ("skt/A.X-K1", None),
    "baichuan": ("baichuan-inc/Baichuan-7B", None),
    "baichuan2": ("baichuan-inc/Baichuan2-7B-Chat", "baichuan2"),
    "bamba": ("ibm-ai-platform/Bamba-9B-v2", None),
    "bitnet": ("microsoft/bitnet-b1.58-2B-4T", None),
    "bloom": ("bigscience/bloomz-560m", None),
    "chatglm": ("THUDM/chatglm3-6b", "chatglm3"),
    "codegen": ("Salesforce/codegen-2B-mono", None),
    "cohere": ("CohereForAI/c4ai-command-r-v01", "command-r"),
    "cohere2": ("CohereLabs/c4ai-command-a-03-2025", None),
    "cohere2_moe": ("CohereLabs/command-a-plus", None),
    "cwm": ("facebook/cwm", None),
    "dbrx": ("databricks/dbrx-instruct", "dbrx"),
    "deepseek": ("deepseek-ai/deepseek-moe-16b-chat", "deepseek"),
    "deepseek_v2": ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek"),
    "deepseek_v3": ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
    "dots1": ("rednote-hilab/dots.llm1.inst", None),
    "ernie4_5": ("baidu/ERNIE-4.5-0.3B-PT", None),
    "ernie4_5_moe": ("baidu/ERNIE-4.5-21B-A3B-PT", None),
    "exaone": ("LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct", None),
    "exaone4": ("LGAI-EXAONE/EXAONE-4.0-32B", None),
    "exaone_moe": ("LGAI-EXAONE/K-EXAONE-236B-A23B", None),
    "falcon": ("tiiuae/falcon-7b-instruct", "falcon"),
    "falcon_h1": ("tiiuae/Falcon-H1-0.5B-Base", None),
    "flex_olmo": ("allenai/FlexOlmo-7x7B-1T", None),
    "flint": ("flint", None),
    "gemma": ("google/gemma-7b-it", "gemma"),
    "gemma2": ("google/gemma-2-2b-it", "gemma"),
    "gemma3_text": ("google/gemma-3-1b-it", "gemma"),
    "gemma4_text": ("google/gemma-4-E2B-it", None),
    "gemma4_unified_text": ("google/gemma-4-12B-it", None),
    "glm": ("THUDM/glm-4-9b-chat-hf", "glm4"),
    "glm4": ("zai-org/GLM-4-32B-0414", None),
    "glm4_moe": ("zai-org/GLM-4.5-Air", None),
    "glm4_moe_lite": ("zai-org/GLM-4.7-Flash", None),
    "gpt2": ("openai-community/gpt2", None),
    "gpt_bigcode": ("bigcode/starcoder", None),
    "gpt_neo": ("EleutherAI/gpt-neo-1.3B", None),
    "gpt_neox": ("EleutherAI/pythia-1b", None),
    "gpt_oss": ("openai/gpt-oss-20b", None),
    "gptj": ("EleutherAI/gpt-j-6b", None),
    "granite": ("ibm-granite/granite-3.1-8b-instruct", "granite"),
    "granite_swa": ("ibm-granite/granite-swash-2b", None),
    "granitemoe": ("ibm-granite/granite-3.0-1b-a400m-instruct", "granite"),
    "granitemoe_swa": ("ibm-granite/granite-swash-moe-3b", None),
    "granitemoehybrid": ("ibm-granite/granite-4.0-h-tiny", None),
    "granitemoeshared": ("ibm-research/moe-7b-1b-active-shared-experts", None),
    "helium": ("kyutai/helium-1-2b", None),
    "hunyuan_v1_dense": ("tencent/Hunyuan-1.8B-Instruct", None),
    "hunyuan_v1_moe": ("tencent/Hunyuan-A13B-Instruct", None),
    "hy_v3": ("tencent/Hy3-preview", None),
    "hyperclovax": ("naver-hyperclovax/HyperCLOVAX-SEED-Think-14B", None),
    "internlm": ("internlm/internlm-chat-7b", "internlm"),
    "internlm2": ("internlm/internlm2_5-7b-chat", "internlm2"),
    "internlm3": ("internlm/internlm3-8b-instruct", "internlm3"),
    "iquestcoder": ("IQuestLab/IQuest-Coder-V1-40B-Instruct", None),
    "jais2": ("inceptionai/Jais-2-8B-Chat", None),
    "lara_mini": ("lara-mini", None),
    "lfm2": ("LiquidAI/LFM2-1.2B", None),
    "lfm2_moe": ("LiquidAI/LFM2-8B-A1B", None),
    "lfm3": ("LiquidAI/LFM3-1.7B", None),
    "llama": ("meta-llama/Llama-3.1-8B-Instruct", "llama3_1"),
    "llama4_text": ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4"),
    "mamba2": ("mistralai/Mamba-Codestral-7B-v0.1", None),
    "mellum": ("JetBrains/Mellum2-12b", None),
    "minicpm": ("openbmb/MiniCPM-2B-dpo-bf16", "minicpm"),
    "minicpm3": ("openbmb/MiniCPM3-4B", "minicpm3"),
    "minimax_m2": ("MiniMaxAI/MiniMax-M2", None),
    "ministral": ("mistralai/Ministral-8B-Instruct-2410", "mistral"),
    "ministral3": ("mistralai/Ministral-3-8B-Instruct-2512", "mistral"),
    "mistral": ("mistralai/Mistral-7B-Instruct-v0.2", "mistral"),
    "mixtral": ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral"),
    "mpt": ("mosaicml/mpt-7b-chat", None),
    "nanochat": ("karpathy/nanochat-d32", None),
    "nemotron": ("nvidia/Minitron-4B-Base", None),
    "nemotron_h": ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", None),
    "olmo": ("allenai/OLMo-7B-0724-Instruct-hf", None),
    "olmo2": ("allenai/OLMo-2-1124-7B-Instruct", None),
    "olmo3": ("allenai/Olmo-3-7B-Instruct", None),
    "olmoe": ("allenai/OLMoE-1B-7B-0924-Instruct", None),
    "opt": ("facebook/opt-1.3b", None),
    "persimmon": ("adept/persimmon-8b-chat", None),
    "phi": ("microsoft/phi-2", None),
    "phi3": ("microsoft/Phi-3-mini-4k-instruct", "phi-3"),
    "phimoe": ("microsoft/Phi-3.5-MoE-instruct", "phi-3"),
    "qwen": ("Qwen/Qwen-7B-Chat", "qwen"),
    "qwen2": ("Qwen/Qwen2.5-7B-Instruct", "qwen2d5"),
    "qwen2_moe": ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "qwen"),
    "qwen3": ("Qwen/Qwen3-8B", "qwen3"),
    "qwen3_5_moe_text": ("Qwen/Qwen3.5-35B-A3B", "qwen3"),
    "qwen3_5_text": ("Qwen/Qwen3.5-4B", "qwen3"),
    "qwen3_moe": ("Qwen/Qwen3-30B-A3B", "qwen3"),
    "qwen3_next": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3"),
    "sdar": ("JetLM/SDAR-1.7B-Chat", None),
    "sdar_moe": ("JetLM/SDAR-30B-A3B-Chat", None),
    "seed_oss": ("ByteDance-Seed/Seed-OSS-36B-Instruct", None),
    "smollm3": ("HuggingFaceTB/SmolLM3-3B", "chatml"),
    "solar_open": ("upstage/Solar-Open-100B", None),
    "stablelm": ("stabilityai/stablelm-2-1_6b-chat", None),
    "starcoder2": ("bigcode/starcoder2-3b", None),
    "vaultgemma": ("google/vaultgemma-1b", None),
    "youtu": ("tencent/Youtu-LLM-2B", None),
}


@pytest.fixture(scope="module")
def open_template(tokenizer_dirs: dict[str, Any]) -> Any:
    tokenizer = Tokenizer.open(tokenizer_dirs["byte_level"])

    def made(model: str) -> tuple[ChatTemplate, str]:
        found = builtin.match(model)
        assert found is not None
        start = tokenizer.start_text if found.start is None else found.start
        return ChatTemplate.open(tokenizer, "x", found.name), start

    return made


def test_every_family_that_reads_text_has_a_row() -> None:
    assert set(FAMILIES) == {name for name in names() if get(name).recipe is None and not get(name).encodes}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_name_of_a_model_finds_its_template(family: str) -> None:
    model, name = FAMILIES[family]
    found = builtin.match(model)
    assert (found and found.name) == name


@pytest.mark.parametrize("model", OWN)
def test_prompts_are_the_model_s_own_but_for_what_is_said(model: str, open_template: Any) -> None:
    template, start = open_template(model)
    row = OWN[model]
    for talk, messages in TALKS.items():
        rendered = template.render(messages).removeprefix(start)
        if talk in row.get("why", {}):
            assert rendered != row[talk], "the reason in own_prompts.json no longer holds"
        else:
            assert rendered == row[talk].removeprefix(start)


@pytest.mark.parametrize(
    "model", [name for name, row in OWN.items() if row["conversation"] and "end" not in row.get("why", {})]
)
def test_a_turn_of_the_model_ends_with_a_stop_word(model: str, open_template: Any) -> None:
    """What its own template writes behind an answer is what the model writes there."""
    behind = OWN[model]["conversation"].split("Hi there.")[1].lstrip()
    assert behind.startswith(tuple(open_template(model)[0].stop_words))
