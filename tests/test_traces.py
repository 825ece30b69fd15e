"""Do traces say what happened? Attention of decoded tokens, recall of sources, replayed drafts, lengths of requests."""

import pytest
import torch
from tiny import dense_logits, tiny_model
from torch import Tensor

from aspire.cache.pool import KVPool
from aspire.engine import Engine
from aspire.kernels.heads import Heads, rotate_heads
from aspire.kernels.scores import probe_scores
from aspire.policies import ClosedForm, CostModel, Fixed, Probe, Stepped, TopBlocks
from aspire.prefill import one_row, prefill
from aspire.recall import Recall, earlier_layer, one_for_all, refreshed, same_layer, server, spread
from aspire.replay import Clock, Drafts, Hindsight, best_of, hindsight, replay
from aspire.request import Request
from aspire.settings import EngineSettings
from aspire.trace import head_max, trace


def ids(count: int, seed: int = 0, vocab: int = 97) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pool_of(model: object, pages: int = 16) -> KVPool:
    spec = model.spec  # type: ignore[attr-defined]
    return KVPool(spec.layers, spec.kv_heads, spec.head_dim, pages, 16)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_trace_along_a_greedy_text_says_that_text(kind: str) -> None:
    """The argmax after each traced token is the token that the engine decoded next."""
    model, prompt = tiny_model(kind, layers=3), ids(50)
    request = Request("a", prompt, max_new_tokens=30)
    Engine(model, EngineSettings(slots=1, max_len=128)).generate([request])
    pool = pool_of(model)
    found = trace(model, pool, prompt, request.output_ids[:-1], prefill_chunk=17)
    assert found.said.tolist() == request.output_ids[1:]
    assert found.weights.shape == (3, 29, 79)
    assert not any(pool.allocator.owners)  # nothing stays taken


def test_weights_are_those_of_plain_causal_attention() -> None:
    """Against the softmax of a pass without a cache, and the engine's own probe of a single token."""
    model, prompt, text = tiny_model(layers=2), ids(21), ids(9, 1)
    want: list[Tensor] = []

    def attend(layer: int, heads: Heads) -> Tensor:
        q, k, v = rotate_heads(heads)
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[2] ** -0.5
        weights = logits.masked_fill(torch.ones_like(logits[0], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        want.append(weights[:, -len(text) :].amax(0))
        return torch.einsum("hqk,khd->qhd", weights, values)

    both = torch.tensor(prompt + text)
    model(both, torch.arange(len(both)), attend)
    found = trace(model, pool_of(model), prompt, text)
    torch.testing.assert_close(found.weights, torch.stack(want), rtol=1e-4, atol=1e-6)
    assert found.said.tolist() == dense_logits(model, both)[-len(text) :].argmax(-1).tolist()
    assert (found.weights[:, 0, 22:] == 0).all() and (found.weights[:, 0, :22] > 0).all()

    pool = pool_of(model)
    kept = prefill(model, pool, prompt + text, 512)
    rows = one_row(pool, kept.pages, len(both) - 1, len(both))
    one = probe_scores(kept.queries[1, -1:], pool.k[1], rows, rows.queries, torch.tensor([[True]]), "max")
    torch.testing.assert_close(found.weights[1, -1], one[0, 0], rtol=1e-4, atol=1e-6)


def test_head_max_of_a_known_case() -> None:
    """Two query heads on one KV head: one looks at position 0, the other everywhere alike."""
    q = torch.zeros(1, 2, 4)
    q[0, 0, 0] = 200.0
    keys = torch.zeros(3, 1, 4)
    keys[0, 0, 0] = 1.0
    torch.testing.assert_close(head_max(q, keys), torch.tensor([[1.0, 1 / 3, 1 / 3]]))


def looking(*layers: list[list[float]]) -> Tensor:
    return torch.tensor(layers)


def test_recall_of_a_known_case() -> None:
    """Two layers, three tokens, tops of one position."""
    weights = looking([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1]], [[0.1, 0.2, 0.7]] * 3)
    recall = Recall(weights, 1, oldest=1)  # over tokens 1 and 2
    now, old = recall.matrix(0), recall.matrix(1)
    torch.testing.assert_close(now.diagonal(), torch.ones(2, dtype=torch.float64))
    assert now[1, 0] == pytest.approx((0.1 / 0.6 + 0.1 / 0.7) / 2)
    assert now[0, 1] == pytest.approx((0.1 / 0.7 + 0.2 / 0.7) / 2)
    assert old[0, 0] == pytest.approx((1 + 0.2 / 0.7) / 2)  # token 2 moved to where its layer had not looked
    assert same_layer(recall.matrix, [1]) == pytest.approx([(float(old[0, 0]) + 1) / 2])
    assert earlier_layer(now, [1]) == [pytest.approx(float(now[0, 1]))]
    assert one_for_all(now) == pytest.approx([float(now[0, 1]), float(now[1, 0])])


def test_recall_reads_rows_as_sources() -> None:
    """A layer's curve by source is what it does for the others; refresh layers do not serve themselves."""
    matrix = torch.arange(16, dtype=torch.float64).view(4, 4)
    assert one_for_all(matrix)[0] == pytest.approx((1 + 2 + 3) / 3)
    assert earlier_layer(matrix, [1, 3]) == pytest.approx([(1 + 6 + 11) / 3, 3])
    assert refreshed(matrix, [1, 2], nearest=False) == pytest.approx([(1 + 2 + 3) / 3, (1 + 11) / 2])
    assert refreshed(matrix, [1], nearest=True) == pytest.approx([(8 + 9 + 11) / 3])  # N-2 serves all others
    assert spread(30, 4, nearest=False) == [0, 7, 15, 22] and spread(30, 2, nearest=True) == [7, 22]
    assert server([0, 7, 15], 14, nearest=False) == 7 and server([0, 7, 15], 14, nearest=True) == 15


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 9, 3)])
def test_recall_refuses_what_it_cannot_average(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="decode longer texts after longer prompts"):
        Recall(torch.rand(shape), 4, oldest=3)


