"""Tokens per second of the shipped model on a CPU: transformers' own experts in fp32 and bf16 against lowgmm's INT8;
and the ceiling, which is the same model with experts that do nothing.

python bench/cpu_generate.py --output bench/results/cpu_generate.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import lowgmm
from lowgmm import environment
from lowgmm.integrations.transformers import register

MODEL = Path(lowgmm.__file__).parent / "demo_model"
RIVALS = {
    "fp32": (torch.float32, "grouped_mm"),
    "bf16": (torch.bfloat16, "grouped_mm"),
    "int8": (torch.bfloat16, "lowgmm_int8"),
    "int8, fp32 model": (torch.float32, "lowgmm_int8"),
}
CEILING = {"bf16 model": (torch.bfloat16, "nothing"), "fp32 model": (torch.float32, "nothing")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    register()
    ALL_EXPERTS_FUNCTIONS.register("nothing", lambda module, hidden, ids, weights: hidden)
    models = {
        name: AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, experts_implementation=experts).eval()
        for name, (dtype, experts) in (RIVALS | CEILING).items()
    }
    prompt, rates = torch.arange(5, 21).unsqueeze(0), {name: [] for name in models}
    for turn in range(args.turns + 1):
        for name, model in models.items():
            start = time.perf_counter()
            out = model.generate(prompt, max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False)
            assert out.shape[1] == prompt.shape[1] + args.tokens
            if turn:  # the first packs weights
                rates[name].append(args.tokens / (time.perf_counter() - start))
    middle = {name: statistics.median(v) for name, v in rates.items()}
    line = {"tokens_per_s": {n: middle[n] for n in RIVALS}, "ceiling": {n: middle[n] for n in CEILING}}
    line |= {"environment": environment.record(torch.device("cpu"))}
    print(line["tokens_per_s"], "ceiling", line["ceiling"])
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
