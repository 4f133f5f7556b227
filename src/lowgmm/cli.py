"""The ``lowgmm`` command."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowgmm import environment, roofline
from lowgmm.formats import FORMATS
from lowgmm.shapes import DeviceError, DtypeError, ShapeError, UnsupportedError
from lowgmm.workloads import MOE_SHAPES

if TYPE_CHECKING:
    from lowgmm.tile_config import Problem

PASSED, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: all bars hold; a bar or a check failed; the command could not be carried out as given (argparse's own
code); Ctrl-C (a shell's own code)."""

FEW_TOKENS = 4096
"""Below this the demo's perplexity bars are within the sampling noise."""

OVERVIEW = """\
Low-precision grouped matrix multiplication for mixture-of-experts inference.

  lowgmm demo                     a real MoE model in INT8 and FP8: accuracy against FP32, speed; exit 0 if it holds
  lowgmm explain --format int8    why one grouped matmul takes the time it takes, and what would make it faster
  lowgmm tune --model olmoe-1b-7b measure tiles for gmm with a model's sizes on this GPU, to be used from then on
  lowgmm info                     versions, the GPU, and what multiplies on this CPU and why
"""

DEMO = """\
Run held-out text through the packaged mixture-of-experts model in FP32, then with its experts in INT8 and in FP8, and
compare: perplexity, route match (chosen experts equal to FP32's), cosine of the logits, a continuation of a prompt.
Then time one grouped matmul as a loop of 16-bit matmuls, as a 16-bit GMM and as an INT8 GMM, each checked first.

Exit code: 0 if the accuracy bars hold, 1 if one does not (it is named), 2 if the demo could not run.
"""

EXPLAIN = """\
Explain one grouped matmul Y[S_e] = X[S_e] @ W[e].T with W [experts, n, k]: its arithmetic intensity by rows per
expert, which limit holds (memory or arithmetic), the floor it cannot beat, the tile configuration the library picks,
and what to change.

  lowgmm explain                                       the default shape on this machine (measures it, some seconds)
  lowgmm explain --machine h200 --format bf16          the same shape on an H200, without one
  lowgmm explain --experts 4 --rows 500,2,2,2          uneven experts
  lowgmm explain --machine h200 --measured-us 210      where a measured time stands
"""

TUNE = """\
Measure tile configurations on this machine's GPU and store the winners. Each candidate is first checked against the
fp64 oracle and then timed in turns with the others, on cold weights. From then on gmm uses the winners, in every
process of yours, also in layers of 4-bit weights (others choose their own tiles, by size); without tuning, a measured
table (on an H200) or a cost model chooses, which is usually within a few percent for 8 and 16 bits.

Sizes are tuned in buckets (rows per expert, rounded up to 2^n or 3*2^n), so new numbers of tokens need no tuning.
Results are stored after each bucket, so the command can be interrupted. They hold for this GPU and these versions of
lowgmm and Triton; what is stored for others is ignored, with a warning. LOWGMM_CACHE names the folder (default: lowgmm
in the user's cache directory). Delete the file to forget everything.

  lowgmm tune --model qwen3-30b-a3b                      both matmuls of its expert layer, INT8, 1 to 8192 tokens
  lowgmm tune --model article --format fp8 --tokens 1,64,1024
  lowgmm tune --experts 64 --n 2048 --k 4096 --rows 1,16,256
  lowgmm tune --model article --dry-run                  what would be tried and what is expected; needs no GPU
"""

INFO = """\
Say what lowgmm runs on here: versions, threads, the GPU, and for the CPU whether the native code was built, which
instruction set it chose and why, and what serves in its place.

  lowgmm info
  LOWGMM_CPU_ISA=avx2 lowgmm info     forces an instruction set; LOWGMM_NATIVE=0 turns the native code off
"""

MOST = 1 << 31
"""No size or count of ours reaches this."""

