"""Tests of ``kernels/hopper_layer.py``'s protocol, by the model of it in hopper_model.py."""

from __future__ import annotations

from typing import Any

import pytest

from hopper_model import REQUANTISE, UP, Barrier, DeadlockError, Program, Warp, again, draw, run


@pytest.mark.parametrize("width", [64, 128, 256])
def test_everything_ends_and_nobody_reads_too_early(width: int) -> None:
    for seed in range(200):
        layer, r = draw(seed, width)
        programs = r.choice([1, 2, 5, 9])
        run(
            layer,
            r,
            programs,
            r.choice([1, 2, programs]),
            r.choice([1, 2, 4]),
            r.choice([2, 4] if width == 64 else [2, 3, 4]),
        )
        tiles = sum(kind != REQUANTISE for kind, _ in layer.tasks)
        shared = sum(kind == UP for kind, _ in layer.tasks) if width == 128 else 0
        assert layer.stored == (tiles if width == 64 else 2 * tiles - shared)
        assert layer.drawn == len(layer.tasks) + programs


@pytest.mark.parametrize("width", [64, 128])
def test_one_token(width: int) -> None:
    for seed in range(200):
        layer, r = draw(seed, width, direct=True)
        programs = r.choice([1, 2, 5, 9])
        stages = r.choice([2, 4] if width == 64 else [2, 3, 4])
        run(layer, r, programs, r.choice([1, 2, programs]), r.choice([1, 2, 4]), stages)
        assert layer.drawn == len(layer.tasks) + programs
        assert layer.ready == [0] * len(layer.ready)
        assert set(layer.left.values()) == {2 * layer.downs}
        assert not any(layer.arrived.values())
        halves = range(1 if width == 64 else 2)
        assert sorted(layer.sums) == [(column, half) for column in range(layer.downs) for half in halves]


def twice(seeds: int) -> None:
    """One token's layer, and once more with the counters as they were left."""
    for seed in range(seeds):
        layer, r = draw(seed, 128, direct=True)
        for one in (layer, again(layer)):
            run(one, r, 3, 3, 2, 3)
            assert len(one.sums) == 2 * one.downs, "some columns were not summed once"


def test_one_token_after_the_other() -> None:
    twice(30)


def test_a_sum_that_comes_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a slot's output were counted before it is written."""
    write, finish = Program.write, Program.finish

    def swapped(self: Program, ticket: int, half: int) -> Warp:
        yield from finish(self, ticket, half)
        yield from write(self, ticket, half)

    monkeypatch.setattr(Program, "write", swapped)
    monkeypatch.setattr(Program, "finish", lambda *args: iter(()))
    with pytest.raises(AssertionError, match="summed before it was complete"):
        twice(30)


def test_a_count_of_one_slot_less_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a slot that has an expert is taken for one that has none."""
    finish = Program.finish

    def hasty(self: Program, ticket: int, half: int) -> Warp:
        place = (self.layer.column(ticket), half)
        if len(self.layer.ready) > 1 and self.layer.arrived.get(place, 0) == len(self.layer.ready) - 2:
            self.layer.arrived[place] += 1
        return finish(self, ticket, half)

    monkeypatch.setattr(Program, "finish", hasty)
    with pytest.raises(AssertionError, match="summed before it was complete"):
        twice(30)


def test_a_slot_without_an_expert_that_is_waited_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Program.finish

    def patient(self: Program, ticket: int, half: int) -> Warp:
        self.layer.arrived.setdefault((self.layer.column(ticket), half), -1)
        return finish(self, ticket, half)

    monkeypatch.setattr(Program, "finish", patient)
    with pytest.raises(AssertionError, match="not summed once"):
        twice(30)


def test_a_counter_that_is_not_reset_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch would sum too early, or never."""
    monkeypatch.setattr(Program, "reset", lambda self, place: None)
    with pytest.raises(AssertionError, match=r"not summed once|summed before"):
        twice(30)


def test_a_single_chunk_of_h_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the two warpgroups had one chunk instead of two, one would overwrite what the other still multiplies."""
    multiply = Program.multiply_row

    def squeezed(self: Program, ticket: int, steps: int, step: int, chunks: int, half: int) -> Warp:
        class Single(list[object]):
            def __setitem__(self, at: Any, value: Any) -> None:
                list.__setitem__(self, at % 2, value)
                list.__setitem__(self, at % 2 + 2, value)

        if not isinstance(self.chunks, Single):
            self.chunks = Single(self.chunks)
        yield from multiply(self, ticket, steps, step, chunks, half)

    monkeypatch.setattr(Program, "multiply_row", squeezed)
    with pytest.raises(AssertionError, match="a chunk was overwritten"):
        run_all(60, 128, 4, direct=True)


def test_a_late_announcement_is_caught() -> None:
    """If a tile of h were announced only when the next one is multiplied, a program could wait for itself."""
    stuck = 0
    for seed in range(20):
        layer, r = draw(seed, 256, announces=False)
        try:
            run(layer, r, 1, 1, 4, 4)
        except DeadlockError:
            stuck += 1
    assert stuck >= 15


def test_a_look_ahead_into_the_next_tile_is_caught() -> None:
    """A DOWN tile's operands may wait for what the warpgroup that looks ahead does after this tile."""
    stuck = 0
    for seed in range(20):
        for crosses in (False, True):
            layer, r = draw(seed, 256, promoted=True, crosses=crosses)
            try:
                run(layer, r, 1, 1, 4, 4)
            except DeadlockError:
                assert crosses
                stuck += 1
    assert stuck == 20


def run_all(seeds: int, width: int, stages: int, promoted: bool | None = None, direct: bool = False) -> None:
    for seed in range(seeds):
        layer, r = draw(seed, width, promoted=promoted, direct=direct)
        run(layer, r, 2, 2, 4, stages)


@pytest.mark.parametrize("promoted", [False, True])
def test_a_slot_that_is_emptied_too_early_is_caught(promoted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one warpgroup's arrival emptied a slot that two multiply."""
    init = Barrier.__init__
    monkeypatch.setattr(Barrier, "__init__", lambda self, count: init(self, 1 if count == 2 else count))
    with pytest.raises(AssertionError, match=r"overwritten|nothing moves"):
        run_all(20, 256, 2, promoted)


def test_a_ring_of_one_slot_is_caught() -> None:
    """A slot is given back when the next one is full: tune.py wants 2 stages."""
    for promoted in (False, True):
        with pytest.raises(DeadlockError):
            run_all(20, 256, 1, promoted)


@pytest.mark.parametrize("stages", [3, 5])
def test_an_odd_ring_for_turns_is_caught(stages: int) -> None:
    """A slot that was the other warpgroup's may not be full yet when later ones are: plan.py wants an even ring."""
    run_all(60, 64, stages - 1)
    with pytest.raises(AssertionError, match="read too early"):
        run_all(60, 64, stages)


def test_a_warpgroup_that_goes_on_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a tile with an odd number of steps the warpgroups change slots."""
    monkeypatch.setattr(Program, "until_taken", lambda self, met: iter(()))
    with pytest.raises(AssertionError, match="read too early"):
        run_all(60, 64, 4)
