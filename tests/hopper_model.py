"""The protocol between the warps and programs of ``kernels/hopper_layer.py``, under random interleavings.

Nothing can run that kernel without a Hopper GPU, so its waits and counters are modelled here, a generator per warp:
mbarriers with their phases, boxes, the ring, whose loads arrive in any order, the queue, and the counters of the row
blocks. The model checks that a consumer finds the operands that it expects, that nobody reads h or a slot's output
before it is complete, that one token's slots are summed once, and that everything ends.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field, replace

Warp = Generator[None, None, None]
UP, REQUANTISE, DOWN, END = "up", "requantise", "down", "end"


class DeadlockError(AssertionError):
    pass


class Barrier:
    """An mbarrier: ``count`` arrivals end a phase; waiting for a parity passes when a phase of that parity is over."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase = count, 0, 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase + 1

    def wait(self, parity: int) -> Warp:
        while self.phase & 1 == parity:
            yield


@dataclass
class Layer:
    """A layer as the queue sees it: row blocks with tasks of three kinds, and what is known of them."""

    tasks: list[tuple[str, int]]
    width: int
    """Channels of a tile: 64, 128 or 256."""
    steps: dict[str, int]
    quantised: bool
    ups: int
    """UP tiles of a block."""
    passes: list[int]
    """REQUANTISE tasks of each block."""
    announces: bool = True
    """An UP tile's announcement does not wait for the next UP tile where another kind of task comes first."""
    promoted: bool = False
    """FP8 sums are promoted: every product is finished before the next, and the next step's operands are waited for
    meanwhile."""
    crosses: bool = False
    """Those of the next tile too."""
    direct: bool = False
    """One token: the program quantises it, and the down tiles quantise h in chunks of ``chunk`` steps."""
    chunk: int = 2
    downs: int = 1
    left: dict[int, int] = field(default_factory=dict)
    outputs: set[tuple[int, int, int]] = field(default_factory=set)
    """Of one token: block (a slot that has an expert), column tile and half of each output that is written."""
    arrived: dict[tuple[int, int], int] = field(default_factory=dict)
    """Column tile and half: how many slots' outputs are said to be written."""
    sums: list[tuple[int, int]] = field(default_factory=list)
    drawn: int = 0
    ready: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    stored: int = 0

    @property
    def chunks_of_h(self) -> int:
        return -(-self.steps[DOWN] // self.chunk)

    def column(self, ticket: int) -> int:
        """A DOWN tile's number within its block."""
        return self.tasks[:ticket].count(self.tasks[ticket])

    @property
    def writers(self) -> int:
        return 1 if self.width <= 128 else 2


class Program:
    def __init__(self, layer: Layer, boxes: int, stages: int, r: random.Random) -> None:
        self.layer, self.boxes, self.stages, self.r = layer, boxes, stages, r
        self.box: list[tuple[int, str, int]] = [(-1, END, -1)] * boxes
        self.slot: list[object] = [None] * stages
        self.posted, self.read = [Barrier(1) for _ in range(boxes)], [Barrier(3) for _ in range(boxes)]
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(1 if layer.width == 64 else 2) for _ in range(stages)]
        self.passed, self.taken, self.other = Barrier(1), Barrier(1), -1
        self.given, self.token = (Barrier(2), Barrier(2)), Barrier(1)
        self.chunks: list[object] = [None] * 4
        self.loads: list[tuple[int, object]] = []
        self.loading = True
        self.warps: list[Warp] = [self.schedule(), self.produce(), self.memory(), self.consume(0), self.consume(1)]

    def load(self, slot: int, operands: object) -> None:
        self.slot[slot] = "in flight"
        self.loads.append((slot, operands))

    def memory(self) -> Warp:
        """What TMA was asked for arrives in any order."""
        while self.loading or self.loads:
            if self.loads:
                slot, self.slot[slot] = self.loads.pop(self.r.randrange(len(self.loads)))
                self.full[slot].arrive()
            yield

    def schedule(self) -> Warp:
        at, total, chunks = 0, len(self.layer.tasks), 0
        while True:
            ticket = self.layer.drawn
            self.layer.drawn += 1
            yield
            yield from self.read[at % self.boxes].wait(at // self.boxes & 1 ^ 1)
            kind, block = self.layer.tasks[ticket] if ticket < total else (END, -1)
            self.box[at % self.boxes] = (ticket, kind, block)
            self.posted[at % self.boxes].arrive()
            at += 1
            if kind == END:
                return
            if kind == DOWN and self.layer.direct:
                chunks += self.layer.chunks_of_h
                yield from self.given[(chunks - 1) & 1].wait((chunks - 1) >> 1 & 1)

    def next_box(self, at: int) -> Warp:
        yield from self.posted[at % self.boxes].wait(at // self.boxes & 1)

    def produce(self) -> Warp:
        layer, step, at = self.layer, 0, 0
        while True:
            yield from self.next_box(at)
            ticket, kind, block = self.box[at % self.boxes]
            if kind == END:
                self.loading = False
                return
            self.read[at % self.boxes].arrive()
            at += 1
            steps = layer.steps.get(kind, 0)
            ahead = min(steps, self.stages) if kind == DOWN and not layer.direct else 0
            for i in range(steps):
                slot = (step + i) % self.stages
                yield from self.empty[slot].wait((step + i) // self.stages & 1 ^ 1)
                self.slot[slot] = "weights only"
                yield
                if kind == UP and layer.direct:
                    yield from self.token.wait(0)
                if i >= ahead:
                    self.load(slot, (ticket, i))
                if i == ahead - 1:
                    need = 2 * layer.passes[block] if layer.quantised else layer.ups * layer.writers
                    counts = layer.done if layer.quantised else layer.ready
                    while counts[block] < need:
                        yield
                    assert layer.written[block] == layer.ups * layer.writers, "h was read before it was complete"
                    for j in range(ahead):
                        self.load((step + j) % self.stages, (ticket, j))
                        yield
            step += steps

    def multiply(self, ticket: int, steps: int, step: int, half: int) -> Warp:
        """All steps, with tiles of 64 channels every other; each slot emptied when its products are done."""

        def until_full(i: int) -> Warp:
            yield from self.full[(step + i) % self.stages].wait((step + i) // self.stages & 1)
            if i < steps:
                assert self.slot[(step + i) % self.stages] == (ticket, i), "a slot was overwritten, or read too early"

        def give_back(i: int) -> None:
            assert self.slot[(step + i) % self.stages] == (ticket, i), "a slot was overwritten while it was multiplied"
            self.empty[(step + i) % self.stages].arrive()

        if self.layer.width == 64:
            for i in range(half, steps, 2):
                yield from until_full(i)
                yield
                give_back(i)
        elif self.layer.promoted:
            more = self.layer.crosses and any(kind != REQUANTISE for kind, _ in self.layer.tasks[ticket + 1 :])
            yield from until_full(0)
            for i in range(steps):
                yield
                if i + 1 < steps or more:
                    yield from until_full(i + 1)
                give_back(i)
        else:
            for i in range(steps):
                yield from until_full(i)
                yield
                if i > 0:
                    give_back(i - 1)
            give_back(steps - 1)

    def multiply_row(self, ticket: int, steps: int, step: int, chunks: int, half: int) -> Warp:
        """As ``multiply``, of an h that both warpgroups quantise a chunk ahead of it."""
        narrow, size = self.layer.width == 64, self.layer.chunk
        for start in range(0, steps, size):
            at, mine = chunks & 1, (ticket, start)
            self.chunks[2 * at + half] = mine
            yield
            self.given[at].arrive()
            yield from self.given[at].wait(chunks >> 1 & 1)
            for i in range(start + (half if narrow else 0), min(steps, start + size), 2 if narrow else 1):
                slot = (step + i) % self.stages
                yield from self.full[slot].wait((step + i) // self.stages & 1)
                yield
                assert self.slot[slot] == (ticket, i), "a slot was overwritten, or read too early"
                assert self.chunks[2 * at : 2 * at + 2] == [mine, mine], "a chunk was overwritten, or read too early"
                self.empty[slot].arrive()
            chunks += 1

    def until_taken(self, met: int) -> Warp:
        """The first warpgroup has finished the tile before."""
        yield from self.taken.wait(met & 1 ^ 1)

    def meet(self, ticket: int, half: int, met: int) -> Warp:
        """The second warpgroup passes something to the first."""
        if half == 1:
            yield from self.taken.wait(met & 1 ^ 1)
            assert self.other == -1
            self.other = ticket
            yield
            self.passed.arrive()
        else:
            yield from self.passed.wait(met & 1)
            assert self.other == ticket
            self.other = -1
            yield
            self.taken.arrive()

    def write(self, ticket: int, half: int) -> Warp:
        yield
        self.layer.outputs.add((self.layer.tasks[ticket][1], self.layer.column(ticket), half))

    def finish(self, ticket: int, half: int) -> Warp:
        """A slot's output is written; the last slot of some columns sums them."""
        layer, place = self.layer, (self.layer.column(ticket), half)
        layer.arrived[place] = layer.arrived.get(place, 0) + 1
        if layer.arrived[place] == len(layer.ready):
            for block in range(len(layer.ready)):
                yield
                assert (block, *place) in layer.outputs, "a slot was summed before it was complete"
            layer.sums.append(place)
            self.reset(place)

    def reset(self, place: tuple[int, int]) -> None:
        self.layer.arrived[place] = 0

    def consume(self, half: int) -> Warp:
        layer, step, at, met, pending, chunks = self.layer, 0, 0, 0, -1, 0
        if half == 0:
            yield
            self.token.arrive()
        yield from self.next_box(at)
        while True:
            ticket, kind, block = self.box[at % self.boxes]
            if pending >= 0 and kind != UP and (layer.announces or kind == END):
                layer.ready[pending] += 1
                pending = -1
                yield
            if kind == END:
                return
            if kind == REQUANTISE:
                while layer.ready[block] < layer.ups * layer.writers:
                    yield
                assert layer.written[block] == layer.ups * layer.writers, "h was quantised before it was complete"
                layer.done[block] += 1
            else:
                stores = layer.width > 64 or half == 0
                if kind == DOWN and layer.direct:
                    while layer.ready[block] < layer.ups * layer.writers:
                        yield
                    yield from self.multiply_row(ticket, layer.steps[kind], step, chunks, half)
                    chunks += layer.chunks_of_h
                    layer.left[block] = layer.left.get(block, 0) + 1
                    if layer.left[block] == 2 * layer.downs:
                        layer.ready[block] = 0
                else:
                    if stores:
                        yield from self.full[step % self.stages].wait(step // self.stages & 1)
                    if pending >= 0 and layer.width > 64 and not layer.promoted and not layer.direct:
                        layer.ready[pending] += 1
                        pending = -1
                        yield
                    if layer.width == 64 and half == 1:
                        yield from self.until_taken(met)
                    yield from self.multiply(ticket, layer.steps[kind], step, half)
                step += layer.steps[kind]
                if layer.width == 64:
                    yield from self.meet(ticket, half, met)
                    met += 1
                if pending >= 0:
                    layer.ready[pending] += 1
                    pending = -1
                if kind == UP and layer.width == 128:
                    yield from self.meet(ticket, half, met)
                    met += 1
                    stores = half == 0
                if stores and kind == UP:
                    yield
                    layer.written[block] += 1
                    pending = block
                if stores and kind == DOWN and layer.direct:
                    yield from self.write(ticket, half)
                    yield from self.finish(ticket, half)
                layer.stored += stores
            assert self.box[at % self.boxes][0] == ticket, "a box was overwritten while it was in use"
            self.read[at % self.boxes].arrive()
            at += 1
            yield from self.next_box(at)


def draw(
    seed: int,
    width: int,
    announces: bool = True,
    promoted: bool | None = None,
    crosses: bool = False,
    direct: bool = False,
) -> tuple[Layer, random.Random]:
    r = random.Random(seed)
    blocks, ups, downs = r.randint(1, 5), r.randint(1, 3), r.randint(1, 3)
    passes = [r.randint(1, 3) for _ in range(blocks)]
    tasks: list[tuple[str, int]] = []
    quantised = r.random() < 0.7
    for kind, number in (
        (UP, [ups] * blocks),
        (REQUANTISE, passes if quantised and not direct else []),
        (DOWN, [downs] * blocks),
    ):
        part = [(kind, block) for block, n in enumerate(number) for _ in range(n)]
        r.shuffle(part)
        tasks += part
    zeros = [[0] * blocks for _ in range(3)]
    steps = {UP: r.randint(1, 6), DOWN: r.randint(1, 6)}
    if promoted is None:
        promoted = r.random() < 0.5
    layer = Layer(tasks, width, steps, quantised, ups, passes, announces, promoted, crosses, direct, downs=downs)
    layer.ready, layer.done, layer.written = zeros
    return layer, r


def again(layer: Layer) -> Layer:
    """The next launch with the same counters."""
    fresh = replace(layer, drawn=0, stored=0, outputs=set(), sums=[], left={})
    fresh.done, fresh.written = ([0] * len(layer.ready) for _ in range(2))
    return fresh


def run(layer: Layer, r: random.Random, programs: int, resident: int, boxes: int, stages: int) -> None:
    """Step warps in random order and at random speeds; at most ``resident`` programs are on the chip at once."""
    waiting = [Program(layer, boxes, stages, r) for _ in range(programs)]
    running: list[Program] = []
    quiet = 0
    while running or waiting:
        while waiting and len(running) < resident:
            running.append(waiting.pop())
        program = r.choice(running)
        warp = r.choice(program.warps)
        state = (layer.drawn, layer.stored, sum(layer.ready), sum(layer.done), sum(layer.written))
        if next(warp, END) == END:
            program.warps.remove(warp)
            if not program.warps:
                running.remove(program)
        quiet = (
            0
            if state != (layer.drawn, layer.stored, *map(sum, (layer.ready, layer.done, layer.written)))
            else quiet + 1
        )
        if quiet > 20_000:
            raise DeadlockError(
                f"{programs} programs, {resident} resident, {boxes} boxes, {stages} stages: nothing moves"
            )
