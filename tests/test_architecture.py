"""The structure that the code promises: which module may import which, what importing costs, and how long files get.

Each rule is a function from files to a list of violations, so that a synthetic violation can show that it bites.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lowgmm"

# What each of these may import of the package; "" is the package itself, and a folder's name stands for all its files.
MAY_IMPORT = {
    "shapes": set[str](),  # the bottom: the dimension key and the errors, for everybody
    "formats": {"shapes"},
    "routing": {"shapes"},
    "quant": {"formats", "shapes"},
    "layer": {"shapes"},
    "reference": {"formats", "layer", "shapes"},
    "integrations": {"", "api", "module", "formats", "shapes", "integrations"},
}
# The oracle and the leaves stay readable and run anywhere: of other packages they may import torch alone.
ONLY_TORCH = {"shapes", "formats", "layer", "routing", "quant", "reference"}
# The backends sit below the operators that launch them.
BACKENDS = {"kernels", "cpu"}
NOT_FROM_BACKENDS = {"", "api", "ops", "ops_layer", "module", "cli", "integrations", "evaluate"}
# Optional at run time, or slow to import: never loaded by `import lowgmm`.
NOT_ON_IMPORT = {"triton", "transformers", "tokenizers", "safetensors", "tqdm", "matplotlib", "scipy", "pandas", "vllm"}

MAX_PUBLIC_NAMES = 12
MAX_LINES, MAX_KERNEL_LINES = 400, 450

# A user's own folders, and hosts of package registries: true of one machine or network, not of the project.
PRIVATE = re.compile(
    r"(?<![\w.~$}])/(?:home|root|work|opt|tmp|mnt|Users)/\w"
    r"|(?:pypi|pythonhosted|npmjs|deb\.debian|crates)\.(?:org|com|io)\b"
)


@dataclass(frozen=True)
class Import:
    """One imported module, as it was written in `importer`."""

    importer: str  # module path inside the package: "api", "kernels.tiles", "" for the package itself
    target: str  # full name: "torch.nn", "lowgmm.formats"
    lazy: bool  # inside a function, or for the type checker only

    @property
    def inside(self) -> str | None:
        """The module path inside the package ("" for the package itself), or None for another package."""
        top, _, rest = self.target.partition(".")
        return rest if top == "lowgmm" else None


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    """A file's place in the rules: its folder, or its own name at the top of the package."""
    return module.partition(".")[0]


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    importer = module_name(path, package)
    modules = {module_name(file, package) for file in package.rglob("*.py")}
    here = ["lowgmm", *importer.split(".")] if importer else ["lowgmm"]
    if path.name != "__init__.py":
        here = here[:-1]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for (
                alias
            ) in node.names:  # `from lowgmm import api` imports lowgmm.api; `from lowgmm import gmm` the package
                full = f"{source}.{alias.name}"
                yield Import(importer, full if full.removeprefix("lowgmm.") in modules else source, lazy)
        else:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                lazy = True
            lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, lazy)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), lazy=False)


def package_imports(package: Path) -> list[Import]:
    return [found for path in sorted(package.rglob("*.py")) for found in imports_of(path, package)]


def wrong_directions(package: Path) -> list[str]:
    """Imports that point up, or out of a leaf."""
    wrong = []
    for found in package_imports(package):
        source, inside = layer(found.importer), found.inside
        if inside is None:
            third_party = found.target.partition(".")[0]
            if source in ONLY_TORCH and third_party not in {*sys.stdlib_module_names, "torch"}:
                wrong.append(f"{found.importer} imports {third_party}; it may import torch alone")
            continue
        target = layer(inside)
        if source in MAY_IMPORT and target not in MAY_IMPORT[source]:
            wrong.append(f"{found.importer} imports {found.target}; it may import {sorted(MAY_IMPORT[source])}")
        if source in BACKENDS and target in NOT_FROM_BACKENDS:
            wrong.append(f"{found.importer} imports {found.target}, which lies above it")
        if target == "cli" and source != "__main__":
            wrong.append(f"{found.importer} imports cli, the top of the package")
    return wrong


