"""Does the near-tie gate pass what rounding explains, and nothing else?"""

import pytest
import torch
from methods import METHODS, prompts, requests
from tiny import tiny_spec

from aspire.engine import Engine
from aspire.model import Decoder, random_weights
from aspire.settings import EngineSettings
from aspire.verify import Verification
from experiments.gate import Forced, Gate, judge, near_tie_gate, parting

PROMPTS = prompts(4)


def texts(model: Decoder, name: str, new: int = 16) -> list[list[int]]:
    """Greedy texts of a method."""
    method = next(m for m in METHODS if m.name == name)
    settings = EngineSettings(4, 96, page_size=16, dtype=model.embed.dtype)
    batch = Engine(model, settings, method, Verification("greedy")).generate(requests(PROMPTS, new=new))
    return [r.output_ids for r in batch]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_texts_of_an_engine_pass(dtype: torch.dtype) -> None:
    """Plain and speculative texts; fp32 leaves no near tie that is not an argmax, bf16 has noise that is measured."""
    model = random_weights(tiny_spec("qwen3", layers=3), dtype, "cpu", 5)
    plain, drafted = texts(model, "autoregressive"), texts(model, "aspire_fixed")
    gate = near_tie_gate(model, PROMPTS, drafted, 6, plain)
    assert gate.passed and gate.tokens == 64 == gate.argmax + gate.near_ties
    assert gate.parted == sum(a != b for a, b in zip(plain, drafted))
    if dtype == torch.float32:
        assert gate.near_ties == gate.parted == 0 and gate.noise < 1e-4
    else:
        assert 0 < gate.noise < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_wrong_token_fails(dtype: torch.dtype) -> None:
    """The least likely token in one place: it is counted, and so is the parting from plain decoding."""
    model = random_weights(tiny_spec(layers=2), dtype, "cpu", 2)
    plain = texts(model, "autoregressive")
    wrong = [list(text) for text in plain]
    wrong[2][7] = (wrong[2][7] + 48) % 97
    gate = near_tie_gate(model, PROMPTS, wrong, 5, plain)
    assert not gate.passed and gate.wrong >= 1 and gate.parted == 1


def test_ragged_texts_of_one_token_and_more() -> None:
    """A text may end before the others, also with its first token."""
    model = random_weights(tiny_spec(), torch.float32, "cpu", 2)
    plain = texts(model, "autoregressive")
    ragged = [text[:n] for text, n in zip(plain, (1, 16, 7, 2))]
    gate = near_tie_gate(model, PROMPTS, ragged, 4, plain)
    assert gate.passed and gate.tokens == 26 and gate.parted == 0


def test_a_tie_within_twice_the_noise_passes_and_one_beyond_does_not() -> None:
    """The noise of all texts counts: one of them may show none."""
    quiet, loud = Forced([0.0, 0.2, 0.21], 0.0), Forced([0.0, 0.0], 0.1, 0.2)
    assert judge([quiet, loud]) == Gate(5, 3, 1, 1, 1, 0, 0.1, 0.2)
    assert judge([loud]).passed and not judge([quiet]).passed and not Gate().passed
    assert judge([Forced([0.0], 0.1, 0.3)]).parted_wrong == 1
    assert judge([loud]).as_record()["passed"] is True


def test_where_texts_part() -> None:
    assert parting([1, 2, 3], [1, 2, 4]) == 2
    assert parting([1, 2], [1, 2, 4]) is None
