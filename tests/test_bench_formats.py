"""The tables of 4-bit weights and of accuracy, on lines made up here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import common
import fidelity
import int4
import pytest

ENVIRONMENT = {"device_name": "toy", "torch": "1", "triton": "2", "commit": "abc"}


def int4_lines(*us: float) -> list[dict[str, Any]]:
    """One case in every format, and the read."""
    columns = [*int4.FORMATS, "read"]
    return [{"case": "a, 1", "format": f, "us": t} for f, t in zip(columns, us, strict=True)]


def test_4_bit_weights_are_held_against_int8():
    head = {"environment": ENVIRONMENT}
    lines = int4_lines(100, 50, 80, 100, 125, 40.4)
    text = int4.render("x.jsonl", head, [*lines, *lines])
    assert text.splitlines()[2].startswith("| case, tokens per expert | int8 | `int4` | `int4_g128` | `int4_g64` | ")
    row = "| a, 1 | 100 | 50 (2.00×) | 80 (1.25×) | 100 (1.00×) | 125 (0.80×) | 40 |"
    assert text.splitlines()[4:] == [row, row]
    slower = int4_lines(100, 50, 80, 100, 125, 80)
    assert int4.render("x.jsonl", head, [*lines, *slower]) != text


@pytest.mark.parametrize("wrong", [{"format": "int8"}, {"case": "b, 1"}], ids=str)
def test_lines_of_another_format_or_case_are_no_row(wrong: dict[str, str]):
    lines = int4_lines(*range(1, 7))
    lines[2] |= wrong
    with pytest.raises(AssertionError):
        int4.render("x.jsonl", {"environment": ENVIRONMENT}, lines)


def fidelity_lines(**of_first: float) -> list[dict[str, Any]]:
    figures = {"perplexity_change": -0.00013, "experts_matched": 0.9976, "sets_matched": 0.99}
    figures |= {"cosine_mean": 0.99994, "cosine_worst": 0.968}
    lines = [{"name": name, **figures} for name in fidelity.NAMES.values()]
    lines[0] |= of_first
    return lines


def test_accuracy_is_shown_as_it_was_found():
    head = {"environment": ENVIRONMENT, "tokens": 32768}
    text = fidelity.render("x.jsonl", head, fidelity_lines())
    assert text.startswith("toy, torch 1, Triton 2, commit abc, `bench/results/x.jsonl`; 32,768 held-out tokens.")
    rows = text.splitlines()[4:]
    assert rows[0] == "| INT8 | −0.013 % | 99.76 % | 99.00 % | 0.99994 (0.968) |"
    assert [r.split("|")[1].strip() for r in rows] == [*fidelity.NAMES]
    for key in fidelity_lines()[0].keys() - {"name"}:
        assert fidelity.render("x.jsonl", head, fidelity_lines(**{key: 0.5})) != text, key


def test_accuracy_of_other_or_fewer_formats_is_no_table():
    head, lines = {"environment": ENVIRONMENT, "tokens": 1}, fidelity_lines()
    for wrong, error in ((lines[::-1], AssertionError), (lines[:-1], ValueError), ([*lines, lines[0]], ValueError)):
        with pytest.raises(error):
            fidelity.render("x.jsonl", head, wrong)


@pytest.mark.parametrize("script", [int4, fidelity])
def test_a_table_is_written_between_its_marks(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the command line, into a copy of the document that the script names."""
    copy, lines = tmp_path / script.DOCUMENT.name, int4_lines(*range(1, 7)) if script is int4 else fidelity_lines()
    copy.write_text(script.DOCUMENT.read_text(encoding="utf-8"), encoding="utf-8")
    results = tmp_path / "made_up.jsonl"
    common.write_lines(results, [{"environment": ENVIRONMENT, "tokens": 1}, *lines])
    monkeypatch.setattr(script, "DOCUMENT", copy)
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--render", str(results)])
    script.main()
    part = script.render(results.name, *common.read_lines(results))
    assert part in copy.read_text(encoding="utf-8")


@pytest.mark.parametrize("script", [int4, fidelity])
def test_the_documents_table_is_the_one_that_the_result_file_gives(script: Any):
    file = Path(common.__file__).parent / "results" / f"{script.__name__}_h200.jsonl"
    text, (head, lines) = script.DOCUMENT.read_text(encoding="utf-8"), common.read_lines(file)
    name = Path(script.__file__).name
    assert text == common.rendered(text, script.render(file.name, head, lines), name), (
        f"run python bench/{name} --render"
    )
    lines[0] = {k: 0.5 if isinstance(v, float) else v for k, v in lines[0].items()}
    assert text != common.rendered(text, script.render(file.name, head, lines), name)
