"""The table, the verdicts and what is weighed."""

from types import SimpleNamespace

import pytest
import torch

from tsattn import PageSelection, SparseConfig
from tsattn.demo import measure, picture, report
from tsattn.demo.answers import Answer
from tsattn.integrations.hf_stats import DecodeTrace, pages_and_tokens

SECONDS = {"sdpa enable_gqa": 0.004, "sdpa grouped rows": 0.002, "bmm": 0.003, "tsattn": 0.0005}


def row(text, expected):
    answer = Answer("dense", None, [1], [5, 6, 7], [0.1] * 3, None)
    return report.make_row(answer, text, expected=expected, context=100, records=[], seconds=SECONDS)


@pytest.mark.parametrize(
    ("text", "right"),
    [("12345", True), (" 12345.\nThe", True), ("12345 is", True), ("123456", False), ("1234", False), ("It is 12345", False)],
)
def test_an_answer_is_right_if_it_is_the_pass_key(text, right):
    assert row(text, "12345").right is right


def test_without_an_expected_answer_nothing_is_judged():
    assert row("12345", None).right is None


def test_the_dense_row_is_the_best_dense_way():
    dense = row("x", None)
    assert dense.attention_ms == 2.0
    assert dense.times_best_dense == 1.0
    assert dense.kv_tokens == 102  # 101, 102, 103
    assert (dense.share, dense.mass) == (1.0, 1.0)


def test_a_sparse_row_counts_per_step_layer_and_head():
    layer = SimpleNamespace(pool=SimpleNamespace(k_cache=torch.zeros(1, 4, 2, 8)))
    answer = Answer(
        "tsattn",
        SparseConfig(),
        [1],
        [5, 6, 7],
        [0.1] * 3,
        SimpleNamespace(paged_layers=[layer, layer]),
        {"tokens_read": 3 * 2 * 2 * 50, "kv_share": 0.49},
    )
    records = [
        measure.StepRecord(0, step, torch.ones(2), torch.ones(2, dtype=torch.bool), mass) for step, mass in enumerate((0.5, 1))
    ]
    made = report.make_row(answer, "x", expected=None, context=100, records=records, seconds=SECONDS)
    assert (made.kv_tokens, made.share, made.mass) == (50, 0.49, 0.75)
    assert made.times_best_dense == 4.0


def test_the_table_is_aligned_and_complete():
    rows = [row("12345.", "12345"), row('a "quoted"\nanswer that goes on for a while', "12345"), row("x", None)]
    lines = report.table(rows).splitlines()
    assert len(lines) == 5
    assert [word in line for word, line in zip(("right", "WRONG", " - "), lines[2:], strict=True)] == [True] * 3
    assert '\\"quoted\\"\\n' in lines[3]
    ends = {len(line) for line in lines}
    assert len(ends) == 1


def test_mass_is_that_of_dense_attention_over_the_pages_read():
    """Three heads of two KV heads' worth of keys: mass counted by hand."""
    keys = torch.zeros(1, 7, 4)
    keys[0, 2] = 2.0
    query = torch.zeros(1, 2, 4)
    query[0, 1] = 1.0
    selection = PageSelection(torch.tensor([[[0, 2, -1]]], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32))
    record = measure._weigh_step(DecodeTrace(3, query, torch.tensor([7]), selection, 0.5, 0.0), keys, 3, 0)
    head = torch.softmax(torch.tensor([0, 0, 4.0, 0, 0, 0, 0]), 0)
    by_hand = [(3 / 7 + head[:3].sum()) / 2, (3 / 7 + head[3:6].sum()) / 2, (1 / 7 + head[6]) / 2]
    torch.testing.assert_close(record.mass, torch.stack(by_hand))
    torch.testing.assert_close(record.covered, float(by_hand[0] + by_hand[2]))
    assert record.read.tolist() == [True, False, True]


def test_mass_of_lists_per_query_head_is_each_heads_own():
    keys = torch.zeros(1, 4, 4)
    selection = PageSelection(torch.tensor([[[0], [1]]], dtype=torch.int32), torch.ones(1, 2, dtype=torch.int32))
    trace = DecodeTrace(0, torch.zeros(1, 2, 4), torch.tensor([4]), selection, 1.0, 0.0)
    record = measure._weigh_step(trace, keys, 2, 0)
    assert record.covered == 0.5
    assert record.read.tolist() == [True, True]
    everything = measure._weigh_step(trace._replace(selection=None), keys, 2, 0)
    assert everything.covered == 1.0


def test_pages_and_tokens_count_the_union_and_the_last_pages_fill():
    ids = torch.tensor([[[0, 2], [1, 2]], [[0, -1], [0, 7]]], dtype=torch.int32)
    counts = torch.tensor([[2, 2], [1, 1]], dtype=torch.int32)
    lengths = torch.tensor([9, 3])
    assert pages_and_tokens(PageSelection(ids, counts), lengths, page_size=4, kv_heads=1) == (3 + 1, 9 + 3)
    assert pages_and_tokens(PageSelection(ids, counts), lengths, page_size=4, kv_heads=2) == (4 + 2, (5 + 5) + (3 + 3))
    assert pages_and_tokens(None, lengths, page_size=4, kv_heads=2) == (2 * 4, 2 * 12)


