"""The layer on a GPU at sizes of real models: launches, graphs, memory, the same bits beside a busy stream.

Each test is one that the interpreter cannot run; what is computed is tested in tests/test_moe_kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import lowgmm
from lowgmm.formats import FORMATS, QuantTensor
from lowgmm.gpu import describe
from lowgmm.kernels.arrange import FEW
from lowgmm.plan import LayerProblem, pick
from lowgmm.testing import assert_within_budget
from overlap import hold

pytestmark = pytest.mark.gpu

E, A, H, I = 32, 4, 1024, 512
TOKENS = (1, 2, 16, 64, 300, 2000)


DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, None: torch.bfloat16}


class Case:
    def __init__(self, format: str | None, T: int, top_k: int = A) -> None:
        g = torch.Generator("cuda").manual_seed(T + top_k)
        self.hidden = torch.randn(T, H, generator=g, device="cuda").bfloat16()
        w13 = torch.randn(E, 2 * I, H, generator=g, device="cuda").mul_(H**-0.5).bfloat16()
        w2 = torch.randn(E, H, I, generator=g, device="cuda").mul_(I**-0.5).bfloat16()
        self.w13, self.w2 = ((w if format is None else lowgmm.quantize(w, format)) for w in (w13, w2))
        self.weights, ids = torch.rand(T, E, generator=g, device="cuda").topk(top_k)
        self.ids = ids.int()

    def __call__(self, ids: Tensor | None = None, **options: Any) -> Tensor:
        given = self.ids if ids is None else ids
        return lowgmm.moe_ffn(self.hidden, self.w13, self.w2, given, self.weights, **options)

    def check(self, y: Tensor, ids: Tensor | None = None) -> None:
        exact = self(ids, impl="reference")
        assert_within_budget(y, exact.double(), self.composed(ids), "moe_ffn")

    def composed(self, ids: Tensor | None) -> Tensor:
        """An independent low-precision computation: torch, expert by expert."""
        given = self.ids if ids is None else ids
        out = torch.zeros(self.hidden.shape, device="cuda")
        for e in range(E):
            token, slot = (given == e).nonzero(as_tuple=True)
            gate, up = _product(self.hidden[token].float(), self.w13, e).chunk(2, 1)
            h = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            y = _product(h, self.w2, e).bfloat16().float()
            out.index_add_(0, token, y * self.weights[token, slot].unsqueeze(1))
        return out.bfloat16()


def _product(x: Tensor, w: Any, e: int) -> Tensor:
    """``x [n, K] @ w[e] [N, K].T`` in float32, x quantised as w is. For FP8 by torch's own FP8 matmul: Hopper's sums of
    it have 14 bits, which moves an h to the next FP8 code now and then, and a float32 product would not show that."""
    if not isinstance(w, QuantTensor):
        return x @ w[e].float().T
    scale = x.abs().amax(1, keepdim=True) / w.format.qmax
    q = torch.where(scale > 0, x / scale, 0)
    if w.format.exact:
        product = q.round() @ w.values[e].float().T
    else:
        rows = torch.nn.functional.pad(q, (0, 0, 0, -len(q) % 16)).to(w.values.dtype)  # it wants multiples of 16
        one = torch.ones((), device="cuda")
        kept = {"scale_a": one, "scale_b": one, "out_dtype": torch.float32, "use_fast_accum": False}
        product = (
            torch._scaled_mm(rows, w.values[e].T, **kept)[: len(q)] if len(q) else x.new_zeros(0, w.values.shape[1])
        )
    return product * scale * w.scales[e].view(1, -1)


@contextmanager
def busy_stream() -> Iterator[None]:
    """Matrix products on another stream: most SMs are taken again and again."""
    side = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(side):
        for _ in range(400):
            a @ a
    yield
    side.synchronize()


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_picked(format: str | None, T: int) -> None:
    case = Case(format, T)
    case.check(case())


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_hundred_runs_give_the_same_bits(format: str, T: int) -> None:
    case = Case(format, T)
    first = case()
    with busy_stream():
        assert all(torch.equal(case(), first) for _ in range(100))


@pytest.mark.parametrize("programs", [1, 2, 7, 132, 1000])
@pytest.mark.parametrize(
    "config",
    [
        "queue-16-64x128-64x256-swap-tma-pre",
        "queue-16-64x128-128x128-swap-tma-ws",
        "queue-16-32x128-64x128-swap-tma-ws",
        "direct-16-32x256-32x256-swap-tma-pre",
    ],
)
def test_any_number_of_programs_beside_a_busy_stream(config: str, programs: int) -> None:
    """No deadlock, whether the programs are on the chip together or not."""
    case, config = Case("int8", 1 if config.startswith("direct") else 16), f"{config}-4w4s{programs}t"
    first = case()
    assert torch.equal(case(config=config), first)  # compiled here, or the stream would be idle again by then
    with busy_stream():
        for _ in range(20):
            assert torch.equal(case(config=config), first)


@pytest.mark.parametrize(
    "config", ["queue-16-64x128-64x256-swap-tma-pdl-4w4s2p", "split-128-64x128-128x128-tma-pdl-8w3s1p"]
)
def test_programmatic_launches_wait_for_each_other(config: str) -> None:
    case = Case("int8", 200)
    plain = case(config=config.replace("-pdl", ""))
    assert all(torch.equal(case(config=config), plain) for _ in range(50))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_graph_replay(format: str | None, T: int) -> None:
    """Replayed with other ids, three times in a row, while a second graph runs: equal to plain calls."""
    case = Case(format, T)
    ids = case.ids.clone()
    case(ids)
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = case(ids)
        graphs.append((graph, y))
    streams = [torch.cuda.Stream() for _ in graphs]
    for round in range(60):
        ids.copy_((case.ids + 5 * round) % E)
        expected = case(ids.clone())
        hold(streams)
        for _ in range(3):
            for stream, (graph, _y) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for _, y in graphs:
            assert torch.equal(y, expected)


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("T", TOKENS)
def test_launches(T: int, top_k: int) -> None:
    case = Case("int8", T, top_k)
    case()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        case()
        torch.cuda.synchronize()
    launched = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    config = pick(LayerProblem(T, top_k, E, H, I, torch.int8), describe(torch.device("cuda")))
    assert config is not None
    allowed = {"direct": 1, "queue": 3, "split": 4}[config.launch]
    if config.warp_specialize and T * top_k > FEW[-1]:
        allowed = 4  # many slots are sorted in a launch of their own
    assert 0 < len(launched) <= allowed, launched


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("format", ["int8", "fp8", None])
def test_memory(format: str | None, T: int) -> None:
    """What docs/expert_layer.md says, 5 % for tables, and the allocator's rounding."""
    case = Case(format, T)
    kept = case()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = case()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - result.numel() * 2
    assert extra <= T * A * (2 * I + 3 * H if format else 4 * max(H, I)) * 1.05 + 8 * 512
    assert torch.equal(result, kept)


