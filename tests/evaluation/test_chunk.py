"""A chunk in one pass equals decoding token by token, and what it says about bytes and mass is counted."""

import pytest
import torch

from tests.integrations.models import CACHE, build, prompts
from tsattn import SparseConfig
from tsattn.evaluation.chunk import score_chunk
from tsattn.evaluation.reading import Prefiller, prefill, snapshot
from tsattn.integrations import hf
from tsattn.policies import POLICIES, QueryAware, Step
from tsattn.policies.base import ScoredPages
from tsattn.testing import assert_close

CONTEXT, CHUNK = 150, 13
SMALL = {"page_size": 4, "token_budget": 32, "recent_pages": 2}
CONFIGS = {
    "means": SparseConfig(stats_dtype=None, **SMALL),
    "one mean": SparseConfig(parts=1, stats_dtype=None, **SMALL),
    "minmax": SparseConfig(kind="minmax", stats_dtype=None, **SMALL),
    "meanvar": SparseConfig(kind="meanvar", **SMALL),
    "int8": SparseConfig(stats_dtype=torch.int8, **SMALL),
    "centroids": SparseConfig(kind="centroids", **SMALL),
    "two levels": SparseConfig(refine_pages=16, **SMALL),
    "a mass": SparseConfig(top_p=0.9, **SMALL),
    "by layer": SparseConfig(layer_budgets={1: 16}, **SMALL),
    "mix": SparseConfig(group_reduce="mix", **SMALL),
    "softmax": SparseConfig(group_reduce="softmax", **SMALL),
    "root": SparseConfig(group_reduce="root", **SMALL),
    "blend": SparseConfig(group_reduce="blend", **SMALL),
    "per query head": SparseConfig.paper(page_size=4, token_budget=32),
    "covering": SparseConfig(page_size=4, token_budget=256),
    "short rows": SparseConfig(min_seq_len=CONTEXT + 6, **SMALL),
}


def read(name):
    """A model, its context read, and the tokens that follow."""
    model = build(name)
    ids, _ = prompts([CONTEXT + CHUNK])
    tokens = ids[0].tolist()
    return model, prefill(model, tokens[:CONTEXT], 64), tokens[CONTEXT:]


@torch.inference_mode()
def one_by_one(model, cache, tokens):
    """Log probabilities of decoding one token at a time."""
    logits = [model(input_ids=torch.tensor([[token]]), **{CACHE: cache}).logits[0, -1] for token in tokens]
    return torch.log_softmax(torch.stack(logits), -1)


PAIRS = [("gemma3", which) for which in CONFIGS] + [
    (name, which) for name in ("gemma2", "gpt_oss", "qwen3", "gpt2") for which in ("means", "mix")
]


@pytest.mark.parametrize(("name", "which"), PAIRS)
def test_a_chunk_equals_decoding_token_by_token(name, which):
    config = CONFIGS[which]
    model, prefilled, tokens = read(name)
    dense = one_by_one(model, snapshot(prefilled), tokens)
    rounding = score_chunk(model, prefilled, tokens, None).log_probs - dense
    cache = hf.make_cache(model.config, config, from_cache=prefilled)
    with hf.sparse(model, config, trace=True) as handle:
        expected = one_by_one(model, cache, tokens)
    policy = Watched(config)
    chunk = score_chunk(model, prefilled, tokens, policy)
    assert_close(chunk.log_probs, expected.double(), expected + rounding)
    stats = handle.stats()["per_layer"]
    assert list(chunk.layers) == list(stats)
    for layer, counts in stats.items():
        lists = [trace.selection.page_ids[0] for trace in handle.traces if trace.layer == layer]
        assert [read_pages(row) for row in policy.lists[layer]] == [read_pages(row) for row in lists]
        same(chunk.layers[layer].kv_bytes / chunk.layers[layer].dense_bytes, counts["kv_share"])


def same(number, exact):
    """Up to the rounding of fp32."""
    assert_close(torch.tensor(number), torch.tensor(exact, dtype=torch.float64))


def read_pages(lists):
    """Lists [H, K] without what is behind their ends."""
    return [[page for page in pages if page >= 0] for pages in lists.tolist()]


class Watched(QueryAware):
    """Remembers what it chose."""

    def begin(self):
        super().begin()
        self.__dict__["lists"] = {}

    def attend(self, step):
        attended = super().attend(step)
        self.lists[step.layer] = attended.selection.page_ids
        return attended


def policy_of(name, **options):
    """A policy; those that keep tokens know of no pages."""
    try:
        return POLICIES[name](SparseConfig(**options))
    except ValueError:
        return POLICIES[name](SparseConfig(token_budget=options["token_budget"]))


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "soft-prune"])
def test_a_covering_budget_is_dense_attention_for_every_policy(policy, name):
    model, prefilled, tokens = read(name)
    observed = Prefiller(model, 64, progress=False, observe=True).read(context_of(tokens)).observed
    dense = score_chunk(model, prefilled, tokens, None).log_probs
    exact = one_by_one(model, snapshot(prefilled), tokens)
    chunk = score_chunk(model, prefilled, tokens, policy_of(policy, page_size=4, token_budget=512), observed=observed)
    assert_close(chunk.log_probs, exact.double(), dense)
    same(chunk.mass, 1.0)
    assert all(layer.kv_bytes == layer.dense_bytes for layer in chunk.layers.values())


