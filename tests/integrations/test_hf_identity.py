"""With a budget over the context, tsattn's tokens and logits are those of the model's own attention."""

import pytest
import torch
import transformers

from tests.integrations.models import CACHE, NAMES, SDPA, build, given, prompts
from tsattn import SparseConfig
from tsattn.integrations import hf
from tsattn.testing import assert_close

COVERING = SparseConfig(page_size=8, token_budget=512)
CONFIGS = [
    COVERING,
    SparseConfig.paper(page_size=16, token_budget=512),
    SparseConfig(page_size=4, token_budget=512, kind="meanvar", group_reduce="softmax"),
    SparseConfig(page_size=8, token_budget=512, parts=1, stats_dtype=torch.int8),
    SparseConfig(page_size=8, token_budget=512, kind="centroids"),
]


def generate(model, lengths, new=16, seed=0, **kwargs):
    ids, mask = prompts(lengths, seed)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, **kwargs)


@pytest.mark.parametrize("config", CONFIGS, ids=["means", "paper", "meanvar", "int8", "centroids"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_models_own_attention(name, config):
    model = build(name)
    want = generate(model, [3, 17, 40], do_sample=False)
    with hf.sparse(model, config) as handle:
        assert torch.equal(generate(model, [3, 17, 40], do_sample=False), want)
    assert handle.stats()["kv_share"] == 1.0


@pytest.mark.parametrize("name", SDPA)
def test_tb_028_left_padding_gives_each_prompts_own_tokens(name):
    """TB-028: prompts of 3 and 17 tokens, padded to 17, page size 16, 16 greedy tokens."""
    model = build(name)
    config = SparseConfig(page_size=16, token_budget=64)
    ids, mask = prompts([3, 17])
    cache = hf.make_cache(model.config, config)
    with hf.sparse(model, config):
        both = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, **{CACHE: cache})
        alone = [
            model.generate(row[row != 0][None], attention_mask=m, max_new_tokens=16, do_sample=False)[0]
            for row in ids
            for m in [torch.ones(1, int((row != 0).sum()), dtype=torch.long)]
        ]
        unmasked = model.generate(ids[1:], max_new_tokens=16, do_sample=False)
    for row, single in enumerate(alone):
        assert torch.equal(both[row, -16:], single[-16:])
    assert torch.equal(unmasked[0], both[1])
    layer = cache.paged_layers[0]
    for seq, real in zip(layer.seqs, [3 + 15, 17 + 15], strict=True):
        assert layer.pool.length(seq) == real
        assert len(layer.pool.pages(seq)) == -(-real // 16)


@pytest.mark.parametrize("name", SDPA)
def test_tb_028_padding_stays_out_of_the_statistics(name):
    """TB-028: the bounds of a padded row are bit for bit those of the row alone."""
    model = build(name)
    config = SparseConfig.paper(page_size=16, token_budget=64)
    ids, mask = prompts([3, 17])
    pools = []
    with hf.sparse(model, config), torch.no_grad():
        for i, m in [(ids, mask), (ids[:1, -3:], mask[:1, -3:])]:
            cache = hf.make_cache(model.config, config)
            model(i, **given(name, m), **{CACHE: cache})
            pools.append(cache.paged_layers[0])
    padded, single = pools
    stats = [layer.pool.page_stats[layer.pool.pages(layer.seqs[0])[0]] for layer in (padded, single)]
    keys = padded.pool.gather(padded.seqs[:1])[0][0]  # [HKV, 3, D]
    assert torch.equal(stats[0][:, 0], keys.amin(1))
    assert torch.equal(stats[0][:, 1], keys.amax(1))
    assert stats[0].shape == stats[1].shape


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_each_decode_step_agree_with_fp64(name):
    model, exact = build(name), build(name).double()
    # eager attention of a padded row is NaN in fp64 where the model casts its mask to fp32
    ids, mask = prompts([9, 30] if name in SDPA else [30, 30])
    got = []
    with torch.no_grad():
        want, yardstick = (m(ids, **given(name, mask)).logits[:, -8:] for m in (exact, model))
        with hf.sparse(model, COVERING):
            cache = hf.make_cache(model.config, COVERING)
            for end in range(22, 31):
                chunk = ids[:, :22] if end == 22 else ids[:, end - 1 : end]
                out = model(chunk, **given(name, mask[:, :end], chunk.shape[1]), **{CACHE: cache})
                got.append(out.logits[:, -1])
    assert_close(torch.stack(got[1:], 1), want, yardstick)


@pytest.mark.parametrize("name", SDPA)
@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
def test_chunked_prefill(name, chunk):
    model = build(name)
    want = generate(model, [37, 50], do_sample=False)
    with hf.sparse(model, COVERING):
        assert torch.equal(generate(model, [37, 50], do_sample=False, prefill_chunk_size=chunk), want)


@pytest.mark.parametrize("name", NAMES)
def test_beam_search(name):
    model = build(name)
    settings = {"do_sample": False, "num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}
    want = generate(model, [11, 26], new=20, **settings)
    with hf.sparse(model, COVERING):
        assert torch.equal(generate(model, [11, 26], new=20, **settings), want)


@pytest.mark.parametrize("name", NAMES)
def test_sampling_with_a_seed(name):
    model = build(name)
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 20, "num_return_sequences": 2}
    torch.manual_seed(5)
    want = generate(model, [8, 21], **settings)
    with hf.sparse(model, COVERING):
        torch.manual_seed(5)
        assert torch.equal(generate(model, [8, 21], **settings), want)


@pytest.mark.parametrize("name", SDPA)
def test_assisted_generation_crops_what_was_not_accepted(name):
    model, assistant = build(name), build(name)
    for parameter in assistant.parameters():  # a draft model that is wrong now and then
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    want = generate(model, [30], new=24, do_sample=False)
    try:
        generate(model, [30], new=24, do_sample=False, assistant_model=assistant)
    except RuntimeError as fault:
        pytest.skip(f"Transformers {transformers.__version__} itself can't assist {name}: {fault}")
    with hf.sparse(model, COVERING) as handle:
        assert torch.equal(generate(model, [30], new=24, do_sample=False, assistant_model=assistant), want)
    assert handle.stats()["dense_chunks"] > len(handle.stats()["layers"])


@pytest.mark.parametrize("name", SDPA)
def test_prompt_lookup(name):
    model = build(name)
    ids, _ = prompts([12])
    ids = ids.repeat(1, 3)
    want = model.generate(ids, max_new_tokens=20, do_sample=False)
    with hf.sparse(model, COVERING):
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=4), want)


