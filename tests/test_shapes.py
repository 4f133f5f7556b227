"""Every wrong argument gives one typed error that says which argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import lowgmm
from lowgmm import cpu
from lowgmm.shapes import (
    DeviceError,
    DtypeError,
    ShapeError,
    UnsupportedError,
    bind,
    check_device,
    check_dtype,
    check_no_overlap,
)
from lowgmm.testing import check_gmm, make_operands
from test_cases_support import BACKENDS, KERNELS, SMALL, Backend

# ---- bind ------------------------------------------------------------------------------------------------------------


def test_bind_returns_every_size() -> None:
    sizes = bind("op", x=(torch.empty(5, 8), "M K"), w=(torch.empty(2, 3, 8), "E N K"), o=(torch.empty(3), "E+1"))
    assert sizes == {"M": 5, "K": 8, "E": 2, "N": 3}
    assert bind("op", x=(None, "M K"), s=(torch.empty(4, 1), "M 1?")) == {"M": 4}
    assert bind("op", s=(torch.empty(4), "M 1?")) == {"M": 4}
    assert bind("op", d=(torch.empty(8, 3), "2I E"), o=(torch.empty(4), "E+1")) == {"I": 4, "E": 3}


BIND_ERRORS = [
    pytest.param({"w": ((2, 3, 9), "E N K")}, "'w' has 9 where K=8 is expected", "[E, N, K], got [2, 3, 9]", id="size"),
    pytest.param({"w": ((3, 8), "E N K")}, "'w' has 2 dimensions, expected 3", "[E, N, K], got [3, 8]", id="rank"),
    pytest.param({"s": ((4,), "M 1?")}, "'s' has 4 where M=5 is expected", "[M], got [4]", id="optional axis left out"),
    pytest.param(
        {"s": ((5, 2), "M 1?")}, "'s' has 2 dimensions, expected 1", "[M], got [5, 2]", id="optional axis wide"
    ),
    pytest.param({"o": ((0,), "E+1")}, "'o' has 0 where E+1 is expected", "[E+1], got [0]", id="plus one"),
    pytest.param({"d": ((9, 5), "2I M")}, "'d' has 9 where 2I is expected", "[2I, M], got [9, 5]", id="odd double"),
    pytest.param({"z": ((), "M")}, "'z' has 0 dimensions, expected 1", "[M], got []", id="scalar"),
]


@pytest.mark.parametrize(("wrong", "problem", "expected"), BIND_ERRORS)
def test_bind_says_what_was_wrong(wrong: dict[str, tuple[tuple[int, ...], str]], problem: str, expected: str) -> None:
    arguments = {"x": (torch.empty(5, 8), "M K")} | {
        n: (torch.empty(shape), spec) for n, (shape, spec) in wrong.items()
    }
    with pytest.raises(ShapeError) as caught:
        bind("the_op", **arguments)
    message = str(caught.value)
    assert message.startswith(f"the_op: argument {problem}.")
    assert f"{next(iter(wrong))}: expected {expected}" in message
    assert "x: expected [M, K], got [5, 8]" in message  # every argument is listed, the right ones too
    assert "M=5, K=8" in message


def test_bind_of_offsets_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"'o' has 5 where E\+1=6 is expected"):
        bind("op", w=(torch.empty(5, 2), "E N"), o=(torch.empty(5), "E+1"))


def test_dtype_and_device_checks() -> None:
    x = torch.empty(2)
    with pytest.raises(DtypeError, match=r"op: argument 'x' is float32, expected int8, bfloat16. Quantise it."):
        check_dtype("op", "x", x, (torch.int8, torch.bfloat16), "Quantise it.")
    check_dtype("op", "x", None, (torch.int8,))
    check_dtype("op", "x", x, (torch.float32,))
    with pytest.raises(DeviceError, match=r"op: all tensors must be on one device, got a on cpu, b on meta"):
        check_device("op", a=x, b=x.to("meta"), c=None)
    assert check_device("op", a=x, b=None) == x.device


def test_overlap_check() -> None:
    """Byte spans decide, of any dtype and layout; neighbours and empty tensors do not overlap."""
    buffer = torch.zeros(64)
    check_no_overlap("op", buffer[:32], x=buffer[32:], y=None, z=buffer[:0])
    check_no_overlap("op", buffer[:0], x=buffer)
    check_no_overlap("op", buffer, x=torch.zeros(64))
    for x in (buffer[31:], buffer[::40], buffer.view(torch.uint8)[127:128], buffer.view(8, 8).T[3:, 3:]):
        with pytest.raises(ShapeError, match="op: 'output' overlaps 'x' in memory"):
            check_no_overlap("op", buffer[:32], x=x)


# ---- gmm -------------------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


I8, FP8, I32 = torch.int8, torch.float8_e4m3fn, torch.int32


@dataclass(frozen=True)
class Wrong:
    """A call that is right but for ``change``."""

    why: str
    change: dict[str, Any]
    error: type[Exception]
    match: str

    def __str__(self) -> str:
        return self.why


def wrong(cases: list[Wrong]) -> list[Any]:
    return [pytest.param(c, id=c.why) for c in cases]


def right_gmm() -> dict[str, Any]:
    o = make_operands([3, 0, 5], 32, 64, "int8")
    return {
        "input": o.x,
        "weights": o.w,
        "scales_x": o.scales_x,
        "scales_w": o.scales_w,
        "expert_offsets": o.offsets,
    }


GMM_ERRORS = [
    Wrong("input 1-D", {"input": zeros(64, dtype=I8)}, ShapeError, "'input' has 1 dimensions"),
    Wrong("input 3-D", {"input": zeros(1, 8, 64, dtype=I8)}, ShapeError, "'input' has 3 dimensions"),
    Wrong("K differs", {"input": zeros(8, 63, dtype=I8)}, ShapeError, r"'weights' has 64 where K=63 is expected"),
    Wrong("K is 0", {"input": zeros(8, 0, dtype=I8), "weights": zeros(3, 32, 0, dtype=I8)}, ShapeError, "K=0"),
    Wrong("no experts", {"weights": zeros(0, 32, 64, dtype=I8), "scales_w": None,
          "expert_offsets": zeros(1, dtype=I32)}, ShapeError, "E=0"),
    Wrong("weights transposed", {"weights": zeros(3, 64, 32, dtype=I8)}, ShapeError, "'weights' has 32 where K=64"),
    Wrong("weights 1-D", {"weights": zeros(64, dtype=I8)}, ShapeError, "'weights' has 1 dimensions"),
    Wrong("weights 4-D", {"weights": zeros(1, 3, 32, 64, dtype=I8)}, ShapeError, "'weights' has 4 dimensions"),
    Wrong("scales_x short", {"scales_x": zeros(7)}, ShapeError, r"'scales_x' has 7 where M=8"),
    Wrong("scales_x per channel", {"scales_x": zeros(8, 64)}, ShapeError, "'scales_x' has 2 dimensions"),
    Wrong("scales_x scalar", {"scales_x": torch.tensor(1.0)}, ShapeError, "'scales_x' has 0 dimensions"),
    Wrong("scales_w swapped", {"scales_w": zeros(32, 3)}, ShapeError, r"'scales_w' has 32 where E=3"),
    Wrong("scales_w per expert", {"scales_w": zeros(3)}, ShapeError, "'scales_w' has 1 dimensions"),
    Wrong("bias per channel", {"bias": zeros(32)}, ShapeError, "'bias' has 1 dimensions"),
    Wrong("bias wide", {"bias": zeros(3, 33)}, ShapeError, "'bias' has 33 where N=32"),
    Wrong("offsets 2-D", {"expert_offsets": zeros(1, 4, dtype=I32)}, ShapeError, "'expert_offsets' has 2 dimensions"),
    Wrong("offsets of sizes' length", {"expert_offsets": zeros(3, dtype=I32)}, ShapeError, r"where E\+1=4 is expected"),
    Wrong("no offsets", {"expert_offsets": None}, ShapeError, r"pass expert_offsets \[E\+1\] or expert_sizes \[E\]"),
    Wrong("sizes disagree", {"expert_sizes": torch.tensor([3, 1, 4])}, ShapeError, r"\[3, 1, 4\] disagree"),
    Wrong("sizes of another length", {"expert_sizes": torch.tensor([3, 5])}, ShapeError,
          "'expert_sizes' has 2 where E=3"),
    Wrong("only sizes, too few", {"expert_sizes": torch.tensor([3, 5]), "expert_offsets": None}, ShapeError,
          "'expert_sizes' has 2 where E=3"),
    Wrong("sizes in a list", {"expert_sizes": [3, 0, 5], "expert_offsets": None}, DtypeError,
          "'expert_sizes' is a list, expected an int32 tensor"),
    Wrong("only sizes, too many rows", {"expert_sizes": torch.tensor([3, 5, 1]), "expert_offsets": None}, ShapeError,
          "end at 9, but input has only 8 rows"),
    Wrong("only sizes, negative", {"expert_sizes": torch.tensor([3, -1, 5]), "expert_offsets": None},
          ShapeError, "fall"),
    Wrong("only sizes, fractions", {"expert_sizes": torch.tensor([3.0, 0.5, 4.5]), "expert_offsets": None}, DtypeError,
          "expert_sizes"),
    Wrong("output narrow", {"output": zeros(8, 31)}, ShapeError, "'output' has 31 where N=32"),
    Wrong("output 1-D", {"output": zeros(256)}, ShapeError, "'output' has 1 dimensions"),
    Wrong("output strided", {"output": zeros(32, 8).T}, ShapeError, "'output' has strides"),
    Wrong("output rows share memory", {"output": zeros(1, 32).expand(8, 32)}, ShapeError, "output"),
    Wrong("output rows overlap", {"output": zeros(300).as_strided((8, 32), (16, 1))}, ShapeError, "output"),
    Wrong("output and out_dtype", {"output": zeros(8, 32), "out_dtype": torch.bfloat16},
          ShapeError, "leave out_dtype out"),
    Wrong("output of integers", {"output": zeros(8, 32, dtype=I32)}, DtypeError, "out_dtype is torch.int32"),
    Wrong("out_dtype double", {"out_dtype": torch.float64}, DtypeError, "out_dtype is torch.float64"),
    Wrong("raw sums with scales", {"out_dtype": I32}, DtypeError, "only for int8 operands without scales"),
    Wrong("input double", {"input": zeros(8, 64, dtype=torch.float64)}, DtypeError, "'input' is float64"),
    Wrong("input uint8", {"input": zeros(8, 64, dtype=torch.uint8)}, DtypeError, "'input' is uint8"),
    Wrong("weights double", {"weights": zeros(3, 32, 64, dtype=torch.float64)}, DtypeError, "'weights' is float64"),
    Wrong("other format", {"input": zeros(8, 64, dtype=FP8)}, DtypeError, "'input' is float8_e4m3fn, expected int8"),
    Wrong("scales_x integers", {"scales_x": zeros(8, dtype=I32)}, DtypeError, "'scales_x' is int32"),
    Wrong("scales_w double", {"scales_w": zeros(3, 32, dtype=torch.float64)}, DtypeError, "'scales_w' is float64"),
    Wrong("bias integers", {"bias": zeros(3, 32, dtype=I8)}, DtypeError, "'bias' is int8"),
    Wrong("offsets int16", {"expert_offsets": zeros(4, dtype=torch.int16)}, DtypeError, "'expert_offsets' is int16"),
    Wrong("offsets float", {"expert_offsets": zeros(4)}, DtypeError, "'expert_offsets' is float32"),
    Wrong("scaled floats", {"input": zeros(8, 64), "weights": zeros(3, 32, 64)}, DtypeError, "belong to quantised"),
    Wrong("scales for a float input", {"input": zeros(8, 64)}, DtypeError, "pass scales_x=None"),
    Wrong("floats of two dtypes", {"input": zeros(8, 64, dtype=torch.float16), "weights": zeros(3, 32, 64),
          "scales_x": None, "scales_w": None}, DtypeError, "'input' is float16, expected float32"),
    Wrong("clip of quantised input", {"clip": 1.0}, ShapeError, "clip=1.0 applies to a float input"),
    Wrong("clip negative", {"input": zeros(8, 64), "scales_x": None, "clip": -1.0}, ShapeError, "clip=-1.0"),
    Wrong("weights elsewhere", {"weights": zeros(3, 32, 64, dtype=I8, device="meta")}, DeviceError, "weights on meta"),
    Wrong("sizes elsewhere", {"expert_sizes": zeros(3, dtype=I32, device="meta"), "expert_offsets": None}, DeviceError,
          "on meta"),
    Wrong("sizes here, offsets elsewhere", {"expert_sizes": torch.tensor([3, 0, 5]),
          "expert_offsets": zeros(4, dtype=I32, device="meta")}, DeviceError, "on meta"),
    Wrong("impl unknown", {"impl": "cutlass"},
          UnsupportedError, "impl 'cutlass' is not one of auto, reference, triton"),
    Wrong("config malformed", {"config": "big", "impl": "triton"}, UnsupportedError, "config 'big' is not a tile"),
    Wrong("config on the CPU backend", {"config": SMALL}, UnsupportedError, "config chooses a GPU tile"),
    Wrong("config too small", {"config": "8x32x64-grid-4w2s", "impl": "triton"}, UnsupportedError, "at least 16"),
    Wrong("config too large", {"config": "256x256x256-grid-8w4s", "impl": "triton"}, UnsupportedError, "shared memory"),
]  # fmt: skip


@pytest.mark.parametrize("case", wrong(GMM_ERRORS))
def test_gmm_errors(case: Wrong) -> None:
    check_gmm(lowgmm.gmm(**right_gmm()), make_operands([3, 0, 5], 32, 64, "int8"))
    arguments = right_gmm() | case.change
    if arguments.get("impl") == "triton":
        arguments = {k: v.to(KERNELS.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(case.error, match=case.match) as caught:
        lowgmm.gmm(**arguments)
    assert str(caught.value).startswith("gmm: ") or "config" in str(caught.value)


def test_plain_weights_need_three_dimensions() -> None:
    """A matrix is no stack of experts, even where its sizes happen to fit."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(ShapeError, match="'weights' has 2 dimensions, expected 3"):
        lowgmm.gmm(x, w, expert_offsets=torch.tensor([0, 8]))


