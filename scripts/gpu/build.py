"""Ahead-of-time build of the Triton and CUDA kernels; see ``scripts/gpu_build``."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from toolkit.kernels.cuda.build import nvcc
from toolkit.kernels.cuda.check import check
from toolkit.kernels.triton.ahead_of_time.build import ARCHITECTURES, Built, build


def main() -> int:
    """Build, print a line for each variant, write JSON; the exit code."""
    parser = argparse.ArgumentParser("gpu_build", description=__doc__)
    parser.add_argument("--arch", default=",".join(map(str, ARCHITECTURES)), help="compute capabilities, as 80,90")
    parser.add_argument("--only", help="variants whose op/label holds this, as paged_attention/decode")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    results, errors, start = [], [], time.perf_counter()
    print(f"{'op':18} {'variant':22} {'dtype':9} {'kernel':26} arch  regs shared warps blocks shows / faults")
    architectures = [int(a) for a in options.arch.split(",")]
    cuda = [check(a, options.only) for a in architectures] if nvcc() is not None else []
    if not cuda:
        print("no nvcc found: the CUDA kernels are left out")
    for found in itertools.chain(build(architectures, options.only, options.jobs), *cuda):
        if not isinstance(found, Built):
            errors.append(found)
            print(f"ERROR {found}", flush=True)
            continue
        results.append(asdict(found))
        faults = f"  FAULT: {'; '.join(found.faults)}" if found.faults else ""
        print(
            f"{found.op:18} {found.label:22} {found.dtype:9} {found.kernel:26} sm_{found.architecture} "
            f"{found.registers:4} {found.shared:6} {found.warps:5} {found.blocks:6} {' '.join(found.shows)}{faults}",
            flush=True,
        )
    faulty = [r for r in results if r["faults"]]
    print(f"{len(results)} built, {len(faulty)} with faults, {len(errors)} failed, {time.perf_counter() - start:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({"built": results, "errors": errors}, indent=1) + "\n")
    return 1 if faulty or errors else 0


if __name__ == "__main__":
    sys.exit(main())
