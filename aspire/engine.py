"""Who runs when? Admit, prefill, step, retire: the loop, and the only file that sees everything.

engine = Engine(model, EngineSettings(slots=8, max_len=2048), method)
engine.generate([Request("a", prompt_ids)])
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch

from aspire.cache.pages import OutOfPages, PageList
from aspire.cache.pool import KVPool
from aspire.graphs import Flight, Landing, Launcher, Notice, masked
from aspire.kernels.jit import wanted
from aspire.kernels.noise import DRAFT_OR_TARGET, RESIDUAL
from aspire.model.decoder import Decoder
from aspire.policies.method import Method
from aspire.prefill import KEPT_QUERIES, Prompt, prefill, prompt_scores
from aspire.request import Request
from aspire.sampling import filter_logits, pick
from aspire.seats import Seats
from aspire.settings import EngineSettings
from aspire.state import SlotState
from aspire.step import Ahead, StepOutput, Stepper
from aspire.verify import Verification


@dataclass(frozen=True)
class PassRecord:
    """One pass as it happened. kinds: a letter a slot, D draft, V verify, '.' empty.

    tokens fed, kv_tokens read per layer (see StepOutput), seconds (see graphs.Landing), committed tokens.
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
        device = torch.device(settings.device)
        if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
            raise ValueError(f"device {settings.device} is not the current one; choose it with CUDA_VISIBLE_DEVICES")
        self.model, self.settings, self.clock = model, settings, clock
        self.method = method or Method()
        self.verification = verification or Verification()
        self.method.check(model.spec.layers)
        self.longest = self.method.speculation.longest
        self.rounds_in_step = self.method.speculation.lockstep and self.longest > 0
        self.pool = pool or make_pool(model, settings, self.longest)
        for name, mine, theirs in (
            ("page_size", settings.page_size, self.pool.page_size),
            ("dtype", settings.dtype, self.pool.k.dtype),
            ("dtype", settings.dtype, model.embed.dtype),
        ):
            if mine != theirs:
                raise ValueError(f"settings.{name} is {mine}, the pool or the model has {theirs}; make them equal")
        self.waiting: deque[tuple[Request, Prompt | None]] = deque()
        self.seats = Seats(settings.slots, self.pool, self.longest)
        self.passes: list[PassRecord] = []
        self.prefill_seconds = 0.0
        self.preemptions = 0
        self._candidates = 0
        self._opened_for = 0
        self._flight: Flight | None = None
        self._aboard = Ahead(0, 0, 0, 0)  # what was decided about the pass in flight
        self.state: SlotState
        self.stepper: Stepper
        self.launcher: Launcher

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

    @property
    def graph_misses(self) -> int:
        """Passes that had to wait for their capture."""
        return self.launcher.graphs.misses if self._opened_for and self.launcher.graphs else 0

    def step(self) -> list[Request]:
        """Fill empty slots, run one pass, retire what finished; returns the finished requests.

        On a GPU the next pass is launched while this one runs, if it may be. A request that then turns out to have
        ended has a row in the next pass all the same, of which nothing is kept. In lockstep that pass begins a round,
        for whose length the slot would stay empty: there the tokens of a verification are looked at first.
        """
        finished: list[Request] = []
        if self._flight is None:
            finished = self.fill_slots()
            if not any(self.seats):
                return finished
            self._reserve()
            self._launch(self.stepper.look(self.state))
        flight, self._flight = self._flight, None
        assert flight is not None
        going, looks = self._may_go_on(), bool(self.rounds_in_step and self._aboard.verifying)
        if going and not looks:
            self._launch(Ahead(*self.launcher.hear(flight)))
        landing = self.launcher.land(flight)
        out = StepOutput.read(landing.report, self.seats.taken())
        committed = sum(self._commit(out, finished))
        if going and looks and not finished:
            self._launch(Ahead(*self.launcher.hear(flight)))
        self.passes.append(self._record(out, committed, landing))
        if not any(self.seats):
            self._drop_flight()
        return finished

    def _launch(self, ahead: Ahead) -> None:
        shape = self.stepper.padded(ahead.shape, self.settings.slots) if self.launcher.on_gpu else ahead.shape
        self._flight, self._aboard = self.launcher.launch(shape, ahead.tokens), ahead

    def _may_go_on(self) -> bool:
        """Whether the pass after the one in flight may start before that one's tokens are handed out.

        No request in it may have ended since it was launched or reach its last token with it, no one may wait who could
        join, and every slot must have pages for whatever it commits and a round more.
        """
        verifying, taken = self._aboard.verifying, self.seats.taken()
        joins = self.waiting and not all(self.seats) and not (self.rounds_in_step and not verifying)
        if not self.launcher.on_gpu or self.settings.poison or joins or self._aboard.active != len(taken):
            return False
        most = self.longest + 1 if verifying else 0
        for slot, seat in enumerate(self.seats):
            if seat is None:
                continue
            request, held = seat.request, len(seat.pages.pages)
            if len(request.output_ids) + most >= request.max_new_tokens:
                return False
            needed = request.length + most + self.longest
            if needed > held * self.pool.page_size and not self.seats.run_ahead(slot, self.state.page_table, needed):
                return False
        return True

    def prepare(self) -> None:
        """Capture the passes that this method can come to, so that none waits for it later; does nothing on a CPU.

        The slots must have been filled once: their requests say how large the state is.
        """
        assert self._opened_for, "fill the slots first"
        if self.launcher.graphs is None:
            return
        for shape in self.stepper.shapes(self.settings.slots):
            if shape not in self.launcher.graphs.captured:
                self.launcher.graphs.capture(shape)

    def fill_slots(self) -> list[Request]:
        """Admit waiting requests while there is a slot and pages; returns those that their first token finished.

        A lockstep method holds late joiners back until the round under way is verified.
        """
        if not any(self.seats):
            self._open()
        elif self.method.speculation.lockstep and self.passes and "D" in self.passes[-1].kinds:
            return []
        if not self.waiting or all(self.seats) or self._flight is not None:
            return []
        self.launcher.settle()
        start = self.clock()
        finished = self._admit_waiting()
        self.launcher.settle()  # a GPU's share of an admission counts as prefill, like the host's
        self.prefill_seconds += self.clock() - start
        return finished

    def _admit_waiting(self) -> list[Request]:
        finished: list[Request] = []
        for slot in range(self.settings.slots):
            while self.waiting and self.seats[slot] is None:
                request, prompt = self.waiting[0]
                try:
                    self._admit(slot, request, prompt)
                except OutOfPages:
                    self._expect_pages_later(request)
                    return finished
                self.waiting.popleft()
                if request.finished:
                    finished.append(request)
        return finished

    def preempt(self, slot: int) -> None:
        """Send a slot's request back to the queue: its committed tokens stay, its drafts and pages go."""
        seat = self.seats[slot]
        assert seat is not None, f"slot {slot} is empty"
        assert self._flight is None, "a pass is in flight: its tokens would find nobody"
        self._empty(slot)
        self.waiting.appendleft((seat.request, seat.prompt))
        self.preemptions += 1

    def close(self) -> None:
        """Drop what still runs or waits and give its pages back; requests keep what they have committed."""
        self.waiting.clear()
        self._drop_flight()
        for slot in self.seats.by_age():
            self._empty(slot)

    def _drop_flight(self) -> None:
        if self._flight is not None:
            self.launcher.land(self._flight)
            self._flight = None

    def _expect_pages_later(self, request: Request) -> None:
        if any(self.seats):
            return
        raise ValueError(
            f"request {request.id} does not fit: {self.pool.allocator.free_pages} of {self.pool.pages} pages are free, "
            f"the others hold prefilled prompts; raise engine.pages or release prompts"
        )

    def _open(self) -> None:
        """Device state sized for the waiting requests; the last batch's, cleared, if that fits."""
        self._candidates = max(self._candidates, self._opened_for)
        if self._opened_for == self._candidates:
            return
        if self._opened_for:  # captured passes and the old state go before the new ones come
            del self.launcher, self.stepper, self.state
        self._opened_for = self._candidates
        spec, selection, s = self.model.spec, self.method.selection, self.settings
        longest = s.max_len + self.longest
        notice = Notice(len(fields(Ahead)), s.device)
        how = self.verification, self._candidates, notice.post, s.invariant
        self.stepper = stepper = Stepper(self.model, self.pool, self.method, *how)
        self.state = state = SlotState.empty(
            s.slots, -(-longest // s.page_size), self.longest, selection.scopes(spec.layers, spec.kv_heads),
            selection.capacity(longest), selection.block,
            self._candidates if self.verification.mode == "rejection" else 1, s.device,
        )  # fmt: skip
        captures = wanted(state.length) if s.graphs is None else s.graphs  # the torch twins wait for the device
        self.launcher = Launcher(
            lambda shape: stepper.step(state, shape), lambda: masked(state.active, state.verify), s.device, captures,
            self.clock, notice,
        )  # fmt: skip

    def _admit(self, slot: int, request: Request, prompt: Prompt | None) -> None:
        """Put a request into an empty slot. Raises OutOfPages, and then changes nothing."""
        shared, ids = prompt, request.prompt_ids + request.output_ids[:-1]  # a preempted one has an answer already
        pages = PageList() if prompt is None else self.pool.fork(prompt.pages, prompt.length)
        if prompt is None or len(ids) > prompt.length:
            done = 0 if prompt is None else prompt.length
            prompt = prefill(self.model, self.pool, ids, self.settings.prefill_chunk, pages, done)
            if shared is not None:  # windows of queries reach back before what was just run
                prompt.queries = torch.cat([shared.queries, prompt.queries], 1)[:, -KEPT_QUERIES:]
        if not request.output_ids:
            request.append([self._first_token(request, prompt)])
        if request.finished:
            self.pool.release(pages)
            return
        self.seats.take(slot, request, pages, shared)
        self.state.occupy(slot, request)
        self.seats.map_pages(slot, self.state.page_table, 0)
        if self.longest and self.method.refresh.due("prefill"):
            self._select_from_prompt(slot, prompt, request.length)
        self.state.adopt(self.method.speculation.start(self.state, slot))

    def _first_token(self, request: Request, prompt: Prompt) -> int:
        """The token after the prompt, by the same rule and noise as every later token."""
        s = request.sampling
        seed, position, top_k = torch.tensor([[s.seed], [prompt.length], [s.top_k]], device=prompt.logits.device)
        temperature, top_p = torch.tensor(
            [[s.temperature], [s.top_p]], dtype=torch.float32, device=prompt.logits.device
        )
        dist = filter_logits(prompt.logits[None], temperature, top_k, top_p, self._candidates)
        purpose = RESIDUAL if self.verification.mode == "rejection" else DRAFT_OR_TARGET
        return int(pick(dist, seed, position, purpose))

    def _select_from_prompt(self, slot: int, prompt: Prompt, length: int) -> None:
        selection, state = self.method.selection, self.state
        scores = None if selection.probe is None else prompt_scores(self.pool, prompt, selection.probe)
        seen, length_ = torch.tensor([[prompt.length], [length]], device=self.settings.device)
        chosen = selection.select(scores, seen, length_)
        width = min(chosen.blocks.shape[2], state.blocks.shape[2])
        state.blocks[:, slot, :width] = chosen.blocks[:, 0, :width]
        state.block_count[:, slot] = chosen.count[:, 0]
        state.tail_start[slot] = chosen.tail_start[0]

    def _reserve(self) -> None:
        """Pages for each slot's next round, its verify included, before it drafts; preempts the youngest if short."""
        for slot in self.seats.by_age():
            while self.seats[slot] is not None and not self.seats.reserve(slot, self.state.page_table):
                self.preempt(self.seats.youngest(slot))

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
                self.pool.forget(seat.pages, seat.request.length - 1)
        return counts

    def _empty(self, slot: int) -> None:
        seat = self.seats[slot]
        assert seat is not None
        self.pool.release(seat.pages)
        self.seats[slot] = None
        self.state.vacate(slot)

    def _record(self, out: StepOutput, committed: int, landing: Landing) -> PassRecord:
        letters = ["."] * self.settings.slots
        for slot, verified in zip(out.slots, out.verified, strict=True):
            letters[slot] = "V" if verified else "D"
        return PassRecord("".join(letters), landing.tokens, out.kv_tokens, landing.seconds, committed)