def context_of(chunk):
    """The tokens before a chunk of :func:`read`."""
    ids, _ = prompts([CONTEXT + CHUNK])
    assert ids[0, CONTEXT:].tolist() == chunk
    return ids[0, :CONTEXT].tolist()


def test_the_prefill_stays_as_it_is():
    model, prefilled, tokens = read("gemma3")
    before = [layer.keys.clone() for layer in prefilled.layers]
    for policy in (None, QueryAware(CONFIGS["means"])):
        score_chunk(model, prefilled, tokens, policy)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(prefilled.layers, before, strict=True))
    assert model.config._attn_implementation == "sdpa"


def test_bytes_are_counted():
    model, prefilled, tokens = read("llama")
    config = SparseConfig(page_size=4, token_budget=32, recent_pages=2, parts=2, stats_dtype=None)
    layer = score_chunk(model, prefilled, tokens[:2], QueryAware(config)).layers[0]
    heads, dim, element = 2, 16, 2
    lengths = [CONTEXT + 1, CONTEXT + 2]  # 38 pages; the last one holds 3 and 4 tokens
    assert layer.dense_bytes == sum(lengths) / 2 * heads * 2 * dim * element
    assert layer.kv_bytes == (31 + 32) / 2 * heads * 2 * dim * element
    assert layer.statistics_bytes == 38 * heads * 2 * dim * element
    refined = SparseConfig(page_size=4, token_budget=32, recent_pages=2, parts=2, refine_pages=20, stats_dtype=None)
    layer = score_chunk(model, prefilled, tokens[:2], QueryAware(refined)).layers[0]
    assert layer.statistics_bytes == 38 * heads * (dim + 4) + 20 * heads * 2 * dim * element
    unlimited = SparseConfig(page_size=4, token_budget=256, stats_dtype=None, top_p=1)
    assert score_chunk(model, prefilled, tokens[:2], QueryAware(unlimited)).layers[0].statistics_bytes == 0
    int8 = SparseConfig(page_size=4, token_budget=32, recent_pages=2, parts=2, stats_dtype=torch.int8)
    layer = score_chunk(model, prefilled, tokens[:2], QueryAware(int8)).layers[0]
    assert layer.statistics_bytes == 38 * heads * 2 * (dim + 4)


def test_what_scores_read_of_a_page_is_counted():
    config = SparseConfig(page_size=4, token_budget=24, recent_pages=1)

    def newest(step, config):
        pages = -(-step.keys.shape[1] // config.page_size)
        return torch.arange(pages).float().expand(step.q.shape[0], step.keys.shape[0], -1)

    rng = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 50, 16, generator=rng)
    lens = torch.tensor([20, 50], dtype=torch.int32)  # the first row keeps everything
    step = Step(0, torch.randn(2, 4, 16, generator=rng), keys, values, lens, {"softmax_scale": 0.25}, (0,), None)
    for per_page in (0.0, 32.0):
        assert ScoredPages(config, newest, per_page).attend(step).statistics_bytes == 13 * 2 * per_page


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": torch.tensor([4.0, -1.0, 0.5, 2.0])}])
def test_the_true_mass_is_that_of_capped_logits_and_beside_sinks(options):
    rng = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 400, 16, generator=rng)
    keys = keys * 3.0
    lens = torch.full((5,), 400, dtype=torch.int32)
    q = torch.randn(5, 4, 16, generator=rng)
    step = Step(0, q, keys, values, lens, {"softmax_scale": 0.25, "softcap": 0.0, "sinks": None} | options, (0,), None)
    config = SparseConfig(page_size=4, token_budget=32, recent_pages=1, sink_pages=0, group_reduce="max")
    weights = step.weights(step.logits()).view(5, 2, 2, 100, 4).sum((2, 4))  # by KV head and page
    best = weights[..., :-1].topk(7).indices
    wanted = [[sorted([*pages, 99]) for pages in row] for row in best.tolist()]
    assert POLICIES["oracle-mass"](config).attend(step).selection.page_ids.tolist() == wanted


def test_oracles_cover_more_mass_than_any_other_choice_of_as_many_pages():
    model, prefilled, tokens = read("llama")
    config = SparseConfig(page_size=4, token_budget=32, recent_pages=1, sink_pages=0)
    choosing = ("tsattn", "random", "oracle-max", "oracle-mass")
    masses = {name: score_chunk(model, prefilled, tokens, POLICIES[name](config)).layers[0].mass for name in choosing}
    assert max(masses, key=masses.get) == "oracle-mass"  # layer 0: all policies are asked the same queries
    assert masses["random"] < min(masses["tsattn"], masses["oracle-max"])
