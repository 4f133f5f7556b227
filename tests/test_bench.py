"""The benchmarks' own logic, on result files made up here: comparing, plotting, and saying that there is no GPU."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import common
import compare
import gmm
import launch_modes
import plot
import pytest
import rivals
import rivals_layer
import torch

from lowgmm import timing
from lowgmm.tile_config import TileConfig
from lowgmm.workloads import GMM_CASES

BENCH = Path(__file__).resolve().parents[1] / "bench"
CASES = [{"case": c, "format": f, "us": 10.0 * i + 5} for i, c in enumerate(("a", "b")) for f in ("int8", "fp8")]


def result_file(path: Path, lines: list[dict[str, Any]], gpu: str = "NVIDIA H200") -> str:
    head = {"environment": {"device_name": gpu}}
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]), encoding="utf-8")
    return str(path)


def scaled(factor: float, **only: str) -> list[dict[str, Any]]:
    """CASES with the lines that `only` describes slowed down."""
    return [{**ln, "us": ln["us"] * (factor if only.items() <= ln.items() else 1)} for ln in CASES]


def test_equal_files_pass(tmp_path: Path, capsys):
    a, b = result_file(tmp_path / "a", CASES), result_file(tmp_path / "b", scaled(1.04))
    assert compare.main([a, b]) == 0
    assert "geometric mean" in capsys.readouterr().out


def test_one_slower_case_fails_by_name(tmp_path: Path, capsys):
    a, b = result_file(tmp_path / "a", CASES), result_file(tmp_path / "b", scaled(1.06, case="b", format="fp8"))
    assert compare.main([a, b]) == 1
    out, err = capsys.readouterr()
    assert "1 slower by more than 5 %: b fp8" in err
    assert out.count("  slower") == 1
    assert compare.main([a, b, "--tolerance", "7"]) == 0
    assert compare.main([b, a]) == 0  # faster is fine


def test_a_time_that_is_no_number_fails(tmp_path: Path):
    a, b = result_file(tmp_path / "a", CASES), result_file(tmp_path / "b", scaled(math.nan, case="a"))
    assert compare.main([a, b]) == 1


def test_other_gpus_and_other_cases_are_refused(tmp_path: Path, capsys):
    a = result_file(tmp_path / "a", CASES)
    assert compare.main([a, result_file(tmp_path / "b", CASES, gpu="NVIDIA H100")]) == 2
    assert "different GPUs" in capsys.readouterr().err
    fewer = result_file(tmp_path / "c", CASES[:3])
    assert compare.main([a, fewer]) == 2
    assert "only in the first: b fp8" in capsys.readouterr().err
    assert compare.main([a, fewer, "--common"]) == 0


def test_picked_configurations_may_differ_between_versions(tmp_path: Path):
    a = result_file(tmp_path / "a", [{**ln, "config": "x"} for ln in CASES])
    b = result_file(tmp_path / "b", [{**ln, "config": "y"} for ln in CASES])
    assert compare.main([a, b]) == 0
    sweep = [{"case": "a", "format": "int8", "config": c, "us": 1.0} for c in "xy"]
    assert compare.main([result_file(tmp_path / "c", sweep), result_file(tmp_path / "d", sweep)]) == 0


@pytest.mark.parametrize("content", ["", "not json", '{"no": "environment"}', "[1]"])
def test_what_is_no_result_file_is_named(tmp_path: Path, content: str):
    (tmp_path / "x").write_text(content)
    with pytest.raises(SystemExit, match=r"x: not a result file"):
        common.read_lines(tmp_path / "x")


def test_shipped_results_compare_with_themselves():
    for name in (
        "sweep_h200",
        "rivals_h200",
        "rivals_layer_8bit_h200",
        "rivals_layer_h200",
        "layer_h200",
        "layer_narrow_h200",
        "gmm_h200",
        "launch_modes_h200",
        "overhead_h200",
        "overhead_int8_h200",
        "accumulation_h200",
    ):
        path = str(BENCH / "results" / f"{name}.jsonl")
        assert compare.main([path, path]) == 0


def test_the_documents_of_rivals_say_what_the_files_say():
    results = BENCH / "results"
    texts = rivals.documents(results)
    assert set(texts) == {rivals.DOCUMENT, rivals.README}
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, "run python bench/rivals.py --render …"
    name = rivals.PRODUCTS
    head, lines = common.read_lines(results / name)
    slower = [{**ln, "us": ln["us"] * 2} if ln["rival"].startswith(rivals.OURS) else ln for ln in lines]
    assert rivals.render(name, head, lines) != rivals.render(name, head, slower)


def test_results_of_other_cases_are_refused():
    with pytest.raises(SystemExit, match="not one of our cases: S9"):
        rivals.convert({"results": [{"kind": "gemm", "peer": "x", "case": "S9"}]}, {})


# expert layers beside other libraries'

layers = pytest.mark.parametrize("name", rivals.LAYERS)
RESULT = {"kind": "layer", "model": "olmoe", "E": 64, "topk": 8, "H": 2048, "I": 1024, "routing": "uniform", "T": 8}
RESULT |= {
    "active": 40.0,
    "peer": "vllm triton int8",
    "dt": "int8",
    "us": 80.0,
    "tflops": 10.0,
    "err": 0.02,
    "ok": True,
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": "llama"}, "model is 'llama', not one of mixtral"),
        ({"routing": "hot"}, "routing is 'hot', not one of uniform, zipf"),
        ({"dt": "fp4"}, "dt is 'fp4', not one of int8"),
        ({"ok": False}, "ok is False"),
        ({"I": 768}, "olmoe has other sizes"),
        ({}, "twice"),
    ],
    ids=str,
)
def test_layers_that_are_unknown_unchecked_or_twice_are_refused(wrong: dict[str, Any], said: str):
    with pytest.raises(SystemExit, match=said):
        rivals_layer.convert([RESULT, RESULT | wrong])


def test_a_harness_without_results_of_the_kind_is_refused():
    with pytest.raises(SystemExit, match="no results of kind gemm"):
        rivals.convert({"results": [RESULT]}, {})


def layer_lines(**us: float) -> list[dict[str, Any]]:
    """A point at the floor (40 experts of 3 · 2048 · 1024 bytes) in all of ours, but for the times given."""
    floor = (40 * 3 * 2048 * 1024 + 4 * 8 * 2048) / 4.6e6
    ours = [{"peer": f"ours lowgmm_{f}", "dt": f, "us": us.get(f, floor)} for f in ("int8", "fp8", "bf16")]
    rivals_us = {"vllm triton int8": 3, "vllm triton w8a16": 2, "vllm cutlass fp8": 1.5, "vllm triton bf16": 1.25}
    theirs = [
        {"peer": name, "dt": "int8" if "8a16" in name else name.split()[-1], "us": floor * times, "err": 0.04}
        for name, times in rivals_us.items()
    ]
    fewer_bits = {"peer": "vllm marlin w4a16", "dt": "int4", "us": floor / 2}
    return rivals_layer.convert([RESULT | r for r in (*ours, *theirs, fewer_bits)])


def test_a_layer_is_held_against_the_fastest_rival_of_its_bits_and_the_floor():
    (point,) = rivals_layer.points_of(layer_lines())
    assert {f: point.fastest(f)["rival"] for f in ("int8", "fp8", "bf16")} == {
        "int8": "vllm cutlass fp8",
        "fp8": "vllm cutlass fp8",
        "bf16": "vllm triton bf16",
    }
    assert point.ratio("int8") == pytest.approx(1.5, rel=1e-5)
    assert point.ratio("bf16") == pytest.approx(1.25, rel=1e-5)
    assert point.of_floor("fp8") == pytest.approx(1.0, rel=1e-5)
    assert rivals_layer.slower([point]).endswith("none.")
    assert "vllm marlin w4a16 | 1 | 0.500× / 0.500× / 1" in rivals_layer.rival_by_rival([point])
    assert "| int8 | 0.500× (vllm triton int8, olmoe-1b-7b uniform T=8)" in rivals_layer.errors([point])


def test_a_layer_whose_many_rows_multiply_longer_than_they_read_has_the_floor_of_operations():
    lines = [{**ln, "T": 8192, "us": 6 * 8192 * 8 * 2048 * 1024 / 1.393e9} for ln in layer_lines()]
    assert rivals_layer.points_of(lines)[0].of_floor("int8") == pytest.approx(1.0)


@layers
def test_targets_are_said_to_be_reached_only_where_they_are(name: str):
    _, lines = common.read_lines(BENCH / "results" / name)
    for factor, reached in ((1e-3, 9), (1e3, 0)):
        times = [{**ln, "us": ln["us"] * (factor if ln["rival"].startswith(rivals.OURS) else 1)} for ln in lines]
        found = list(rivals_layer.aims(rivals_layer.points_of(times), "int8"))
        assert (len(found), sum(ok for _, ok in found)) == (9, reached)


@layers
def test_a_slower_or_less_accurate_layer_changes_the_document(name: str):
    _, lines = common.read_lines(BENCH / "results" / name)
    decode = next(i for i, ln in enumerate(lines) if ln["rival"] == "lowgmm_int8" and ln["T"] == 8)
    for key in ("us", "relative_error", "active_experts"):
        changed = [{**ln, key: ln[key] * 2} if i == decode else ln for i, ln in enumerate(lines)]
        assert rivals_layer.render(changed) != rivals_layer.render(lines), key


def test_a_slower_layer_or_faster_rival_changes_the_readme():
    _, lines = common.read_lines(BENCH / "results" / rivals.LAYERS[0])
    for rival, factor in (("lowgmm_int8", 2), ("lowgmm_fp8", 2), ("vllm triton w8a16", 0.1)):
        one = next(i for i, ln in enumerate(lines) if ln["rival"] == rival and ln["T"] == 1)
        changed = [{**ln, "us": ln["us"] * factor} if i == one else ln for i, ln in enumerate(lines)]
        before, after = (rivals_layer.headline(x).splitlines() for x in (lines, changed))
        assert before[0] != after[0] or before[1] != after[1]  # what is said of all points
        assert before[3:] != after[3:]  # the table


def test_ahead_and_behind_are_counted():
    said = rivals_layer.said_of("int8", [2.0, 1.0, 0.995, 0.5], "points")
    assert "at 1 of 4 points, behind by more than 1 % at 1: least 0.500×, geometric mean 0.999×" in said


def test_a_run_of_8_bit_weights_has_no_column_of_bf16_but_one_point_without_it_is_no_such_run():
    without = [ln for ln in layer_lines() if ln["format"] != "bf16"]
    (point,) = rivals_layer.points_of(without)
    assert rivals_layer.formats_of([point]) == ["int8", "fp8"]
    assert "bf16" not in rivals_layer.ratios([point]) + rivals_layer.slower([point]) + rivals_layer.errors([point])
    (whole,) = rivals_layer.points_of(layer_lines())
    (lacking,) = rivals_layer.points_of([ln for ln in layer_lines() if ln["rival"] != "lowgmm_bf16"])
    with pytest.raises(KeyError, match="bf16"):
        rivals_layer.slower([whole, lacking])


def test_shipped_results_name_no_folder_of_a_machine():
    for path in (BENCH / "results").glob("rivals*.jsonl"):
        assert not re.search(r'"(?:[^"]* )?/(?:work|tmp|root|home)\b', path.read_text(encoding="utf-8")), path.name


LINE = {"us": 50.0, "floor_us": 40.0, "tb_per_s": 4.0, "tflops": 700.0, "intensity": 180.0}


def test_a_report_is_one_svg_that_shows_every_case():
    head = {"environment": {"device_name": "GPU <1>"}, "read_bandwidth": 4.5e12, "dense_rates": {"int8": 1.3e15}}
    lines = [{"case": c, "format": f, **LINE} for c in ("a & b", "c") for f in ("int8", "fp8")]
    svg = plot.gmm_report(head, lines[:-1])  # one format is missing in one case
    root = ElementTree.fromstring(svg)
    tips = [e.text for e in root.iter() if e.tag.endswith("title")]
    assert sum("µs" in str(t) for t in tips) == 3
    assert sum("FLOP/B" in str(t) for t in tips) == 3
    words = " ".join(str(e.text) for e in root.iter() if e.tag.endswith("text"))
    for part in ("a & b", "GPU <1>", "int8 balance 289", "article: FP16 balance 40 to 80"):
        assert part in words
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched


@pytest.mark.parametrize("log", [False, True])
def test_bars_are_as_high_as_their_values(log: bool):
    _, body = plot.bars("t", ["g"], {"a": [10.0], "b": [1.0], "c": [None]}, plot.OTHERS[:3], unit="µs", log=log)
    root = ElementTree.fromstring(f"<svg>{body}</svg>")
    heights = [float(r.get("height", 0)) for r in root.iter("rect") if r.find("title") is not None]
    assert len(heights) == 2
    assert heights[0] > heights[1]
    if not log:
        assert heights[0] == pytest.approx(10 * heights[1], rel=0.01)


def test_lines_are_complete_after_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(common.environment, "record", lambda device: {"device_name": "x"})
    path = tmp_path / "new" / "r.jsonl"
    out = common.Lines(path, read_bandwidth=1.0)
    out.add(case="a", us=1.0)
    head, lines = common.read_lines(path)
    assert head["read_bandwidth"] == 1.0
    assert lines == [{"case": "a", "us": 1.0}]
    assert list(path.parent.iterdir()) == [path]


def test_shares_cover_every_compilation_once():
    config, cases = TileConfig(16, 64, 256), list(GMM_CASES.values())
    jobs = [(f, config, case) for f in ("int8", "fp8") for case in cases]
    shares = [job for part in range(3) for job in common.share(jobs, f"{part}/3")]
    assert sorted(map(str, shares)) == sorted(map(str, common.distinct(jobs)))
    assert 2 <= len(shares) < len(jobs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["gmm.py", "sweep.py", "launch_modes.py", "overhead.py", "int4.py"])
def test_without_a_gpu_a_benchmark_says_so(script: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, BENCH / script, "--output", tmp_path / "x.jsonl"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "sees no CUDA GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.interpreter
def test_a_case_is_timed_checked_and_held_against_floor_read_and_dense(monkeypatch: pytest.MonkeyPatch):
    """run_case with clocks made up: 2 × the floor in every format."""
    machine = gmm.roofline.Machine("fake", 1e9, {"int8": 1e10, "bf16": 1e10})
    case = gmm.GmmCase("tiny", 32, 64, (3, 0, 2))
    names = []

    def interleave(rivals, device, **_):
        names.extend(r.name for r in rivals)
        for rival in rivals:
            for i, call in enumerate(rival.calls):
                rival.check(i, call())
        return [timing.Timing(r.name, (1e-3,) * 5, "fake") for r in rivals]

    monkeypatch.setattr(gmm.timing, "interleave", interleave)
    monkeypatch.setattr(common, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(gmm, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 4096)
    monkeypatch.setattr(gmm, "pick", lambda problem, gpu: TileConfig(16, 32, 32))
    monkeypatch.setattr(gmm, "DENSE", 32)
    lines = gmm.run_case(case, ["int8", "bf16"], machine, 1.0)
    assert names == ["int8", "bf16", "read int8", "read bf16"]
    assert [ln["format"] for ln in lines] == ["int8", "bf16"]
    assert lines[0]["of_read"] == pytest.approx(1.0)
    assert lines[0]["of_floor"] == pytest.approx(lines[0]["floor_us"] / 1000)
    monkeypatch.setattr(common.lowgmm, "gmm", lambda x, w, *_, **__: torch.zeros(5, 32, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="budget"):
        gmm.run_case(case, ["int8", "bf16"], machine, 1.0)


def test_the_table_of_limits_is_the_one_that_the_result_file_gives():
    path = BENCH / "results" / "gmm_h200.jsonl"
    text = gmm.DOCUMENT.read_text(encoding="utf-8")
    head, lines = common.read_lines(path)
    assert text == common.rendered(text, gmm.render(path.name, head, lines), "gmm.py"), (
        "run python bench/gmm.py --render bench/results/…"
    )
    lines[0]["us"] *= 2
    assert text != common.rendered(text, gmm.render(path.name, head, lines), "gmm.py")


# launch modes

LAUNCHES_FILE = BENCH / "results" / "launch_modes_h200.jsonl"


def test_the_documents_table_is_the_one_that_the_result_file_gives():
    text = launch_modes.DOCUMENT.read_text(encoding="utf-8")
    part = launch_modes.render(LAUNCHES_FILE.name, *common.read_lines(LAUNCHES_FILE))
    assert text == common.rendered(text, part, "launch_modes.py"), (
        "run python bench/launch_modes.py --render bench/results/…"
    )
    assert LAUNCHES_FILE.with_suffix(".svg").read_text(encoding="utf-8") == launch_modes.picture(
        *common.read_lines(LAUNCHES_FILE)
    )


def test_a_figure_changed_by_hand_would_be_noticed():
    text = launch_modes.DOCUMENT.read_text(encoding="utf-8")
    head, lines = common.read_lines(LAUNCHES_FILE)
    lines[0]["us"] *= 2
    assert text != common.rendered(text, launch_modes.render(LAUNCHES_FILE.name, head, lines), "launch_modes.py")


def test_the_table_shows_balancing_as_shares_of_the_roof():
    """A toy machine of 1 TB/s, on which the skewed case's bytes take as long as `floor` says."""
    env = {"device_name": "toy", "torch": "1", "triton": "2", "commit": "abc"}
    head = {"environment": env, "read_bandwidth": 1e12, "dense_rates": {"int8": 1e18}}
    case = launch_modes.LAUNCH_CASES["article-skewed"]
    load = gmm.roofline.Load(case.N, case.K, case.sizes, "int8")
    floor = gmm.roofline.traffic(load).total / 1e12 * 1e6
    times = {"expert": floor / 0.43, "queue": floor / 0.78, "grid": floor / 0.5}
    lines = [{"case": case.name, "format": "int8", "launch": n, "us": us} for n, us in times.items()]
    text = launch_modes.render("x.jsonl", head, lines)
    assert f"| {times['expert']:.0f} (43%) | {times['grid']:.0f} (50%) | **{times['queue']:.0f} (78%)** |" in text
    assert "int8 from 43% (`expert`) to 78% (`queue`)" in text


def test_every_launch_is_compared_where_it_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch_modes, "CUDA", torch.device("cpu"))
    for case, format, by in launch_modes.work(list(launch_modes.LAUNCH_CASES), ["int8", "fp8", "bf16"]):
        assert set(by) >= set(launch_modes.ORDER) - {launch_modes.WARPS}, f"{case.name} {format}"
        assert len({str(c) for c in by.values()}) == len(by)


def test_compared_sizes_differ_only_in_skew():
    groups: dict[tuple[int, int], list[str]] = {}
    for name, case in launch_modes.LAUNCH_CASES.items():
        groups.setdefault((case.E, case.M), []).append(name)
    assert groups[32, 2048] == ["article-balanced", "article-skewed", "article-zipf"]
    assert groups[32, 32 * 512] == ["balanced-512", "zipf-512"]
