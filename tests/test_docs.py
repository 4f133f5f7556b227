"""The documents: their Python runs, their links lead somewhere, and their table of files is the package's."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

import lowgmm

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
names = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def dead_links(document: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", document.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target and not (document.parent / target).exists()]


def undocumented(readme: str, package: Path) -> set[str]:
    """Modules missing from the README's table of files, and rows of that table without a file."""
    rows = set(re.findall(r"^\| `([\w/]+(?:\.py|/))` \|", readme, flags=re.MULTILINE))
    files = {path.name for path in package.glob("*.py")} | {f"{path.parent.name}/" for path in package.glob("*/*")}
    return rows ^ (files - {"__init__.py", "__main__.py", "__pycache__/"})


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if python_blocks(path.read_text(encoding="utf-8"))])
def test_python_blocks_run(document: Path):
    """All blocks of a document run in order, in one namespace, as a reader would paste them."""
    namespace: dict[str, object] = {}
    for block in python_blocks(document.read_text(encoding="utf-8")):
        exec(compile(block, str(document), "exec"), namespace)


@names
def test_links_lead_somewhere(document: Path):
    assert dead_links(document) == []


def test_readme_lists_every_module():
    assert undocumented((ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "src" / "lowgmm") == set()


def test_readme_has_the_signature_of_gmm():
    shown = re.search(r"^    gmm\((.*?)\)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert shown is not None
    parameters = inspect.signature(lowgmm.gmm).parameters.values()
    starred = [p.kind is p.KEYWORD_ONLY for p in parameters].index(True)
    written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace("'", '"') for p in parameters]
    written.insert(starred, "*")
    assert re.split(r",\s*", shown[1]) == written


def test_readme_quotes_the_recorded_demo():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "bench" / "results" / "demo_h200.json").read_text())
    for row in record["timing"]["rows"]:
        speedup = f"{row['speedup']:.{1 if row['speedup'] > 2 else 2}f}×"
        assert f"| {row['timing']['median_s'] * 1e6:.0f} | {speedup} | {row['gb_per_s'] / 1e3:.1f} TB/s |" in readme
    assert record["environment"]["commit"][:7] in readme


def test_the_checks_can_fail(tmp_path: Path):
    (tmp_path / "a.py").touch()
    assert undocumented("| `b.py` | what b does |", tmp_path) == {"a.py", "b.py"}
    document = tmp_path / "a.md"
    document.write_text("[gone](gone.md#part) [here](a.py) [web](https://example.org)", encoding="utf-8")
    assert dead_links(document) == ["gone.md"]
    assert python_blocks("text\n```python\nx = 1\n```\n```sh\nls\n```\n") == ["x = 1\n"]
