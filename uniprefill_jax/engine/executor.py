"""Runs what the scheduler decided: the pools, the slots, every request's rows on the device, and compiled programs.

Programs are few: chunks come in a handful of sizes, row buffers in powers of two, the decode batch and page tables in
one size each, and stages of equal shape share a program whatever their layers.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np

from uniprefill_jax.cache.pools import CachePools, attention_layers, make_pools, row_pages
from uniprefill_jax.cache.tables import pages_of
from uniprefill_jax.config import EngineConfig
from uniprefill_jax.engine.decode_steps import (
    GO_ON,
    IDLE,
    Joining,
    decode_step,
    empty_slots,
    finish_prefill,
    longest_window,
    window_layers,
)
from uniprefill_jax.engine.plans import DecodeRow, Piece, Unit
from uniprefill_jax.engine.prefill_steps import (
    Chunk,
    DropOutcome,
    LayerPlaces,
    Members,
    RowBuffer,
    drop_rows,
    empty_chunk,
    last_positions,
    last_queries,
    load_rows,
    put_back,
    run_stage,
    start_rows,
    store_rows,
)
from uniprefill_jax.engine.prefix_steps import copy_pages, copy_state, restore_rows, save_rows
from uniprefill_jax.engine.programs import StepPrograms
from uniprefill_jax.engine.requests import Pack, PrefillReport, Request
from uniprefill_jax.engine.scheduler import MOST_MEMBERS
from uniprefill_jax.engine.stages import Stage, prefill_stages, stage_parts, stage_program
from uniprefill_jax.llm import DTYPES, LLM
from uniprefill_jax.sampling import Drawn, SamplingKind, SamplingNumbers, token_logprobs
from uniprefill_jax.sparsify.drop_layers import resolve_drop_layers

SMALLEST_CHUNK = 64
CHUNK_STEP = 4


@dataclass
class _Rows:
    """One request's prefill on the device.

    Attributes:
        stages: its stages.
        drop_layers: where it drops.
        all_rows: the whole prompt; in discard mode no longer needed after the first drop.
        kept_rows: what the last drop kept.
        queries: the last queries of the stage's last mixer so far.
        tails: positions that decoding may still see through sliding windows.
        page_tables: pages of the segments that are open.
        outcomes: every drop so far.
        logits: of the last prompt token, at the end.
    """

    stages: tuple[Stage, ...]
    drop_layers: tuple[int, ...]
    all_rows: RowBuffer | None
    kept_rows: RowBuffer | None
    queries: jax.Array
    tails: jax.Array
    page_tables: jax.Array
    outcomes: list[DropOutcome] = field(default_factory=list)
    logits: jax.Array | None = None

    def buffer(self, stage: Stage) -> RowBuffer:
        """The rows that a stage runs on."""
        buffer = self.all_rows if stage.rows == "all" else self.kept_rows
        assert buffer is not None
        return buffer


@dataclass
class _Packed:
    """A chunk on the device, on its way through a stage.

    Attributes:
        chunk: its rows.
        numbers: by request id, whose rows come first, second, ...
        cu_seqlens: where they begin, and where the last end, as often as there are members.
        members: how many there may be: 1, or as many as packs have at most, so that programs are few.
    """

    chunk: Chunk
    numbers: dict[int, int]
    cu_seqlens: np.ndarray
    members: int

    @classmethod
    def of(cls, pieces: tuple[Piece, ...], chunk: Chunk) -> "_Packed":
        """The layout of these pieces, in this order."""
        members = 1 if len(pieces) == 1 else MOST_MEMBERS
        counts = np.zeros(members + 1, np.int32)
        counts[1 : 1 + len(pieces)] = [piece.count for piece in pieces]
        numbers = {piece.request.id: number for number, piece in enumerate(pieces)}
        return cls(chunk, numbers, np.cumsum(counts, dtype=np.int32), members)

    def place(self, piece: Piece) -> np.ndarray:
        """Where in the chunk a piece begins, its first row and its number of rows."""
        return np.asarray([self.cu_seqlens[self.numbers[piece.request.id]], piece.start, piece.count], np.int32)

    def present(self, pieces: tuple[Piece, ...], no_slot: int) -> Members:
        """The members, of whom only these pieces' are still there."""
        counts, first_rows = np.zeros((2, self.members), np.int32)
        slots = np.full(self.members, no_slot, np.int32)
        for piece in pieces:
            number = self.numbers[piece.request.id]
            counts[number], first_rows[number], slots[number] = piece.count, piece.start, piece.request.slot + 1
        return Members(self.cu_seqlens, counts, first_rows, slots)  # pyright: ignore[reportArgumentType]


