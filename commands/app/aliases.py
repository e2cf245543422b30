"""What users of vLLM, llama.cpp and others type: true aliases where one means the same, else a word on the right name.

In the help they would only take room. LMDeploy's names are the options' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolkit.configs.checks import nearest

_ENGINE = {
    "--max-model-len": "--session-len",
    "--ctx-size": "--session-len",
    "--max-num-seqs": "--max-batch-size",
    "--parallel": "--max-batch-size",
    "--max-num-batched-tokens": "--max-prefill-token-num",
    "--tensor-parallel-size": "--tp",
    "--block-size": "--cache-block-seq-len",
    "--draft-model": "--speculative-draft-model",
    "--model-draft": "--speculative-draft-model",
}
_DRAWN = {"--temp": "--temperature", "--repeat-penalty": "--repetition-penalty"}
_WRITTEN = {"--n-predict": "--max-new-tokens", "--predict": "--max-new-tokens", "--max-tokens": "--max-new-tokens"}
_ADDRESS = {"--host": "--server-name", "--port": "--server-port"}
_SERVER = {"--served-model-name": "--model-name", "--api-key": "--api-keys"}
_ROWS = {"--max-new-tokens": "--max-tokens", "--n-predict": "--max-tokens"}
_LOAD = {
    "--max-concurrency": "--concurrency",
    "--dataset-path": "--dataset",
    "--sharegpt-output-len": "--random-output-len",
    "--model-name": "--model",
    "--output-file": "--json",
    "--extra-request-body": "--extra-body",
}

# Command → what is typed there → our option of that command.
ALIASES: dict[tuple[str, ...], dict[str, str]] = {
    ("chat",): _ENGINE | _DRAWN | _WRITTEN,
    ("serve", "api_server"): _ENGINE | _ADDRESS | _SERVER,
    ("serve", "api_client"): _DRAWN | _WRITTEN,
    ("serve", "gradio"): _ENGINE | _ADDRESS | {"--served-model-name": "--model-name"},
    ("serve", "proxy"): _ADDRESS | {"--api-key": "--api-keys", "--routing-strategy": "--strategy"},
    ("profile", "throughput"): _ENGINE
    | _DRAWN
    | {"--max-concurrency": "--concurrency", "--dataset-path": "--dataset", "--output-json": "--json"}
    | {"--input-len": "--random-input-len", "--output-len": "--random-output-len"},
    ("profile", "generation"): _ENGINE | _DRAWN,
    ("profile", "api_server"): _LOAD,
    ("profile", "restful_api"): _LOAD,  # LMDeploy's script is profile_restful_api.py
    ("eval", "ppl"): _ENGINE,
    ("eval", "tasks"): _ENGINE,
    ("batch",): _ENGINE | _DRAWN | _ROWS,
    ("check_env",): {"--dump-file": "--json"},
}

# Words for commands → the command that does the same.
COMMANDS = {"run": "chat"}

# What has no twin here → what does that job.
_CACHE = "the KV cache's bits are --quant-policy: 8 or 4, 16 for fp8 (e4m3), 17 for fp8_e5m2"
_ADAPTER = "LoRA adapters are named by --adapters NAME=PATH"
_ALONE = "the model stands without a flag: tool COMMAND MODEL"
INSTEAD = {
    "--kv-cache-dtype": _CACHE,
    "--cache-type-k": _CACHE,
    "--cache-type-v": _CACHE,
    "--gpu-memory-utilization": "--cache-max-entry-count is the KV cache's share of what the weights leave free",
    "--num-gpu-blocks-override": "--cache-max-entry-count N is a number of blocks",
    "--quantization": "how weights are quantized is read from the model; --model-format refuses any other",
    "--n-gpu-layers": "--device cuda puts the whole model there",
    "--gpu-layers": "--device cuda puts the whole model there",
    "--cpu-offload-gb": "a model lies whole on one --device",
    "--lora": _ADAPTER,
    "--lora-modules": _ADAPTER,
    "--enable-lora": _ADAPTER,
    "--model-path": _ALONE,
    "--hf-repo": _ALONE,
    "--tokenizer": "the tokenizer is the model's own",
    "--mmproj": "it is found beside the .gguf file",
    "--flash-attn": "attention is computed so always; leave it out",
    "--enforce-eager": "leave it out: --backend pytorch is the engine without captured graphs",
    "--max-model-len": "the longest context is --session-len, of commands that run a model",
    "--ctx-size": "the longest context is --session-len, of commands that run a model",
    "--host": "the address to listen on is --server-name, of tool serve",
    "--port": "the port to listen on is --server-port, of tool serve",
}
INSTEAD_OF_COMMANDS = {
    "quantize": "tool lite auto_awq MODEL quantizes; to llama.cpp's types: tool convert MODEL --to gguf --gguf-type …",
    "bench": "tool profile measures speed, tool eval quality",
    "perplexity": "tool eval ppl MODEL --data FILE",
    "download": "tool pull MODEL",
    "show": "tool inspect MODEL",
    "ps": "a server's models: curl ADDRESS/v1/models; packed ones: tool cache list",
}


def spelled_here(argv: Sequence[str]) -> list[str]:
    """``argv`` with its first word as our command is called."""
    return [COMMANDS.get(argv[0], argv[0]), *argv[1:]] if argv else []


def of_command(argv: Sequence[str]) -> dict[str, str]:
    """The aliases of the command that ``argv`` runs."""
    words = tuple(word.replace("-", "_") for word in argv[:2])
    return ALIASES.get(words) or ALIASES.get(words[:1]) or {}


def option_meant(typed: str, argv: Sequence[str], own: Iterable[str]) -> str:
    """What to add to a message about an unknown flag: what does its job, or the flag of which it is a slip of the pen.
    ``argv``: the command's words; ``own``: its options."""
    if typed in INSTEAD:
        return f"; {INSTEAD[typed]}"
    own, ours = list(own), of_command(argv)
    found = nearest(typed, [*own, *ours, *INSTEAD])
    if found in ours:
        return f"; did you mean {found}, here {ours[found]}?"
    if found in INSTEAD:
        return f"; did you mean {found}? {INSTEAD[found]}"
    return f"; did you mean {found}?" if found else ""


def command_meant(typed: str, own: Iterable[str]) -> str:
    """The same for an unknown command. ``own``: those that there are."""
    if typed in INSTEAD_OF_COMMANDS:
        return f"; {INSTEAD_OF_COMMANDS[typed]}"
    found = nearest(typed, [*own, *COMMANDS, *INSTEAD_OF_COMMANDS])
    if found in INSTEAD_OF_COMMANDS:
        return f"; did you mean {found}? {INSTEAD_OF_COMMANDS[found]}"
    return f"; did you mean {COMMANDS.get(found, found)}?" if found else ""
