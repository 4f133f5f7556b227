"""INT4 weights with INT8 activations: the definition, gmm and layers against the oracle, and what is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import lowgmm
from lowgmm import cpu, native, reference
from lowgmm.formats import INT4, INT4_GROUPED, QuantFormat, QuantTensor, group_size, pack_nibbles, unpack_nibbles
from lowgmm.shapes import DtypeError, ShapeError, UnsupportedError
from lowgmm.testing import MUTANTS, check_gmm, judge, make_operands

FORMATS = (INT4, *INT4_GROUPED)
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
every_format = pytest.mark.parametrize("name", ["int8", *(f.name for f in FORMATS)])

SHAPES = [
    pytest.param([5, 0, 33, 2], 96, 128, id="whole groups, an empty expert"),
    pytest.param([1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17], 70, 200, id="every tile of rows, a short last group"),
    pytest.param([900, 1], 130, 72, id="more rows than one chunk"),
    pytest.param([3], 1, 2, id="smallest"),
    pytest.param([0, 2], 33, 34, id="a last group of 2"),
]


@formats
def test_quantise_is_what_it_says(fmt: QuantFormat) -> None:
    """scale = absmax / 7 over each group, values rounded half to even and within ±7; computed element by element."""
    w = torch.randn(2, 3, 150)
    w[0, 1] = 0
    q = lowgmm.quantize(w, fmt.name)
    group = fmt.group or 150
    assert q.values is not None
    assert q.values.shape == (2, 3, 75)
    assert q.shape == (2, 3, 150)
    for e in range(2):
        for n in range(3):
            for g, part in enumerate(w[e, n].split(group)):
                scale = q.scales[e, n] if fmt.blocks(150) == 1 else q.scales[e, n, g]
                absmax = part.abs().max()
                assert scale == absmax / torch.tensor(7.0)
                expected = (part * (torch.tensor(7.0) / absmax)).round() if absmax > 0 else torch.zeros(len(part))
                assert torch.equal(q.codes()[e, n, g * group : g * group + len(part)].float(), expected)


def test_ties_round_to_even() -> None:
    codes = lowgmm.quantize(torch.tensor([[[7.0, 0.5, 1.5, -2.5, -7.0, 3.5]]]), "int4").codes()
    assert codes.tolist() == [[[7, 0, 2, -2, -7, 4]]]


@formats
def test_dequantised_weights_are_near(fmt: QuantFormat) -> None:
    """No element is further off than half a step of its own group."""
    w = torch.randn(2, 5, 160)
    q = lowgmm.quantize(w, fmt.name)
    step = q.scales.unsqueeze(-1) if q.scales.dim() == 2 else q.scales.repeat_interleave(fmt.group or 1, -1)[..., :160]
    assert ((lowgmm.dequantize(q) - w).abs() <= step / 2 * 1.0001).all()


def test_nibbles() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [(low & 15) | (high & 15) << 4 for low, high in codes.view(-1, 2).tolist()]
    assert torch.equal(unpack_nibbles(packed), codes)


def test_group_size_follows_from_the_number_of_scales() -> None:
    for K in (2, 31, 32, 33, 64, 65, 96, 127, 128, 129, 160, 192, 256, 257, 4096):
        for fmt in INT4_GROUPED:
            blocks = fmt.blocks(K)
            assert group_size(K, blocks) == (K if blocks == 1 else fmt.group)


@formats
@pytest.mark.parametrize(("sizes", "N", "K"), SHAPES)
def test_gmm(fmt: QuantFormat, sizes: list[int], N: int, K: int) -> None:
    """Plain and packed weights against the oracle, and equal to each other in every output dtype."""
    o = make_operands(sizes, N, K, fmt.name, extra_rows=2)
    packed = cpu.pack(o.weights)
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, out_dtype=out_dtype)
        check_gmm(y, o)
        assert torch.equal(lowgmm.gmm(o.x, packed, o.scales_x, expert_sizes=o.sizes, out_dtype=out_dtype), y)
    exact = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes, impl="reference", out_dtype=torch.float32)
    assert torch.equal(exact, o.exact().float())


@formats
def test_sums_in_a_group_are_exact_and_groups_are_added_in_order(fmt: QuantFormat) -> None:
    """The definition step by step: INT32 in a group, times the group's scale, added in FP32, in K order."""
    o = make_operands([3, 9], 70, 200, fmt.name)
    bias = torch.randn(2, 70)
    scales = o.scales_w if o.scales_w.dim() == 3 else o.scales_w.unsqueeze(-1)
    width, rows = fmt.group or 200, []
    for m in range(12):
        e, y = int(m >= 3), None
        for g in range(scales.shape[2]):
            columns = slice(g * width, (g + 1) * width)
            part = (o.x[m, columns].long() * o.w[e][:, columns].long()).sum(1).float() * scales[e, :, g]
            y = part if y is None else y + part
        rows.append(y * o.scales_x[m] + bias[e])
    for weights in (o.weights, cpu.pack(o.weights)):
        y = lowgmm.gmm(o.x, weights, o.scales_x, expert_sizes=o.sizes, bias=bias, out_dtype=torch.float32)
        assert torch.equal(y, torch.stack(rows))


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_input_is_quantised_to_int8(fmt: QuantFormat, dtype: torch.dtype) -> None:
    o = make_operands([4, 7], 48, 128, fmt.name)
    x = torch.randn(11, 128).to(dtype)
    xq, scales = lowgmm.quantize_tokens(x, "int8", 2.0)
    expected = lowgmm.gmm(xq, o.weights, scales, expert_sizes=o.sizes, out_dtype=dtype)
    for weights in (o.weights, cpu.pack(o.weights)):
        assert torch.equal(lowgmm.gmm(x, weights, expert_sizes=o.sizes, clip=2.0), expected)


