"""Reading masks, and the dense attention for softcap and sinks."""

import pytest
import torch

from tsattn.integrations.hf_dense import dense_attention
from tsattn.integrations.hf_mask import MaskReader, read_padding
from tsattn.testing import assert_close


def causal(pads, new, total):
    """The mask that Transformers makes: [B, 1, new, total] bool."""
    column = torch.arange(total)
    query = torch.arange(total - new, total)[:, None]
    return torch.stack([(column >= pad) & (column <= query) for pad in pads])[:, None]


@pytest.mark.parametrize("pads", [[0], [3], [0, 2, 5], [6, 0], [8, 1]])
@pytest.mark.parametrize("new", [1, 3, 8])
@pytest.mark.parametrize("additive", [None, torch.finfo(torch.float32).min, -torch.inf, -1e9, torch.finfo(torch.float16).min])
def test_left_padding_is_read(pads, new, additive):
    mask = causal(pads, new, 8)
    if additive is not None:
        mask = torch.zeros(mask.shape).masked_fill(~mask, additive)
    assert read_padding(mask, rows=len(pads), new=new, total=8) == pads


def test_one_mask_for_all_rows_and_heads():
    assert read_padding(causal([2], 4, 8), rows=3, new=4, total=8) == [2, 2, 2]
    assert read_padding(causal([2], 4, 8).expand(1, 5, 4, 8), rows=3, new=4, total=8) == [2, 2, 2]


def test_an_image_block_inside_a_chunk_is_served():
    mask = causal([1], 6, 6)
    mask[0, 0, 2:5, 2:5] = True
    assert read_padding(mask, rows=1, new=6, total=6) == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m[..., 7:].fill_(False), "right padding"),
        (lambda m: m[..., 4:5].fill_(False), "holes"),
        (lambda m: m[:, :, -1, :5].fill_(False), "packed"),
        (lambda m: m[:, 1].logical_and_(torch.arange(8) > 1), "heads"),
    ],
)
def test_other_masks_are_refused(change, message):
    mask = causal([0, 1], 8, 8).repeat(1, 2, 1, 1)
    change(mask)
    with pytest.raises(ValueError, match=message):
        read_padding(mask, rows=2, new=8, total=8)


def test_a_bias_is_refused():
    bias = torch.zeros(1, 1, 4, 4).masked_fill(~causal([0], 4, 4), -torch.inf)
    bias[0, 0, 3, 0] = -0.5
    with pytest.raises(ValueError, match="bias"):
        read_padding(bias, rows=1, new=4, total=4)


def test_a_mask_is_read_once_per_forward_pass(monkeypatch):
    calls = []
    monkeypatch.setattr("tsattn.integrations.hf_mask.read_padding", lambda mask, **kwargs: calls.append(1) or [0])
    reader, mask = MaskReader(), causal([0], 2, 4)
    for _ in range(5):
        reader.read(mask, rows=1, new=2, total=4)
    assert len(calls) == 1
    reader.read(mask.clone(), rows=1, new=2, total=4)
    reader.read(mask, rows=1, new=2, total=4)
    assert len(calls) == 3


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive"])
def test_dense_attention_agrees_with_fp64(softcap, with_sinks, kind, monkeypatch):
    monkeypatch.setattr("tsattn.integrations.hf_dense._SCORE_ELEMENTS", 100)  # several slices of queries
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, 8, generator=rng) for heads, tokens in ((6, 5), (2, 9), (2, 9)))
    sinks = torch.randn(6, generator=rng) if with_sinks else None
    visible = {"none": torch.ones(1, 1, 5, 9, dtype=torch.bool), "causal": causal([0], 5, 9)}.get(kind, causal([2, 0], 5, 9))
    mask = {"none": None, "causal": None, "bool": visible}.get(kind, torch.zeros(visible.shape).masked_fill(~visible, -1e9))

    def plain(dtype):
        heads = [t.to(dtype).repeat_interleave(3, 1) for t in (k, v)]
        logits = q.to(dtype) @ heads[0].transpose(2, 3) * 0.3
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        logits = logits.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(dtype).reshape(1, 6, 1, 1).expand(2, 6, 5, 1)], -1)
        return (torch.softmax(logits, -1)[..., :9] @ heads[1]).transpose(1, 2)

    got = dense_attention(q, k, v, mask, scale=0.3, softcap=softcap, sinks=sinks, causal=kind == "causal")
    assert_close(got, plain(torch.float64), plain(torch.float32))


def test_a_query_that_sees_nothing_gives_zero():
    q = torch.randn(1, 2, 3, 4)
    mask = causal([2], 3, 3)
    out = dense_attention(q, q, q, mask, scale=1.0)
    assert torch.equal(out[0, :2], torch.zeros(2, 2, 4))
    assert torch.equal(out[0, 2], q[0, :, 2])
