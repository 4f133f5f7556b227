"""The operators behave under PyTorch's own checks: opcheck, fakes, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lowgmm
from lowgmm import cpu, native, ops
from lowgmm.shapes import UnsupportedError
from lowgmm.testing import make_operands

ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def arguments(dtype: str, device: torch.device) -> tuple[object, ...]:
    o = make_operands([5, 0, 7], 48, 64, dtype, device=device.type)
    weights = o.weights.operands if dtype.startswith("int4") else [o.w]
    return o.x, weights, o.scales_x, o.scales_w, o.offsets, None, None, "auto", None


@pytest.mark.parametrize("dtype", ["int8", "int4", "int4_g32", "fp8", "bfloat16", "float16", "float32"])
def test_opcheck_gmm(dtype: str, device: torch.device) -> None:
    # opcheck's schema test scales its inputs, which torch does not define for float8 on a CPU.
    tests = ALL[1:] if dtype == "fp8" else ALL
    args = arguments(dtype, device)
    torch.library.opcheck(torch.ops.lowgmm.gmm.default, (*args, torch.bfloat16), test_utils=tests)
    out = torch.empty(12, 48, device=device)
    torch.library.opcheck(torch.ops.lowgmm.gmm_out.default, (*args, out), test_utils=tests)


@pytest.mark.parametrize("packing", ["native", "onednn"])
def test_opcheck_packed_weights(packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = ALL
    if packing == "onednn":
        monkeypatch.setattr(native, "library", lambda: None)
        tests = ALL[3:]  # the others clone their inputs through data_ptr, which oneDNN's opaque tensors do not have
    elif native.library() is None:
        pytest.skip("the native loops were not built, or this CPU lacks AVX512-VNNI")
    o = make_operands([5, 0, 7], 48, 64, "int8")
    weights = cpu.pack(o.weights).operands
    args = (o.x, weights, o.scales_x, o.scales_w, o.offsets, None, None, "auto", None, torch.bfloat16)
    torch.library.opcheck(torch.ops.lowgmm.gmm.default, args, test_utils=tests)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_opcheck_quantize_tokens(format: str, device: torch.device) -> None:
    args = (torch.randn(5, 33, device=device), format, 2.0, "auto")
    torch.library.opcheck(torch.ops.lowgmm.quantize_tokens.default, args)


@pytest.mark.parametrize("format", ["int8", "int4_g32"])
@pytest.mark.parametrize("packed", [False, True])
def test_compile_fullgraph_dynamic(packed: bool, format: str) -> None:
    """One graph for any number of rows, with plain and with packed weights."""
    torch._dynamo.reset()
    q = lowgmm.quantize(torch.randn(3, 32, 64), format)
    w = cpu.pack(q) if packed else q
    graphs = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=graphs)
    def double(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return lowgmm.gmm(x, w, expert_offsets=offsets) * 2

    for rows in (7, 2, 40):
        x, offsets = torch.randn(rows, 64), torch.tensor([0, 1, 1, rows])
        assert torch.equal(double(x, offsets), lowgmm.gmm(x, w, expert_offsets=offsets) * 2)
    assert graphs.frame_count == 1


def test_output_argument_returns_it() -> None:
    o = make_operands([3, 4], 32, 64, "int8")
    out = torch.full((7, 32), float("nan"))
    y = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, output=out)
    assert y is out
    assert torch.equal(y, lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=torch.float32))


CALLS = {
    "gmm": lambda x, **o: lowgmm.gmm(x, torch.ones(2, 8, 8), expert_sizes=torch.tensor([1, 2]), **o),
    "quantize_tokens": lambda x, **o: lowgmm.quantize_tokens(x, "int8", **o),
    "moe_ffn": lambda x, **o: lowgmm.moe_ffn(
        x, torch.ones(2, 16, 8), torch.ones(2, 8, 8), torch.ones(3, 1, dtype=torch.int32), torch.ones(3, 1), **o
    ),
    "route": lambda x, **o: lowgmm.route(logits=x, top_k=2, **o),
}


@pytest.mark.parametrize("op", CALLS)
def test_kernels_that_cannot_run_are_refused_with_the_reason(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8)
    monkeypatch.setattr(ops, "_triton_is_there", lambda: False)
    with monkeypatch.context() as without:
        without.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(UnsupportedError, match=f"{op}: the GPU kernels need Triton, which is not installed"):
            CALLS[op](x, impl="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnsupportedError, match=f"{op}: .* needs Triton's interpreter"):
        CALLS[op](x, impl="triton")
    CALLS[op](x)