@formats
@pytest.mark.parametrize("name", MUTANTS)
def test_the_budget_rejects_mutants(fmt: QuantFormat, name: str) -> None:
    o = make_operands([40, 70, 18], 96, 256, fmt.name)
    y = lowgmm.gmm(o.x, o.weights, o.scales_x, expert_sizes=o.sizes)
    check_gmm(y, o)
    assert not judge(MUTANTS[name](y.clone(), o), o.exact(), o.baseline(y.dtype)).ok


@every_format
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2", "none", "swiglu_oai"])
@pytest.mark.parametrize(("T", "H", "I"), [(1, 256, 64), (5, 64, 128), (70, 96, 100), (17, 34, 66)])
def test_layer(name: str, activation: str, T: int, H: int, I: int) -> None:
    """Packed weights (one native call) against plain ones (one operation after the other): as near to the oracle."""
    A, E = 3, 5
    w13, w2 = torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5
    plain = [lowgmm.quantize(w, name) for w in (w13, w2)]
    packed = [cpu.pack(w) for w in plain]
    ids, weights = torch.randint(-1, E, (T, A)), torch.rand(T, A)
    biases = {"bias_w13": torch.randn(E, 2 * I) / 4, "bias_w2": torch.randn(E, H) / 4}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(T, H).to(dtype)
        exact = reference.moe_ffn(x, *plain, ids, weights, activation=activation, **biases)
        errors = []
        for w in (plain, packed):
            y = lowgmm.moe_ffn(x, *w, ids, weights, activation=activation, **biases)
            assert y.dtype == dtype
            errors.append((y.double() - exact).norm())
        assert errors[1] <= 1.1 * errors[0] + 1e-3 * exact.norm()
        assert errors[0] <= 0.03 * exact.norm()  # both zero if no slot has an expert


@formats
def test_module_keeps_and_returns_its_bytes(fmt: QuantFormat) -> None:
    """Packed on the CPU; state dict, copies and pickles carry the plain form and give the same results."""
    w13, w2 = torch.randn(4, 64, 96), torch.randn(4, 96, 32)
    layer = lowgmm.MoEExperts.from_dense(w13, w2, fmt.name)
    assert (layer.w13.packed is not None) == (native.library() is not None)
    state = layer.state_dict()
    q = lowgmm.quantize(w13, fmt.name)
    assert torch.equal(state["w13.values"], q.values)
    assert torch.equal(state["w13.scales"], q.scales)
    x, ids, weights = torch.randn(6, 96), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    y = layer(x, ids, weights)
    fresh = lowgmm.MoEExperts.from_dense(torch.randn(4, 64, 96), torch.randn(4, 96, 32), fmt.name)
    fresh.load_state_dict(state)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (fresh, copy.deepcopy(layer), torch.load(buffer, weights_only=False), layer.half()):
        assert torch.equal(other(x, ids, weights), y)


def test_nothing_is_made_anew_at_a_call() -> None:
    """Operands with the shape [E, N, K], without data, and the bytes; also of nothing, and of copies."""
    for made in (lowgmm.quantize(torch.randn(2, 3, 64), "int4"), lowgmm.quantize(torch.randn(0, 3, 64), "int4_g32")):
        for q in (made, copy.deepcopy(made), made.to("meta")):
            stand_in, values = q.operands
            assert q.operands[0] is stand_in
            assert values is q.values
            assert (stand_in.shape, stand_in.device) == (q.shape, values.device)
            assert stand_in.untyped_storage().nbytes() == 1


def test_a_layer_on_a_device_holds_scales_as_kernels_read_them() -> None:
    """However they came: a call that has to copy them is not replayed either (the meta device's take nothing else)."""
    made = [lowgmm.quantize(torch.randn(2, *shape), "int4_g32") for shape in ((64, 96), (96, 64))]
    loose = [QuantTensor(q.values.to("meta"), q.scales.contiguous().to("meta"), q.format) for q in made]
    state = lowgmm.MoEExperts(*made, gate_up="none").state_dict()
    for layer in (lowgmm.MoEExperts(*loose, gate_up="none"), lowgmm.MoEExperts(*made, gate_up="none").to("meta")):
        for _ in range(2):
            assert all(w.scales.mT.is_contiguous() for w in (layer.w13, layer.w2))
            assert all(t.is_contiguous() for t in layer.state_dict().values())
            layer.load_state_dict(state)


