"""Architectures that transformers lists as causal language models and that do not run here, and why.

``tests/models/test_lacking.py`` holds this against transformers' own list; the table in
``docs/models-that-do-not-run.md`` is made of it.
"""

from __future__ import annotations

TRIED = "5.24.0"  # the transformers whose whole list is either here or in families/

# What is missing → the architectures that need it.
NEEDS: dict[str, tuple[str, ...]] = {
    "attention to the tokens that an indexer picks": (
        "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM", "AXK2ForCausalLM",
        "Dots3NoteForCausalLM", "HYV4ForCausalLM", "Qwen4ExpForCausalLM",
    ),
    "hyper-connections and compressed attention": ("DeepseekV4ForCausalLM",),
    "Kimi delta attention, which fades each channel by itself": (
        "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration", "BailingHybridForCausalLM",
    ),
    "Fourier position embeddings": ("InternS1ProForConditionalGeneration",),
    "several residual streams side by side, and low-rank layers beside each": (
        "Gemma3nForConditionalGeneration", "Gemma3nForCausalLM",
    ),
    "keys and values of the Gemma 4 whose speculative_draft_model it is": (
        "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM",
    ),
    "positions of sines that are added to the embedding, or norms behind each sum": (
        "OpenAIGPTLMHeadModel", "BioGptForCausalLM", "XGLMForCausalLM", "CTRLLMHeadModel", "GitForCausalLM",
        "RobertaPreLayerNormForCausalLM",
    ),
    "layers of an encoder that writes, with a head of several layers": ("ModernBertDecoderForCausalLM",),
    "a bias that is stored apart from its matrix, in the last layer alone": ("GPTNeoXJapaneseForCausalLM",),
    "an encoder's layers, with norms behind each sum": (
        "BertLMHeadModel", "BertGenerationDecoder", "BigBirdForCausalLM", "CamembertForCausalLM",
        "Data2VecTextForCausalLM", "ElectraForCausalLM", "ErnieForCausalLM", "MegatronBertForCausalLM",
        "RemBertForCausalLM", "RobertaForCausalLM", "RoCBertForCausalLM",
        "RoFormerForCausalLM", "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM", "XmodForCausalLM",
        "XLMWithLMHeadModel", "XLNetLMHeadModel",
    ),
    "an encoder beside the decoder": (
        "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
        "MarianForCausalLM", "MBartForCausalLM", "MvpForCausalLM", "PegasusForCausalLM", "PLBartForCausalLM",
        "ProphetNetForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM",
    ),
    "sound, or tokens that stand for sound": (
        "MoshiForCausalLM", "MusicgenForCausalLM", "MusicgenMelodyForCausalLM",
        "MossTranscribeDiarizeForConditionalGeneration", "Phi4MultimodalForCausalLM",
    ),
    "a vision encoder, or image tokens, of their own": (
        "AriaTextForCausalLM", "CohereCompassForCausalLM", "Emu3ForCausalLM", "FuyuForCausalLM",
        "GotOcr2ForConditionalGeneration", "Apertus1p5TextForCausalLM",
    ),
    "a state that Mamba-1, RWKV, xLSTM, RG-LRU or lightning attention keeps": (
        "MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "ZambaForCausalLM", "RwkvForCausalLM",
        "xLSTMForCausalLM", "RecurrentGemmaForCausalLM", "MiniMaxForCausalLM",
    ),
    "layers that several places share, each with low-rank changes": ("Zamba2ForCausalLM",),
    "layers that are run several times": (
        "DoryForCausalLM", "HrmTextForCausalLM", "Inkling2LoopForCausalLM",
    ),
    "relative positions as a bias, or convolutions inside of attention": (
        "InklingForCausalLM", "Inkling2ForCausalLM", "ZayaForCausalLM", "CpmAntForCausalLM",
    ),
    "attention within buckets of a hash": ("ReformerModelWithLMHead",),
    "a gate by softplus": ("LagunaForCausalLM",),
    "values of heads that are of another size than keys, beside a window": ("MiMoV2FlashForCausalLM",),
    "the difference of two attentions": ("DiffLlamaForCausalLM",),
    "masks that are learned, and experts in a table": ("DogeForCausalLM",),
    "attention whose heads are chosen as experts are": ("JetMoeForCausalLM",),
    "experts that do nothing, and layers with two attentions": ("LongcatFlashForCausalLM",),
    "experts that are chosen by corrected logits, not scores": ("Kolibri1ForCausalLM",),
    "a gated delta rule whose rate reaches 2": ("OlmoHybridForCausalLM",),
    "bytes that are joined to patches as they are read": ("BltForCausalLM",),
    "sums with the residual that are weighed by their depth": ("BeamForCausalLM",),
}  # fmt: skip
LACKING = {name: why for why, architectures in NEEDS.items() for name in architectures}

# Causal language models that run here under another name of their architecture.
ELSEWHERE = {"MllamaForCausalLM": "MllamaForConditionalGeneration"}


def table() -> list[str]:
    """The rows of docs/models-that-do-not-run.md."""
    rows = ["| It would need | architectures |", "|---|---|"]
    return rows + [f"| {why} | {', '.join(f'`{name}`' for name in names)} |" for why, names in NEEDS.items()]
