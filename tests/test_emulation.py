"""Does emulated acceptance follow its profile, and is it marked?"""

from dataclasses import replace

import pytest
import torch
from methods import ASPIRE, IDENTITY, engine_for, ids, prompts, requests, run

from aspire.policies import Fixed
from aspire.sampling import Filtered
from aspire.verify import Drafts, Emulation, Verification, emulate

REQUESTS, LONGEST = 256, 20


def accepted(how: Emulation, rounds: int, longest: int = LONGEST) -> torch.Tensor:
    """Accepted drafts of every round of 256 requests that always draft `longest`.  # [rounds, 256]"""
    seed = torch.arange(REQUESTS) * 7919 + 1
    tokens = torch.zeros(REQUESTS, longest, dtype=torch.int64)
    target = Filtered(
        torch.zeros(REQUESTS * (longest + 1), 1, dtype=torch.int64), torch.ones(REQUESTS * (longest + 1), 1)
    )
    count, position, out = torch.full_like(seed, longest), torch.full_like(seed, 100), []
    for number in range(rounds):
        verdict = emulate(how, target, Drafts(tokens, count, seed, position, torch.full_like(seed, number)))
        position = position + verdict.accepted + 1
        out.append(verdict.accepted)
    return torch.stack(out)


def test_hetero_has_the_papers_spread() -> None:
    """Over 256 requests and 20 drafts the mean accepted length runs from 2.56 to 20 with mean 11.51."""
    means = accepted(Emulation("hetero"), 60).double().mean(0)
    assert means.mean() == pytest.approx(11.51, abs=0.6)
    assert 1.5 < means.min() < 4.5
    assert 19 < means.max() <= 20


def test_hetero_without_the_walk_is_the_table() -> None:
    """The spread between requests alone, without fluctuation within them."""
    means = accepted(Emulation("hetero", sigma=0.0), 60).double().mean(0)
    assert means.mean() == pytest.approx(11.51, abs=0.6)
    assert means.min() == pytest.approx(2.56, abs=0.8)
    assert means.max() == pytest.approx(20, abs=0.5)


def test_hetero_walks_within_a_request() -> None:
    """Neighbouring rounds of a request are alike, distant ones less; the mean stays where it was."""
    how = Emulation("hetero", rho=0.8, sigma=0.6)
    seed = torch.arange(REQUESTS) * 7919 + 1
    alphas = torch.stack([how.alphas(seed, torch.full_like(seed, n)) for n in range(80)])
    logits = torch.logit(alphas[:, alphas.amax(0) < 0.99].double())
    walk = logits - logits.mean(0)
    near = (walk[1:] * walk[:-1]).mean() / walk.square().mean()
    far = (walk[20:] * walk[:-20]).mean() / walk.square().mean()
    assert near == pytest.approx(0.8, abs=0.1)
    assert abs(far) < 0.15
    assert walk.std() == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
def test_iid_accepts_at_its_rate(alpha: float) -> None:
    """Each draft stands with probability alpha: the mean is alpha (1 - alpha^20) / (1 - alpha)."""
    counts = accepted(Emulation("iid", alpha=alpha), 40).double()
    expected = sum(alpha**j for j in range(1, LONGEST + 1))
    assert counts.mean() == pytest.approx(expected, abs=4 * float(counts.std()) / counts.numel() ** 0.5 + 1e-9)
    first = (counts >= 1).double().mean()
    assert first == pytest.approx(alpha, abs=0.02)


def test_the_mark_names_the_profile() -> None:
    """A record can never pass for measured."""
    assert Verification().acceptance_mark == "measured"
    assert Verification(emulation=Emulation("iid", alpha=0.8)).acceptance_mark == "emulated:iid(0.8)"
    assert Verification(emulation=Emulation()).acceptance_mark == "emulated:hetero(0.8,0.3)"
    with pytest.raises(ValueError, match="iid or hetero"):
        Emulation("uniform")


def test_engine_obeys_the_profile() -> None:
    """Emulation drives the engine: alpha 1 accepts poor drafts, alpha 0 none; never more tokens than asked for."""
    batch = prompts(4, seed=3)
    for alpha in (0.0, 1.0):
        how = Verification(emulation=Emulation("iid", alpha=alpha))
        done = run("llama", replace(ASPIRE, speculation=Fixed(5)), requests(batch, new=25), slots=2, verification=how)
        assert {len(r.output_ids) for r in done} == {25}
        assert all(taken == drafted * alpha for r in done for drafted, taken in r.rounds)


def test_no_acceptance_leaves_autoregressive_text() -> None:
    """With alpha 0 every token is the target's correction."""
    batch = prompts(3, seed=4)
    none = Verification(emulation=Emulation("iid", alpha=0.0))
    assert ids(run("llama", ASPIRE, requests(batch), verification=none)) == ids(run("llama", IDENTITY, requests(batch)))


def test_emulation_does_not_depend_on_the_batch() -> None:
    """Acceptance is a function of request, round and position: rounds are the same alone and in company."""
    how = Verification(emulation=Emulation("hetero"))
    method = replace(ASPIRE, speculation=Fixed(6))
    together = run("llama", method, requests(prompts(4, seed=3)), slots=4, verification=how)
    for alone, request in zip(requests(prompts(4, seed=3)), together):
        engine_for("llama", method, 1, verification=how).generate([alone])
        assert alone.rounds == request.rounds