def cycles(package: Path) -> list[str]:
    """Modules that import themselves by way of others, at any time. A type checker's imports count as well."""
    graph: dict[str, set[str]] = {}
    for found in package_imports(package):
        if found.inside and found.inside != found.importer:
            graph.setdefault(found.importer, set()).add(found.inside)
    found_cycles, done = [], set[str]()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            found_cycles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                walk(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        walk(module, [])
    return found_cycles


def eager_triton(package: Path) -> list[str]:
    """Imports of Triton or of the kernels that run when a module outside kernels/ is imported."""
    return [
        f"{found.importer} imports {found.target} when it is imported itself"
        for found in package_imports(package)
        if not found.lazy
        and layer(found.importer) != "kernels"
        and (layer(found.target) == "triton" or layer(found.inside or "") == "kernels")
    ]


def unseen_work(package: Path) -> list[str]:
    """Of the kernels' host code, what `replay.py` could not note: launches of its own, and work on memory in place."""
    wrong = []
    for path in sorted((package / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                wrong.append(f"{path.name}:{node.lineno} launches by itself, not through replay.launch")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[-1] == "_":
                wrong.append(f"{path.name}:{node.lineno} works in place: {node.func.attr}")
    return wrong


def long_files(root: Path) -> list[str]:
    wrong = []
    folders = [root / folder for folder in ("src", "tests", "bench", "examples")]
    for path in sorted(file for folder in folders for kind in ("*.py", "*.[ch]") for file in folder.rglob(kind)):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = MAX_KERNEL_LINES if path.parent.name == "kernels" else MAX_LINES
        if lines > limit:
            wrong.append(f"{path.relative_to(root)} has {lines} lines, more than {limit}")
    return wrong


def private_text(files: list[Path]) -> list[str]:
    wrong = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and the like
        for number, line in enumerate(text.splitlines(), start=1):
            if match := PRIVATE.search(line):
                wrong.append(f"{path.name}:{number} mentions {match.group()!r}")
    return wrong


def project_files() -> list[Path]:
    """Every file that is or may be committed."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:  # an unpacked archive: no git there
        return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# ------------------------------------------------------------------------------------------- the project as it is


@pytest.mark.parametrize("rule", [wrong_directions, cycles, eager_triton, unseen_work])
def test_package_structure(rule):
    assert rule(PACKAGE) == []


def test_file_lengths():
    assert long_files(ROOT) == []


def test_nothing_private_is_mentioned():
    files = project_files()
    assert ROOT / "pyproject.toml" in files
    assert private_text(files) == []


def public_names(init: Path) -> list[str]:
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{init} has no __all__")


def test_public_names_are_few():
    assert len(public_names(PACKAGE / "__init__.py")) <= MAX_PUBLIC_NAMES


def test_public_names_exist():
    import lowgmm

    assert [name for name in public_names(PACKAGE / "__init__.py") if not hasattr(lowgmm, name)] == []


def test_import_is_light():
    code = "import sys, torch; before = set(sys.modules); import lowgmm; print(*(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "lowgmm" in loaded
    assert loaded & NOT_ON_IMPORT == set()


# ------------------------------------------------------------------------------------------- the rules can fail


def make_package(folder: Path, **sources: str) -> Path:
    for name, source in {"__init__": "", "api": "", "ops": "", "shapes": "", "kernels__tiles": "", **sources}.items():
        path = folder / f"{name.replace('__', '/') if not name.startswith('__') else name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        pytest.param(unseen_work, {"kernels__tiles": "def f():\n    kernel[(1,)](x)"}, id="a launch of its own"),
        pytest.param(unseen_work, {"kernels__tiles": "def f(x):\n    x.zero_()"}, id="work in place"),
        pytest.param(wrong_directions, {"shapes": "from .api import gmm"}, id="a leaf imports the API"),
        pytest.param(wrong_directions, {"shapes": "from lowgmm import api"}, id="a leaf, by an absolute import"),
        pytest.param(wrong_directions, {"shapes": "def f():\n    from . import api"}, id="a leaf, lazily"),
        pytest.param(wrong_directions, {"reference": "import numpy"}, id="the oracle imports more than torch"),
        pytest.param(wrong_directions, {"reference": "from .kernels import tiles"}, id="the oracle imports a kernel"),
        pytest.param(wrong_directions, {"api": "from .cli import main"}, id="the cli is imported"),
        pytest.param(wrong_directions, {"kernels__tiles": "from ..api import gmm"}, id="a kernel imports the API"),
        pytest.param(wrong_directions, {"formats": "import lowgmm"}, id="a leaf imports the package itself"),
        pytest.param(wrong_directions, {"integrations__hf": "from ..ops import x"}, id="an integration digs deeper"),
        pytest.param(cycles, {"api": "from . import ops", "ops": "def f():\n    import lowgmm.api"}, id="a cycle"),
        pytest.param(eager_triton, {"api": "import triton.language as tl"}, id="Triton is imported eagerly"),
        pytest.param(eager_triton, {"api": "try:\n    import triton\nexcept ImportError: ..."}, id="or in a try"),
        pytest.param(eager_triton, {"api": "from .kernels import tiles"}, id="a kernel is imported eagerly"),
    ],
)
def test_a_violation_is_found(rule, sources: dict[str, str], tmp_path: Path):
    assert rule(make_package(tmp_path)) == []
    assert len(rule(make_package(tmp_path, **sources))) == 1


def test_lazy_and_type_checking_imports_are_allowed(tmp_path: Path):
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton\ndef f():\n    import triton"
    assert eager_triton(make_package(tmp_path, api=source)) == []


def test_a_long_file_is_found(tmp_path: Path):
    kernels = tmp_path / "src" / "kernels"
    kernels.mkdir(parents=True)
    limits = {
        tmp_path / "src" / "a.py": MAX_LINES,
        kernels / "b.py": MAX_KERNEL_LINES,
        tmp_path / "src" / "c.c": MAX_LINES,
    }
    for path, limit in limits.items():
        path.write_text("x\n" * limit, encoding="utf-8")
        assert long_files(tmp_path) == []
        path.write_text("x\n" * (limit + 1), encoding="utf-8")
        assert len(long_files(tmp_path)) == 1
        path.unlink()


@pytest.mark.parametrize("text", ["see {}home{}me/notes", "pip install -i https://{}py{}pi.org/simple"])
def test_private_text_is_found(text: str, tmp_path: Path):
    path = tmp_path / "a.txt"
    separator = "/" if "home" in text else ""
    path.write_text(text.format(separator, separator), encoding="utf-8")
    assert len(private_text([path])) == 1
    path.write_text("src/work/a.py, ~/work, https://example.org/tmp/x", encoding="utf-8")
    assert private_text([path]) == []
