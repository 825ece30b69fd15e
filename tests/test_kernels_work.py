"""Is the reading split and resolved as the contracts say: pieces of tiles, pool entries of blocks, rollbacks?"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aspire.kernels import work as planning
from aspire.kernels.blocks import count_below_torch, count_below_triton, resolve_torch, resolve_triton, unit_of
from aspire.kernels.jit import triton
from aspire.kernels.work import drain, plan_work, plan_work_torch, plan_work_triton, row_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(triton is None, reason="needs triton")


# -- the split ------------------------------------------------------------------------------------------------------


def plans_of(case: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """Arguments of `plan_work`, three plans of `heads` scopes of different counts."""
    *lists, unit = planning.CASES[case]
    width, position, sparse, count, tail = (torch.tensor(x, device=DEVICE) for x in lists)
    scopes = torch.stack([(count * (7 * s % 4)) // 3 for s in range(3 * heads)])
    return width, position, sparse, scopes, tail, unit


@needs_triton
@pytest.mark.parametrize("budget", [1, 5, 40])
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("case", range(len(planning.CASES)))
def test_plan_work(case: int, tile: int, budget: int) -> None:
    """Kernel against twin: one dense plan, a plan a layer, a plan for the two heads of a layer."""
    for heads in (0, 1, 2):
        width, position, *chosen, unit = plans_of(case, max(heads, 1))
        sparse, count, tail = chosen
        if heads:
            ours = plan_work_triton(width, position, tile, budget, sparse, count, tail, unit, heads)
            most = count.view(3, heads, -1).amax(1) * unit
            head, tail = torch.where(sparse, most, 0), torch.where(sparse, tail, 0)
        else:
            ours, head, tail = plan_work_triton(width, position, tile, budget), None, None
        pieces, spans = plan_work_torch(sum(row_tiles(width, position, tile, head, tail)), budget)  # type: ignore
        assert len(ours) == (3 if heads else 1)
        real = pieces[..., :1] >= 0
        for plan, work in enumerate(ours):
            assert work.tile == tile and torch.equal(work.spans, spans[plan])
            assert torch.equal(work.pieces[:, 0], pieces[plan, :, 0])
            assert torch.equal(work.pieces * real[plan], pieces[plan] * real[plan])
        if heads:
            again = plan_work(width, position, tile, budget, *chosen, unit, heads)
            assert all(torch.equal(a.spans, b.spans) for a, b in zip(again, ours))


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=9), min_size=1, max_size=3), st.integers(1, 30))
def test_pieces_cover_every_tile_once(plans: list[list[int]], budget: int) -> None:
    """Near-equal runs of tiles, at most budget + R of them, in the order of rows, as `spans` says."""
    rows = len(plans[0])
    tiles = torch.tensor([(plan + [0] * rows)[:rows] for plan in plans])
    pieces, spans = plan_work_torch(tiles, budget)
    assert pieces.shape == (len(plans), budget + rows, 3) and pieces.dtype == spans.dtype == torch.int32
    for plan, wanted in enumerate(tiles.tolist()):
        real = [p for p in pieces[plan].tolist() if p[0] >= 0]
        assert pieces[plan, : len(real), 0].ge(0).all(), "pieces lie together at the front"
        covered = [(row, tile) for row, begin, end in real for tile in range(begin, end)]
        assert covered == [(row, tile) for row, n in enumerate(wanted) for tile in range(n)]
        assert all(begin < end for _, begin, end in real)
        assert max((end - begin for _, begin, end in real), default=0) <= max(1, 1.5 * sum(wanted) / budget + 1)
        for row, (first, number) in enumerate(spans[plan].tolist()):
            assert [p[0] for p in real[first : first + number]] == [row] * number
            assert number == sum(p[0] == row for p in real)
            *equal, last = [end - begin for _, begin, end in real[first : first + number]] or [0]
            assert len(set(equal)) <= 1 and (not equal or last <= equal[0])
            assert number <= max(1, (wanted[row] * budget + sum(wanted) // 2) // max(1, sum(wanted)))


@needs_triton
@pytest.mark.parametrize("case", range(len(planning.CASES)))
def test_rows_cut_at_fixed_places(case: int) -> None:
    """Kernel as twin, and each row in the pieces that it has alone, whatever the others read."""
    width, position, sparse, count, tail, unit = plans_of(case, 1)
    rows = len(width)
    bound = rows * (-(-int((position + width + count.amax(0) * unit).max()) // 16) + 2)
    ours = plan_work_triton(width, position, 16, bound, sparse, count, tail, unit, 1, every=2)
    head, start = torch.where(sparse, count * unit, 0), torch.where(sparse, tail, 0)
    pieces, spans = plan_work_torch(sum(row_tiles(width, position, 16, head, start)), bound, every=2)  # type: ignore
    for plan, work in enumerate(ours):
        assert torch.equal(work.spans, spans[plan])
        real = pieces[plan, :, :1] >= 0
        assert torch.equal(work.pieces * real, pieces[plan] * real) and torch.equal(
            work.pieces[:, 0], pieces[plan, :, 0]
        )
        for r in range(rows):
            one = [x[r : r + 1].contiguous() for x in (width, position, sparse)], count[plan : plan + 1, r : r + 1]
            (alone,) = plan_work_triton(
                *one[0][:2], 16, bound, one[0][2], one[1].contiguous(), tail[r : r + 1], unit, every=2
            )
            mine = work.pieces[work.pieces[:, 0] == r, 1:]
            assert torch.equal(mine, alone.pieces[alone.pieces[:, 0] == 0, 1:])
            cuts = mine[:, 0].tolist()
            assert cuts == list(range(0, 2 * len(cuts), 2))


# -- blocks ---------------------------------------------------------------------------------------------------------

SETS = [  # (scopes, rows, K, block, page size)
    (1, 1, 1, 1, 1),
    (2, 3, 17, 16, 16),
    (1, 3, 63, 6, 4),
    (2, 2, 257, 16, 4),  # more units than a program takes
    (3, 2, 17, 1, 16),
    (1, 2, 17, 4, 16),
]


def sets(scopes: int, rows: int, capacity: int, block: int, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """blocks ascending, far out of range past the counts; count; page table."""
    rng = torch.Generator().manual_seed(capacity)
    pages = -(-2 * capacity * block // page)
    picked = torch.stack([torch.randperm(2 * capacity, generator=rng)[:capacity] for _ in range(scopes * rows)])
    blocks = picked.sort(1).values.view(scopes, rows, capacity)
    count = torch.randint(0, capacity + 1, (scopes, rows), generator=rng)
    count[0, -1] = capacity
    blocks = torch.where(torch.arange(capacity) < count[..., None], blocks, 10**6)
    table = torch.randperm(rows * pages, generator=rng).view(rows, pages)
    return blocks.to(DEVICE), count.to(DEVICE), table.to(DEVICE)


@needs_triton
@pytest.mark.parametrize("case", SETS, ids=str)
def test_resolve(case: tuple[int, int, int, int, int]) -> None:
    """Kernel against twin and page table, up to the counts; rows that are not wanted may hold anything."""
    scopes, rows, capacity, block, page = case
    blocks, count, table = sets(*case)
    unit = unit_of(block, page)
    wanted = torch.arange(rows, device=DEVICE) != rows - 2
    ours = resolve_triton(blocks, count, table, wanted, block, page)
    twin = resolve_torch(blocks, table, block, page)
    assert ours.shape == twin.shape == (scopes, rows, capacity * block // unit)
    assert ours.dtype == twin.dtype == torch.int32
    assert page % unit == block % unit == 0
    for s, r in ((s, r) for s in range(scopes) for r in wanted.nonzero()[:, 0].tolist()):
        units = int(count[s, r]) * (block // unit)
        at = (blocks[s, r, : count[s, r], None] * block + torch.arange(0, block, unit, device=DEVICE)).flatten()
        entries = table[r, at // page] * page + at % page
        assert entries.tolist() == twin[s, r, :units].tolist() == ours[s, r, :units].tolist()


@needs_triton
@pytest.mark.parametrize("case", [*SETS, (2, 2, 1500, 1, 16)], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_count_below(case: tuple[int, int, int, int, int], share: float) -> None:
    """Kernel against twin and a loop; entries past the counts do not count, whatever they are."""
    blocks, count, _ = sets(*case)
    bound = torch.full((case[1],), int(share * 2 * case[2]), device=DEVICE)
    bound[0] += 1
    for past in (0, 10**6):
        chosen = torch.arange(case[2], device=DEVICE) < count[..., None]
        listed = torch.where(chosen, blocks, past)
        ours, twin = count_below_triton(listed, count, bound), count_below_torch(listed, count, bound)
        assert torch.equal(ours, twin)
        for s in range(case[0]):
            for r in range(case[1]):
                assert int(twin[s, r]) == sum(b < int(bound[r]) for b in blocks[s, r, : count[s, r]].tolist())


@needs_triton
@pytest.mark.parametrize("contexts", [[90_000] * 13, [90_000, 1, 6_000, 0, 17], [4_096] * 64, [5]], ids=str)
def test_the_last_wave_is_a_full_one(contexts: list[int]) -> None:
    """Kernel and twin agree, and no plan takes longer than the wish itself would, with 396 programs at once."""
    tiles = torch.tensor([[-(-n // 128) for n in contexts]])
    width = torch.tensor([int(n > 0) for n in contexts], device=DEVICE)
    position = (torch.tensor(contexts, device=DEVICE) - 1).clamp(min=0)
    pieces, spans = plan_work_torch(tiles, 99, 8, 396)
    (ours,) = plan_work_triton(width, position, 128, 99, kv_heads=8, slots=396)
    real = pieces[0, :, :1] >= 0
    assert torch.equal(ours.spans.cpu(), spans[0]) and torch.equal(ours.pieces.cpu() * real, pieces[0] * real)

    def time(pieces: Tensor) -> int:
        runs = [end - begin for row, begin, end in pieces[0].tolist() if row >= 0]
        return int(drain(torch.tensor(len(runs) * 8), 396)) * (4 * max(runs) + 1)

    assert time(pieces) <= time(plan_work_torch(tiles, 99)[0])


def test_few_programs_do_not_fill_the_bus() -> None:
    """Full waves take their own time and a twelfth of one, a small rest that of a third of a wave at least."""
    took = [int(drain(torch.tensor(n), 396)) - 33 for n in (0, 396, 792, 397, 396 + 390)]
    assert took == [0, 396, 792, 396 + 132, 396 + 390]
