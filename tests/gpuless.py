"""Compile the kernels for a GPU that is not there, and read what came out: shared memory, spills, matrix instructions.

Runs as a program of its own (requests as JSON lines on standard input, reports as JSON lines on standard output),
because the tests' process has Triton in interpreter mode.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from lowgmm.gpu import Gpu
from lowgmm.kernels.grouped_mm import grouped_mm_kernel, promote_every
from lowgmm.kernels.hopper import BOXES, hopper_kernel
from lowgmm.kernels.hopper_read import box_of
from lowgmm.tile_config import LAUNCHES, Problem, TileConfig

ELEMENT = {
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "i8",
}
TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def report(asm: dict[str, Any], shared: int) -> dict[str, int]:
    """Bytes of shared memory, and counts of what matters in the assembly."""
    if "amdgcn" in asm:
        text = asm["amdgcn"]
        spills = sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s+(\d+)", text))
        counts = {"mfma": len(re.findall(r"v_mfma", text)), "spills": spills}
        return {"shared": shared, "idle_barriers": idle_barriers(asm["ttgir"]), **counts}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(asm["cubin"])
        f.flush()
        sass = subprocess.run([tool, "-sass", f.name], capture_output=True, text=True, check=True).stdout
    counts = {
        name: len(re.findall(pattern, asm["ptx"]))
        for name, pattern in {
            "wgmma": r"wgmma\.mma_async",
            "mma": r"mma\.sync",
            "tcgen05": r"tcgen05\.mma",
            "tma": r"cp\.async\.bulk\.tensor",
            "cp_async": r"cp\.async\.c[ag]",
            "wide_stores": r"st\.global\.v4",
        }.items()
    }
    counts["spills"] = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    return {"shared": shared, "idle_barriers": idle_barriers(asm["ttgir"]), **counts}


def idle_barriers(ttgir: str) -> int:
    """Barriers in shared memory that are initialised and nothing else.

    Triton gives the memory of what is not used any more to somebody else, and on an H200 such a barrier was found in it
    again, in place of what had been written there since (decision 13).
    """
    names = [set(re.findall(r"%[\w.-]+", line.split(" loc(")[0])) for line in ttgir.splitlines()]
    of: dict[str, str] = {}
    for view, viewed in re.findall(r"(%[\w-]+) = ttg\.memdesc_index (%[\w-]+)\[", ttgir):
        of[view] = of.get(viewed, viewed)
    initialised = {of.get(b, b) for b in re.findall(r"ttng\.init_barrier (%[\w-]+)", ttgir)}
    used = set()
    for line, mentioned in zip(ttgir.splitlines(), names, strict=True):
        if not re.search(r"= ttg\.(local_alloc|memdesc_index) |ttng\.init_barrier ", line):
            used |= {of.get(name, name) for name in mentioned}
    return len(initialised - used)


def gpu_of(target: GPUTarget) -> Gpu:
    """What kernels ask of a GPU, as far as a target says it."""
    capability = divmod(target.arch, 10) if target.backend == "cuda" else (9, 4)
    return Gpu(str(target.arch), capability, 1, 0, target.backend)


def compile_grouped_mm(problem: Problem, config: TileConfig, target: GPUTarget) -> dict[str, int]:
    """Compile the mainloop as the launcher would for ``problem`` (all sizes and strides multiples of 16)."""
    scaled = problem.dtype.itemsize == 1
    element, integer = ELEMENT[problem.dtype], not problem.dtype.is_floating_point
    if target.backend == "hip" and element == "fp8e4nv":
        element = "fp8e4b8"
    promote = promote_every(problem.dtype, gpu_of(target))
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    group = problem.group if problem.four_bits else None
    constants: dict[str, Any] = {"BM": bm, "BN": bn, "BK": bk, "STAGES": config.num_stages, "BIAS": False}
    constants |= {"bias": None, "SCALED_X": scaled, "SCALED_W": scaled}
    if not scaled:
        constants |= {"scales_x": None, "scales_w": None}
    if config.warp_specialize:
        layout, out = (NVMMASharedLayout(128, 8 * size, rank=2) for size in (problem.dtype.itemsize, 2))
        constants |= {"BOXES": BOXES, "OUT": out, "INT": integer, "PROMOTE": promote > 0}
        constants |= {"GROUP": group, "SCALED_W": scaled and not problem.group}
        x, w = (
            f"tensordesc<{element}[{rows}, {columns}],{layout!r}>"
            for rows, columns in (
                box_of(bm, bn, problem.dtype.itemsize),
                (64, int(bk * problem.weight_size // problem.element_size)),
            )
        )
        kernel, source_type = hopper_kernel, GluonASTSource
    else:
        constants |= {
            "LAUNCH": LAUNCHES.index(config.launch),
            "GROUPS": triton.next_power_of_2(problem.E + 1),
            "SWAP": config.swap_ab,
            "TMA": config.tma,
            "EVEN_K": problem.K % bk == 0,
            "ACC": tl.int32 if integer else tl.float32,
            "PROMOTE": min(promote, bk),
            "GROUP": group,
            "WORDS": target.backend == "cuda",
            "SCALED_W": scaled and not problem.group,
        }
        x = w = f"*{element}"
        if config.tma:
            loaded = problem.group or bk
            of_w = int(loaded * problem.weight_size // problem.element_size)
            x, w = (f"tensordesc<{element}[{rows}, {n}]>" for rows, n in ((bm, loaded), (bn, of_w)))
        kernel, source_type = grouped_mm_kernel, ASTSource
    types = {"x": x, "w": w, "y": "*bf16", "scales_x": "*fp32", "scales_w": "*fp32"}
    types |= dict.fromkeys(("offsets", "table", "ticket"), "*i32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    divisible = {"x", "w", "y", "scales_x", "scales_w", "N", "K", "stride_xm", "stride_we", "stride_wn", "stride_ym"}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if name in divisible and not kind.startswith(("tensordesc", "constexpr"))
    }
    source = source_type(kernel, signature, constants, attrs)
    options = {"num_warps": config.num_warps}
    if not config.warp_specialize:
        options["num_stages"] = config.num_stages
    if problem.four_bits:
        options["enable_fp_fusion"] = False
    compiled = triton.compile(source, target=target, options=options)
    return report(compiled.asm, compiled.metadata.shared)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        dtype = getattr(torch, request["dtype"])
        problem = Problem(*(request[name] for name in "EMNK"), dtype, group=request.get("group", 0))
        print(json.dumps(compile_grouped_mm(problem, TileConfig.parse(request["config"]), TARGETS[request["target"]])))


def compile_all(requests: list[dict[str, Any]], program: str = __file__) -> list[Any]:
    """Reports for ``requests`` (E, M, N, K, dtype, config, target), compiled without the interpreter by a process per
    core.

    A compilation takes seconds. Triton keeps it on disk, so that the next run takes none, and reports are counted anew.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    parts = max(1, min(8, len(requests), os.cpu_count() or 1))

    def compile_part(part: int) -> list[Any]:
        lines = "\n".join(json.dumps(r) for r in requests[part::parts])
        done = subprocess.run([sys.executable, program], input=lines, capture_output=True, text=True, env=env)
        if done.returncode:
            raise RuntimeError(f"compiling failed:\n{done.stderr[-4000:]}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(parts) as pool:
        reports = list(pool.map(compile_part, range(parts)))
    return [reports[i % parts][i // parts] for i in range(len(requests))]


if __name__ == "__main__":
    main()
