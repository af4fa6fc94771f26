"""The model of the GPU benchmarks: its size is what tables say, and its choices compute the same."""

import pytest
import torch

from bench.determinism import AS_IT_IS, BASE, Choice, best, differences
from bench.transformer import EMBEDDINGS, SHAPES, Transformer, loss_of
from bench.workload import Config, make_task


def test_the_number_of_parameters_is_the_formula() -> None:
    with torch.device("meta"):
        for shape in SHAPES.values():
            assert sum(p.numel() for p in Transformer(shape).parameters()) == shape.parameters
    assert 0.78e9 < SHAPES["llm-0.8B"].parameters < 0.86e9


@pytest.mark.parametrize("embedding", EMBEDDINGS[1:])
def test_every_way_to_look_tokens_up_has_the_same_gradient(embedding: str) -> None:
    shape = SHAPES["llm-tiny"]
    torch.manual_seed(0)
    net = Transformer(shape)
    text = torch.randint(0, 7, (2, shape.length + 1))  # few different tokens: rows are added up
    grads = []
    for net.embedding in (EMBEDDINGS[0], embedding):
        net.zero_grad()
        loss_of(net, (text[:, :-1], text[:, 1:])).backward()
        assert net.tokens.weight.grad is not None
        grads.append(net.tokens.weight.grad)
    # The product of matrices takes gradients in bf16, which has 8 bits.
    torch.testing.assert_close(grads[1], grads[0], rtol=2**-7, atol=2**-7 * float(grads[0].abs().max()))


def test_tokens_of_a_batch_follow_each_other() -> None:
    task = make_task(Config("steps", "", 2, "llm-tiny", batch=2), torch.device("cpu"))
    x, y = task.data.batch(3, 1, 2, 2)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, task.data.x[14:16])


def test_the_best_choice_repeats_and_is_fastest() -> None:
    flash, cudnn, index = (
        Choice(True, attention="flash"),
        Choice(True, attention="cudnn"),
        Choice(True, embedding="index"),
    )
    plain = Choice(True)
    works = [BASE, AS_IT_IS, plain, flash, cudnn, index]
    seconds = {BASE: 1.0, AS_IT_IS: 1.3, plain: 1.2, flash: 1.1, cudnn: 1.0, index: 1.15}
    found = best(works, {c.name: c is not cudnn for c in works}, {c.name: [s, s] for c, s in seconds.items()})
    assert found == Choice(True, attention="flash", embedding="index")


def test_differences_are_sorted_by_size() -> None:
    found = differences({"a": 1.0, "b": 5.0}, {"a": 1.5, "c": 2.0})
    assert [d["name"] for d in found] == ["b", "c", "a"]
