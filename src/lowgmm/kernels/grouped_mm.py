"""The grouped matmul: one mainloop, four ways to hand out its tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowgmm.formats import group_size
from lowgmm.gpu import Gpu, describe
from lowgmm.kernels.nibbles import accumulate_nibbles, unzipped
from lowgmm.kernels.queue import counters
from lowgmm.kernels.tiles import accumulate, count_tiles, find_tile, group_bounds, store
from lowgmm.quant import to_fnuz
from lowgmm.relaunch import descriptor
from lowgmm.replay import empty, launch
from lowgmm.routing import max_row_tiles
from lowgmm.shapes import UnsupportedError
from lowgmm.tile_config import LAUNCHES, Problem, TileConfig, supports
from lowgmm.tune import by_pointers, pick

GRID, PERSISTENT, QUEUE, EXPERT = (tl.constexpr(i) for i in range(len(LAUNCHES)))


@triton.jit
def one_tile(
    x,
    w,
    y,
    scales_x,
    scales_w,
    bias,
    expert,
    row,
    end,
    n_tile,
    E,
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    stride_ym,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
    PROMOTE: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    SCALED_X: tl.constexpr,
    SCALED_W: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Rows behind the last expert come as expert E: they run on expert E-1's weights (one code path, no branch that
    would break the loop nest's pipelining) and are stored as zeros."""
    live = expert < E
    expert = tl.minimum(expert, E - 1)
    if GROUP is not None:
        acc = accumulate_nibbles(
            x, w, scales_w, expert, row, end, n_tile, N, K, stride_xm, stride_we, stride_wn,
            BM, BN, BK, TMA, EVEN_K, STAGES, GROUP, WORDS,
        )  # fmt: skip
    else:
        acc = accumulate(
            x, w, expert, row, end, n_tile, N, K, stride_xm, stride_we, stride_wn,
            BM, BN, BK, SWAP, TMA, EVEN_K, STAGES, ACC, PROMOTE,
        )  # fmt: skip
    store(
        acc, y, scales_x, scales_w, bias, expert, live, row, end, n_tile, N, stride_ym,
        BM, BN, SWAP, SCALED_X, SCALED_W, BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])  # a token count must never compile anything
