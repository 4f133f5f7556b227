"""Compile the expert layer's kernels for a GPU that is not there; see gpuless.py, whose reports these are.

Runs as a program of its own: requests as JSON lines on standard input, reports as JSON lines on standard output.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpuless import ELEMENT, TARGETS, compile_all, gpu_of, report
from lowgmm.formats import format_of
from lowgmm.kernels.moe_layer import BOTH, DOWN, UP, combine_kernel, moe_layer_kernel
from lowgmm.kernels.route import _blocks, prepare_kernel, sort_kernel
from lowgmm.kernels.rows import activate_kernel, gather_kernel
from lowgmm.kernels.run_layer import constants
from lowgmm.layer import LayerSpec
from lowgmm.plan import LayerConfig

LAYER_POINTERS = {
    "scales_x": "fp32", "scales_w13": "fp32", "scales_w2": "fp32", "scales_h": "fp32", "bias_w13": "bf16",
    "bias_w2": "bf16", "h": "bf16", "y": "bf16", "out": "bf16", "ids": "i32",
    "topk_weights": "fp32", "workspace": "i32",
}  # fmt: skip


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    target: GPUTarget,
    divisible: set[str],
    **options: int,
) -> dict[str, int]:
    """Compile with pointers and the integers named in ``divisible`` taken for multiples of 16."""
    types = types | dict.fromkeys(constexprs, "constexpr")
    names = kernel.arg_names
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*") or n in divisible}
    source = ASTSource(kernel, {n: types[n] for n in names}, constexprs, attrs)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False, **options})
    return report(compiled.asm, compiled.metadata.shared) | {"regs": getattr(compiled, "n_regs", 0) or 0}


def compile_layer(request: dict[str, Any]) -> list[dict[str, int]]:
    """Every launch of a layer, in order: prepare, the products, combine."""
    config, target = LayerConfig.parse(request["config"]), TARGETS[request["target"]]
    spec = LayerSpec(**request.get("options", {}))
    dtype, direct = getattr(torch, request["dtype"]), config.launch == "direct"
    experts, hidden, inner, top_k = (request[name] for name in "EHIA")
    biased = bool(request.get("biased"))
    if config.launch == "gmm":
        return compile_rows(spec, dtype, biased, top_k, target)
    shared = constants(spec, config, dtype, hidden, inner, (biased, biased), gpu_of(target))
    split, quantised = config.launch == "split", dtype.itemsize == 1
    reports = []
    for phase in (UP, DOWN) if split else (BOTH,):
        done = split and quantised and spec.requantize == "token"
        requantize = "none" if not quantised else "done" if done and phase == DOWN else spec.requantize
        element = ELEMENT[dtype]
        types = {name: f"*{kind}" for name, kind in LAYER_POINTERS.items()}
        types |= dict.fromkeys(("R", "bound", "E", "H", "I", "stride_x", "stride_hq"), "i32")
        types |= dict.fromkeys(("clip", "slope", "limit"), "fp32")
        types |= {"x": "*bf16" if direct else f"*{element}", "w13_pointer": f"*{element}", "w2_pointer": f"*{element}"}
        types |= {"w13": f"*{element}", "w2": f"*{element}", "hq": f"*{element}"}
        if config.tma:
            types["w13"] = f"tensordesc<{element}[{config.up_n}, {config.up_k}]>"
            types["w2"] = f"tensordesc<{element}[{config.down_n}, {config.down_k}]>"
            if config.gather:
                types["x"] = f"tensordesc<{element}[{config.block_m}, {config.up_k}]>"
            if requantize == "done":
                types["hq"] = f"tensordesc<{element}[{config.block_m}, {config.down_k}]>"
        constexprs = shared | {
            "PHASE": phase, "GATHERED": config.gather, "DIRECT": direct, "REQUANTISE": done and phase == UP,
            "PREFETCH": config.prefetch and target.backend == "cuda", "PDL": config.pdl, "A": top_k, "TMA": config.tma,
            "REQUANTIZE": requantize,
        }  # fmt: skip
        absent = {"scales_h"} if spec.requantize != "static" else set()
        absent |= set() if biased else {"bias_w13", "bias_w2"}
        absent |= set() if quantised else {"scales_w13", "scales_w2"}
        constexprs |= dict.fromkeys(absent)
        reports.append(
            compile_kernel(
                moe_layer_kernel, types, constexprs, target, {"H", "I", "stride_x", "stride_hq"},
                num_warps=config.num_warps, num_stages=3,
            )
        )  # fmt: skip
    if not direct and request.get("all"):
        types = dict.fromkeys(("R", "bound", "E", "H", "stride_x"), "i32") | {"clip": "fp32"}
        types |= {"ids": "*i32", "x": "*bf16", "xq": f"*{ELEMENT[dtype]}", "scales": "*fp32", "out": "*bf16"}
        types |= {"workspace": "*i32", "gate": "*i32"}
        constexprs = {name: shared[name] for name in ("QMAX", "GROUPS", "BM")} | _blocks(request["T"] * top_k, experts)
        constexprs |= {
            "A": top_k,
            "ZERO": top_k == 1,
            "PDL": config.pdl,
            "GATHER": config.gather,
            "BLOCK_H": shared["BLOCK_H"],
        }
        reports.append(compile_kernel(prepare_kernel, types, constexprs, target, {"H", "stride_x"}, num_warps=4))
        types = {
            "y": "*bf16",
            "inverse": "*i32",
            "ids": "*i32",
            "topk_weights": "*fp32",
            "out": "*bf16",
            "E": "i32",
            "H": "i32",
        }
        constexprs = {
            "A": top_k,
            "SORTED": False,
            "WEIGHT_ON_INPUT": spec.weight_on_input,
            "PDL": config.pdl,
            "BLOCK": 1024,
        }
        reports.append(compile_kernel(combine_kernel, types, constexprs, target, {"H"}, num_warps=4))
        types = {"ids": "*i32", "order": "*i32", "inverse": "*i32", "offsets": "*i32", "R": "i32", "E": "i32"}
        blocks = _blocks(request["T"] * top_k, experts)
        reports.append(compile_kernel(sort_kernel, types, blocks, target, set(), num_warps=4))
    return reports


def compile_rows(
    spec: LayerSpec, dtype: torch.dtype, biased: bool, top_k: int, target: GPUTarget
) -> list[dict[str, int]]:
    """The launches between two grouped matmuls, which tests/test_compile.py compiles."""
    fmt = format_of(dtype)
    shared = {"QMAX": 0.0 if fmt is None else fmt.qmax, "PDL": target.backend == "cuda", "BLOCK": 4096}
    none = {} if fmt is not None else {"scales": None}
    gather = {"x": "*bf16", "order": "*i32", "rows": f"*{ELEMENT[dtype]}", "scales": "*fp32"}
    gather |= {"H": "i32", "stride_x": "i32", "clip": "fp32"}
    act = {"gate_up": "*fp32", "h": "*bf16", "hq": f"*{ELEMENT[dtype]}", "scales": "*fp32", "order": "*i32"}
    act |= {"ids": "*i32", "topk_weights": "*fp32", "bias": "*fp32", "E": "i32", "I": "i32"}
    act |= {"slope": "fp32", "bound": "fp32"}
    choices = {"ACTIVATION": spec.activation, "LAYOUT": spec.gate_up, "CLAMPED": spec.bound is not None}
    choices |= {"WEIGHT_ON_INPUT": spec.weight_on_input, "BIAS": biased} | ({} if biased else {"bias": None})
    return [
        compile_kernel(gather_kernel, gather, {"A": top_k, **shared, **none}, target, {"H", "stride_x"}, num_warps=4),
        compile_kernel(activate_kernel, act, {**choices, **shared, **none}, target, {"I"}, num_warps=4),
    ]


def compile_layers(requests: list[dict[str, Any]]) -> list[list[dict[str, int]]]:
    return compile_all(requests, __file__)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(compile_layer(json.loads(line))), flush=True)
