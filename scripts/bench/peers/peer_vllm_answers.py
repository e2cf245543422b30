"""vLLM's CPU build, asked a line at a time; for speculation.py. Runs in an environment of its own (peer_vllm.py):

    python peer_vllm_answers.py CHECKPOINT [--speculative ngram]

Reads a JSON object a line, {"prompt", "max_tokens", "response_format"}, and prints a list: the greedy answer, tokens
behind those of the first step, and the seconds that those took.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

if TYPE_CHECKING:
    from vllm import LLM


def answer(llm: LLM, asked: dict[str, Any]) -> tuple[str, int, float]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    form = asked.get("response_format")
    schema = None if form is None else StructuredOutputsParams(json=form["json_schema"]["schema"])
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], structured_outputs=schema)
    messages = [{"role": "user", "content": asked["prompt"]}]
    text = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    llm.llm_engine.add_request(str(time.time_ns()), {"prompt_token_ids": ids}, params)
    first, begun, said, count = 0, 0.0, "", 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            said, count = output.outputs[0].text, len(output.outputs[0].token_ids)
            if not first and count:
                first, begun = count, time.perf_counter()
    return said, count - first, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--speculative", choices=["ngram"], help="how it guesses; default: not at all")
    parser.add_argument("--tokens", type=int, default=8, help="that it guesses at most")
    args = parser.parse_args()
    lines, sys.stdout = sys.stdout, sys.stderr  # vLLM prints, too
    from vllm import LLM

    guesses = {"method": args.speculative, "num_speculative_tokens": args.tokens, "prompt_lookup_max": 4}
    llm = LLM(args.model, max_model_len=2048, max_num_seqs=1, speculative_config=guesses if args.speculative else None)
    for line in sys.stdin:
        print(json.dumps(answer(llm, json.loads(line))), file=lines, flush=True)


if __name__ == "__main__":
    main()