class Executor:
    """The device's side of the engine.

    Attributes:
        pools: pages and recurrent states.
        max_pages: width of page tables.
        chunk_sizes: rows to which chunks are padded, rising.
        compiled: how many programs of the model were made so far, by any engine.
        row_pages: pages that the rows of a page of tokens take in the prefix cache.
        identity: names all that keys and values depend on beside tokens.
    """

    def __init__(self, llm: LLM, config: EngineConfig, max_length: int):
        self.model = llm.config
        self.config = config
        self.max_pages = pages_of(max_length, config.page_size)
        self._dtype = DTYPES[llm.dtype]
        self._programs = StepPrograms.of(llm)
        pages, slots = (config.pool_pages, config.page_size), config.max_running
        shards = self._programs.shards
        self.pools: CachePools = self._programs.make(
            partial(make_pools, llm.config, *pages, self.num_states, self._dtype, shards=shards)
        )
        self.row_pages = row_pages(llm.config, shards)
        self.identity = repr((llm.config, llm.dtype, config.page_size, shards))
        self.slots = self._programs.make(partial(empty_slots, llm.config, slots, self.max_pages, config.pool_pages))
        self._rows: dict[int, _Rows] = {}
        self._packed: dict[Pack, _Packed] = {}
        self.chunk_sizes = _chunk_sizes(config.prefill_chunk)
        shape = (len(attention_layers(llm.config)), config.max_running)
        no_table = np.full((len(attention_layers(llm.config)), self.max_pages), config.pool_pages, np.int32)
        self._no_table = self._programs.put(no_table)
        self._no_new_pages = self._programs.put(np.full(shape, config.pool_pages, np.int32))

    @property
    def compiled(self) -> int:
        """Programs of the model made so far."""
        return self._programs.count

    @property
    def num_states(self) -> int:
        """Slots of recurrent states beside the dummy: requests', then those of the prefix cache."""
        return self.config.max_running + (self.config.state_checkpoints if self.config.prefix_reuse else 0)

    def drop_is_ready(self, request: Request) -> bool:
        """Whether `read_drop` would not wait."""
        return self._rows[request.id].outcomes[-1].count.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def read_drop(self, request: Request) -> int:
        """How many tokens the last drop of a request kept; waits for the device."""
        return int(self._rows[request.id].outcomes[-1].count)

    def next_segment(self, request: Request) -> None:
        """The pages of a segment after a drop are there: note them."""
        rows = self._rows[request.id]
        rows.page_tables = self._page_tables(request)
        assert rows.kept_rows is not None
        self._note_tails(request, rows, rows.kept_rows)

    def forget(self, request: Request) -> None:
        """Drop what the device holds of a request's prefill, finished or not."""
        self._rows.pop(request.id, None)
        for pack in [pack for pack in self._packed if not pack.members]:
            del self._packed[pack]

    def run(self, unit: Unit) -> list[tuple[Request, Drawn]]:
        """Dispatch one unit; the first tokens, not yet computed, of requests whose prefill it ends."""
        # Only now, not when they are admitted: hidden states of prompts that wait their turn would fill the memory.
        all_rows = [self._rows.get(piece.request.id) or self._begin(piece.request) for piece in unit.pieces]
        stage = all_rows[0].stages[unit.stage]
        packed = self._packed.get(unit.pack)
        if packed is None:
            packed = self._packed[unit.pack] = self._load(unit.pieces, all_rows, stage)
        part = stage_parts(self.model, stage)[unit.part]
        program = stage_program(self.model, part)
        layers = np.asarray([part.feed_forward or 0, part.first, part.last or 0], np.int32)
        run = self._programs.with_model(("stage", program), partial(run_stage, program), donate=(1,))
        tables = [self._no_table] * packed.members
        for piece, rows in zip(unit.pieces, all_rows, strict=True):
            tables[packed.numbers[piece.request.id]] = rows.page_tables
        x, self.pools, queries = run(
            self.pools, packed.chunk, packed.present(unit.pieces, self.num_states + 1), tuple(tables), layers
        )
        packed.chunk = replace(packed.chunk, x=x)
        if not unit.ends_chunk:
            return []
        del self._packed[unit.pack]
        ended = []
        for piece, rows in zip(unit.pieces, all_rows, strict=True):
            first = self._end_chunk(piece, rows, stage, x, queries, packed.place(piece))
            if first is not None:
                ended.append((piece.request, first))
        return ended

    def _load(self, pieces: tuple[Piece, ...], all_rows: list[_Rows], stage: Stage) -> _Packed:
        """Rows of the pieces in one chunk."""
        total = sum(piece.count for piece in pieces)
        size = next(size for size in self.chunk_sizes if size >= total)
        windows = LayerPlaces(self.model).windows
        meaning = pieces[0].request.config.sliding_window
        empty = self._programs.get(
            ("empty", size, self._dtype),
            partial(empty_chunk, size, self.model.hidden_size, self._dtype, len(windows)),
        )
        packed = _Packed.of(pieces, empty())
        load = self._programs.get(
            ("load", meaning), partial(load_rows, windows=windows, window_meaning=meaning), donate=(0,)
        )
        for piece, rows in zip(pieces, all_rows, strict=True):
            packed.chunk = load(packed.chunk, rows.buffer(stage), packed.place(piece))
        return packed

    def _end_chunk(
        self, piece: Piece, rows: _Rows, stage: Stage, x: jax.Array, queries: jax.Array | None, place: np.ndarray
    ) -> Drawn | None:
        """What follows a chunk that has gone through a stage, for one of its requests."""
        request = piece.request
        if piece.saved_state >= 0:
            self._copy_state(request.slot + 1, self._checkpoint(piece.saved_state))
        if piece.ends_prefill:
            return self._join(request, rows, x, place[0] + piece.count - 1)
        buffer = rows.buffer(stage)
        buffer = replace(buffer, x=self._programs.get(("store",), store_rows, donate=(0,))(buffer.x, x, place))
        if stage.drops:
            rows.queries = self._programs.get(("queries",), last_queries)(rows.queries, queries, place)
        if piece.saved_rows:
            self._save_rows(piece, buffer)
        if stage.rows == "all":
            rows.all_rows = buffer
        else:
            rows.kept_rows = buffer
        if piece.ends_stage and stage.drops:
            self._drop(request, rows, stage, buffer, piece.start + piece.count)
        elif piece.ends_stage:
            last = rows.outcomes[-1]
            assert rows.all_rows is not None
            x = self._programs.get(("put_back",), put_back, donate=(0,))(rows.all_rows.x, buffer.x, last.indices)
            rows.all_rows = replace(rows.all_rows, x=x, token_scores=last.token_scores)
            rows.kept_rows = None
        return None

    def decode(self, planned: list[DecodeRow]) -> Drawn:
        """Dispatch one decode step of these requests; the tokens of all slots, not yet computed."""
        commands = np.full(self.config.max_running, IDLE, np.int32)
        draws = reports = False
        new_pages = None
        for request, opened in planned:
            draws |= request.sampling.temperature > 0
            reports |= request.logprobs is not None
            fed = request.dispatched - 2  # the token before the one that this step computes
            # After a preemption its own tokens are fed again: the same ones, whatever rounding would make of them.
            known = fed < len(request.generated)
            commands[request.slot] = request.generated[fed] if known else GO_ON
            for layer, _, page in opened:
                if new_pages is None:
                    new_pages = np.full(self._no_new_pages.shape, self.config.pool_pages, np.int32)
                new_pages[layer, request.slot] = page
        key = ("decode", draws, reports)
        step = self._programs.with_model(key, partial(decode_step, draws, reports), donate=(1, 2))
        drawn, self.slots, self.pools = step(
            self.pools, self.slots, commands, self._no_new_pages if new_pages is None else new_pages
        )
        return drawn

    def report(self, request: Request) -> PrefillReport:
        """What a finished prefill decided; waits for the device."""
        rows = self._rows[request.id]
        assert rows.logits is not None
        kept = {}
        margins = {}
        for layer, outcome in zip(rows.drop_layers, rows.outcomes, strict=True):
            kept[layer] = np.asarray(outcome.kept.positions)[: int(outcome.count)]
            margins[layer] = float(outcome.cut_margin)
        return PrefillReport(np.asarray(rows.logits), kept, margins)

    def _begin(self, request: Request) -> _Rows:
        """Put an admitted request's prompt on the device."""
        drop_layers = resolve_drop_layers(request.config, self.model)
        length = len(request.prompt)
        tokens = np.zeros(_buffer_rows(length, self.config.page_size), np.int32)
        tokens[:length] = request.prompt
        buffer = self._programs.with_model(("start",), start_rows)(tokens, np.int32(length))
        if request.reused.tokens:
            buffer = self._reuse(request, buffer)
        # Also where nothing is dropped: that shares its programs with what drops.
        window = request.config.window_tokens
        rows = _Rows(
            stages=prefill_stages(self.model, request.config, drop_layers),
            drop_layers=drop_layers,
            all_rows=buffer,
            kept_rows=None,
            queries=self._programs.put(np.zeros((window, self.model.num_heads, self.model.head_dim), self._dtype)),
            tails=self._programs.put(np.zeros((len(window_layers(self.model)), longest_window(self.model)), np.int32)),
            page_tables=self._page_tables(request),
        )
        self._rows[request.id] = rows
        self._note_tails(request, rows, buffer)
        return rows

    def _reuse(self, request: Request, buffer: RowBuffer) -> RowBuffer:
        """Take over what the prefix cache holds of a prompt's beginning; its buffer from there on."""
        assert request.pages is not None
        match, shape = request.reused, request.shape.prefix
        if match.state >= 0:
            self._copy_state(self._checkpoint(match.state), request.slot + 1)
        if match.partial is not None:
            column = request.pages.segments[0].ids[: shape.layers, len(match.blocks)]
            pages = np.full((2, len(attention_layers(self.model))), self.config.pool_pages, np.int32)
            pages[0, : shape.layers], pages[1, : shape.layers] = match.partial.pages[: shape.layers], column
            self.pools = self._programs.get(("copy_pages",), copy_pages, donate=(0,))(self.pools, *pages)
        if shape.rows_of is None:
            return buffer
        blocks = [*match.blocks, *([match.partial] if match.partial else [])]
        ids = np.full((buffer.x.shape[0] // self.config.page_size, self.row_pages), self.config.pool_pages, np.int32)
        ids[: len(blocks)] = [block.rows[shape.rows_of] for block in blocks]
        restore = self._programs.get(("restore_rows",), restore_rows, donate=(1,))
        return replace(buffer, x=restore(self.pools, buffer.x, ids, np.int32(match.tokens)))

    def _save_rows(self, piece: Piece, buffer: RowBuffer) -> None:
        """Write rows that a chunk has finished to pages of the prefix cache."""
        most = self.chunk_sizes[-1] // self.config.page_size + 1
        columns = np.full(most, np.iinfo(np.int32).max, np.int32)
        ids = np.full((most, self.row_pages), self.config.pool_pages, np.int32)
        for place, (column, pages) in enumerate(piece.saved_rows):
            columns[place], ids[place] = column, pages
        self.pools = self._programs.get(("save_rows",), save_rows, donate=(0,))(self.pools, buffer.x, columns, ids)

    def _copy_state(self, source: int, target: int) -> None:
        copy = self._programs.get(("copy_state",), copy_state, donate=(0,))
        self.pools = copy(self.pools, np.int32(source), np.int32(target))

    def _checkpoint(self, number: int) -> int:
        """Where the recurrent pool holds a state of the prefix cache: behind the dummy's and the requests' own."""
        return 1 + self.config.max_running + number

    def _drop(self, request: Request, rows: _Rows, stage: Stage, buffer: RowBuffer, length: int) -> None:
        assert stage.last is not None
        config = request.config
        fixed = replace(config, top_p=0.5, score_memory=0.5 if config.score_memory else 0.0, drop_layers="auto")
        drop = self._programs.get(("drop", fixed), partial(drop_rows, fixed, self.model))
        place = attention_layers(self.model).index(stage.last)
        outcome = drop(
            self.pools,
            rows.page_tables[place],
            buffer,
            rows.queries,
            np.int32(length),
            np.float32(config.top_p),
            np.float32(config.score_memory if rows.outcomes else 0.0),
        )
        rows.outcomes.append(outcome)
        rows.kept_rows = outcome.kept
        if config.dropped_tokens == "discard":
            rows.all_rows = None

    def _join(self, request: Request, rows: _Rows, x: jax.Array, last_row: int) -> Drawn:
        assert request.pages is not None
        joining = Joining(
            page_tables=rows.page_tables,
            kept=request.pages.lengths(),
            prompt_length=np.int32(len(request.prompt)),
            tails=rows.tails,
            window_counts_kept=np.bool_(request.config.sliding_window == "kept"),
            numbers=self._programs.put(SamplingNumbers.of(request.sampling)),
        )
        kind = SamplingKind.of(request.sampling)
        finish = self._programs.with_model(
            ("finish", kind), partial(finish_prefill, self.model.layers[-1].kind, kind), donate=(1,)
        )
        self.slots, token, logits = finish(self.slots, joining, np.int32(request.slot), x, np.int32(last_row))
        rows.logits = logits
        rows.all_rows = rows.kept_rows = None
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._programs.get(("logprobs",), token_logprobs)(logits[None], token[None])
        return Drawn(token[None], logprobs)

    def _note_tails(self, request: Request, rows: _Rows, buffer: RowBuffer) -> None:
        """Positions at the end of the segment that has just been opened, for its windowed layers."""
        if not rows.tails.size:
            return
        windowed = [attention_layers(self.model).index(layer) for layer in window_layers(self.model)]
        number = len(request.segment_lengths) - 1
        in_segment = np.isin(windowed, request.shape.segments[number])
        if in_segment.any():
            note = self._programs.get(("tails",), last_positions)
            rows.tails = note(rows.tails, buffer, np.int32(request.segment_lengths[number]), in_segment)

    def _page_tables(self, request: Request) -> jax.Array:
        assert request.pages is not None
        return self._programs.put(request.pages.device_table(self.max_pages, self.config.pool_pages))


def _chunk_sizes(largest: int) -> tuple[int, ...]:
    """Sizes, rising, to which chunks of up to `largest` rows are padded."""
    sizes = [max(1 << (largest - 1).bit_length(), SMALLEST_CHUNK)]
    while sizes[-1] // CHUNK_STEP >= SMALLEST_CHUNK:
        sizes.append(sizes[-1] // CHUNK_STEP)
    return tuple(sizes[::-1])


def buffer_sizes(longest: int, page_size: int) -> tuple[int, ...]:
    """Rows of the buffers of all prompts of up to `longest` tokens, rising."""
    sizes = [_buffer_rows(1, page_size)]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def _buffer_rows(length: int, page_size: int) -> int:
    """Rows of the buffer of a prompt: a power of two, whole pages."""
    return max(1 << (length - 1).bit_length(), page_size, SMALLEST_CHUNK)