def grouped_mm_kernel(
    x,  # (M, K): descriptor or pointer, see tiles.accumulate
    w,  # (E, N, K): descriptor or pointer
    y,  # (M, N)
    scales_x,  # (M,) float32
    scales_w,  # (E, N) float32; (E, k, N) with GROUP
    bias,  # (E, N)
    offsets,  # (E+1,) int32
    table,  # (GROUPS,) int32: scratch for tiles.count_tiles
    ticket,  # (1,) int32, zero before and after: the QUEUE launch's counter
    M,
    E,
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    stride_ym,
    LAUNCH: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
    PROMOTE: tl.constexpr,
    GROUP: tl.constexpr,  # of 4-bit weights, see nibbles.accumulate_nibbles; else None
    WORDS: tl.constexpr,
    SCALED_X: tl.constexpr,
    SCALED_W: tl.constexpr,  # by channel, behind the sum
    BIAS: tl.constexpr,
):
    """Tiles are numbered expert by expert (``tiles.find_tile``), and handed out in one of four ways.

    GRID        grid (max_row_tiles · tiles_n,): a tile each at most.
    PERSISTENT  grid (programs,): tile numbers in a fixed stride.
    QUEUE       grid (programs,): tile numbers from an atomic ticket; a program takes its next ticket before it
    computes,
                so that the atomic's latency is hidden.
    EXPERT      grid (E+1,): program e walks all tiles of expert e. The article's first version; it shows what balancing
                is worth.
    """
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    if LAUNCH == EXPERT:
        start, end = group_bounds(offsets, pid, M, E)
        expert = pid
        for row in tl.range(start, end, BM):
            for n_tile in tl.range(0, tiles_n):
                one_tile(
                    x, w, y, scales_x, scales_w, bias, expert, row, end, n_tile, E, N, K,
                    stride_xm, stride_we, stride_wn, stride_ym,
                    BM, BN, BK, SWAP, TMA, EVEN_K, STAGES, ACC, PROMOTE, GROUP, WORDS,
                    SCALED_X, SCALED_W, BIAS,
                )  # fmt: skip
    else:
        total = count_tiles(offsets, table, M, E, BM, GROUPS) * tiles_n
        if LAUNCH == QUEUE:
            tile = pid
            while tile < total:
                next_tile = tl.num_programs(0) + tl.atomic_add(ticket, 1, sem="relaxed")
                expert, row, end, n_tile = find_tile(offsets, table, tile, tiles_n, M, E, BM, GROUPS)
                one_tile(
                    x, w, y, scales_x, scales_w, bias, expert, row, end, n_tile, E, N, K,
                    stride_xm, stride_we, stride_wn, stride_ym,
                    BM, BN, BK, SWAP, TMA, EVEN_K, STAGES, ACC, PROMOTE, GROUP, WORDS,
                    SCALED_X, SCALED_W, BIAS,
                )  # fmt: skip
                tile = next_tile
            # One ticket is drawn per tile; who draws the last leaves the counter as it was found.
            if tile == tl.num_programs(0) + total - 1:
                tl.store(ticket, 0)
        else:
            # Flattening fuses the tile loop with the K loop, so that the next tile's loads overlap this one's epilogue.
            for tile in tl.range(pid, total, tl.num_programs(0), flatten=LAUNCH == PERSISTENT):
                expert, row, end, n_tile = find_tile(offsets, table, tile, tiles_n, M, E, BM, GROUPS)
                one_tile(
                    x, w, y, scales_x, scales_w, bias, expert, row, end, n_tile, E, N, K,
                    stride_xm, stride_we, stride_wn, stride_ym,
                    BM, BN, BK, SWAP, TMA, EVEN_K, STAGES, ACC, PROMOTE, GROUP, WORDS,
                    SCALED_X, SCALED_W, BIAS,
                )  # fmt: skip


PROMOTE_EVERY = 128
"""K between promotions of an FP8 accumulator to FP32: the numerics contract's, and the block size of FP8
checkpoints."""


