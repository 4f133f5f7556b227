"""Reported faults of the surroundings: drift between runs, synchronisation, graph capture, fakes, compilation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import lowgmm
from lowgmm.shapes import DtypeError, ShapeError
from lowgmm.testing import make_operands
from test_cases_support import CPU, KERNELS, LAUNCHES, kernels_only

Layer = tuple[Tensor, "lowgmm.QuantTensor | Tensor", "lowgmm.QuantTensor | Tensor", Tensor, Tensor]


def make_layer(T: int, A: int, E: int, H: int, format: str | None, device: str) -> Layer:
    """A layer with H = I, on seeded data."""
    g = torch.Generator().manual_seed(T)
    hidden = torch.randn(T, H, generator=g)
    w13, w2 = (torch.randn(E, n, H, generator=g) / H**0.5 for n in (2 * H, H))
    ids, weights = torch.randint(0, E, (T, A), generator=g), torch.rand(T, A, generator=g)
    if format is None:
        return hidden.to(device), w13.to(device), w2.to(device), ids.to(device), weights.to(device)
    q13, q2 = (lowgmm.quantize(w, format).to(device) for w in (w13, w2))
    return hidden.to(device), q13, q2, ids.to(device), weights.to(device)


# ---- A18: the same bits in every run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_a18_cpu_runs_agree_to_the_bit(format: str | None) -> None:
    layer = make_layer(16, 4, 8, 64, format, CPU.device)
    first = lowgmm.moe_ffn(*layer)
    assert all(torch.equal(lowgmm.moe_ffn(*layer), first) for _ in range(9))


@kernels_only
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a18_launch_modes_agree_to_the_bit(dtype: str) -> None:
    """Who computes a tile, and when, changes no bit: no sum is shared between programs."""
    o = make_operands([5, 0, 17], 48, 128, dtype, device=KERNELS.device)
    args = (o.x, o.weights, o.scales_x, None, o.offsets)
    launches = ("grid", "persistent2", "queue1", "expert")
    results = [lowgmm.gmm(*args, impl="triton", config=f"16x32x64-{launch}-4w2s") for launch in launches]
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a18_hundred_runs_beside_a_busy_stream(format: str) -> None:
    layer = make_layer(512, 8, 64, 2048, format, "cuda")
    first = lowgmm.moe_ffn(*layer)
    noise, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for run in range(100):
        if run % 2:
            with torch.cuda.stream(side):
                noise = (noise @ noise).tanh()
        assert torch.equal(lowgmm.moe_ffn(*layer), first), f"run {run}"
    torch.cuda.synchronize()


# ---- A32: host synchronisation, graph capture ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_a32_no_host_synchronisation(format: str | None) -> None:
    """A warm layer never waits for the device."""
    layer = make_layer(64, 4, 16, 256, format, "cuda")
    lowgmm.moe_ffn(*layer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lowgmm.moe_ffn(*layer)
        with pytest.raises(RuntimeError, match="synchronizing"):
            layer[0].sum().item()  # the mode does catch what it should
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_a32_graph_replays_with_other_ids(format: str | None) -> None:
    """Captured with one routing, replayed with others: one hot expert, most experts empty, nobody local."""
    hidden, w13, w2, ids, weights = make_layer(64, 4, 16, 256, format, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        lowgmm.moe_ffn(hidden, w13, w2, ids, weights)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lowgmm.moe_ffn(hidden, w13, w2, ids, weights)
    for other in (torch.zeros_like(ids), ids.flip(0), (ids % 2) * 15, torch.full_like(ids, -1)):
        ids.copy_(other)
        hidden.normal_()
        graph.replay()
        assert torch.equal(captured, lowgmm.moe_ffn(hidden, w13, w2, ids, weights))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [c.replace("16x32x64", "16x64x64") for c in LAUNCHES])
def test_a32_every_launch_replays(config: str) -> None:
    """The queue's counter is back at its start when a launch ends, whatever the offsets were."""
    o = make_operands([40, 3, 0, 21], 256, 256, "int8", device="cuda")
    offsets = o.offsets.clone()
    args = (o.x, o.weights, o.scales_x, None, offsets)
    lowgmm.gmm(*args, impl="triton", config=config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lowgmm.gmm(*args, impl="triton", config=config)
    for sizes in ([40, 3, 0, 21], [0, 0, 0, 64], [64, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]):
        offsets[1:] = torch.tensor(sizes, device="cuda").cumsum(0)
        graph.replay()
        assert torch.equal(captured, lowgmm.gmm(*args))


# ---- A33: fake tensors, compilation ----------------------------------------------------------------------------------


def fails(call: Callable[[], object]) -> str:
    with pytest.raises((ShapeError, DtypeError)) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    "fault", ["long offsets", "short offsets", "K", "scales_x", "scales_w", "dtype", "output", "overlap"]
)
def test_a33_fake_tensors_give_the_same_error(fault: str) -> None:
    """What eager execution refuses, tracing refuses in the same words."""

    def call() -> object:
        x, w = torch.zeros(8, 64, dtype=torch.int8), torch.zeros(3, 32, 64, dtype=torch.int8)
        given = {"input": x, "weights": w, "expert_offsets": torch.zeros(4, dtype=torch.int32)}
        match fault:
            case "long offsets":
                given["expert_offsets"] = torch.zeros(5, dtype=torch.int32)
            case "short offsets":
                given["expert_offsets"] = torch.zeros(3, dtype=torch.int32)
            case "K":
                given["input"] = x[:, :63]
            case "scales_x":
                given["scales_x"] = torch.ones(7)
            case "scales_w":
                given["scales_w"] = torch.ones(3, 31)
            case "dtype":
                given["weights"] = w.bfloat16()
            case "output":
                given["output"] = torch.zeros(8, 31)
            case "overlap":
                buffer = torch.zeros(8, 64, dtype=torch.float32)
                given |= {"input": buffer, "weights": w.float(), "output": buffer[:, :32]}
        return lowgmm.gmm(**given)

    eager = fails(call)
    with FakeTensorMode():
        assert fails(call) == eager


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
def test_a33_fake_results_look_like_real_ones(out_dtype: torch.dtype) -> None:
    """Shape, strides and dtype, with rows that no expert covers and with none at all."""

    def results(rows: int) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
        x, w = torch.zeros(rows, 64, dtype=torch.int8), torch.zeros(3, 32, 64, dtype=torch.int8)
        y = lowgmm.gmm(x, w, expert_offsets=torch.zeros(4, dtype=torch.int32), out_dtype=out_dtype)
        return [(t.shape, t.stride(), t.dtype) for t in (y, *lowgmm.quantize_tokens(x.float(), "fp8"))]

    for rows in (8, 0):
        real = results(rows)
        with FakeTensorMode():
            assert results(rows) == real