def test_the_picture_is_drawn_for_many_layers_and_uneven_steps(tmp_path):
    pytest.importorskip("matplotlib")
    records = [
        measure.StepRecord(layer, step, torch.rand(5 + step), torch.rand(5 + step) < 0.4, 0.5)
        for layer in range(9)
        for step in range(3)
    ]
    panels = [picture.Panel("a", records, ["x", "y", "z"], 4), picture.Panel("b", records, ["x", "y", "z"], 4)]
    for needle in ((3, 7), None):
        picture.draw(tmp_path / "sub" / "p.png", panels, title="t", needle=needle)
        assert (tmp_path / "sub" / "p.png").stat().st_size > 1000


def test_long_titles_and_many_steps_stay_readable(tmp_path, recwarn):
    """No warning of matplotlib's (a layout that can't be made), and as many labels as have room."""
    pytest.importorskip("matplotlib")
    for steps in (40, 70):
        records = [
            measure.StepRecord(layer, step, torch.rand(300), torch.rand(300) < 0.1, 0.5)
            for layer in range(3)
            for step in range(steps)
        ]
        labels = [picture.label_of(f" token{step}" * (1 + step % 5)) for step in range(steps)]
        panels = [picture.Panel(f"{name}: {'a very long answer ' * 20}", records, labels, 16) for name in ("tsattn", "paper")]
        picture.draw(tmp_path / "p.png", panels, title="a title " * 60, needle=(100, 140))
        assert [str(w.message) for w in recwarn] == []
        width, height = (int.from_bytes((tmp_path / "p.png").read_bytes()[at : at + 4]) for at in (16, 20))
        assert 1500 < width < 3000
        assert height < 3000


@pytest.mark.parametrize("steps", [1, 11, 32, 33, 64, 65, 300])
def test_labels_on_the_axis_keep_apart(steps):
    shown = picture.labelled_steps(steps)
    assert shown[0] == 0
    assert len(shown) <= 32
    assert steps > 32 or len(shown) == steps


def test_long_answers_follow_the_table_in_full():
    short, long = row("12345.", None), row("It was late, and nobody had\nthought of the lamp.", None)
    assert report.full_answers([short]) == ""
    assert "…" in report.table([short, long])
    text = report.full_answers([short, long])
    assert "12345." in text
    assert "It was late, and nobody had\n       thought of the lamp.\n" in text


def sparse_row(mass, speed):
    return report.Row("paper", "1", None, 10.0, 0.1, 1.0, speed, mass)


def test_a_certificate_that_says_nothing_says_so():
    assert report.certificate(sparse_row(0.5, 2.0), None) == ""
    assert "at most 40.00% of the attention mass was not read; it was 12.50%" in report.certificate(sparse_row(0.875, 2.0), 0.4)
    words = report.certificate(sparse_row(0.5, 2.0), 0.99999)
    assert "says nothing here" in words
    assert "50.0% of it does" in words
    assert "100.00%" not in words


def test_a_covering_budget_leaves_no_negative_mass():
    for mass in (1.0, 1.0000001):
        assert "everything was read" in report.certificate(sparse_row(mass, 1.0), 0.0)
        assert "-0" not in report.certificate(sparse_row(mass, 1.0), 0.3)


def test_times_say_how_they_were_taken(monkeypatch):
    threads = {"bmm": 1, "tsattn": 2}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    text = report.how_timed(SECONDS, threads, [sparse_row(0.5, 2.0)], 3)
    assert "3 full-attention layers" in text
    assert "over the best dense way here, sdpa grouped rows" in text
    assert "with one thread and with 2, and its better time counts" in text
    assert "Slower" not in text
    assert "Slower than dense here: paper." in report.how_timed(SECONDS, threads, [sparse_row(0.5, 0.7)], 3)
    assert "thread" not in report.how_timed(SECONDS, dict.fromkeys(threads, 0), [sparse_row(0.5, 2.0)], 3)


def test_the_faster_thread_count_counts_and_threads_are_put_back(monkeypatch):
    times = {1: {"bmm": 2.0, "tsattn": 1.0}, 3: {"bmm": 1.5, "tsattn": 4.0}}
    monkeypatch.setattr(measure, "_take_turns", lambda ways, device: times[torch.get_num_threads()])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        timing = measure.best_of_threads({"bmm": [], "tsattn": []}, torch.device("cpu"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert timing == measure.Timing({"bmm": 1.5, "tsattn": 1.0}, {"bmm": 3, "tsattn": 1})


def test_white_space_is_visible_on_the_axis():
    assert [picture.label_of(token) for token in ("\n", " the", "", "7")] == ["\\n", "␣the", "∅", "7"]


def test_the_result_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "a" / "demo.json"
    report.write_json(path, {"answer": "Zoë"})
    assert "Zoë" in path.read_text(encoding="utf-8")
    with pytest.raises(TypeError):
        report.write_json(tmp_path / "b" / "demo.json", {"answer": object()})
    assert not (tmp_path / "b" / "demo.json").exists()