def test_tb_027_prefill_does_not_look_ahead():
    """TB-027: changing the last of 32 prompt tokens leaves the other 31 positions alone."""
    model = build("llama")
    ids, _ = prompts([32])
    changed = ids.clone()
    changed[0, -1] = ids[0, -1] % 90 + 4
    assert changed[0, -1] != ids[0, -1]
    eager, exact = build("llama"), build("llama").double()
    eager.set_attn_implementation("eager")
    hidden = {"output_hidden_states": True}
    with torch.no_grad(), hf.sparse(model, COVERING):
        first, second = (model(i, **hidden).hidden_states[-1] for i in (ids, changed))
        yardstick, want = (m(ids, **hidden).hidden_states[-1] for m in (eager, exact))
    assert torch.equal(first[:, :31], second[:, :31])
    assert not torch.equal(first[:, 31], second[:, 31])
    assert_close(first, want, yardstick)


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt_oss"])
def test_tb_027_sliding_layers_do_not_look_ahead_either(name):
    """TB-027, for models whose masks come in two kinds."""
    model = build(name)
    ids, _ = prompts([40])
    changed = ids.clone()
    changed[0, -1] = ids[0, -1] % 90 + 4
    with torch.no_grad(), hf.sparse(model, COVERING):
        first, second = (model(i, output_hidden_states=True).hidden_states[-1] for i in (ids, changed))
    assert torch.equal(first[:, :39], second[:, :39])


def test_bf16_tokens():
    model = build("llama").bfloat16()
    want = generate(model, [12, 33], do_sample=False)
    with hf.sparse(model, COVERING) as handle:
        got = generate(model, [12, 33], do_sample=False)
    assert got.shape == want.shape
    assert handle.stats()["kv_share"] == 1.0
