"""A scheduler driven without a model: drops and tokens are made up, the books are checked after every operation.

Pages hold, in place of keys and values, a number that stands for the layer and all tokens up to a row; they are written
and read as the device would, in the order of the plan. A page that was freed holds nothing.
"""

from dataclasses import replace

import numpy as np

from uniprefill_jax.cache.prefix import CachedBlock, PrefixShape
from uniprefill_jax.config import EngineConfig, SamplingConfig, UniPrefillConfig
from uniprefill_jax.engine.plans import Piece, StepPlan
from uniprefill_jax.engine.requests import PartPrice, PrefillShape, Request, RequestState, StageRows
from uniprefill_jax.engine.scheduler import Scheduler

LAYERS = 6
TWO_PARTS = (PartPrice(), PartPrice(row=1.5, seen=((None, 0.01),)))
DENSE = PrefixShape(LAYERS, linear_layers=0, rows_of=None, recomputed=1)
DROPPING = PrefixShape(layers=2, linear_layers=0, rows_of=1, recomputed=5)
SHAPES = {
    "dense": PrefillShape((StageRows("all", False),), (tuple(range(LAYERS)),), False, DENSE, "dense"),
    "discard": PrefillShape(
        (StageRows("all", True, TWO_PARTS), StageRows("kept", True), StageRows("kept", False, TWO_PARTS)),
        ((0, 1), (2, 3), (4, 5)),
        False,
        DROPPING,
        "discard",
    ),
    "carry": PrefillShape(
        (StageRows("all", True), StageRows("kept", False), StageRows("all", True), StageRows("kept", False)),
        ((0, 1, 3), (2,), (4, 5)),
        True,
        DROPPING,
        "carry",
    ),
    "recurrent": PrefillShape(
        (StageRows("all", False, TWO_PARTS),),
        (tuple(range(LAYERS)),),
        False,
        replace(DENSE, linear_layers=4),
        "recurrent",
    ),
}
LAYER = 1 << 40


def generated_token(request: Request, number: int) -> int:
    """What the model would say: two requests in three with the same prompt say the same."""
    return int(request.prompt.sum() + number + (request.id % 3 == 0)) % 7


def stamps(request: Request, count: int) -> np.ndarray:
    """For every row, a number that stands for the tokens up to it."""
    generated = [generated_token(request, number) for number in range(count - len(request.prompt))]
    seen, numbers = 0, []
    for token in [*request.prompt.tolist(), *generated][:count]:
        seen = (seen * 1_000_003 + token + 1) % (LAYER >> 8)
        numbers.append(seen << 8 | 128)
    return np.asarray(numbers, np.int64)