def grouped_mm(
    out: Tensor,
    x: Tensor,
    w: Tensor,
    scales_x: Tensor | None,
    scales_w: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    config: TileConfig | None = None,
    *,
    fast_accum: bool = False,
) -> None:
    """``out[M, N] = X[M, K] @ W[E, N, K].T`` by groups; everything is on one device.

    Operands have one dtype; or ``w`` is uint8 [E, N, K/2], two 4-bit values to a byte, ``x`` int8, and ``scales_w``
    [E, N], or [E, N, k] with k groups along K.
    """
    (num_rows, k_size), (num_experts, n_size) = x.shape, w.shape[:2]
    x, w = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, w))
    gpu, dtype, group = describe(x.device), w.dtype, None  # the dtype as tables name it
    if dtype == torch.uint8:
        x, w, group = unzipped(x), w.view(torch.int8), 0
        if scales_w is not None and scales_w.dim() == 3:
            group, scales_w = group_size(k_size, scales_w.shape[2]), scales_w.mT.contiguous()
    if gpu.fnuz and x.dtype == torch.float8_e4m3fn:
        x, w, scales_x, scales_w = as_fnuz(x, w, scales_x, scales_w)
    problem = Problem(num_experts, num_rows, n_size, k_size, dtype, out.dtype, group or 0)
    if config is None:
        config = pick(problem, gpu)
        if config.tma and not _tma_ready(x, w, out):
            config = by_pointers(problem, config)
    elif (why := supports(problem, config, gpu)) is not None:
        raise UnsupportedError(f"gmm: config {config} cannot run here: {why}")
    elif config.tma and not _tma_ready(x, w, out):
        raise UnsupportedError(
            f"gmm: config {config} needs contiguous operands that start at a multiple of 16 bytes, and "
            f"rows of the output that are less than {FAR} elements apart."
        )
    promote = 0 if fast_accum else promote_every(x.dtype, gpu)
    if config.warp_specialize:
        from lowgmm.kernels.hopper import hopper_mm

        hopper_mm(out, x, w, scales_x, scales_w, offsets, bias, counters(x.device), config, gpu.sms, promote, group)
        return
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    loaded = group or bk  # elements of a row at a time
    of_w = loaded if group is None else loaded // 2
    if config.launch == "expert":
        programs = num_experts + 1
    else:
        programs = max_row_tiles(num_rows, num_experts, bm) * -(-n_size // bn)
        if config.launch != "grid":
            programs = min(programs, gpu.sms * config.programs_per_sm)
    groups = 1 << num_experts.bit_length()  # a power of two > num_experts
    constants = (
        LAUNCHES.index(config.launch),
        groups,
        bm,
        bn,
        bk,
        config.swap_ab,
        config.tma,
        k_size % bk == 0,
        config.num_stages,
        tl.float32 if x.dtype.is_floating_point else tl.int32,
        min(promote, bk),
        group,
        gpu.backend == "cuda" and not gpu.interpreted,
        scales_x is not None,
        scales_w is not None and not group,
        bias is not None,
    )
    launch(
        grouped_mm_kernel,
        programs,
        descriptor(TensorDescriptor, x, x.shape, (x.stride(0), 1), [bm, loaded]) if config.tma else x,
        descriptor(TensorDescriptor, w, (num_experts * n_size, w.shape[2]), (w.shape[2], 1), [bn, of_w])
        if config.tma
        else w,
        *(out, scales_x, scales_w, bias, offsets),
        empty((groups,), torch.int32, x.device),
        counters(x.device) if config.launch == "queue" else None,
        *(num_rows, num_experts, n_size, k_size, x.stride(0), w.stride(0), w.stride(1), out.stride(0)),
        *constants,
        num_warps=config.num_warps,
        # The epilogue's roundings are the contract's, so no multiply-add is fused there; the matrix instructions do not
        # care. Only fp32 operands are multiplied by ordinary instructions, twice as many of them without fusion.
        enable_fp_fusion=x.dtype == torch.float32,
    )


def promote_every(dtype: torch.dtype, gpu: Gpu) -> int:
    """K between promotions for operands of ``dtype``; 0: the accumulator is FP32, as Blackwell's and AMD's for FP8."""
    coarse = gpu.backend == "cuda" and gpu.capability < (10, 0)
    return PROMOTE_EVERY if dtype == torch.float8_e4m3fn and coarse else 0


def as_fnuz(
    x: Tensor, w: Tensor, scales_x: Tensor | None, scales_w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FP8 operands and their scales for hardware whose FP8 is e4m3fnuz.

    Done at every call, which is slow: correct first. Nobody has measured this library on that hardware yet.
    """
    (x, scales_x), (w, scales_w) = to_fnuz(x, scales_x), to_fnuz(w, scales_w)
    return x, w, scales_x.expand(x.shape[0]).contiguous(), scales_w.expand(w.shape[:2]).contiguous()


FAR = 1 << 24
"""Elements between rows of a result with which 128 rows are more than 32 bits apart: ``hopper_write.write``."""


def _tma_ready(x: Tensor, w: Tensor, out: Tensor) -> bool:
    """Descriptors address whole 16-byte units and view the experts as one [E·N, K] matrix."""
    return (
        x.data_ptr() % 16 == 0
        and w.data_ptr() % 16 == 0
        and x.stride(0) * x.element_size() % 16 == 0
        and x.stride(0) >= x.shape[1]  # a broadcast row has stride 0, which no descriptor can hold
        and w.is_contiguous()
        and (len(out) == 1 or out.stride(0) < FAR)
    )