def drafts(*answers: str, prompt: int = 1000) -> Drafts:
    """A letter a position: + stands, - does not."""
    longest = max(map(len, answers))
    stands = torch.tensor([[letter == "+" for letter in answer.ljust(longest)] for answer in answers])
    count = torch.tensor([len(answer) for answer in answers])
    return Drafts(stands, count, torch.full_like(count, prompt))


ASPIRE = TopBlocks(Probe("first_last", (-2,), "max"))
CLOCK = Clock(CostModel(1.0, 0.01, 1e-4, 30, 1), ASPIRE, batch=8)
PLAIN = Clock(CostModel(1.0, 0.0, 0.0), ASPIRE, batch=8)  # every pass takes 1 ms


def test_runs_end_where_a_draft_falls_and_where_the_answer_ends() -> None:
    assert drafts("++-+", "+").runs.tolist() == [[2, 1, 0, 1, 0], [1, 0, 0, 0, 0]]


def test_a_replay_of_fixed_lengths_by_hand() -> None:
    """ "++-+++": 2 stand and the third is corrected, then 2 stand and the last token comes from the verify."""
    found = replay(Fixed(2, lockstep=False), drafts("++-+++", "-"), PLAIN)
    assert found.rounds.tolist() == [2, 1] and found.drafted.tolist() == [4, 0] and found.accepted.tolist() == [4, 0]
    assert found.ms.tolist() == [6, 1] and found.committed.tolist() == [6, 1]
    wasteful = replay(Fixed(3, lockstep=False), drafts("+--++-"), PLAIN)
    assert (wasteful.drafted.item(), wasteful.accepted.item(), wasteful.rounds.item()) == (
        8,
        3,
        3,
    )  # the third round has room for two