def test_quantised_weights_bring_their_scales() -> None:
    o = make_operands([3, 5], 32, 64, "int8")
    with pytest.raises(ShapeError, match="brings its own"):
        lowgmm.gmm(o.x, o.weights, o.scales_x, o.scales_w, o.offsets)


PACKED_ERRORS: list[tuple[str, Callable[[Any, Any], Any], type[Exception], str]] = [
    ("K", lambda o, w: lowgmm.gmm(o.x[:, :60], w, o.scales_x, None, o.offsets), ShapeError, "K=60"),
    ("offsets", lambda o, w: lowgmm.gmm(o.x, w, o.scales_x, None, o.offsets[:2]), ShapeError, "expert_offsets"),
    ("kernels", lambda o, w: lowgmm.gmm(o.x, w, o.scales_x, None, o.offsets, impl="triton"), UnsupportedError,
     "packed"),
    ("raw sums", lambda o, w: lowgmm.gmm(o.x, lowgmm.QuantTensor(None, w.scales, w.format, w.packed), None, None,
     o.offsets, out_dtype=I32), (DtypeError, UnsupportedError), "int32|INT32"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "match"), [pytest.param(*c[1:], id=c[0]) for c in PACKED_ERRORS])
def test_packed_weights(call: Callable[[Any, Any], Any], error: type[Exception], match: str) -> None:
    o = make_operands([3, 5], 32, 64, "int8")
    packed = cpu.pack(o.weights)
    check_gmm(lowgmm.gmm(o.x, packed, o.scales_x, None, o.offsets), o)
    with pytest.raises(error, match=match):
        call(o, packed)


