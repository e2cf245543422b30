"""What figures are called in tables, in all commands alike: as vLLM's benchmark has them."""

from __future__ import annotations

LABELS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "request_rate": "Request rate configured (RPS)",
    "max_concurrency": "Maximum request concurrency",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "total_images": "Total images",
    "request_throughput": "Request throughput (req/s)",
    "goodput": "Request goodput (req/s)",
    "input_throughput": "Input token throughput (tok/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "image_throughput": "Image throughput (images/s)",
    "prefill_throughput": "Prefill token throughput (tok/s)",  # these two vLLM has not
    "decode_throughput": "Decode token throughput (tok/s)",
    "peak_memory_mib": "Peak memory (MiB)",
}
LATENCY_LABELS = {"e2e_latency": "E2EL", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL"}


def latency_label(name: str, statistic: str = "") -> str:
    """Of one of ``options.LATENCIES``: "Mean TTFT (ms)"; without ``statistic`` "TTFT (ms)"."""
    return f"{statistic.capitalize()} {LATENCY_LABELS[name]} (ms)".strip()