def test_a_replay_takes_the_time_of_the_cost_model() -> None:
    """One round of two drafts at 1,000 tokens and then plain decoding, for 8 copies."""
    cost, found = CLOCK.cost, replay(Fixed(2, lockstep=False), drafts("++-"), CLOCK)
    read = [512 * 29 / 30 + context / 30 for context in (1000, 1001)]
    want = sum(cost.model + 8 * cost.mlp + 8 * cost.attn * x for x in read)
    want += cost.model + 24 * cost.mlp + 8 * cost.attn * 1002
    assert found.ms.item() == pytest.approx(want, rel=1e-6)
    plain = replay(Fixed(0, lockstep=False), drafts("++"), CLOCK).ms.item()
    assert plain == pytest.approx(2 * (cost.model + 8 * cost.mlp) + 8 * cost.attn * (1000 + 1001), rel=1e-6)


def mixed(seed: int = 0, requests: int = 12, positions: int = 90) -> Drafts:
    """Requests whose drafts stand with .2 to .97."""
    rng = torch.Generator().manual_seed(seed)
    alpha = torch.linspace(0.2, 0.97, requests)[:, None]
    stands = torch.rand(requests, positions, generator=rng) < alpha
    count = torch.randint(positions // 2, positions + 1, (requests,), generator=rng)
    return Drafts(stands, count, torch.randint(300, 9000, (requests,), generator=rng))


def test_every_policy_commits_the_whole_answer() -> None:
    given = mixed()
    cost = CLOCK.cost_for(len(given.count))
    policies = [ClosedForm(cost=cost), Stepped(), Fixed(5, lockstep=False), hindsight(given, CLOCK, 16)]
    for policy in policies:
        found = replay(policy, given, CLOCK)
        assert (found.accepted + found.rounds).tolist() == given.count.tolist(), policy


def test_nobody_beats_hindsight() -> None:
    """The plan of least time is at most that of any policy, of any fixed length, and of any other plan."""
    given = mixed()
    best = replay(hindsight(given, CLOCK, 16), given, CLOCK)
    cost = CLOCK.cost_for(len(given.count))
    rng = torch.Generator().manual_seed(3)
    others = [ClosedForm(cost=cost), Stepped(), *(Fixed(k, lockstep=False) for k in (0, 1, 3, 6, 10, 16))]
    others += [Hindsight(16, torch.randint(17, given.stands.shape, generator=rng), given.prompt) for _ in range(5)]
    for policy in others:
        assert (replay(policy, given, CLOCK).ms >= best.ms - 1e-3).all(), policy
    own = best_of([replay(Fixed(k, lockstep=False), given, CLOCK) for k in (1, 5, 9)])
    assert best.ms.sum() < own.ms.sum() < replay(Fixed(5, lockstep=False), given, CLOCK).ms.sum()
    assert (own.accepted + own.rounds).tolist() == given.count.tolist()
    assert (best.drafted == best.accepted).all()  # who knows drafts nothing that falls


def test_hindsight_plans_every_request_by_itself() -> None:
    """Beside others or alone, a request's plan and time are the same."""
    given = mixed(requests=4, positions=40)
    together = replay(hindsight(given, CLOCK, 8), given, CLOCK)
    for i in range(4):
        one = Drafts(given.stands[i : i + 1], given.count[i : i + 1], given.prompt[i : i + 1])
        assert replay(hindsight(one, CLOCK, 8), one, CLOCK).ms.item() == pytest.approx(together.ms[i].item())


def test_the_closed_form_decides_for_copies_of_a_request() -> None:
    """A replay of many requests decides as the engine would for a batch of that one."""
    given = mixed(requests=3, positions=60)
    together = replay(ClosedForm(cost=CLOCK.cost_for(3)), given, CLOCK)
    for i in range(3):
        copies = Drafts(*(x[i : i + 1].repeat_interleave(8, 0) for x in (given.stands, given.count, given.prompt)))
        one = replay(ClosedForm(cost=CLOCK.cost), copies, CLOCK)
        assert one.drafted[0] == together.drafted[i] and one.ms[0].item() == pytest.approx(together.ms[i].item())
