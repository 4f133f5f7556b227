"""The ``lowgmm`` command."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from lowgmm import environment, roofline
from lowgmm.shapes import DeviceError, DtypeError, ShapeError, UnsupportedError

PASSED, FAILED, UNUSABLE = 0, 1, 2
"""Exit codes: all bars hold; a bar or a check failed; the command could not be carried out as given (argparse's own
code)."""

FEW_TOKENS = 4096
"""Below this the demo's perplexity bars are within the sampling noise."""

OVERVIEW = """\
Low-precision grouped matrix multiplication for mixture-of-experts inference.

  lowgmm demo                     a real MoE model in INT8 and FP8: accuracy against FP32, speed; exit 0 if it holds
  lowgmm explain --format int8    why one grouped matmul takes the time it takes, and what would make it faster
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. ``argv`` is ``sys.argv[1:]`` by default; usage errors exit with
    2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return UNUSABLE
    try:
        return _demo(args, parser) if args.command == "demo" else _explain(args, parser)
    except (ShapeError, DtypeError, DeviceError, UnsupportedError, ImportError) as error:
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
    return parser


def _demo(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from lowgmm import demo
    from lowgmm.timing import CheckError

    device = _device(args.device, parser)
    if args.json is not None:
        _check_target(args.json, parser)
    if args.prompt is not None and not args.prompt.strip():
        parser.error("--prompt: expected some text for the models to continue")
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
    from lowgmm import gpu, timing, tune

    facts: gpu.Gpu | None = None
    if args.machine == "h200":
        machine, facts = roofline.H200, gpu.H200
    else:
        device = _device(args.device, parser)
        machine = timing.measure_machine(device, tuple(dict.fromkeys((args.format, "bf16", "int8", "fp8"))))
        facts = gpu.describe(device) if device.type == "cuda" else None
    text = roofline.explain(
        args.experts,
        args.n,
        args.k,
        args.rows,
        args.format,
        machine=machine,
        measured_s=None if args.measured_us is None else args.measured_us * 1e-6,
        config=None if args.config is None else tune.TileConfig.parse(args.config),
        gpu=facts,
    )
    print(text)
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
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
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
    if not all(p.isdecimal() for p in parts) or not sum(map(int, parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows, or one per expert with commas, not all 0")
    values = tuple(map(int, parts))
    return values if len(values) > 1 else values[0]


def _version() -> str:
    try:
        return metadata.version("lowgmm")
    except metadata.PackageNotFoundError:  # run from a source tree without being installed
        return "(not installed)"
