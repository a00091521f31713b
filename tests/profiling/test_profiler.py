"""A profile sees every way in, counts what was read, and changes nothing."""

import itertools
import json
import threading

import pytest
import torch

import tsattn
from tests.integrations.models import CACHE, build, prompts
from tsattn import PagedKVCache, SparseConfig, marks
from tsattn.integrations import hf
from tsattn.profiling import Profiler
from tsattn.testing import assert_close, assert_same_bits

CONFIG = SparseConfig(page_size=8, token_budget=64, recent_pages=1, plan="separate")
HEADS, GROUP, DIM, LENGTH, PAGES = 2, 2, 16, 203, 26


def new_cache(seed=0, impl="auto", config=CONFIG, length=LENGTH):
    cache = PagedKVCache.from_config(config, 64, HEADS, DIM, dtype=torch.float32, impl=impl)
    seqs = cache.allocate(1)
    rng = torch.Generator().manual_seed(seed)
    cache.append(seqs, *torch.randn(2, 1, length, HEADS, DIM, generator=rng))
    return cache, seqs


def decode(caches, steps, **options):
    """Steps over layers, each an append and a sparse step; the outputs."""
    rng = torch.Generator().manual_seed(9)
    found = []
    for _ in range(steps):
        for cache, seqs in caches:
            cache.append(seqs, *torch.randn(2, 1, 1, HEADS, DIM, generator=rng))
            q = torch.randn(1, HEADS * GROUP, DIM, generator=rng)
            found.append(cache.sparse_decode(seqs, q, config=CONFIG, return_selection=True, **options))
    return found


def stages(rows):
    return list(dict.fromkeys(row["stage"] for row in rows))


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
def test_layers_steps_and_stages_are_told_apart(impl):
    caches = [new_cache(seed, impl) for seed in range(3)]
    with Profiler() as profile:
        decode(caches, 4)
    assert stages(profile.rows) == ["append", "set-up", "score", "select", "attend"]
    assert {(row["step"], row["layer"]) for row in profile.rows} == {(step, layer) for step in range(4) for layer in range(3)}
    assert {row["impl"] for row in profile.rows} == {impl}
    assert all(row["seconds"] >= 0.0 for row in profile.rows)
    starts = [row["start"] for row in profile.rows]
    assert starts[0] == 0.0
    assert starts == sorted(starts)


@pytest.mark.parametrize(
    ("plan", "fused"), [("two", "score+select"), ("ticket", "score+select+attend"), ("row", "score+select+attend")]
)
def test_what_one_launch_does_is_one_row(plan, fused):
    config = SparseConfig(page_size=8, token_budget=64, recent_pages=1, plan=plan)
    cache, seqs = new_cache(impl="triton", config=config)
    with Profiler() as profile:
        cache.sparse_decode(seqs, torch.randn(1, 4, DIM), config=config)
    assert fused in stages(profile.rows)
    moved = sum(row["bytes"] for row in profile.rows)
    with Profiler() as apart:
        cache.sparse_decode(seqs, torch.randn(1, 4, DIM), config=CONFIG)
    assert moved == sum(row["bytes"] for row in apart.rows)


def test_bytes_and_pages_are_those_of_the_lists():
    caches = [new_cache()]
    with Profiler() as profile:
        ((_, selection),) = decode(caches, 1)
    by_stage = {row["stage"]: row for row in profile.rows}
    cached, kept = PAGES, 8  # 204 tokens
    assert selection.page_counts.tolist() == [[kept, kept]]
    token, last = 2 * DIM * 4, 204 - 25 * 8
    assert by_stage["append"]["bytes"] == HEADS * 2 * token
    assert by_stage["score"]["bytes"] == cached * HEADS * 2 * (DIM + 4)  # int8 halves, and their scales
    assert by_stage["select"]["bytes"] == cached * HEADS * 4
    assert by_stage["attend"]["bytes"] == HEADS * (7 * 8 + last) * token + 2 * HEADS * GROUP * DIM * 4
    assert by_stage["attend"]["pages"], by_stage["attend"]["pages_of"] == (kept, cached)
    assert "reuse" not in by_stage["attend"]


