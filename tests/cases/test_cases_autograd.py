"""Writing in place under autograd: TB-103."""

import pytest
import torch

import tsattn

from .world import counting


def saved_by_exp(shape, device):
    """A tensor that the backward of exp() reads again, and the loss that needs it."""
    x = torch.zeros(shape, device=device, requires_grad=True)
    saved = x.exp()
    return saved.detach(), saved.sum()


@pytest.mark.parametrize("what", ["k_cache", "v_cache", "page_stats", "out", "scores"])
def test_tb_103_autograd_sees_every_write_in_place(impl, device, what):
    """Either the gradient is that of an untouched tensor, or autograd refuses: never a wrong number."""
    world, q = counting([5], impl, device)
    shape = {"out": (1, 1, 16), "scores": (1, 1, world.page_table.shape[1])}.get(what, (2, 16, 1, 16))
    shape = (2, 1, 2, 16) if what == "page_stats" else shape
    buffer, loss = saved_by_exp(shape, device)
    with torch.no_grad():
        if what == "out":
            world.dense(q, out=buffer)
        elif what == "scores":
            world.score(q, out=buffer)
        else:
            pools = {"k_cache": torch.zeros(2, 16, 1, 16, device=device), "v_cache": torch.zeros(2, 16, 1, 16, device=device)}
            pools |= {"page_stats": torch.zeros(2, 1, 2, 16, device=device), what: buffer}
            new = torch.full((1, 1, 16), 3.0, device=device)
            slots = torch.tensor([0], device=device)
            tsattn.append_kv(new, new, *pools.values(), slots, kind="minmax", impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tb_103_a_gradient_is_refused_not_dropped(impl, device):
    world, q = counting([5], impl, device)
    with pytest.raises(ValueError, match="q requires a gradient"):
        world.dense(q.to(device).requires_grad_())
