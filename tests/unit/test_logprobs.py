"""Log-probabilities of chosen tokens against the plain formula over all logits."""

import torch

from art_core.training.head import frozen_head_logprobs
from art_core.training.logprobs import target_logprobs

HIDDEN, VOCABULARY = 8, 50


def head_of(generator: torch.Generator) -> torch.nn.Linear:
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCABULARY, HIDDEN, generator=generator))
    return head


def case(rows: int, targets: int):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=generator)
    at = torch.randint(0, rows, (targets,), generator=generator).sort().values
    tokens = torch.randint(0, VOCABULARY, (targets,), generator=generator)
    return head_of(generator), hidden, at, tokens


def test_chunks_give_the_values_and_gradients_of_one_piece():
    head, hidden, at, tokens = case(23, 40)
    plain = hidden.clone().requires_grad_()
    expected = torch.log_softmax(head(plain), dim=-1)
    expected[at, tokens].sum().backward()
    for chunk in (1, 4, 23, 100):
        given = hidden.clone().requires_grad_()
        logprob, entropy = target_logprobs(head, given, at, tokens, chunk=chunk)
        logprob.sum().backward()
        torch.testing.assert_close(logprob, expected[at, tokens])
        torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
        torch.testing.assert_close(given.grad, plain.grad)
        assert not entropy.requires_grad


def test_logits_of_the_whole_batch_never_exist():
    head, hidden, at, tokens = case(64, 64)
    sizes: list[int] = []

    def watched(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return head(part)

    logprob, _ = target_logprobs(watched, hidden.requires_grad_(), at, tokens, chunk=16)
    forward = len(sizes)
    logprob.sum().backward()
    assert max(sizes) == 16
    assert len(sizes) == 2 * forward  # computed again in backward, not kept


def test_the_softmax_is_taken_in_float32():
    head, hidden, at, tokens = case(5, 9)
    logprob, entropy = target_logprobs(head.bfloat16(), hidden.bfloat16(), at, tokens)
    assert logprob.dtype == entropy.dtype == torch.float32


def test_impossible_tokens_leave_the_entropy_finite():
    def head(hidden: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[0.0, 0.0, float("-inf")]]).expand(len(hidden), 3)

    logprob, entropy = target_logprobs(head, torch.zeros(1, 4), torch.tensor([0]), torch.tensor([1]))
    assert entropy.item() == torch.log(torch.tensor(2.0)).item()
    assert logprob.item() == -entropy.item()


def test_entropy_has_the_plain_formulas_gradient_when_it_is_asked_for():
    head, hidden, at, tokens = case(23, 40)
    plain = hidden.clone().requires_grad_()
    expected = torch.log_softmax(head(plain), dim=-1)
    (-(expected.exp() * expected).sum(-1) * torch.arange(23)).sum().backward()
    for chunk in (4, 100):
        given = hidden.clone().requires_grad_()
        _, entropy = target_logprobs(head, given, at, tokens, entropy_gradient=True, chunk=chunk)
        (entropy * torch.arange(23)).sum().backward()
        torch.testing.assert_close(given.grad, plain.grad, atol=1e-4, rtol=1e-3)


def test_impossible_tokens_leave_the_gradient_of_the_entropy_finite():
    shift = torch.zeros((), requires_grad=True)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        move = torch.stack([shift, shift * 0, shift])
        return torch.tensor([[0.0, 1.0, float("-inf")]]).expand(len(hidden), 3) + move

    _, entropy = target_logprobs(
        head, torch.zeros(1, 4), torch.tensor([0]), torch.tensor([1]), entropy_gradient=True
    )
    entropy.sum().backward()
    p = torch.sigmoid(torch.tensor(1.0))
    torch.testing.assert_close(entropy[0], torch.distributions.Bernoulli(p).entropy())
    assert torch.isfinite(shift.grad)


def test_a_frozen_heads_own_backward_is_autograds():
    head, hidden, at, tokens = case(23, 40)
    factors, weights = torch.linspace(-1, 2, 40), torch.linspace(0.1, 1, 23)
    for chunk in (1, 4, 23, None):
        results = []
        for function in (
            lambda h: target_logprobs(head, h, at, tokens, entropy_gradient=True),
            lambda h, chunk=chunk: frozen_head_logprobs(h, head.weight.detach(), at, tokens, chunk=chunk),
        ):
            given = hidden.clone().requires_grad_()
            logprob, entropy = function(given)
            ((factors * logprob).sum() + (weights * entropy).sum()).backward()
            results.append((logprob.detach(), entropy.detach(), given.grad))
        torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-4)


def test_a_frozen_head_in_bfloat16_gives_float32_probabilities():
    head, hidden, at, tokens = case(9, 12)
    given = hidden.bfloat16().requires_grad_()
    weight = head.weight.detach().bfloat16()
    logprob, entropy = frozen_head_logprobs(given, weight, at, tokens, chunk=4)
    logprob.sum().backward()
    assert logprob.dtype == entropy.dtype == torch.float32
    assert given.grad is not None
    assert given.grad.dtype == torch.bfloat16
    expected, _ = target_logprobs(head, hidden, at, tokens)
    torch.testing.assert_close(logprob, expected, atol=0.15, rtol=0.05)


def test_each_row_has_a_temperature_of_its_own_whatever_the_chunks():
    head, hidden, at, tokens = case(23, 40)
    heat = torch.linspace(0.5, 2, 23)
    factors, weights = torch.linspace(-1, 2, 40), torch.linspace(0.1, 1, 23)

    def outcome(function):
        given = hidden.clone().requires_grad_()
        logprob, entropy = function(given)
        ((factors * logprob).sum() + (weights * entropy).sum()).backward()
        return logprob.detach(), entropy.detach(), given.grad

    def plain(given: torch.Tensor):
        every = torch.log_softmax(head(given) / heat[:, None], dim=-1)
        return every[at, tokens], -(every.exp() * every).sum(-1)

    expected = outcome(plain)
    for chunk in (1, 4, 23, 100):
        for found in (
            outcome(
                lambda h, n=chunk: target_logprobs(
                    head, h, at, tokens, temperature=heat, entropy_gradient=True, chunk=n
                )
            ),
            outcome(
                lambda h, n=chunk: frozen_head_logprobs(
                    h, head.weight.detach(), at, tokens, temperature=heat, chunk=n
                )
            ),
        ):
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_temperature_leaves_a_frozen_head_in_bfloat16_where_it_was():
    head, hidden, at, tokens = case(9, 12)
    heat = torch.full((9,), 0.7)
    given = hidden.bfloat16().requires_grad_()
    weight = head.weight.detach().bfloat16()
    logprob, entropy = frozen_head_logprobs(given, weight, at, tokens, temperature=heat, chunk=4)
    logprob.sum().backward()
    assert logprob.dtype == entropy.dtype == torch.float32
    assert given.grad is not None
    assert given.grad.dtype == torch.bfloat16
    expected, _ = target_logprobs(head, hidden, at, tokens, temperature=heat)
    torch.testing.assert_close(logprob, expected, atol=0.2, rtol=0.05)
