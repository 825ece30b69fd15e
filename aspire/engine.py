"""Who runs when? Admit, prefill, step, retire: the loop, and the only file that sees everything.

engine = Engine(model, EngineSettings(slots=8, max_len=2048), method)
engine.generate([Request("a", prompt_ids)])
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from aspire.cache.pages import OutOfPages, PageList
from aspire.cache.pool import KVPool
from aspire.kernels.noise import DRAFT_OR_TARGET, RESIDUAL
from aspire.model.decoder import Decoder
from aspire.policies.method import Method
from aspire.prefill import Prompt, prefill, prompt_scores
from aspire.request import Request
from aspire.sampling import filter_logits, pick
from aspire.settings import EngineSettings
from aspire.state import SlotState
from aspire.step import StepOutput, Stepper, write_selection
from aspire.verify import Verification


@dataclass(frozen=True)
class PassRecord:
    """One pass as it happened. kinds: a letter a slot, D draft, V verify, '.' empty.

    tokens fed, kv_tokens read per layer (see StepOutput), seconds on the engine's clock, committed tokens.
    """

    kinds: str
    tokens: int
    kv_tokens: float
    seconds: float
    committed: int

    @property
    def kind(self) -> str:
        """draft, verify or mixed"""
        letters = set(self.kinds) - {"."}
        return {"D": "draft", "V": "verify"}[letters.pop()] if len(letters) == 1 else "mixed"


@dataclass
class Seat:
    """A request in a slot, with its pages. order: when it was admitted; the last one in is preempted first."""

    request: Request
    pages: PageList
    order: int
    prompt: Prompt | None  # the caller's prefilled prompt, should the request have to come back


def make_pool(model: Decoder, settings: EngineSettings, longest_draft: int) -> KVPool:
    """A pool of settings.pages pages, by default enough for every slot to hold max_len tokens and its drafts."""
    spec = model.spec
    pages = settings.pages or settings.slots * -(-(settings.max_len + longest_draft) // settings.page_size)
    return KVPool(
        spec.layers, spec.kv_heads, spec.head_dim, pages, settings.page_size,
        settings.dtype, settings.device, settings.poison,
    )  # fmt: skip


class Engine:
    """Runs requests through one method. Engines may share a model, a pool and prefilled prompts."""

    def __init__(
        self, model: Decoder, settings: EngineSettings, method: Method | None = None,
        verification: Verification | None = None, pool: KVPool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """Raises ValueError where the settings exceed the model's context, or the method does not fit the model."""
        if settings.max_len > model.spec.max_len:
            raise ValueError(f"max_len {settings.max_len} exceeds the model's context of {model.spec.max_len} tokens")
        self.model, self.settings, self.clock = model, settings, clock
        self.method = method or Method()
        self.verification = verification or Verification()
        self.method.check(model.spec.layers)
        self.longest = self.method.speculation.longest
        self.pool = pool or make_pool(model, settings, self.longest)
        for name, mine, theirs in (
            ("page_size", settings.page_size, self.pool.page_size),
            ("dtype", settings.dtype, self.pool.k.dtype),
            ("dtype", settings.dtype, model.embed.dtype),
        ):
            if mine != theirs:
                raise ValueError(f"settings.{name} is {mine}, the pool or the model has {theirs}; make them equal")
        self.waiting: deque[tuple[Request, Prompt | None]] = deque()
        self.seats: list[Seat | None] = [None] * settings.slots
        self.passes: list[PassRecord] = []
        self.prefill_seconds = 0.0
        self.preemptions = 0
        self._admitted = 0
        self._candidates = 0
        self.state: SlotState
        self.stepper: Stepper

    def generate(self, requests: Iterable[Request]) -> list[Request]:
        """Run requests to their end; returns them in the order given."""
        batch = list(requests)
        for request in batch:
            self.submit(request)
        while self.busy:
            self.step()
        return batch

    def submit(self, request: Request, prompt: Prompt | None = None) -> None:
        """Queue a request; `prompt` is its prefilled prompt, if there is one (it stays the caller's to release).

        Raises ValueError for a request that can never run: too long for the context or for the pool, or sampled
        while the verification is greedy.
        """
        if request.finished:
            raise ValueError(f"request {request.id} is finished; make a new one to run it again")
        self.check(request)
        wanted = self._candidates_for(request)
        if any(self.seats) and wanted > self._candidates:
            raise ValueError(
                f"request {request.id} needs {wanted} candidate tokens, the running batch was opened with "
                f"{self._candidates}; submit it before the batch starts, or lower its top_k"
            )
        if not any(self.seats):
            self._candidates = max(wanted, *(self._candidates_for(r) for r, _ in self.waiting), 1)
        self.waiting.append((request, prompt))

    def check(self, request: Request) -> None:
        """Refuse a request that can never run; see `submit`."""
        prompt, answer, limit = len(request.prompt_ids), request.max_new_tokens, self.settings.max_len
        if prompt + answer > limit:
            raise ValueError(
                f"request {request.id}: prompt of {prompt} tokens + max_new_tokens {answer} = {prompt + answer} "
                f"exceeds max_len {limit}; shorten the prompt or raise max_len "
                f"(the model's context is {self.model.spec.max_len})"
            )
        needed = self.pool.allocator.pages_for(prompt + answer + self.longest)
        if needed > self.pool.pages:
            raise ValueError(
                f"request {request.id} needs {needed} pages of {self.pool.page_size} tokens, the pool has "
                f"{self.pool.pages}; raise engine.pages or lower max_new_tokens"
            )
        if self.verification.mode == "greedy" and request.sampling.temperature > 0:
            raise ValueError(
                f"request {request.id}: temperature > 0 needs verification coupled or rejection, not greedy"
            )

    def _candidates_for(self, request: Request) -> int:
        s = request.sampling
        return 1 if s.temperature == 0 else min(s.top_k or self.model.spec.vocab_size, self.model.spec.vocab_size)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(self.seats)

    def step(self) -> list[Request]:
        """Fill empty slots, run one pass, retire what finished; returns the finished requests."""
        finished = self.fill_slots()
        if not any(self.seats):
            return finished
        self._reserve()
        start = self.clock()
        self.state, out = self.stepper.step(self.state)
        committed = sum(self._commit(out, finished))
        self.passes.append(self._record(out, committed, self.clock() - start))
        return finished

    def fill_slots(self) -> list[Request]:
        """Admit waiting requests while there is a slot and pages; returns those that their first token finished.

        A lockstep method holds late joiners back until the round under way is verified.
        """
        if not any(self.seats):
            self._open()
        elif self.method.speculation.lockstep and self.passes and "D" in self.passes[-1].kinds:
            return []
        start = self.clock()
        finished: list[Request] = []
        for slot in range(self.settings.slots):
            while self.waiting and self.seats[slot] is None:
                request, prompt = self.waiting[0]
                try:
                    self._admit(slot, request, prompt)
                except OutOfPages:
                    self._expect_pages_later(request)
                    self.prefill_seconds += self.clock() - start
                    return finished
                self.waiting.popleft()
                if request.finished:
                    finished.append(request)
        self.prefill_seconds += self.clock() - start
        return finished

    def preempt(self, slot: int) -> None:
        """Send a slot's request back to the queue: its committed tokens stay, its drafts and pages go."""
        seat = self.seats[slot]
        assert seat is not None, f"slot {slot} is empty"
        self._empty(slot)
        self.waiting.appendleft((seat.request, seat.prompt))
        self.preemptions += 1

    def close(self) -> None:
        """Drop what still runs or waits and give its pages back; requests keep what they have committed."""
        self.waiting.clear()
        for slot in self._by_age():
            self._empty(slot)

    def _expect_pages_later(self, request: Request) -> None:
        if any(self.seats):
            return
        free, pages = self.pool.allocator.free_pages, self.pool.pages
        raise ValueError(
            f"request {request.id} does not fit: {free} of {pages} pages are free, the others hold prefilled prompts; "
            f"raise engine.pages or release prompts"
        )

    def _open(self) -> None:
        """A fresh batch: device state sized for the waiting requests."""
        spec, selection, s = self.model.spec, self.method.selection, self.settings
        longest = s.max_len + self.longest
        self.stepper = Stepper(self.model, self.pool, self.method, self.verification, self._candidates)
        self.state = SlotState.empty(
            s.slots, -(-longest // s.page_size), self.longest, selection.scopes(spec.layers, spec.kv_heads),
            selection.capacity(longest), selection.block,
            self._candidates if self.verification.mode == "rejection" else 1, s.device,
        )  # fmt: skip

    def _admit(self, slot: int, request: Request, prompt: Prompt | None) -> None:
        """Put a request into an empty slot. Raises OutOfPages, and then changes nothing."""
        shared, ids = prompt, request.prompt_ids + request.output_ids[:-1]  # a preempted one has an answer already
        pages = PageList() if prompt is None else self.pool.fork(prompt.pages, prompt.length)
        if prompt is None or len(ids) > prompt.length:
            done = 0 if prompt is None else prompt.length
            prompt = prefill(self.model, self.pool, ids, self.settings.prefill_chunk, pages, done)
        if not request.output_ids:
            request.append([self._first_token(request, prompt)])
        if request.finished:
            self.pool.release(pages)
            return
        self.seats[slot] = Seat(request, pages, self._admitted, shared)
        self._admitted += 1
        self._seat_state(slot, request)
        self._map_pages(slot, 0)
        if self.method.refresh.due("prefill"):
            self._select_from_prompt(slot, prompt, request.length)
        self.state = self.method.speculation.start(self.state, slot)

    def _first_token(self, request: Request, prompt: Prompt) -> int:
        """The token after the prompt, by the same rule and noise as every later token."""
        s = request.sampling
        seed, position, top_k = torch.tensor([[s.seed], [prompt.length], [s.top_k]], device=prompt.logits.device)
        temperature, top_p = torch.tensor([[s.temperature], [s.top_p]], device=prompt.logits.device)
        dist = filter_logits(prompt.logits[None], temperature, top_k, top_p, self._candidates)
        purpose = RESIDUAL if self.verification.mode == "rejection" else DRAFT_OR_TARGET
        return int(pick(dist, seed, position, purpose))

    def _seat_state(self, slot: int, request: Request) -> None:
        state, s = self.state, request.sampling
        state.active[slot] = True
        state.length[slot], state.last_token[slot] = request.length, request.output_ids[-1]
        state.room[slot] = request.max_new_tokens - len(request.output_ids)
        state.seed[slot], state.temperature[slot] = s.seed, s.temperature
        state.top_k[slot], state.top_p[slot] = s.top_k, s.top_p

    def _select_from_prompt(self, slot: int, prompt: Prompt, length: int) -> None:
        selection = self.method.selection
        scores = None if selection.probe is None else prompt_scores(self.pool, prompt, selection.probe)
        slots, seen, length_ = torch.tensor([[slot], [prompt.length], [length]], device=self.settings.device)
        write_selection(self.state, slots, selection.select(scores, seen, length_))

    def _map_pages(self, slot: int, first: int) -> None:
        """Tell the device which pages a slot has, from logical page `first` on."""
        seat = self.seats[slot]
        assert seat is not None
        new = torch.tensor(seat.pages.pages[first:], dtype=torch.int64, device=self.settings.device)
        self.state.page_table[slot, first : first + len(new)] = new

    def _reserve(self) -> None:
        """Pages for each slot's next round, its verify included, before it drafts; preempts the youngest if short."""
        for slot in self._by_age():
            while (seat := self.seats[slot]) is not None:
                held = len(seat.pages.pages)
                try:
                    if self.pool.allocator.reserve(seat.pages, seat.request.length + self.longest):
                        self._map_pages(slot, held)
                    break
                except OutOfPages:
                    self._make_way(seat)

    def _by_age(self) -> list[int]:
        """Occupied slots, the longest admitted first."""
        return [slot for _, slot in sorted((seat.order, slot) for slot, seat in enumerate(self.seats) if seat)]

    def _make_way(self, needy: Seat) -> None:
        """Preempt the youngest slot; a slot that is alone and still short can never go on."""
        by_age = self._by_age()
        if len(by_age) == 1:
            needed = self.pool.allocator.pages_for(needy.request.length + self.longest)
            raise ValueError(
                f"request {needy.request.id} needs {needed} pages; the pool has {self.pool.pages}, less those of "
                f"prefilled prompts; raise engine.pages or release prompts"
            )
        self.preempt(by_age[-1])

    def _commit(self, out: StepOutput, finished: list[Request]) -> list[int]:
        """Hand committed tokens to their requests; returns how many each row committed."""
        counts = []
        for slot, verified, drafted, accepted, tokens in zip(
            out.slots, out.verified, out.drafted, out.accepted, out.tokens, strict=True
        ):
            if not verified:
                continue
            seat = self.seats[slot]
            assert seat is not None, f"slot {slot} verified without a request"
            taken = seat.request.append(tokens)
            counts.append(taken)
            if seat.request.finished:
                # Drafts past the end of a request have no right answer: they are counted in no way.
                seat.request.rounds.append((min(drafted, taken), min(accepted, taken)))
                finished.append(seat.request)
                self._empty(slot)
                continue
            seat.request.rounds.append((drafted, accepted))
            if accepted < drafted:
                self.pool.truncate(seat.pages, seat.request.length - 1)
        return counts

    def _empty(self, slot: int) -> None:
        seat = self.seats[slot]
        assert seat is not None
        self.pool.release(seat.pages)
        self.seats[slot] = None
        self.state.clear(slot)

    def _record(self, out: StepOutput, committed: int, seconds: float) -> PassRecord:
        letters = ["."] * self.settings.slots
        for slot, verified in zip(out.slots, out.verified, strict=True):
            letters[slot] = "V" if verified else "D"
        return PassRecord("".join(letters), out.width, out.kv_tokens, seconds, committed)