# ---- moe_ffn ---------------------------------------------------------------------------------------------------------


def right_layer() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(3, 16, generator=g),
        "w13": torch.randn(2, 48, 16, generator=g),
        "w2": torch.randn(2, 16, 24, generator=g),
        "topk_ids": torch.tensor([[0, 1], [1, 1], [0, -1]]),
        "topk_weights": torch.rand(3, 2, generator=g),
    }


def right_int8_layer() -> dict[str, Any]:
    args = right_layer()
    return args | {n: lowgmm.quantize(args[n], "int8") for n in ("w13", "w2")}


LONG = torch.int64
LAYER_ERRORS = [
    Wrong("hidden 3-D", {"hidden": zeros(1, 3, 16)}, ShapeError, "'hidden' has 3 dimensions"),
    Wrong("hidden of other H", {"hidden": zeros(3, 17)}, ShapeError, "H=17"),
    Wrong("ids 1-D", {"topk_ids": zeros(3, dtype=LONG)}, ShapeError, "'topk_ids' has 1 dimensions"),
    Wrong("ids of other T", {"topk_ids": zeros(4, 2, dtype=LONG)}, ShapeError, "'topk_ids' has 4 where T=3"),
    Wrong("weights of other A", {"topk_weights": zeros(3, 3)}, ShapeError, "'topk_weights' has 3 where A=2"),
    Wrong("w13 2-D", {"w13": zeros(48, 16)}, ShapeError, "'w13' has 2 dimensions"),
    Wrong("w2 2-D", {"w2": zeros(16, 24)}, ShapeError, "'w2' has 2 dimensions"),
    Wrong("w13 transposed", {"w13": zeros(2, 16, 48)}, ShapeError, r"w13: expected \[E, 2I, H\], got \[2, 16, 48\]"),
    Wrong("w13 odd", {"w13": zeros(2, 47, 16)}, ShapeError, r"w13: expected \[E, 2I, H\], got \[2, 47, 16\]"),
    Wrong("w2 of other I", {"w2": zeros(2, 16, 23)}, ShapeError, r"w2: expected \[E, H, I\], got \[2, 16, 23\]"),
    Wrong("w2 of other E", {"w2": zeros(3, 16, 24)}, ShapeError, r"w2: expected \[E, H, I\], got \[3, 16, 24\]"),
    Wrong("no experts", {"w13": zeros(0, 48, 16), "w2": zeros(0, 16, 24)}, ShapeError, "at least 1"),
    Wrong("ids float", {"topk_ids": zeros(3, 2)}, DtypeError, "'topk_ids' is float32"),
    Wrong("ids int16", {"topk_ids": zeros(3, 2, dtype=torch.int16)}, DtypeError, "'topk_ids' is int16"),
    Wrong("routing weights integers", {"topk_weights": zeros(3, 2, dtype=LONG)}, DtypeError, "topk_weights"),
    Wrong("hidden double", {"hidden": zeros(3, 16, dtype=torch.float64)}, DtypeError, "float64"),
    Wrong("hidden quantised", {"hidden": zeros(3, 16, dtype=I8)}, DtypeError, "int8"),
    Wrong("hidden of other dtype", {"hidden": zeros(3, 16, dtype=torch.bfloat16)}, DtypeError, "bfloat16"),
    Wrong("w2 without scales", {"w2": zeros(2, 16, 24, dtype=I8)}, DtypeError, "'w2' is int8, expected float32"),
    Wrong("w13 without scales", {"w13": zeros(2, 48, 16, dtype=I8)}, DtypeError, "'w13' is int8, expected float32"),
    Wrong("ids elsewhere", {"topk_ids": zeros(3, 2, dtype=LONG, device="meta")}, DeviceError, "topk_ids on meta"),
    Wrong("routing weights elsewhere", {"topk_weights": zeros(3, 2, device="meta")},
          DeviceError, "topk_weights on meta"),
    Wrong("w13 elsewhere", {"w13": zeros(2, 48, 16, device="meta")}, DeviceError, "on meta"),
    Wrong("w2 elsewhere", {"w2": zeros(2, 16, 24, device="meta")}, DeviceError, "on meta"),
    Wrong("hidden elsewhere", {"hidden": zeros(3, 16, device="meta")}, DeviceError, "on meta"),
    Wrong("activation unknown", {"activation": "tanhshrink"}, UnsupportedError, "'tanhshrink' is not one of silu"),
    Wrong("clip without quantisation", {"clip": 2.0}, ShapeError, "clip"),
    Wrong("impl unknown", {"impl": "cutlass"}, UnsupportedError, "impl 'cutlass'"),
]  # fmt: skip
INT8_LAYER_ERRORS = [
    Wrong("clip negative", {"clip": -2.0}, ShapeError, "clip"),
    Wrong("impl unknown", {"impl": "cutlass"}, UnsupportedError, "impl 'cutlass'"),
    Wrong(
        "activation unknown",
        {"activation": "tanhshrink"},
        UnsupportedError,
        "'tanhshrink' is not one of silu",
    ),
    Wrong("hidden integers", {"hidden": zeros(3, 16, dtype=I8)}, DtypeError, "int8"),
]


@pytest.mark.parametrize("case", wrong(LAYER_ERRORS))
def test_layer_errors(case: Wrong) -> None:
    assert lowgmm.moe_ffn(**right_layer()).shape == (3, 16)
    with pytest.raises(case.error, match=case.match):
        lowgmm.moe_ffn(**right_layer() | case.change)


@pytest.mark.parametrize("case", wrong(INT8_LAYER_ERRORS))
def test_quantised_layer_errors(case: Wrong) -> None:
    assert lowgmm.moe_ffn(**right_int8_layer()).shape == (3, 16)
    with pytest.raises(case.error, match=case.match):
        lowgmm.moe_ffn(**right_int8_layer() | case.change)


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantise_tokens_refuses_an_unknown_impl(backend: Backend) -> None:
    with pytest.raises(UnsupportedError, match="impl 'cutlass'"):
        lowgmm.quantize_tokens(torch.ones(2, 8, device=backend.device), "int8", impl="cutlass")
