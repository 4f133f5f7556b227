"""The CPU benchmark of the grouped matmul: its statistic, and that the README shows the recorded run."""

from __future__ import annotations

import sys
from pathlib import Path

import common
import cpu_gmm
import pytest

from lowgmm import timing

RECORD = Path(__file__).resolve().parents[1] / "bench" / "results" / "cpu_gmm_epyc_2cores.jsonl"


def test_cpu_ratios_are_medians_of_the_rounds_ratios():
    """Memory becomes twice as fast in the third of five rounds, after the read's turn and before INT8's."""
    slow = {"read": (4.0, 4.0, 4.0, 2.0, 2.0), "int8 gmm": (5.0, 5.0, 2.5, 2.5, 2.5)}
    samples = slow | {"int8 gmm of bf16": slow["int8 gmm"], "bf16 loop": (15.0,) * 2 + (7.5,) * 3}
    samples["fp32 loop"] = tuple(3 * s for s in slow["read"])
    found = cpu_gmm.summary([timing.Timing(n, s, "cpu clock") for n, s in samples.items()], 2)
    assert found["share_of_read"]["int8 gmm"]["median"] == pytest.approx(0.8)  # of medians: 1.6
    assert found["x_bf16_loop"]["int8 gmm"] == {"median": 3.0, "p20": 3.0, "p80": 3.0}
    assert found["x_fp32_loop"]["int8 gmm of bf16"]["median"] == pytest.approx(2.4)
    assert found["us_per_expert"]["read"]["median"] == 2e6
    assert found["rounds"] == 5


@pytest.fixture
def tiny_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The CPU benchmark on small shapes; the file that it writes."""
    monkeypatch.setattr(cpu_gmm, "SHAPES", ((64, 2), (96, 3)))
    monkeypatch.setattr(cpu_gmm, "TOKENS", (1, 3))
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 4096)
    monkeypatch.setattr(sys, "argv", ["cpu_gmm.py", "--seconds", "0", "--output", str(tmp_path / "r.jsonl")])
    return tmp_path / "r.jsonl"


def test_the_cpu_benchmark_writes_what_it_renders(tiny_cpu: Path):
    cpu_gmm.main()
    head, lines = common.read_lines(tiny_cpu)
    assert [(ln["N"], ln["tokens_per_expert"], ln["rounds"]) for ln in lines] == [
        (64, 1, 5), (64, 3, 5), (96, 1, 5), (96, 3, 5)
    ]  # fmt: skip
    for ln in lines:
        assert "cores_of_others" in ln
        assert set(ln["us_per_expert"]) == {"read", "fp32 loop", "bf16 loop", "int8 gmm", "int8 gmm of bf16"}
    assert len(cpu_gmm.render("r.jsonl", head, lines).splitlines()) == 4 + len(lines)


def test_the_cpu_benchmark_times_nothing_wrong(tiny_cpu: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_gmm.lowgmm, "gmm", lambda *_, output, **__: output.zero_())
    with pytest.raises(timing.CheckError, match=r"int8 gmm: .*budget"):
        cpu_gmm.main()
    assert not tiny_cpu.exists()


def test_the_readmes_cpu_table_is_the_one_that_the_result_file_gives():
    text = cpu_gmm.README.read_text(encoding="utf-8")
    head, lines = common.read_lines(RECORD)
    assert text == common.rendered(text, cpu_gmm.render(RECORD.name, head, lines), "cpu_gmm.py"), (
        "run python bench/cpu_gmm.py --render bench/results/…"
    )
    for figure in (*cpu_gmm.OVER, "us_per_expert"):
        head, lines = common.read_lines(RECORD)
        lines[0][figure]["int8 gmm"]["median"] *= 2
        assert text != common.rendered(text, cpu_gmm.render(RECORD.name, head, lines), "cpu_gmm.py"), figure


def test_cores_of_others_are_what_this_process_did_not_use(monkeypatch: pytest.MonkeyPatch):
    now = cpu_gmm.Others._now()
    assert now is None or now[0] > 0 < now[1]  # Linux says
    times = iter([(10.0, 4.0, 100.0), (16.0, 8.0, 102.0)])
    monkeypatch.setattr(cpu_gmm.Others, "_now", staticmethod(lambda: next(times)))
    assert cpu_gmm.Others().cores() == 1.0