@pytest.mark.parametrize("format", ["int8", "fp8", "bfloat16"])
def test_a33_large_layer_under_fake_tensors(format: str) -> None:
    """Shapes and dtypes at hidden size 2880, where no memory is used."""
    with FakeTensorMode():
        hidden = torch.empty(17, 2880, dtype=torch.bfloat16)
        w13, w2 = torch.empty(32, 5760, 2880, dtype=torch.bfloat16), torch.empty(32, 2880, 2880, dtype=torch.bfloat16)
        layer: tuple[Tensor | lowgmm.QuantTensor, ...] = (w13, w2)
        if format != "bfloat16":
            layer = (lowgmm.quantize(w13, format), lowgmm.quantize(w2, format))
        y = lowgmm.moe_ffn(hidden, *layer, torch.zeros(17, 4, dtype=torch.int64), torch.ones(17, 4))
        assert (y.shape, y.dtype) == ((17, 2880), torch.bfloat16)
        with pytest.raises(ShapeError, match="has 2880 where H=2879 is expected"):
            lowgmm.moe_ffn(hidden[:, :2879], *layer, torch.zeros(17, 4, dtype=torch.int64), torch.ones(17, 4))


@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_a33_one_compilation_for_every_token_count(format: str | None) -> None:
    """fullgraph and dynamic: T = 2, 17 and 64 share one graph, whose results equal eager execution's.

    No other size is 2, since the compiler takes dimensions that are equal in the first call for the same one.
    """
    torch._dynamo.reset()
    _, w13, w2, _, _ = make_layer(2, 3, 5, 32, format, CPU.device)

    def layer(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return lowgmm.moe_ffn(hidden, w13, w2, ids, weights)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for T in (2, 17, 64):
        hidden, _, _, ids, weights = make_layer(T, 3, 5, 32, format, CPU.device)
        assert torch.equal(compiled(hidden, ids, weights), layer(hidden, ids, weights))
        assert counter.frame_count == 1, f"T={T} compiled again"
    # One token may be specialised, once.
    hidden, _, _, ids, weights = make_layer(1, 3, 5, 32, format, CPU.device)
    assert torch.equal(compiled(hidden, ids, weights), layer(hidden, ids, weights))
    assert counter.frame_count <= 2
    # The counter counts: another hidden dtype is another graph.
    before = counter.frame_count
    if format is not None:
        compiled(hidden.bfloat16(), ids, weights)
        assert counter.frame_count == before + 1


@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_a33_module_compiles(format: str | None) -> None:
    """The same for the module, whose INT8 weights are packed on a CPU."""
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(5, 64, 32, generator=g), torch.randn(5, 32, 32, generator=g)
    module = lowgmm.MoEExperts.from_dense(w13, w2, format)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for T in (2, 17, 64):
        hidden, _, _, ids, weights = make_layer(T, 3, 5, 32, None, CPU.device)
        assert torch.equal(compiled(hidden, ids, weights), module(hidden, ids, weights))
        assert counter.frame_count == 1, f"T={T} compiled again"