def test_nothing_waits_for_the_device() -> None:
    case = Case("int8", 40)
    case()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case()
        lowgmm.route(case.ids, E)
        lowgmm.route(logits=case.hidden[:, :E].contiguous(), top_k=A)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_an_expert_beyond_two_to_the_31(format: str) -> None:
    """Weights of more than 2^31 elements: the last expert's are found."""
    fmt, experts, hidden, inner = FORMATS[format], 72, 4096, 4096
    values = torch.zeros(experts, 2 * inner, hidden, dtype=torch.uint8, device="cuda").view(fmt.dtype)
    assert values.numel() > 2**31
    one = torch.ones(1, device="cuda").to(fmt.dtype).view(torch.uint8)
    values.view(torch.uint8)[-1] = one
    down = torch.zeros(experts, hidden, inner, dtype=torch.uint8, device="cuda").view(fmt.dtype)
    down.view(torch.uint8)[-1] = one
    w13 = QuantTensor(values, torch.full((experts, 2 * inner), 1 / hidden, device="cuda"), fmt)
    w2 = QuantTensor(down, torch.full((experts, hidden), 1 / inner, device="cuda"), fmt)
    for T in (1, 5, 300):
        x = torch.ones(T, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.full((T, 1), experts - 1, device="cuda")
        y = lowgmm.moe_ffn(x, w13, w2, ids, torch.ones(T, 1, device="cuda"))
        assert bool(((y.float() - 0.731) / 0.731).abs().max() < 0.02)


@pytest.mark.parametrize("rows", [65_536, 300_032])
def test_sort_of_many_slots(rows: int) -> None:
    from lowgmm import routing

    ids = torch.randint(-1, 1025, (rows // 8, 8), device="cuda", dtype=torch.int32)
    made, defined = lowgmm.route(ids, 1024), routing.route(ids, 1024)
    assert torch.equal(made.order, defined.order)
    assert torch.equal(made.inverse, defined.inverse)
    assert torch.equal(made.offsets, defined.offsets)
