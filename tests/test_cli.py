"""The command line: exit codes, messages and files, on a tiny random model."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from lowgmm import cli, demo, evaluate, gpu, native, roofline, speed, tile_config, timing, tune

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

WORDS = ["<end>", *(f"word{i}" for i in range(31))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with an untrained model, its tokenizer, and text to read."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[],
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORDS[0], pad_token=WORDS[0]).save_pretrained(folder)
    rng = random.Random(0)
    (folder / "heldout.txt").write_text(" ".join(rng.choice(WORDS[1:]) for _ in range(700)), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch):
    """A timing table of a size that takes no time, against rates that nobody measured; one thread for tiny matrices."""
    monkeypatch.setattr(speed, "CPU_SHAPE", speed.Shape(E=4, N=64, K=96, rows=4))
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 0)
    rates = {"bf16": 1e10, "int8": 2e10, "fp8": 1e10}
    machine = roofline.Machine("fake", 1e9, rates, is_gpu=False, native_fp8=False)
    monkeypatch.setattr(timing, "measure_machine", lambda *args: machine)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_demo(checkpoint: Path, *more: str) -> int:
    return cli.main(
        ["demo", "--device", "cpu", "--model", str(checkpoint), "--tokens", "512", "--prompt", "word1", *more]
    )


def test_demo_passes_prints_everything_and_writes_every_figure(checkpoint: Path, tmp_path: Path, capsys):
    file = tmp_path / "figures.json"
    assert run_demo(checkpoint, "--json", str(file)) == 0
    out, _ = capsys.readouterr()
    for part in (
        "perplexity",
        "experts=",
        "cosine",
        "worst",
        "near-ties",
        'prompt    "word1"',
        "loop of 4 matmuls, bf16",
    ):
        assert part in out
    for part in (
        "GMM INT8",
        "a CPU gets N and K halved",
        "FP8 is not timed",
        "arithmetic intensity",
        "every accuracy bar",
    ):
        assert part in out
    figures = json.loads(file.read_text())
    assert figures["passed"] is True
    assert figures["failed_bars"] == []
    assert figures["environment"]["torch"] == torch.__version__
    assert [r["name"] for r in figures["accuracy"]["results"]] == ["lowgmm_int8", "lowgmm_fp8"]
    assert set(figures["continuations"]) == {"FP32", "INT8", "FP8"}
    assert [r["format"] for r in figures["timing"]["rows"]] == ["bf16", "fp32", "bf16", "int8"]
    for row in figures["timing"]["rows"]:  # what is printed, not only what it comes from
        line = next(line for line in out.splitlines() if line.startswith(row["label"])).removeprefix(row["label"])
        shown = [f"{row['timing'][name] * 1e3:.3f}" for name in ("median_s", "p20_s", "p80_s")]
        assert line.split()[:4] == [*shown, f"{row['speedup']:.2f}x"]
    assert f"INT8      {figures['int8']}" in out
    assert len(figures["intensity"]) == len(roofline.TABLE_ROWS)
    assert list(tmp_path.iterdir()) == [file]


def test_demo_fails_by_name_when_the_experts_are_broken(checkpoint: Path, tmp_path: Path, capsys, monkeypatch):
    ALL_EXPERTS_FUNCTIONS.register("test_cli_broken", lambda module, hidden, ids, weights: -10 * hidden)
    monkeypatch.setitem(demo.IMPLEMENTATIONS, "INT8", "test_cli_broken")
    file = tmp_path / "figures.json"
    assert run_demo(checkpoint, "--json", str(file)) == 1
    out, err = capsys.readouterr()
    assert "accuracy bar failed: INT8: mean cosine of the logits" in err
    assert "FAILED    INT8: " in out
    assert "FP8:" not in err
    assert json.loads(file.read_text())["passed"] is False


def test_demo_names_the_source_of_a_failure(checkpoint: Path, capsys, monkeypatch):
    monkeypatch.setitem(demo.BARS, "FP8", demo.Bar(1.1, 0.5, 0.5))
    assert run_demo(checkpoint) == 1
    out = capsys.readouterr().out
    assert "FP8 weights only: experts matched" in out
    assert "FP8 activations only: experts matched" in out
    assert "INT8 weights only" not in out


def test_demo_fails_when_a_timed_product_is_wrong(checkpoint: Path, capsys, monkeypatch):
    monkeypatch.setattr(speed.lowgmm, "gmm", lambda x, w, **_: torch.zeros(16, 64, dtype=torch.bfloat16))
    assert run_demo(checkpoint) == 1
    assert "check failed: GMM bf16: output of weight set 0 is wrong" in capsys.readouterr().err


GOOD = {"experts_matched": 0.999, "cosine_mean": 0.9999, "perplexity_change": 0.0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({}, [], id="all hold"),
        pytest.param({"experts_matched": 0.9939}, ["experts matched 99.390 %"], id="route match"),
        pytest.param({"cosine_mean": 0.99949}, ["mean cosine of the logits 0.999490"], id="cosine"),
        pytest.param({"perplexity_change": 0.0011}, ["perplexity +0.110 %"], id="perplexity"),
        pytest.param({"perplexity_change": -0.5}, [], id="a better perplexity is no failure"),
        pytest.param(
            dict.fromkeys(GOOD, math.nan), ["experts matched", "mean cosine", "perplexity"], id="NaN fails all"
        ),
        pytest.param(
            {"experts_matched": 0.994, "cosine_mean": 0.9995, "perplexity_change": 0.001}, [], id="at the bar"
        ),
    ],
)
def test_bars(changes: dict[str, float], named: list[str]):
    rest = {"sets_matched": 1, "cosine_worst": 1, "top1_agreement": 1, "near_ties_among_mismatches": 0, "mismatches": 0}
    found = evaluate.Fidelity(name="x", perplexity=10.0, **{**GOOD, **changes}, **rest)
    failed = demo.failed_bars("INT8", found, demo.BARS["INT8"])
    assert len(failed) == len(named)
    assert all(text in line for text, line in zip(named, failed, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["demo", "--tokens", "0"], "'0' is not a positive whole number", id="tokens"),
        pytest.param(["demo", "--device", "tpu"], "invalid choice: 'tpu'", id="device"),
        pytest.param(["demo", "--json", "no/such/folder/a.json"], "does not exist", id="json folder"),
        pytest.param(["explain", "--rows", "1,-2"], "is not a number of rows", id="rows"),
        pytest.param(["explain", "--rows", "9" * 400], "is not a number of rows below 2^31", id="too many rows"),
        pytest.param(["explain", "--format", "int3"], "invalid choice: 'int3'", id="format"),
        pytest.param(["frobnicate"], "invalid choice: 'frobnicate'", id="command"),
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], message: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--device", "cuda"])
    assert stopped.value.code == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["explain", "--machine", "h200", "--experts", "2", "--rows", "1,2,3"], "rows has 3 numbers", id="rows"
        ),
        pytest.param(["explain", "--machine", "h200", "--config", "big"], "not a tile configuration", id="config"),
        pytest.param(
            ["explain", "--machine", "h200", "--config", "0x64x64-grid-4w2s"], "not a tile configuration", id="no rows"
        ),
        pytest.param(["explain", "--format", "fp32"], "no rate for 'fp32'", id="a rate nobody knows"),
        pytest.param(["demo", "--device", "cpu", "--model", "no/such/model"], "no checkpoint in", id="model"),
    ],
)
def test_impossible_requests_exit_with_2(arguments: list[str], message: str, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_too_little_text(checkpoint: Path, capsys):
    command = ["demo", "--device", "cpu", "--model", str(checkpoint), "--tokens", "100"]
    assert cli.main(command) == 2
    assert "100 tokens of text are less than one window; expected at least 256" in capsys.readouterr().err


def test_missing_transformers_is_explained(checkpoint: Path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    assert run_demo(checkpoint) == 2
    assert 'pip install "transformers>=5.17"' in capsys.readouterr().err


def test_explain(capsys):
    assert cli.main(["explain", "--machine", "h200", "--measured-us", "210"]) == 0
    out = capsys.readouterr().out
    assert "64 experts, N=2048 K=4096, 1024 rows (16 per expert), int8, on NVIDIA H200" in out
    for part in (
        "memory bound",
        "measured  210.0 us",
        f"tiles     {tune.pick(tile_config.Problem(64, 1024, 2048, 4096, torch.int8), gpu.H200)}",
        "what to change",
        "arithmetic intensity",
    ):
        assert part in out


def test_explain_judges_a_given_configuration(capsys):
    assert cli.main(["explain", "--machine", "h200", "--config", "64x64x32-expert-4w3s", "--rows", "4"]) == 0
    out = capsys.readouterr().out
    for part in ("block_k=32 is too small", "mostly padding", "launch='expert' starts only 64 programs"):
        assert part in out


def test_explain_says_that_a_given_configuration_cannot_run(capsys):
    assert cli.main(["explain", "--machine", "h200", "--config", "256x256x256-swap-tma-grid-4w4s"]) == 0
    out = capsys.readouterr().out
    assert "cannot run on NVIDIA H200: 256x256x256-swap-tma-grid-4w4s needs" in out
    assert "predicted" not in out


def test_an_interruption_is_no_traceback(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_info", mock.Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "lowgmm info: interrupted\n"


def test_nobody_has_to_listen():
    """Started with standard output closed, as by some daemons."""
    close = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'lowgmm', 'info'])"
    done = subprocess.run([sys.executable, "-c", close], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_explain_here_warns_of_fp8_without_instructions(capsys):
    assert cli.main(["explain", "--device", "cpu", "--format", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "FP8 is slow here" in out
    assert "none to choose on a CPU" in out


def test_no_command_teaches(capsys):
    assert cli.main([]) == 2
    assert "lowgmm demo" in capsys.readouterr().out


def test_module_and_help_run_without_loading_transformers():
    code = "import sys, lowgmm.cli; assert 'transformers' not in sys.modules and 'triton' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    done = subprocess.run([sys.executable, "-m", "lowgmm", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "explain" in done.stdout


def test_tf32_is_off_inside_and_restored():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with demo.full_fp32():
            assert torch.backends.cuda.matmul.allow_tf32 is False
        assert torch.backends.cuda.matmul.allow_tf32 is True
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_info(capsys):
    """Versions, threads, and what multiplies on this CPU."""
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    chosen = native.library()
    assert ("oneDNN" if chosen is None else f"native {chosen.name} loops") in out


def test_info_says_why_the_native_code_does_not_run(capsys, monkeypatch):
    native._choose.cache_clear()
    native.library.cache_clear()
    monkeypatch.setenv("LOWGMM_NATIVE", "0")
    try:
        assert cli.main(["info"]) == 0
        assert "oneDNN, one call per expert: native code turned off (LOWGMM_NATIVE=0)" in capsys.readouterr().out
    finally:
        native._choose.cache_clear()
        native.library.cache_clear()
