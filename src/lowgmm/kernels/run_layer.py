"""Launch the expert layer's kernels: scratch memory, descriptors, and which launches follow each other."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowgmm.formats import format_of
from lowgmm.gpu import Gpu, describe
from lowgmm.kernels.combine import combine
from lowgmm.kernels.grouped_mm import promote_every
from lowgmm.kernels.moe_layer import BOTH, DOWN, UP, moe_layer_kernel
from lowgmm.kernels.queue import counters
from lowgmm.kernels.route import TILE_FIELDS, prepare
from lowgmm.layer import GROUP, LayerSpec, Weights
from lowgmm.plan import LayerConfig
from lowgmm.replay import empty, launch
from lowgmm.routing import max_row_tiles

TYPES = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv, torch.bfloat16: tl.bfloat16}
HEAD = 4
"""Words of a workspace in front of its tables: the queue's ticket, the number of row tiles, two spare."""


def moe_ffn(
    hidden: Tensor,
    w13: Weights,
    w2: Weights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    spec: LayerSpec,
    scales_h: Tensor | None,
    config: LayerConfig,
) -> Tensor:
    """[T, H] in ``hidden``'s dtype: ``lowgmm.moe_ffn`` of checked arguments that ``config`` supports, T > 0.

    Scratch memory for a bfloat16 ``hidden`` is R · (2 · I + 2 · H) + T · H bytes (h; the slots' outputs, unless A = 1;
    quantised tokens; R · H instead of T · H with ``gather``) and a few words per row and tile; warp-specialised
    see ``run_hopper``.
    """
    if config.warp_specialize:
        from lowgmm.kernels.run_hopper import moe_ffn

        return moe_ffn(hidden, w13, w2, topk_ids, topk_weights, spec, config)
    call = Call(hidden, w13, w2, topk_ids, topk_weights, spec, scales_h, config)
    if config.launch == "direct":
        call.products(BOTH)
        return call.out
    call.prepare()
    if config.launch == "queue":
        call.products(BOTH)
    else:
        call.products(UP)
        call.products(DOWN)
    if call.y is not call.out:
        call.combine()
    return call.out


