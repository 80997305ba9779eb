"""The model of the demo is an ordinary causal language model, and its step an ordinary step."""

import math

import pytest
import torch

from wholestep.cli.workloads.gpt import GPT, NUM_BYTES, GPTConfig, next_byte_loss, sample, train_step

SMALL = GPTConfig(num_layers=2, num_heads=2, width=16, context=12)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


def test_the_default_size_is_a_few_million_parameters() -> None:
    num_parameters = sum(parameter.numel() for parameter in GPT(GPTConfig()).parameters())
    assert 2_000_000 <= num_parameters <= 3_000_000


def test_logits_have_one_row_per_byte_also_below_the_context(model: GPT) -> None:
    assert model(torch.zeros(3, 12, dtype=torch.long)).shape == (3, 12, NUM_BYTES)
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, NUM_BYTES)


def test_a_byte_does_not_see_what_follows(model: GPT) -> None:
    tokens = torch.randint(NUM_BYTES, (1, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % NUM_BYTES
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_an_untrained_model_knows_nothing(model: GPT) -> None:
    tokens = torch.randint(NUM_BYTES, (8, 13), generator=torch.Generator().manual_seed(1))
    loss = next_byte_loss(model, tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(NUM_BYTES), abs=0.2)


def test_the_step_learns_clips_and_leaves_no_gradient(model: GPT) -> None:
    tokens = torch.arange(13).repeat(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    losses = [float(train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:]))]
    moved = torch.stack([(a - b).norm() for a, b in zip(model.parameters(), before, strict=True)]).norm()
    assert moved.item() <= 1.0 + 1e-5  # SGD at rate 1 moves by the gradient, whose norm was clipped to 1
    assert all(parameter.grad is None for parameter in model.parameters())
    losses += [float(train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:])) for _ in range(10)]
    assert losses[-1] < losses[0] - 1


def test_a_sample_continues_the_prompt_and_its_seed_decides_it(model: GPT) -> None:
    drawn = [sample(model, b"def ", num_bytes=20, temperature=0.8, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0].startswith("def ")
    assert drawn[0] == drawn[1] != drawn[2]
