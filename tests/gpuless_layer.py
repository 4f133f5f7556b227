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
from triton.experimental.gluon._runtime import GluonASTSource

from gpuless import ELEMENT, TARGETS, compile_all, gpu_of, report
from lowgmm.formats import QuantFormat, format_of
from lowgmm.kernels.arrange import FEW, STEP, SUB, bins_of, gather_kernel
from lowgmm.kernels.arrange import sort_kernel as arrange_sort_kernel
from lowgmm.kernels.combine import combine_kernel
from lowgmm.kernels.grouped_mm import promote_every
from lowgmm.kernels.hopper_layer import hopper_layer_kernel
from lowgmm.kernels.hopper_read import box_of
from lowgmm.kernels.moe_layer import BOTH, DOWN, UP, moe_layer_kernel
from lowgmm.kernels.route import _blocks, prepare_kernel, sort_kernel
from lowgmm.kernels.run_hopper import WIDTH, _constants
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
    source_type: type[ASTSource] = ASTSource,
    **options: int,
) -> dict[str, int]:
    """Compile with pointers and the integers named in ``divisible`` taken for multiples of 16."""
    names = kernel.arg_names
    types = types | dict.fromkeys(constexprs, "constexpr")
    odd = {p.name for p in kernel.params if p.do_not_specialize_on_alignment}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if (types[n].startswith("*") and n not in odd) or n in divisible
    }
    source = source_type(kernel, {n: types[n] for n in names}, constexprs, attrs)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False, **options})
    return report(compiled.asm, compiled.metadata.shared) | {"regs": getattr(compiled, "n_regs", 0) or 0}


def compile_layer(request: dict[str, Any]) -> list[dict[str, int]]:
    """Every launch of a layer, in order: prepare, the products, combine."""
    config, target = LayerConfig.parse(request["config"]), TARGETS[request["target"]]
    spec = LayerSpec(**request.get("options", {}))
    dtype, direct = getattr(torch, request["dtype"]), config.launch == "direct"
    experts, hidden, inner, top_k = (request[name] for name in "EHIA")
    biased = bool(request.get("biased"))
    if config.warp_specialize:
        return compile_warp_specialised(spec, config, dtype, biased, request, target)
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
            "stride_y": "i32",
        }
        constexprs = {
            "A": top_k,
            "SORTED": False,
            "WEIGHT_ON_INPUT": spec.weight_on_input,
            "PDL": config.pdl,
            "BLOCK": 1024,
        }
        reports.append(compile_kernel(combine_kernel, types, constexprs, target, {"H", "stride_y"}, num_warps=4))
        types = {"ids": "*i32", "order": "*i32", "inverse": "*i32", "offsets": "*i32", "R": "i32", "E": "i32"}
        blocks = _blocks(request["T"] * top_k, experts)
        reports.append(compile_kernel(sort_kernel, types, blocks, target, set(), num_warps=4))
    return reports


def compile_warp_specialised(
    spec: LayerSpec, config: LayerConfig, dtype: torch.dtype, biased: bool, request: dict[str, Any], target: GPUTarget
) -> list[dict[str, int]]:
    """Both products, and the launch before them; combine, where there is one, is every layer's."""
    fmt, element = format_of(dtype), ELEMENT[dtype]
    promote = promote_every(dtype, gpu_of(target)) > 0
    between = torch.float32 if request.get("h_size") == 4 else torch.bfloat16
    direct = config.launch == "direct"
    one = (request["A"], min(triton.next_power_of_2(request["H"]), WIDTH)) if direct else (0, 0)
    layout, constants = _constants(config, spec, dtype, between, promote, biased, biased, *one)
    names = hopper_layer_kernel.arg_names
    constexprs = dict(zip(names[-len(constants) :], constants, strict=True))
    of_rows = box_of(config.block_m, config.down_n, dtype.itemsize)
    boxes = (of_rows, [min(64, config.down_n // 2), config.down_k], [64, config.down_k])
    x, w13, w2 = (f"tensordesc<{element}{box},{layout!r}>" for box in boxes)
    types = {
        "x": x,
        "hq_tiles": x,
        "w_gate": w13,
        "w_up": w13,
        "w2": w2,
        "y": f"*{ELEMENT[between]}",
        "h": f"*{ELEMENT[between]}",
        "hq": f"*{element}",
        "hidden": "*bf16",
        "xq": f"*{element}",
        "ids": "*i64",
        "result": "*bf16",
    }
    types |= dict.fromkeys(("scales_x", "scales_h", "w13_scales", "w2_scales", "topk_weights"), "*fp32")
    types |= dict.fromkeys(("absmax", "order", "offsets", "ticket", "ready", "arrived"), "*i32")
    types |= dict.fromkeys(("w13_bias", "w2_bias"), "*bf16") | dict.fromkeys(("clip", "slope", "bound"), "fp32")
    types |= dict.fromkeys(("R", "E", "H", "I", "S", "expert_rows", "stride"), "i32")
    constexprs |= {} if biased else {"w13_bias": None, "w2_bias": None}
    constexprs |= {"w13_scales": None, "w2_scales": None} if fmt is None else {}
    constexprs |= dict.fromkeys(("order", "offsets") if direct else ("hidden", "xq", "ids", "result", "arrived"))
    divisible = {"H", "I", "expert_rows", "stride"}
    made = [compile_kernel(hopper_layer_kernel, types, constexprs, target, divisible, GluonASTSource, num_warps=4)]
    if request.get("all"):
        made += compile_arrange(element, fmt, request, target)
    return made


def compile_arrange(
    element: str, fmt: QuantFormat | None, request: dict[str, Any], target: GPUTarget
) -> list[dict[str, int]]:
    rows, experts = request["T"] * request["A"], request["E"]
    few = next((n for n in FEW if rows <= n), 0)
    numbers = ("R", "E", "H", "groups", "chunks", "size", "number", "stride_x", "stride_xq")
    types = dict.fromkeys(numbers, "i32") | {"x": "*bf16", "xq": f"*{element}", "scales": "*fp32", "clip": "fp32"}
    types |= dict.fromkeys(("ids", "order", "inverse", "offsets", "counts", "gate", "zeros"), "*i32")
    block = min(triton.next_power_of_2(request["H"]), 4096)
    constexprs = {"A": request["A"], "QMAX": 0.0 if fmt is None else fmt.qmax, "SORT": few > 0, "PDL": True}
    constexprs |= {"BINS": bins_of(experts + 2), "SLOTS": max(few, 1), "BLOCK": block, "WHOLE": block >= request["H"]}
    divisible = {"H", "stride_x", "stride_xq"}
    made = [compile_kernel(gather_kernel, types, constexprs, target, divisible, num_warps=4)]
    if not few:
        constexprs = {"PDL": True, "BINS": bins_of(experts), "STEP": STEP, "SUB": SUB}
        made.append(compile_kernel(arrange_sort_kernel, types, constexprs, target, set(), num_warps=4))
    return made


def compile_layers(requests: list[dict[str, Any]]) -> list[list[dict[str, int]]]:
    return compile_all(requests, __file__)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(compile_layer(json.loads(line))), flush=True)