W = lowgmm.quantize(torch.randn(2, 8, 64), "int4_g32")
X, SIZES = torch.randn(4, 64), torch.tensor([3, 1])
REST = (None, W.scales, torch.tensor([0, 3, 4]), None, None, "auto", None, torch.float32)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: lowgmm.quantize(torch.randn(1, 2, 3), "int4"), ShapeError, "K=3 is odd"),
        (lambda: lowgmm.quantize_tokens(X, "int4"), UnsupportedError, "the tokens they are multiplied by are int8"),
        (lambda: lowgmm.gmm(X, W.values, expert_sizes=SIZES), DtypeError, "come as a QuantTensor"),
        (lambda: torch.ops.lowgmm.gmm(X, [W.operands[0], W.values[:1]], *REST), ShapeError, "are .E, N, K/2. bytes"),
        (lambda: torch.ops.lowgmm.gmm(X, [W.operands[0], W.values.char()], *REST), DtypeError, "is int8, expected"),
        (lambda: lowgmm.gmm(X.to(torch.uint8), W, expert_sizes=SIZES), DtypeError, "input is int8, or floating"),
        (lambda: lowgmm.gmm(X[:, :62], W, expert_sizes=SIZES), ShapeError, "K=62"),
        (lambda: QuantTensor(W.values, W.scales, INT4), ShapeError, "scales"),
        (lambda: QuantTensor(W.values, W.scales[..., :1], W.format), ShapeError, "scales have 1 groups"),
        (lambda: group_size(64, 5), ShapeError, r"expected 1 \(per channel\), 2 \(groups of 32\)"),
    ],
)
def test_what_is_refused(call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


@formats
def test_layer_of_the_kernels(fmt: QuantFormat, device: torch.device) -> None:
    """On a GPU a layer is a sequence of operations, as near to the oracle as the CPU's."""
    T, A, E, H, I = 5, 3, 4, 64, 96
    w13, w2 = torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5
    weights = [lowgmm.quantize(w, fmt.name) for w in (w13, w2)]
    x, ids, share = torch.randn(T, H), torch.randint(-1, E, (T, A)), torch.rand(T, A)
    exact = reference.moe_ffn(x, *weights, ids, share)
    on_cpu = lowgmm.moe_ffn(x, *weights, ids, share)
    there = [w.to(device) for w in weights]
    y = lowgmm.moe_ffn(x.to(device), *there, ids.to(device), share.to(device), impl="triton").cpu()
    assert (y.double() - exact).norm() <= 1.1 * (on_cpu.double() - exact).norm()


@pytest.mark.gpu
@formats
def test_module_on_a_gpu(fmt: QuantFormat) -> None:
    """The same weights and results as on a CPU; graphs replay it; a copy from a checkpoint, too."""
    w13, w2 = torch.randn(4, 64, 96), torch.randn(4, 96, 32)
    host = lowgmm.MoEExperts.from_dense(w13, w2, fmt.name)
    layer = lowgmm.MoEExperts.from_dense(w13.cuda(), w2.cuda(), fmt.name)
    x, ids, share = torch.randn(6, 96), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    want, here = host(x, ids, share), [t.cuda() for t in (x, ids, share)]
    torch.testing.assert_close(layer(*here).cpu(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    other = lowgmm.MoEExperts.from_dense(torch.randn(4, 64, 96).cuda(), torch.randn(4, 96, 32).cuda(), fmt.name)
    other.load_state_dict(host.state_dict())
    assert torch.equal(other(*here), layer(*here))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*here)
    here[0].copy_(torch.randn(6, 96))
    graph.replay()
    assert torch.equal(out, layer(*here))


def test_an_output_over_the_weights_is_refused() -> None:
    """The values are what matters, not the stand-in that carries their shape."""
    w, offsets, apart = lowgmm.quantize(torch.randn(2, 16, 64), "int4"), torch.tensor([0, 2, 4]), torch.empty(4, 16)
    assert w.values is not None
    over = w.values.view(-1)[: 4 * 16 * 4].view(torch.float32).view(4, 16)
    for output in (over, apart, over):  # also at the second call of a signature, whose other checks are remembered
        if output is apart:
            lowgmm.gmm(torch.ones(4, 64), w, expert_offsets=offsets, output=output)
        else:
            with pytest.raises(ShapeError, match="overlaps 'weights'"):
                lowgmm.gmm(torch.ones(4, 64), w, expert_offsets=offsets, output=output)