TUNE_TOKENS = tuple(1 << i for i in range(14))
"""1 to 8192."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. ``argv`` is ``sys.argv[1:]`` by default; usage errors exit with
    2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # µ and × on a terminal that has them; no error on one that has not
            stream.reconfigure(errors="replace")
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return UNUSABLE
    try:
        code = {"demo": _demo, "explain": _explain, "tune": _tune, "info": _info}[args.command](args, args.parser)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # whoever reads us, `head` say, has enough; what is still buffered must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PASSED
    except KeyboardInterrupt:
        print(f"lowgmm {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ShapeError, DtypeError, DeviceError, UnsupportedError, ImportError, OSError) as error:
        print(f"lowgmm {args.command}: error: {error}", file=sys.stderr)
        return UNUSABLE


def build_parser() -> argparse.ArgumentParser:
    """The parser, with one subparser per command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("lowgmm", description=OVERVIEW, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"lowgmm {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    demo = commands.add_parser("demo", help="accuracy and speed of a real model", description=DEMO, formatter_class=raw)
    demo.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face MoE checkpoint; default: the packaged one"
    )
    demo.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes the GPU if there is one"
    )
    demo.add_argument(
        "--tokens",
        type=_positive,
        default=None,
        metavar="N",
        help="held-out tokens to read (32768); below 4096 the perplexity bars are noise",
    )
    demo.add_argument("--prompt", default=None, metavar="TEXT", help="text for the models to continue")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write every figure and the environment here")

    explain = commands.add_parser("explain", help="bound, floor and advice", description=EXPLAIN, formatter_class=raw)
    explain.add_argument("--experts", type=_positive, default=64, metavar="E", help="experts (64)")
    explain.add_argument("--n", type=_positive, default=2048, metavar="N", help="output channels (2048)")
    explain.add_argument("--k", type=_positive, default=4096, metavar="K", help="reduction length (4096)")
    explain.add_argument(
        "--rows",
        type=_rows,
        default=16,
        metavar="M",
        help="rows per expert: one number, or one per expert with commas (16)",
    )
    explain.add_argument(
        "--format", choices=tuple(roofline.OPERAND_BYTES), default="int8", help="of input and weights (int8)"
    )
    explain.add_argument(
        "--machine",
        choices=("here", "h200"),
        default="here",
        help="measure this machine, or use an H200's recorded rates",
    )
    explain.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="what --machine here measures"
    )
    explain.add_argument("--measured-us", type=_positive_float, metavar="US", help="a measured time, in microseconds")
    explain.add_argument(
        "--config", metavar="TILES", help="a tile configuration to judge, for example 64x128x128-swap-grid-4w3s"
    )

    info = commands.add_parser("info", help="what runs here, and why", description=INFO, formatter_class=raw)

    tune = commands.add_parser("tune", help="measure configurations here", description=TUNE, formatter_class=raw)
    what = tune.add_argument_group("what to tune: a model, or one matmul")
    what.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MOE_SHAPES)}")
    what.add_argument("--tokens", type=_numbers, metavar="T,…", help="with --model: numbers of tokens (1,2,4,…,8192)")
    for name, text in (("experts", "experts"), ("n", "output channels"), ("k", "reduction length")):
        what.add_argument(f"--{name}", type=_positive, metavar=name.upper()[0], help=text)
    what.add_argument("--rows", type=_numbers, metavar="M,…", help="rows per expert (1,4,16,64,256,1024)")
    what.add_argument(
        "--format",
        type=_formats,
        default=("int8",),
        metavar="F,…",
        help="int8, fp8, int4, int4_g128, …, bf16, or several (int8)",
    )
    tune.add_argument("--seconds", type=_positive_float, default=1.0, help="of measuring per bucket (1)")
    tune.add_argument("--limit", type=_positive_float, default=math.inf, help="seconds after which no bucket starts")
    tune.add_argument("--dry-run", action="store_true", help="list buckets, candidates and predicted times only")
    for command in (demo, explain, info, tune):
        command.set_defaults(parser=command)  # whose usage an error shows
    return parser


