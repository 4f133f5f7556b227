"""The CPU backend's native code: every instruction set to the bit, sanitizers, threads."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import lowgmm
from lowgmm import cpu, native
from lowgmm.shapes import UnsupportedError

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src/lowgmm/native").glob("*.c"))
DRIVER = ROOT / "tests/native_driver.c"
needs_native = pytest.mark.skipif(native.library() is None, reason="the native code was not built or cannot run here")


def build(compiler: str, to: Path, *flags: str) -> None:
    """The driver with AMX emulated and AVX-VNNI in AVX512VL's encoding, so that one CPU runs every loop."""
    command = [compiler, "-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", *flags]
    command += ["-DLOWGMM_EMULATE_AMX", "-DLOWGMM_AVXVNNI_AS_VL", f"-I{SOURCES[0].parent}"]
    subprocess.run([*command, *map(str, SOURCES), str(DRIVER), "-lpthread", "-lm", "-o", str(to)], check=True)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    """Memory errors, undefined behaviour, data races; every instruction set against plain loops, threads included."""
    build("gcc", tmp_path / "driver", "-O0", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    run = subprocess.run([tmp_path / "driver"], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split("\n")[-2] == "scalar"


ARM, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


@pytest.mark.skipif(shutil.which(ARM) is None, reason=f"needs {ARM}")
def test_arm(tmp_path: Path) -> None:
    """The NEON loops compile, and give the right bits where an emulator can run them."""
    build(ARM, tmp_path / "driver", "-O2", "-static")
    if shutil.which(EMULATOR) is not None:
        command = [EMULATOR, "-cpu", "max", str(tmp_path / "driver")]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (run.returncode, run.stdout) == (0, "neon\nscalar\n"), run.stderr


PROBE = """
import sys, torch, lowgmm
from lowgmm import cpu
torch.manual_seed(0)
found = {}
for name in ("int8", "int4", "int4_g32", "int4_g64", "int4_g128"):
    w13, w2 = lowgmm.quantize(torch.randn(5, 128, 202), name), lowgmm.quantize(torch.randn(5, 202, 64), name)
    packed = [cpu.pack(w) for w in (w13, w2)]
    assert torch.equal(packed[0].plain(), w13.plain())
    sizes = torch.tensor([1, 0, 30, 6, 9])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(46, 202).to(dtype)
        y = lowgmm.gmm(x, packed[0], expert_sizes=sizes)
        assert torch.equal(y, lowgmm.gmm(x, w13, expert_sizes=sizes))
        for act in ("silu", "gelu", "relu2", "none", "swiglu_oai"):
            layer = lowgmm.moe_ffn(x, *packed, torch.randint(-1, 5, (46, 2)), torch.rand(46, 2), activation=act)
            found[name, dtype, act] = layer
        found[name, dtype] = y
torch.save(found, sys.argv[1])
"""


def forced(isa: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LOWGMM_CPU_ISA": isa}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)


@needs_native
def test_every_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    """gmm as plain torch computes it, and the whole layer as the first of them; in processes of their own."""
    lib = native.library()
    assert lib is not None
    usable = [name for name, (_, supported) in native._instruction_sets(lib.call).items() if supported]
    assert {"scalar", lib.name} <= set(usable)
    results = []
    for isa in usable:
        run = forced(isa, "-c", PROBE, str(tmp_path / isa))
        assert run.returncode == 0, run.stderr
        results.append(torch.load(tmp_path / isa, weights_only=False))
    for other in results[1:]:
        assert all(torch.equal(results[0][key], other[key]) for key in results[0])


@needs_native
@pytest.mark.parametrize("name", ["int8", "int4_g32"])
def test_large_outputs_are_those_of_their_parts(name: str) -> None:
    """Over 2 MiB AVX512 streams whole cache lines to memory, by code of its own. The bits are those of small calls,
    also in a block that is not whole, on rows not aligned, and of a NaN that would overflow if it were rounded."""
    torch.manual_seed(2)
    w, bias = cpu.pack(lowgmm.quantize(torch.randn(1, 2080, 64), name)), torch.randn(1, 2080)
    bias[0, 5] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    x, ends = torch.randn(560, 64).bfloat16(), torch.tensor([0, 560])
    x[7] = torch.nan
    parts = [lowgmm.gmm(p, w, expert_offsets=torch.tensor([0, len(p)]), bias=bias) for p in x.split(80)]
    wanted = torch.cat(parts).view(torch.int16)
    aligned, shifted = torch.zeros(560, 2080).bfloat16(), torch.zeros(560 * 2080 + 1).bfloat16()[1:].view(560, 2080)
    for out in (aligned, shifted):
        assert out.nbytes > 2 << 20 > parts[0].nbytes
        lowgmm.gmm(x, w, expert_offsets=ends, bias=bias, output=out)
        assert torch.equal(out.view(torch.int16), wanted)
    experts = lowgmm.MoEExperts.from_dense(torch.randn(4, 128, 512) / 20, torch.randn(4, 512, 64) / 10, name)
    # Some 2000 rows an expert, more than the C code takes at a time.
    hidden, ids, weights = torch.randn(2000, 512).bfloat16(), torch.randint(0, 4, (2000, 4)), torch.rand(2000, 4)
    pieces = zip(hidden.split(80), ids.split(80), weights.split(80), strict=True)
    assert torch.equal(experts(hidden, ids, weights), torch.cat([experts(*piece) for piece in pieces]))


@needs_native
def test_outputs_that_malloc_maps_anew_come_in_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[torch.Tensor] = []
    monkeypatch.setattr(native, "advise_huge_pages", advised.append)
    w13, w2 = (cpu.pack(lowgmm.quantize(torch.randn(2, *s), "int8")) for s in ((64, 32), (32, 32)))
    x, ids = torch.randn(3, 32), torch.tensor([[0], [1], [1]])
    layer = lowgmm.MoEExperts(w13, w2)
    layer(x, ids, torch.ones(3, 1))  # its scratch is there now
    for most, expected in ((native.MAPPED_BYTES, 0), (1, 2)):
        monkeypatch.setattr(native, "MAPPED_BYTES", most)
        advised.clear()
        found = [lowgmm.gmm(x, w13, expert_sizes=torch.tensor([1, 2])), layer(x, ids, torch.ones(3, 1))]
        assert len(advised) == expected
        assert all(a.data_ptr() == y.data_ptr() for a, y in zip(advised, found, strict=False))


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    run = forced("sve", "-c", "from lowgmm import native; native.library()")
    assert f"{UnsupportedError.__name__}: LOWGMM_CPU_ISA=sve: this CPU and build have" in run.stderr


def layer(name: str = "int8") -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    experts = lowgmm.MoEExperts.from_dense(torch.randn(8, 256, 512) / 20, torch.randn(8, 512, 128) / 10, name)
    return experts, (torch.randn(33, 512), torch.randint(0, 8, (33, 3)), torch.rand(33, 3))


@needs_native
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_a_gate_far_below_zero_gives_zero(activation: str) -> None:
    """sigmoid(gate) is no number that a float32 holds, and must be 0: the gate may be 1e38 times as large."""
    w13 = cpu.pack(lowgmm.quantize(torch.eye(32).repeat(1, 2, 1), "int8"))
    w2 = cpu.pack(lowgmm.quantize(torch.eye(32)[None], "int8"))
    hidden = torch.full((1, 32), -2e38)
    bias = torch.cat([torch.zeros(32), torch.full((32,), 3e38)])[None]  # of up, whose sum is 1e38
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    limit = {"limit": 1e38} if activation == "swiglu_oai" else {}
    for b in (None, bias):
        y = lowgmm.moe_ffn(hidden, w13, w2, ids, weights, activation=activation, bias_w13=b, **limit)
        assert not y.any()


@needs_native
@pytest.mark.parametrize("name", ["int8", "int4_g64"])
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    experts, inputs = layer(name)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 8):  # 8: more than the cores of a small machine, so threads must give way
            torch.set_num_threads(threads)
            results += [experts(*inputs) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, results[0]) for y in results)


@needs_native
@pytest.mark.parametrize("name", ["int8", "int4_g64"])
def test_python_threads_at_once(name: str) -> None:
    """Each caller has scratch of its own; results are those of one caller."""
    experts, inputs = layer(name)
    shifted = [(x.roll(i, 0), ids.roll(i, 0), weights.roll(i, 0)) for i in range(4) for x, ids, weights in [inputs]]
    expected, wrong = [experts(*arguments) for arguments in shifted], []

    def work(i: int) -> None:
        for _ in range(30):
            if not torch.equal(experts(*shifted[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@needs_native
def test_the_gil_is_released() -> None:
    """Another Python thread counts on while one native call runs."""
    w = cpu.pack(lowgmm.quantize(torch.randn(4, 1024, 1024), "int8"))
    x, sizes = torch.randn(8192, 1024), torch.full((4,), 2048)
    counted, running = [0], [True]

    def count() -> None:
        while running[0]:
            counted[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    original, during = native._run, []

    def run(*args) -> int:
        before = counted[0]
        result = original(*args)
        during.append(counted[0] - before)
        return result

    try:
        native._run = run
        lowgmm.gmm(x, w, expert_sizes=sizes)
    finally:
        native._run = original
        running[0] = False
        thread.join()
    assert max(during) > 10


ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch, lowgmm
torch.set_num_threads(2)
torch.randn(1 << 20).sum()
pool = len(os.listdir("/proc/self/task"))
experts = lowgmm.MoEExperts.from_dense(torch.randn(8, 256, 512), torch.randn(8, 512, 128), "int8")
for _ in range(20):
    experts(torch.randn(9, 512), torch.randint(0, 8, (9, 3)), torch.rand(9, 3))
threads = os.listdir("/proc/self/task")
print(len(threads) - pool, {len(os.sched_getaffinity(int(t))) for t in threads})
"""


@needs_native
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_affinity_and_no_second_pool() -> None:
    """Two threads on one core finish; every thread keeps to that core; and none was added to torch's pool."""
    run = subprocess.run([sys.executable, "-c", ONE_CORE], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "0 {1}\n"


@needs_native
def test_packed_weights_travel_as_plain_ones(tmp_path: Path) -> None:
    """What was packed under one instruction set is packed anew where another reads it."""
    q = cpu.pack(lowgmm.quantize(torch.randn(2, 8, 200), "int8"))
    (tmp_path / "q.pkl").write_bytes(pickle.dumps(q))
    x = torch.randn(4, 200)
    y = lowgmm.gmm(x, q, expert_sizes=torch.tensor([1, 3]))
    torch.save((x, y), tmp_path / "xy.pt")
    code = """
import pickle, sys, torch, lowgmm
q = pickle.load(open(sys.argv[1] + "/q.pkl", "rb"))
x, y = torch.load(sys.argv[1] + "/xy.pt")
assert q.packed is not None
torch.testing.assert_close(lowgmm.gmm(x, q, expert_sizes=torch.tensor([1, 3])), y, rtol=1e-6, atol=1e-5)
"""
    for setting in ({"LOWGMM_CPU_ISA": "scalar"}, {"LOWGMM_NATIVE": "0"}):
        environment = {**os.environ, **setting}
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)


@needs_native
def test_weights_packed_for_something_else_are_refused() -> None:
    q = cpu.pack(lowgmm.quantize(torch.randn(2, 96, 200), "int8"))
    stand_in, packed = q.operands
    x, offsets = torch.randn(4, 200), torch.tensor([0, 2, 4])
    other = torch.uint8 if packed.dtype == torch.int8 else torch.int8
    for wrong in (packed[:, :1], packed[:, :, :-1].contiguous(), packed[:1], packed.view(other), packed[..., ::2]):
        operands = [stand_in, wrong]
        with pytest.raises(UnsupportedError, match="packed for the native code, but not as"):
            torch.ops.lowgmm.gmm(x, operands, None, q.scales, offsets, None, None, "auto", None, torch.float32, False)


def test_int8_stays_exact_where_onednn_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs without VNNI."""
    monkeypatch.setattr(cpu, "onednn_is_exact", lambda: False)
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(torch, "_int_mm", None)
    x, w = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((9, 3000), (3, 33, 3000)))
    x[0], w[0, 0] = -128, -128
    wanted = torch.cat([x[:4].long() @ w[0].long().T, x[4:].long() @ w[2].long().T])
    y = lowgmm.gmm(x, w, expert_sizes=torch.tensor([4, 0, 5]), out_dtype=torch.int32)
    assert torch.equal(y.long(), wanted)
    q = lowgmm.quantize(torch.randn(2, 8, 64), "int8")
    assert cpu.pack(q) is q
    assert cpu.int8_backend().startswith("float32 products")


def test_onednn_is_probed() -> None:
    code = "from lowgmm import cpu; assert not cpu.onednn_is_exact()"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs a CPU of which oneDNN can be told to use less")
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}, check=True)
    assert cpu.onednn_is_exact()
