"""Who owns which page, and what stands in it? Random lives of sequences against plain bookkeeping."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from aspire.cache import KVPool, OutOfPages, PageAllocator, PageList

PAGE, PAGES = 4, 12


@dataclass(eq=False)
class Sequence:
    """A sequence and what its entries should hold, one number a token."""

    pages: PageList = field(default_factory=PageList)
    tokens: list[int] = field(default_factory=list)


def small_pool(poison: bool = True, pages: int = PAGES) -> KVPool:
    return KVPool(layers=2, kv_heads=1, head_dim=2, pages=pages, page_size=PAGE, poison=poison)


def write(pool: KVPool, sequence: Sequence, values: list[int]) -> None:
    """Append tokens to a sequence that has room for them."""
    start = len(sequence.tokens)
    entries = pool.entries(sequence.pages, start, start + len(values))
    stamp = torch.tensor(values, dtype=torch.float32)[None, :, None, None]
    pool.k[:, entries], pool.v[:, entries] = stamp, -stamp
    sequence.tokens += values


def books(pool: KVPool) -> tuple[int, list[int]]:
    return pool.allocator.free_pages, list(pool.allocator.owners)


class Lives(RuleBasedStateMachine):
    """Sequences are born, grow, fork, are cut back and die in any order, in a pool that is often too small."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = small_pool()
        self.alive: list[Sequence] = []
        self.stamp = 0

    @rule(target=sequences)
    def begin(self) -> Sequence:
        self.alive.append(Sequence())
        return self.alive[-1]

    @rule(sequence=sequences, count=st.integers(0, 9), spare=st.integers(0, 5))
    def grow(self, sequence: Sequence, count: int, spare: int) -> None:
        """Room for `spare` tokens more than are written, as for drafts."""
        wanted = len(sequence.tokens) + count
        before, held = books(self.pool), list(sequence.pages.pages)
        missing = max(0, -(-(wanted + spare) // PAGE) - len(held))
        try:
            new = self.pool.allocator.reserve(sequence.pages, wanted + spare)
        except OutOfPages:
            assert missing > before[0] and books(self.pool) == before and sequence.pages.pages == held
            return
        assert len(new) == missing and sequence.pages.pages == held + new
        write(self.pool, sequence, list(range(self.stamp, self.stamp + count)))
        self.stamp += count

    @rule(target=sequences, source=sequences, share=st.floats(0, 1))
    def fork(self, source: Sequence, share: float) -> Sequence:
        tokens = round(share * len(source.tokens))
        before = books(self.pool)
        try:
            child = Sequence(self.pool.fork(source.pages, tokens), source.tokens[:tokens])
        except OutOfPages:
            assert tokens % PAGE and before[0] == 0 and books(self.pool) == before
            return multiple()
        full = tokens // PAGE
        assert child.pages.pages[:full] == source.pages.pages[:full]
        assert not set(child.pages.pages[full:]) & set(source.pages.pages)
        assert self.pool.allocator.free_pages == before[0] - (tokens % PAGE > 0)
        self.alive.append(child)
        return child

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: Sequence, share: float) -> None:
        """Never into a shared page: the engine forks prompts and cuts back answers."""
        tokens = round(share * len(sequence.tokens))
        shared = PAGE * sum(self.pool.allocator.owners[page] > 1 for page in sequence.pages.pages)
        if tokens < shared:
            tokens -= tokens % PAGE
        self.pool.truncate(sequence.pages, tokens)
        del sequence.tokens[tokens:]

    @rule(sequence=consumes(sequences))
    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        assert sequence.pages.pages == []
        self.alive.remove(sequence)

    @rule(order=st.randoms(use_true_random=False))
    def shuffle(self, order: random.Random) -> None:
        free = [page for page, owners in enumerate(self.pool.allocator.owners) if not owners]
        order.shuffle(free)
        self.pool.allocator.shuffle(free)

    @invariant()
    def every_page_is_counted_once(self) -> None:
        """D05: owners = sequences that hold the page; free = the others; no sequence holds a page twice."""
        held = [page for s in self.alive for page in s.pages.pages]
        assert self.pool.allocator.owners == [held.count(page) for page in range(PAGES)]
        assert self.pool.allocator.free_pages == PAGES - len(set(held))
        assert all(len(set(s.pages.pages)) == len(s.pages.pages) for s in self.alive)

    @invariant()
    def tokens_are_where_they_belong_and_nan_is_everywhere_else(self) -> None:
        """A20, A22: what is committed reads back; what was cut back, freed or never written is poison."""
        known = torch.full((PAGES * PAGE,), float("nan"))
        for s in self.alive:
            entries = self.pool.entries(s.pages, 0, len(s.tokens))
            known[entries] = torch.tensor(s.tokens, dtype=torch.float32)
            assert torch.equal(self.pool.k[1, entries, 0, 1], torch.tensor(s.tokens, dtype=torch.float32))
        for cache, sign in ((self.pool.k, 1), (self.pool.v, -1)):
            assert torch.equal(
                (sign * cache).nan_to_num(-9), known[None, :, None, None].expand(cache.shape).nan_to_num(-9)
            )


Lives.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase


@pytest.mark.parametrize("longest", [1, 4, 9])
def test_no_page_leaks_in_two_hundred_requests(longest: int) -> None:
    """D05: random accept counts, ends in the middle of a block, cancelled and failed requests; a prompt serves many."""
    dice, pool = random.Random(longest), small_pool()
    prompt = Sequence()
    pool.allocator.reserve(prompt.pages, 6)
    write(pool, prompt, list(range(6)))
    start = books(pool)
    for request in range(200):
        answer = Sequence(pool.fork(prompt.pages, 6), list(range(6)))
        limit = dice.randint(7, 6 + 3 * PAGE)
        while len(answer.tokens) < limit:
            pool.allocator.reserve(answer.pages, len(answer.tokens) + 1 + longest)
            committed, drafted = len(answer.tokens), dice.randint(0, longest)
            write(pool, answer, [request] * (drafted + 1))
            kept = committed + 1 + dice.randint(0, drafted)
            pool.truncate(answer.pages, kept)
            del answer.tokens[kept:]
            assert len(answer.pages.pages) == pool.allocator.pages_for(kept)
            if dice.random() < 0.05:  # cancelled, failed, or a stop string
                break
        pool.release(answer.pages)
        assert books(pool) == start
    pool.release(prompt.pages)
    assert pool.allocator.free_pages == PAGES and pool.k.isnan().all() and pool.v.isnan().all()


def test_rollback_edges() -> None:
    """A26: back by nothing, to a page boundary, past the end (nothing happens), to nothing."""
    pool, sequence = small_pool(), Sequence()
    pool.allocator.reserve(sequence.pages, 10)
    write(pool, sequence, list(range(10)))
    for tokens, pages in ((99, 3), (12, 3), (10, 3), (9, 3), (8, 2), (5, 2), (0, 0)):
        pool.truncate(sequence.pages, tokens)
        assert len(sequence.pages.pages) == pages and pool.allocator.free_pages == PAGES - pages
        assert int(pool.k.isfinite().all((0, 2, 3)).sum()) == min(tokens, 10)


def test_a_page_freed_twice_is_caught() -> None:
    """D06: a late result must not give pages back a second time."""
    allocator = PageAllocator(4, PAGE)
    owner = PageList()
    allocator.reserve(owner, 5)
    stale = PageList(list(owner.pages))
    allocator.truncate(owner, 0)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.truncate(stale, 0)


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    """Full pages need no room, a partial one does; the failed fork leaves no owner behind."""
    pool, source = small_pool(pages=3), Sequence()
    pool.allocator.reserve(source.pages, 10)
    before = books(pool)
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 free"):
        pool.fork(source.pages, 10)
    assert books(pool) == before
    assert pool.fork(source.pages, 8).pages == source.pages.pages[:2]
    with pytest.raises(OutOfPages):
        pool.allocator.reserve(source.pages, 13)
    assert len(source.pages.pages) == 3


def test_a_shared_page_cannot_be_cut_into() -> None:
    """A20: half of a page that somebody else reads must neither be poisoned nor become writable."""
    pool, source = small_pool(), Sequence()
    pool.allocator.reserve(source.pages, 8)
    write(pool, source, list(range(8)))
    child = pool.fork(source.pages, 8)
    with pytest.raises(AssertionError):
        pool.truncate(child, 6)
    assert pool.k[0, pool.entries(source.pages, 0, 8), 0, 0].tolist() == list(range(8))


@pytest.mark.parametrize("poison", [True, False])
def test_rejected_tokens_are_forgotten_and_their_pages_stay(poison: bool) -> None:
    """A22: after a rollback a slot keeps its pages for the next drafts; what they held is poison, and nothing else."""
    pool, prompt, other = small_pool(poison), Sequence(), Sequence()
    for sequence, tokens in ((prompt, 6), (other, 10)):
        pool.allocator.reserve(sequence.pages, tokens)
        write(pool, sequence, list(range(1, 1 + tokens)))
    answer = Sequence(pool.fork(prompt.pages, 6), list(range(1, 7)))
    pool.allocator.reserve(answer.pages, 14)
    write(pool, answer, list(range(7, 15)))
    for kept in (16, 14, 13, 12, 9, 8, 6):
        held = books(pool), list(answer.pages.pages)
        pool.forget(answer.pages, kept)
        assert (books(pool), list(answer.pages.pages)) == held
        for cache, sign in ((pool.k, 1), (pool.v, -1)):
            read = [
                (sign * cache[0, pool.entries(s.pages, 0, n), 0, 0]).tolist() for s, n in ((answer, 14), (other, 10))
            ]
            assert read[1] == list(range(1, 11))
            known = min(kept, 14) if poison else 14
            assert read[0][:known] == list(range(1, 1 + known))
            assert all(x != x for x in read[0][known:])
    assert pool.k[0, pool.entries(prompt.pages, 0, 6), 0, 0].tolist() == list(range(1, 7))


def test_without_poison_nothing_is_marked() -> None:
    """Poison costs time and is off by default; entries then keep what they held."""
    pool, sequence = small_pool(poison=False), Sequence()
    assert not pool.k.any() and not pool.v.any()
    pool.allocator.reserve(sequence.pages, 6)
    write(pool, sequence, [7] * 6)
    pool.release(sequence.pages)
    assert pool.k.eq(7).sum() == 2 * 6 * 2
    assert pool.pages == PAGES and pool.bytes == 2 * 2 * PAGES * PAGE * 2 * 4