def _demo(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from lowgmm import demo
    from lowgmm.timing import CheckError

    device = _device(args.device, parser)
    if args.json is not None:
        _check_target(args.json, parser)
    if args.prompt is not None and (not args.prompt.strip() or any("\ud800" <= c <= "\udfff" for c in args.prompt)):
        parser.error("--prompt: expected some text, in UTF-8, for the models to continue")
    options = demo.Options(
        model=args.model,
        device=device,
        tokens=args.tokens or demo.Options.tokens,
        prompt=args.prompt if args.prompt is not None else demo.PROMPT,
    )
    try:
        report = demo.run(options)
    except demo.DemoError as error:
        print(f"lowgmm demo: error: {error}", file=sys.stderr)
        return UNUSABLE
    except CheckError as error:
        print(f"lowgmm demo: check failed: {error}", file=sys.stderr)
        return FAILED
    if args.json is not None:
        environment.write_json(args.json, report)
    for line in report["failed_bars"]:
        print(f"lowgmm demo: accuracy bar failed: {line}", file=sys.stderr)
    if report["failed_bars"] and options.tokens < FEW_TOKENS:
        print(
            f"lowgmm demo: {options.tokens} tokens are few: perplexity changes of a few tenths of a percent are noise "
            f"below {FEW_TOKENS}.",
            file=sys.stderr,
        )
    return PASSED if report["passed"] else FAILED


def _explain(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from lowgmm import gpu, timing

    facts: gpu.Gpu | None = None
    if args.machine == "h200":
        if args.device != "auto":
            parser.error(f"--device {args.device}: --machine h200 takes recorded rates and measures no device")
        machine, facts = roofline.H200, gpu.H200
    else:
        device = _device(args.device, parser)
        machine = timing.measure_machine(device, tuple(dict.fromkeys((args.format, "bf16", "int8", "fp8"))))
        facts = gpu.describe(device) if device.type == "cuda" else None
        if facts is None and args.config is not None:
            parser.error("--config: a tile configuration is for a GPU; use --machine h200, or leave it out")
    text = roofline.explain(
        args.experts,
        args.n,
        args.k,
        args.rows,
        args.format,
        machine=machine,
        measured_s=None if args.measured_us is None else args.measured_us * 1e-6,
        config=args.config,
        gpu=facts,
    )
    print(text)
    return PASSED


def _tune(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from lowgmm import gpu, timing, tuner
    from lowgmm.tune import bucket, candidates, pick, predict

    problems = list(dict.fromkeys(bucket(p) for p in _problems(args, parser)))
    available = torch.cuda.is_available()
    if args.dry_run:
        facts = gpu.describe(torch.device("cuda")) if available else gpu.H200
        for problem in problems:
            chosen = pick(problem, facts)
            print(f"{problem.key} on {facts.name}: {chosen} is in use")
            for config in sorted(candidates(problem, facts), key=lambda c: predict(problem, c, facts)):
                print(f"  {predict(problem, config, facts) * 1e6:10.1f} µs predicted  {config}")
        return PASSED
    if not available:
        print(
            "lowgmm tune: error: torch sees no GPU here, and tuning measures GPU kernels. --dry-run shows what would "
            "be tried; on a CPU there is nothing to tune.",
            file=sys.stderr,
        )
        return UNUSABLE
    with timing.progress_bar("tuning", len(problems)) as advance:

        def report(result: tuner.Tuned) -> None:
            advance(1)
            us = result.seconds[result.config] * 1e6
            note = f", {result.gain:.2f} x the predicted {result.predicted}" if result.gain > 1 else ", as predicted"
            wrong = f"; {len(result.rejected)} rejected" if result.rejected else ""
            print(f"{result.problem.key}: {result.config} {us:.1f} µs{note}{wrong}", flush=True)
            for config, why in result.rejected.items():
                print(f"lowgmm tune: {config} is not used: {why}", file=sys.stderr)

        try:
            done = tuner.tune(problems, seconds=args.seconds, limit=args.limit, progress=report)
        except timing.CheckError as error:
            print(f"lowgmm tune: check failed: {error}", file=sys.stderr)
            return FAILED
        except OSError as error:
            print(f"lowgmm tune: error: results cannot be stored: {error}; set LOWGMM_CACHE", file=sys.stderr)
            return UNUSABLE
    print(f"{len(done)} of {len(problems)} buckets stored in {tuner.stored_at(torch.device('cuda'))}")
    return PASSED


def _problems(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[Problem]:
    from lowgmm.tile_config import Problem

    if args.model is not None:
        if args.model not in MOE_SHAPES:
            parser.error(f"--model {args.model}: expected one of {', '.join(MOE_SHAPES)}; or --experts, --n and --k")
        if not args.experts is args.n is args.k is args.rows is None:
            parser.error("--model names the shape: leave --experts, --n, --k and --rows out, or leave --model out")
        shape = MOE_SHAPES[args.model]
        sizes = [(shape.E, t * shape.A, *nk) for nk in shape.gemms().values() for t in args.tokens or TUNE_TOKENS]
    else:
        if None in (args.experts, args.n, args.k) or args.tokens is not None:
            parser.error("expected --model [--tokens], or --experts, --n and --k [--rows]")
        rows = args.rows or (1, 4, 16, 64, 256, 1024)
        sizes = [(args.experts, m * args.experts, args.n, args.k) for m in rows]
    for format in args.format:
        for E, M, N, K in sizes:
            yield Problem.of(E, M, N, K, format)


def _info(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from lowgmm import info

    for name, value in info.collect().items():
        print(f"{name:<14} {value}")
    return PASSED


def _device(name: str, parser: argparse.ArgumentParser) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        parser.error("--device cuda: torch sees no GPU here; use --device cpu, or install a CUDA build of torch")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def _check_target(path: Path, parser: argparse.ArgumentParser) -> None:
    """Refuse a --json target before any work is done for it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        parser.error(f"--json {path}: the folder {folder} does not exist")
    if path.exists() and not path.is_file():
        parser.error(f"--json {path}: exists and is not a regular file")
    if not os.access(folder, os.W_OK):
        parser.error(f"--json {path}: the folder {folder} cannot be written to")


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number below 2^31")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _rows(text: str) -> int | tuple[int, ...]:
    parts = text.split(",")
    if not all(p.isdecimal() and int(p) < MOST for p in parts) or not sum(map(int, parts)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of rows below 2^31, or one per expert with commas, not all 0"
        )
    values = tuple(map(int, parts))
    return values if len(values) > 1 else values[0]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _formats(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    known = (*FORMATS, "bf16")
    if unknown := [p for p in parts if p not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return parts


def _version() -> str:
    try:
        return metadata.version("lowgmm")
    except metadata.PackageNotFoundError:  # run from a source tree without being installed
        return "(not installed)"