class Call:
    """One call's arguments as kernels want them, its scratch memory, and its launches."""

    def __init__(
        self,
        hidden: Tensor,
        w13: Weights,
        w2: Weights,
        topk_ids: Tensor,
        topk_weights: Tensor,
        spec: LayerSpec,
        scales_h: Tensor | None,
        config: LayerConfig,
    ) -> None:
        self.w13, self.w2, self.spec, self.scales_h, self.config = w13, w2, spec, scales_h, config
        self.values13, self.values2 = (w.operands[0].contiguous() for w in (w13, w2))
        self.hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        self.ids, self.weights = topk_ids.contiguous(), topk_weights.contiguous()
        self.E, self.H, self.I = self.values2.shape
        (self.T, self.A), self.R = topk_ids.shape, topk_ids.numel()
        self.fmt = format_of(self.values2.dtype)
        self.device, self.gpu = hidden.device, describe(hidden.device)
        biased = (w13.bias is not None, w2.bias is not None)
        self.constexprs = constants(spec, config, self.values2.dtype, self.H, self.I, biased, self.gpu)
        self.direct = config.launch == "direct"
        # The last gate/up tile of a row block quantises the block's rows, where the down tiles are another launch's.
        self.done_in_up = config.launch == "split" and self.fmt is not None and spec.requantize == "token"
        self.pdl = config.pdl and not self.direct
        self.after: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}  # no other backend knows the option
        self._allocate()

    def _allocate(self) -> None:
        between = torch.bfloat16 if self.hidden.dtype == torch.bfloat16 else torch.float32
        self.out = self._empty(self.T, self.H, dtype=self.hidden.dtype)
        self.h = self._empty(self.R, self.I, dtype=between)
        self.hq = self.h
        if self.fmt is not None and self.done_in_up:  # in place, so that it takes no memory
            self.hq = self.h.view(torch.uint8)[:, : self.I].view(self.fmt.dtype)
        # With one expert per token the down tiles write the result.
        self.y = self.out if self.A == 1 else self._empty(self.R, self.H, dtype=between)
        self.bound = self.A if self.direct else max_row_tiles(self.R, self.E, self.config.block_m)
        size = HEAD + self.bound * (TILE_FIELDS.value + 1) + self.R * (1 + self.constexprs["GROUPS"])
        self.x, self.scales_x = self.hidden, self.h
        if self.direct:
            self.workspace = counters(self.device, size + triton.cdiv(self.H, self.config.down_n))
            return
        # With gather, `prepare` keeps the sort's inverse and offsets behind the tables.
        self.workspace = self._empty(size + (self.R + self.E + 1 if self.config.gather else 0), dtype=torch.int32)
        if self.fmt is not None:
            given = self.R if self.config.gather else self.T
            self.x = self._empty(given, self.H, dtype=self.fmt.dtype)
            self.scales_x = self._empty(given, dtype=torch.float32)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return empty(shape, dtype, self.device)

    def prepare(self) -> None:
        gate = counters(self.device, 2) if self.config.gather else None
        prepare(
            self.ids, self.hidden, self.x, self.scales_x, self.out, self.workspace, gate, self.E, self.config.block_m,
            self.fmt, self.spec.clip, self.constexprs["GROUPS"], self.pdl,
        )  # fmt: skip

    def products(self, phase: tl.constexpr) -> None:
        """Launch the layer's kernel for both products, or for one of them."""
        config, spec = self.config, self.spec
        x: Any = self.x
        w13: Any = self.values13
        w2: Any = self.values2
        hq: Any = self.hq
        requantize = "none" if self.fmt is None else spec.requantize
        if self.done_in_up and phase == DOWN:
            requantize = "done"
        if config.tma:
            across = 2 if spec.gate_up == "interleaved" else 1
            w13 = TensorDescriptor.from_tensor(w13.view(-1, across * self.H), [config.up_n, config.up_k])
            w2 = TensorDescriptor.from_tensor(w2.view(-1, self.I), [config.down_n, config.down_k])
            if config.gather:
                x = TensorDescriptor.from_tensor(x, [config.block_m, config.up_k])
            if requantize == "done":
                hq = TensorDescriptor.from_tensor(hq, [config.block_m, config.down_k])
        launch(
            moe_layer_kernel, config.programs or self.gpu.sms * config.programs_per_sm,
            x, self.scales_x, w13, self.values13, self.w13.scales, self.w13.bias, w2, self.values2, self.w2.scales,
            self.w2.bias, self.scales_h, self.h, hq, self.y, self.out, self.ids, self.weights,
            self.workspace, self.R, self.bound, self.E, self.H, self.I, self.x.stride(0), self.hq.stride(0),
            math.inf if spec.clip is None else spec.clip, spec.slope, spec.bound or 0.0,
            PHASE=phase,
            GATHERED=config.gather,
            DIRECT=self.direct,
            REQUANTISE=self.done_in_up and phase == UP,
            PREFETCH=config.prefetch and self.device.type == "cuda" and self.gpu.backend == "cuda",
            PDL=self.pdl,
            A=self.A,
            TMA=config.tma,
            REQUANTIZE=requantize,
            **self.constexprs,
            num_warps=config.num_warps,
            enable_fp_fusion=False,  # the epilogues' roundings are the contract's
            **self.after,
        )  # fmt: skip

    def combine(self) -> None:
        combine(self.y, None, self.ids, self.weights, self.out, self.E, self.spec, self.pdl)


def constants(
    spec: LayerSpec,
    config: LayerConfig,
    dtype: torch.dtype,
    width: int,
    inner: int,
    biased: tuple[bool, bool],
    gpu: Gpu,
) -> dict[str, Any]:
    """The layer kernel's compile-time arguments that all of its launches share."""
    fmt, by_group = format_of(dtype), spec.requantize == "group128"
    return {
        "BM": config.block_m,
        "BN1": config.up_n,
        "BK1": config.up_k,
        "BN2": config.down_n,
        "BK2": config.down_k,
        "STAGES": config.num_stages,
        "SWAP": config.swap_ab,
        "EVEN_K1": width % config.up_k == 0,
        "EVEN_K2": inner % config.down_k == 0,
        "TYPE": TYPES[dtype],
        "ACC": tl.int32 if dtype == torch.int8 else tl.float32,
        "PROMOTE": min(promote_every(dtype, gpu), config.up_k, config.down_k),
        "QMAX": 0.0 if fmt is None else fmt.qmax,
        "ACTIVATION": spec.activation,
        "LAYOUT": spec.gate_up,
        "CLAMPED": spec.bound is not None,
        "NVIDIA": gpu.backend == "cuda" and not gpu.interpreted,
        "WEIGHT_ON_INPUT": spec.weight_on_input,
        "BIAS1": biased[0],
        "BIAS2": biased[1],
        "GROUPS": 0 if fmt is None or spec.requantize == "static" else triton.cdiv(inner, GROUP) if by_group else 1,
        "GROUP": GROUP if by_group else 1 << 30,
        "BLOCK_H": min(max(128, triton.next_power_of_2(width)), 4096),
    }