class Simulation:
    """Requests on a scheduler; what drops keep is random, and so is whether a request stops by itself (`stops`)."""

    operations = 0
    reused_tokens = 0
    packed = 0

    def __init__(self, config: EngineConfig, seed: int = 0, stops: float = 0.0):
        self.stops = stops
        self.config = config
        self.scheduler = Scheduler(config, LAYERS)
        self.random = np.random.default_rng(seed)
        self.requests: list[Request] = []
        self.in_flight: list[tuple[Request, int]] = []
        self.pages = np.zeros((config.pool_pages, config.page_size), np.int64)
        self.states: dict[int, int] = {}
        self.scheduler.pages.on_free = lambda ids: self.pages.__setitem__(ids, 0)

    def submit(self, shape: str, length: int, limit: int, priority: int = 0, text: int | None = None) -> Request:
        """Prompts of the same `text` begin alike; those without one are like no other."""
        seed = (1, len(self.requests)) if text is None else (0, text)
        request = Request(
            id=len(self.requests),
            prompt=np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32),
            config=UniPrefillConfig(),
            sampling=SamplingConfig(),
            shape=SHAPES[shape],
            limit=limit,
            rank=(priority, len(self.requests)),
        )
        Simulation.operations += 1
        self.scheduler.submit(request)
        self.requests.append(request)
        self.check()
        return request

    def step(self) -> StepPlan:
        """One step as the engine takes it: tokens are seen one step after they were dispatched."""
        Simulation.operations += 1
        for request in self.scheduler.in_state(RequestState.PREFILLING):
            if request.awaits_drop:
                self.scheduler.drop_read(request, int(self.random.integers(1, request.rows + 1)))
                self.check()
        plan = self.scheduler.schedule()
        for unit in plan.units:
            assert sum(piece.count for piece in unit.pieces) <= self.config.prefill_chunk
            assert len({piece.request.shape.kind for piece in unit.pieces}) == 1
        arrived, self.in_flight = self.in_flight, []
        for row in plan.decode:
            assert row.request.admitted
            self.in_flight.append((row.request, row.request.dispatched - 1))
            self.write(row.request, len(row.request.prompt) + row.request.dispatched - 2, 1)
        for unit in plan.units:
            Simulation.packed += len(unit.pieces) > 1
            for piece in unit.pieces:
                if unit.stage == 0:
                    self.run(piece, unit.part == 0, unit.ends_chunk)
                if piece.ends_prefill:
                    self.in_flight.append((piece.request, 0))
        self.check()
        for request, number in arrived:
            if request.ended or number < len(request.generated):
                continue
            assert number == len(request.generated), "a token is missing"
            request.generated.append(generated_token(request, number))
            stops = self.random.random() < self.stops
            if len(request.generated) == request.limit or stops:
                self.scheduler.finish(request, "stop" if stops else "length")
                self.check()
        return plan

    def cancel(self, request: Request) -> None:
        Simulation.operations += 1
        if not request.ended:
            self.scheduler.finish(request, "cancelled")
            self.check()

    def run(self, piece: Piece, begins: bool, ends: bool) -> None:
        """Rows of the first stage: take over what is reused, write their own, see that all before them is right."""
        request, shape = piece.request, piece.request.shape.prefix
        match, page = request.reused, self.config.page_size
        table = request.pages.segments[0].ids
        if begins and piece.start == match.tokens and match.tokens:
            Simulation.reused_tokens += match.tokens
            blocks = list(match.blocks)
            if match.partial is not None:
                self.pages[table[: shape.layers, len(blocks)]] = self.pages[match.partial.pages[: shape.layers]]
                blocks.append(match.partial)
            if shape.linear_layers:
                assert self.states[match.state] == stamps(request, match.tokens)[-1] + shape.linear_layers
            if shape.rows_of is not None:
                rows = np.concatenate([self.pages[block.rows[shape.rows_of][0]] for block in blocks])
                assert (rows[: match.tokens] == stamps(request, match.tokens) - 1).all()
        if not ends:
            return
        self.write(request, piece.start, piece.count)
        for column, ids in piece.saved_rows:
            self.pages[ids] = stamps(request, (column + 1) * page)[-page:] - 1
        if piece.saved_state >= 0:
            self.states[piece.saved_state] = stamps(request, piece.start + piece.count)[-1] + shape.linear_layers

    def write(self, request: Request, start: int, count: int) -> None:
        """Rows of the layers whose pages may be shared; afterwards these hold what they should, from row 0 on."""
        segment, page = request.pages.segments[0], self.config.page_size
        rows = np.arange(start + count)
        for layer in range(request.shape.prefix.layers):
            own = stamps(request, start + count) + layer * LAYER
            ids = segment.ids[layer, rows // page]
            assert start // page >= len(request.reused.blocks), "a page that others read is written to"
            self.pages[ids[start:], rows[start:] % page] = own[start:]
            np.testing.assert_array_equal(self.pages[ids, rows % page], own)

    @property
    def alive(self) -> list[Request]:
        return [request for request in self.requests if not request.ended]

    def check(self) -> None:
        """Every page and slot is accounted for, exactly once."""
        scheduler = self.scheduler
        segments = [
            (request, segment)
            for request in self.requests
            if request.pages is not None
            for segment in request.pages.segments
        ]
        # Blocks are found by their prefix, or are still read by a request.
        blocks = {block for request in self.requests for block in request.blocks}
        if scheduler.prefix is not None:
            blocks |= set(scheduler.prefix.blocks())
            evictable = sum(block.evictable for block in blocks)
            assert scheduler.prefix.evictable_pages == evictable <= scheduler.pages.used_pages
        ids = [segment.ids[segment.owned] for _, segment in segments]
        ids += [ids for block in blocks for ids in (block.pages, *block.rows.values())]
        taken = np.concatenate(ids) if ids else np.empty(0, int)
        assert len(np.unique(taken)) == len(taken) == scheduler.pages.used_pages
        for request, segment in segments:
            # What is not its own is of a block that it holds, of its own tokens.
            column_of = {page: column for column, page in np.ndenumerate(segment.ids) if not segment.owned[column]}
            held = {int(page) for block in request.blocks for page in block.pages[: request.shape.prefix.layers]}
            assert set(column_of) <= held
        self.check_blocks(blocks)
        assert scheduler.pages.reserved_pages == sum(request.reserved for request in self.requests)
        assert scheduler.pages.available_pages >= 0
        slots = [request.slot for request in self.requests if request.slot >= 0]
        assert len(set(slots)) == len(slots) == self.config.max_running - scheduler.slots.free_slots
        assert [request.rank for request in scheduler.waiting] == sorted(r.rank for r in scheduler.waiting)
        for request in self.requests:
            assert (request.pages is not None) == (request.slot >= 0) == request.admitted
            assert (request in scheduler.waiting) == (request.state is RequestState.WAITING)
            assert (request in scheduler.admitted) == request.admitted
            if not request.admitted:
                assert not request.blocks
            if request.pages is not None:
                for segment in request.pages.segments:
                    length = segment.length + request.pages.appended
                    assert length <= segment.ids.shape[1] * self.config.page_size < length + 8 + 8

    def check_blocks(self, blocks: set[CachedBlock]) -> None:
        """Blocks are used by those who say so, and hold the tokens of those who use them."""
        for block in blocks:
            users = [request for request in self.requests if block in request.blocks]
            copied = [entry for entry in self.scheduler.prefix._copied if entry[0] is block]
            assert len(block.users) == len(users) + len(copied)
            assert block.needed_layers <= len(block.pages)
            for request in users:
                tokens, parents = [], block
                while parents.parent is not None:
                    tokens.append(parents.tokens)
                    parents = parents.parent
                tokens = np.concatenate(tokens[::-1])
                assert (request.prompt[: len(tokens)] == tokens).all()
        states = [block.state for block in blocks if block.state >= 0]
        assert len(set(states)) == len(states) <= self.config.state_checkpoints
