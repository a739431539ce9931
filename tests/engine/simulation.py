"""A scheduler driven without a model: drops and tokens are made up, the books are checked after every operation."""

import numpy as np

from uniprefill_jax.config import EngineConfig, SamplingConfig, UniPrefillConfig
from uniprefill_jax.engine.requests import PrefillShape, Request, RequestState, StageRows
from uniprefill_jax.engine.scheduler import Scheduler, StepPlan

LAYERS = 6
SHAPES = {
    "dense": PrefillShape((StageRows("all", False),), (tuple(range(LAYERS)),), False),
    "discard": PrefillShape(
        (StageRows("all", True), StageRows("kept", True), StageRows("kept", False)), ((0, 1), (2, 3), (4, 5)), False
    ),
    "carry": PrefillShape(
        (StageRows("all", True), StageRows("kept", False), StageRows("all", True), StageRows("kept", False)),
        ((0, 1, 3), (2,), (4, 5)),
        True,
    ),
}


class Simulation:
    """Requests on a scheduler; what drops keep is random, and so is whether a request stops by itself (`stops`)."""

    operations = 0

    def __init__(self, config: EngineConfig, seed: int = 0, stops: float = 0.0):
        self.stops = stops
        self.config = config
        self.scheduler = Scheduler(config, LAYERS)
        self.random = np.random.default_rng(seed)
        self.requests: list[Request] = []
        self.in_flight: list[tuple[Request, int]] = []

    def submit(self, shape: str, length: int, limit: int, priority: int = 0) -> Request:
        request = Request(
            id=len(self.requests),
            prompt=np.zeros(length, np.int32),
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
        assert sum(unit.count for unit in plan.units) <= self.config.prefill_chunk
        arrived, self.in_flight = self.in_flight, []
        for row in plan.decode:
            assert row.request.admitted
            self.in_flight.append((row.request, row.request.dispatched - 1))
        self.in_flight += [(unit.request, 0) for unit in plan.units if unit.ends_prefill]
        self.check()
        for request, number in arrived:
            if request.ended or number < len(request.generated):
                continue
            assert number == len(request.generated), "a token is missing"
            request.generated.append(0)
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

    @property
    def alive(self) -> list[Request]:
        return [request for request in self.requests if not request.ended]

    def check(self) -> None:
        """Every page and slot is accounted for, exactly once."""
        scheduler = self.scheduler
        ids = [
            segment.ids.reshape(-1)
            for request in self.requests
            if request.pages is not None
            for segment in request.pages.segments
        ]
        taken = np.concatenate(ids) if ids else np.empty(0, int)
        assert len(np.unique(taken)) == len(taken) == scheduler.pages.used_pages
        assert scheduler.pages.reserved_pages == sum(request.reserved for request in self.requests)
        assert scheduler.pages.available_pages >= 0
        slots = [request.slot for request in self.requests if request.slot >= 0]
        assert len(set(slots)) == len(slots) == self.config.max_running - scheduler.slots.free_slots
        assert [request.rank for request in scheduler.waiting] == sorted(r.rank for r in scheduler.waiting)
        for request in self.requests:
            assert (request.pages is not None) == (request.slot >= 0) == request.admitted
            assert (request in scheduler.waiting) == (request.state is RequestState.WAITING)
            assert (request in scheduler.admitted) == request.admitted
            if request.pages is not None:
                for segment in request.pages.segments:
                    assert segment.length <= segment.ids.shape[1] * self.config.page_size < segment.length + 8 + 8