def test_a_step_that_keeps_everything_scores_nothing():
    cache, seqs = new_cache(length=40)
    with Profiler() as profile:
        cache.sparse_decode(seqs, torch.randn(1, 4, DIM), config=CONFIG)
        cache.dense_decode(seqs, torch.randn(1, 4, DIM))
    assert "score" not in stages(profile.rows)
    sparse, dense = (row["bytes"] for row in profile.rows if row["stage"] == "attend")
    assert sparse == dense == HEADS * 40 * 2 * DIM * 4 + 2 * 4 * DIM * 4


def test_reuse_is_the_share_of_pages_that_were_read_before():
    caches = [new_cache()]
    with Profiler() as profile:
        results = decode(caches, 3)
    lists = [[set(ids.tolist()) for ids in result.selection.page_ids[0]] for result in results]
    expected = []
    for before, now in itertools.pairwise(lists):
        expected.append(sum(len(a & b) for a, b in zip(before, now, strict=True)) / sum(map(len, now)))
    found = [row["reuse"] for row in profile.rows if "reuse" in row]
    assert_close(torch.tensor(found), torch.tensor(expected).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_mass_and_entropy_are_those_of_dense_attention(dtype):
    scale = None if dtype == torch.float32 else 0.03
    cache = PagedKVCache.from_config(CONFIG, 64, HEADS, DIM, dtype=torch.float32, kv_dtype=dtype, k_scale=scale, v_scale=scale)
    seqs = cache.allocate(1)
    cache.append(seqs, *torch.randn(2, 1, LENGTH, HEADS, DIM))
    q = torch.randn(1, HEADS * GROUP, DIM)
    with Profiler(attention_every=2) as profile:
        found = [cache.sparse_decode(seqs, q, config=CONFIG, return_selection=True) for _ in range(3)]
    keys, _ = cache.gather(seqs)
    logits = torch.einsum("hd,hld->hl", q[0], keys[0].repeat_interleave(GROUP, 0)).double() * DIM**-0.5
    weights = logits.softmax(-1)
    read = torch.zeros(HEADS, PAGES * 8, dtype=torch.bool)
    for head, ids in enumerate(found[0].selection.page_ids[0].tolist()):
        for page in ids:
            read[head, page * 8 : (page + 1) * 8] = True
    mass = (weights * read[:, :LENGTH].repeat_interleave(GROUP, 0)).sum(-1).mean()
    entropy = -(weights * weights.log()).sum(-1).mean()
    rows = [row for row in profile.rows if "mass" in row]
    assert [row["step"] for row in rows] == [0, 2]
    for row in rows:
        assert_close(torch.tensor(row["mass"]), mass, magnitude=1.0)
        assert_close(torch.tensor(row["entropy"]), entropy, magnitude=10.0)


def test_a_profile_of_transformers_names_its_layers():
    model = build("gemma3")
    ids, _ = prompts([150])
    config = SparseConfig(page_size=4, token_budget=32, recent_pages=2)
    with hf.sparse(model, config) as handle, Profiler(attention_every=1) as profile:
        model.generate(ids, max_new_tokens=5, do_sample=False)
    counts = handle.stats()
    rows = [row for row in profile.rows if "pages" in row]
    assert sorted({row["layer"] for row in rows}) == counts["layers"] == [1, 3]
    assert len(rows) == counts["steps"] * 2
    heads = 1
    assert sum(row["pages"] for row in rows) * heads == counts["pages_read"]
    assert all(0.0 < row["mass"] <= 1.0 and row["entropy"] > 0.0 for row in rows)
    assert CACHE


def test_the_drop_in_and_single_stages_are_seen():
    cache, seqs = new_cache()
    table, lengths = cache.tables(seqs)
    q = torch.randn(1, 4, DIM)
    stored = {"page_stats_scale": cache.page_stats_scale}
    with Profiler() as profile:
        scores = tsattn.score_pages(q, cache.page_stats, table, lengths, page_size=8, kind="means", **stored)
        selection = tsattn.select_pages(scores, lengths, page_size=8, budget=64)
        tsattn.attend_pages(q, cache.k_cache, cache.v_cache, table, lengths, selection)
        tsattn.sparse_attn_with_kvcache(
            q[:, None],
            cache.k_cache,
            cache.v_cache,
            page_stats=cache.page_stats,
            cache_seqlens=lengths,
            block_table=table,
            config=CONFIG,
            **stored,
        )
    assert [row["stage"] for row in profile.rows] == ["score", "select", "attend", "set-up", "score", "select", "attend"]
    assert {row["layer"] for row in profile.rows} == {0}
    assert [row["step"] for row in profile.rows] == [0] * 3 + [1] * 4


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_profiled_step_gives_the_same_bits(impl):
    plain = decode([new_cache(impl=impl)], 2)
    with Profiler(attention_every=1):
        profiled = decode([new_cache(impl=impl)], 2)
    for mine, theirs in zip(profiled, plain, strict=True):
        assert_same_bits(mine.out, theirs.out, "out")


def test_nothing_listens_afterwards():
    cache, seqs = new_cache()
    q = torch.randn(1, 4, DIM)
    with pytest.raises(ValueError, match="token"), Profiler() as profile:
        cache.sparse_decode(seqs, q, config=CONFIG)
        with pytest.raises(RuntimeError, match="nested"), Profiler():
            pass
        with pytest.raises(RuntimeError, match="over"):
            assert profile.rows
        SparseConfig(token_budget=0)
    assert marks.listener is None
    assert len(profile.rows) == 4
    cache.sparse_decode(seqs, q, config=CONFIG)
    assert len(profile.rows) == 4


def test_two_levels_are_one_step():
    config = SparseConfig(page_size=8, token_budget=64, recent_pages=1, refine_pages=16)
    cache, seqs = new_cache(config=config)
    with Profiler(attention_every=2) as profile:
        for _ in range(4):
            cache.append(seqs, *torch.randn(2, 1, 1, HEADS, DIM))
            cache.sparse_decode(seqs, torch.randn(1, 4, DIM), config=config)
    assert [(row["step"], "mass" in row) for row in profile.rows if "pages" in row] == [
        (0, True),
        (1, False),
        (2, True),
        (3, False),
    ]
    appended = [row["bytes"] for row in profile.rows if row["stage"] == "append"]
    assert appended == [HEADS * 2 * 2 * DIM * 4, 0] * 4


def test_a_cache_that_grows_under_transformers_is_the_same_layer():
    model = build("llama")
    ids, _ = prompts([150])
    config = SparseConfig(page_size=4, token_budget=32, recent_pages=2)
    with hf.sparse(model, config), Profiler() as profile:
        model.generate(ids, max_new_tokens=120, do_sample=False)
    steps = [row["step"] for row in profile.rows if row["stage"] == "append" and row["layer"] == 0]
    assert steps == list(range(120))
    assert all(row["bytes"] > 0 for row in profile.rows if row["stage"] == "append")


def test_other_threads_are_not_seen():
    caches = [new_cache(0), new_cache(1)]
    with Profiler() as profile:
        thread = threading.Thread(target=decode, args=([caches[1]], 20))
        thread.start()
        decode([caches[0]], 20)
        thread.join()
    assert len([row for row in profile.rows if "pages" in row]) == 20
    assert {row["layer"] for row in profile.rows} == {0}


def test_two_configurations_in_one_block_have_their_own_bytes():
    other = SparseConfig(page_size=8, token_budget=64, recent_pages=1, stats_dtype=None)
    cache, seqs = new_cache(0)
    wide, wide_seqs = new_cache(0, config=other)
    with Profiler() as profile:
        marks.layer(3)
        cache.sparse_decode(seqs, torch.randn(1, 4, DIM), config=CONFIG)
        wide.sparse_decode(wide_seqs, torch.randn(1, 4, DIM), config=other)
        marks.layer(None)
        cache.dense_decode(seqs, torch.randn(1, 4, DIM), window=16)
    scored = [row["bytes"] for row in profile.rows if row["stage"] == "score"]
    assert scored == [PAGES * HEADS * 2 * (DIM + 4), PAGES * HEADS * 2 * DIM * 4]
    last = profile.rows[-1]
    assert last["bytes"] == HEADS * 16 * 2 * DIM * 4 + 2 * 4 * DIM * 4
    assert (last["layer"], last["pages"], last["pages_of"]) == (0, 3, PAGES)  # 203 tokens: the window lies on three pages


def test_a_call_that_fails_is_no_row(monkeypatch):
    cache, seqs = new_cache()
    q = torch.randn(1, 4, DIM)

    def broken(*tensors, **options):
        raise MemoryError

    with Profiler() as profile:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr("tsattn.torch_path.sparse_decode", broken)
            cache.sparse_decode(seqs, q, config=CONFIG)
        cache.sparse_decode(seqs, q, config=CONFIG)
    assert stages(profile.rows) == ["set-up", "score", "select", "attend"]


def test_files(tmp_path):
    caches = [new_cache(0), new_cache(1)]
    with Profiler(attention_every=2) as profile:
        decode(caches, 5)
    profile.save(tmp_path / "a" / "profile.json")
    read = json.loads((tmp_path / "a" / "profile.json").read_text())
    assert read["rows"] == profile.rows
    assert read["totals"] == profile.totals()
    assert {total["calls"] for total in read["totals"]} == {5}
    profile.save_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(profile.rows)
    assert {event["tid"] for event in spans} == {0, 1}
    profile.save_picture(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 10_000
    lines = profile.table().splitlines()
    assert len(lines) == 2 + 2 * 5 + 1
    assert all(line.count("|") == 13 for line in lines)


def test_files_of_a_step_without_numbers_are_json(tmp_path):
    cache, seqs = new_cache()
    with Profiler(attention_every=1) as profile:
        cache.sparse_decode(seqs, torch.full((1, HEADS * GROUP, DIM), torch.nan), config=CONFIG)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    profile.save(tmp_path / "profile.json")
    profile.save_chrome_trace(tmp_path / "trace.json")
    read = [json.loads((tmp_path / name).read_text(), parse_constant=refuse) for name in ("profile.json", "trace.json")]
    assert any(row.get("mass", 0) is None for row in read[0]["rows"])


def test_a_cache_that_has_the_ids_of_a_freed_one_is_looked_at_anew():
    cache, seqs = new_cache()
    with Profiler() as alone:
        cache.sparse_decode(seqs, torch.ones(1, HEADS * GROUP, DIM), config=CONFIG)
    freed = torch.zeros(7, 3, 2, 5, dtype=torch.int8)
    with Profiler() as profile:
        for tensor in (cache.k_cache, cache.page_stats):
            profile._recorder._look_at(freed)
            profile._recorder._pools[id(tensor)] = profile._recorder._pools.pop(id(freed))
        cache.sparse_decode(seqs, torch.ones(1, HEADS * GROUP, DIM), config=CONFIG)
    del freed
    assert [row["bytes"] for row in profile.rows] == [row["bytes"] for row in alone.rows]


def test_an_empty_profile_is_empty(tmp_path):
    with Profiler() as profile:
        pass
    assert profile.rows == []
    assert "Nothing was recorded" in profile.table()
    with pytest.raises(ValueError, match="nothing was recorded"):
        profile.save_picture(tmp_path / "none.png")


@pytest.mark.parametrize("every", [-1, 1.5, "2"])
def test_attention_every_is_a_number_of_steps(every):
    with pytest.raises(ValueError, match="attention_every"):
        Profiler(attention_every=every)
