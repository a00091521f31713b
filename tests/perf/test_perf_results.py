"""The model, the goals and the figures, on the committed results; the GPU script without a GPU."""

import json
import sys

import pytest
import torch

from perf import check_plans, cpu_path, cpu_products, gpu, model, plots, suite, targets, timing
from perf.bench_decode import BENCH, PLANS
from perf.workloads import choose
from tsattn.demo.report import machine
from tsattn.testing import assert_close
from tsattn.tuning import plans

RESULTS = timing.ROOT / "perf" / "results"
H200 = RESULTS / "model" / "h200.json"


def modelled() -> list[dict]:
    return json.loads(H200.read_text())["rows"]


def step(name: str) -> model.Step:
    (workload,) = choose([name])
    return model.Step(model.MACHINES[0], workload)


def test_the_committed_model_is_that_of_the_code():
    assert json.loads(json.dumps(model.machine_file(model.MACHINES[0])["rows"])) == modelled()


def test_everything_modelled_says_so():
    for file in (RESULTS / "model").glob("*.json"):
        content = json.loads(file.read_text())
        rows = [content, *content["rows"], *content["break_even"]]
        assert {row["label"] for row in rows} == {"modelled, not measured"}, file


def test_the_documented_table_is_that_of_the_committed_model():
    page = (timing.ROOT / "docs" / "performance.md").read_text()
    lines = model.table(modelled(), "H200").splitlines()
    assert len(lines) == 16 and "\n".join(lines[2:]) in page


def counted_table(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / "cpu" / name).read_text().splitlines()]


def test_the_documented_bytes_are_those_of_the_committed_counts():
    page = (timing.ROOT / "docs" / "cost.md").read_text()
    for row in counted_table("traffic.jsonl"):
        if row["model"] != "llama-3.1-8b" or row["summary"] != "means2" or row["page_size"] != 16:
            continue
        kb = " | ".join(f"{row[name] / 1024:,.0f}" for name in ("floor", "counted_once", "counted", "dense"))
        ratios = row["dense_floor"] / row["floor"], row["dense"] / row["counted"]
        assert f"| {row['context'] // 1024}K | {row['budget']} | {kb} | {ratios[0]:.2f} | {ratios[1]:.2f} |" in page
    by_context: dict[int, list[str]] = {}
    for row in counted_table("traffic_plans.jsonl"):
        by_context.setdefault(row["context"], []).append(f"{row['counted'] / 1024:,.0f}")
    assert len(by_context) == 4
    for context, numbers in by_context.items():
        assert f"| {context // 1024}K | {' | '.join(numbers)} |" in page


def test_the_automatic_plan_is_as_good_as_the_model_can_tell():
    """Within 3 us or 10% of the best plan; the exceptions are those that tsattn/tuning/plans.py names."""
    times: dict[tuple, dict[str, float]] = {}
    for row in modelled():
        if row["plan"]:
            heads = row["batch"] * row["heads"][1]
            shape = heads, row["context"] // row["page_size"], row["budget"] // row["page_size"]
            times.setdefault((row["workload"], *shape), {})[row["plan"]] = 1e6 * row["seconds"]["median"]
    assert len(times) > 70
    for (workload, *shape), by_plan in times.items():
        picked = plans.plan_for(*shape)
        best = min(by_plan, key=by_plan.__getitem__)
        lost = by_plan[picked] - by_plan[best]
        if shape[1] > 2048:
            assert picked == "separate", workload  # The model's fused selection holds them, the kernels' reads them again.
        elif shape[0] == 128 and best == "row":
            assert picked == "two" and lost < 6, workload
        else:
            assert lost <= max(3, 0.1 * by_plan[picked]), workload


@pytest.mark.parametrize("name", ["llama-3.1-8b-32k-b1-t2048-s16-minmax", "llama-3.1-8b-128k-b64-t1024-s16-means1"])
def test_plans_differ_by_launches_and_handoffs(name):
    one = step(name)
    gpu_ = one.machine
    saved = 2 * one.start - 2 * gpu_.handoff
    assert round(1e12 * (one.separate() - one.two() - saved)) == 0
    hidden = (one.waves - 1) * one.selecting
    assert round(1e12 * (one.two() - one.ticket() - hidden - gpu_.launch)) == 0
    assert one.dense() > one.bytes_of("score", "attend") / gpu_.bandwidth


def test_no_step_is_faster_than_its_bytes():
    for row in modelled():
        assert 0 < row["copy_share"] < 1, row


def test_break_even_is_where_a_plan_overtakes():
    context = model.break_even(model.MACHINES[0], "two", 1, 2048, "minmax", True)
    assert context is not None
    for tokens, faster in ((context, True), (context - 256, False)):
        one = model.Step(model.MACHINES[0], model.Workload(model.MODELS[0], tokens, 1, 2048, 16, "minmax"))
        assert (one.two() < one.dense()) == faster


def test_goals_are_judged_where_there_are_rows():
    found = {verdict.goal: verdict for verdict in targets.verdicts(modelled())}
    assert all(verdict.reached is not None for goal, verdict in found.items() if "select" not in goal)
    assert {verdict.reached for verdict in targets.verdicts([])} == {None}


def test_a_goal_is_missed_when_sparse_is_slow():
    name = "llama-3.1-8b-32k-b16-t2048-s16-minmax"
    rows = [row for row in modelled() if row["workload"] == name and row["stage"] == "decode"]
    assert targets.share_of_ideal(rows, name, 0.1).reached is True
    slow = [row | {"seconds": {"median": 1.0}} if row["way"].startswith("sparse") else row for row in rows]
    assert targets.share_of_ideal(slow, name, 0.1).reached is False


def test_crossing():
    assert targets.crossing([(1024, 0.5), (2048, 1.5), (4096, 2.0)]) == 1536
    assert targets.crossing([(1024, 1.5), (2048, 0.5), (4096, 1.5)]) == 3072
    assert targets.crossing([(1024, 1.5), (2048, 2.0)]) == 1024
    assert targets.crossing([(1024, 0.5), (2048, 0.9)]) == float("inf")
    assert targets.crossing([(1024, 0.5)]) is None


def test_figures_of_the_committed_results(tmp_path, capsys):
    drawn = plots.draw_all([H200, RESULTS / "cpu" / "traffic.jsonl"], tmp_path)
    assert len(drawn) == len(plots.figures.FIGURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    printed = capsys.readouterr().out
    assert "perf/results/model/h200.json ->" in printed and "no figure" not in printed


def test_a_figure_without_rows_is_left_out_with_a_message(tmp_path, capsys):
    few = tmp_path / "few.json"
    content = json.loads(H200.read_text())
    few.write_text(json.dumps(content | {"rows": content["rows"][:5]}))
    assert [path.name for path in plots.draw_all([few], tmp_path)] == ["plans_few-model.png", "roofline_few-model.png"]
    assert "no figure 'latency-context': needs decode rows at three contexts" in capsys.readouterr().out
    assert plots.known_files(tmp_path / "nothing") == []


def test_figures_read_the_sweep_of_the_pytorch_path(tmp_path):
    rows = list(cpu_path.measure("4/1/256", torch.bfloat16, 512, [64], ["minmax"], 0.0))
    table = cpu_path.markdown([*rows, {**rows[0], "context": 1024, "budget": 2048, "speed_up": 1.25, "share_of_ideal": 0.5}])
    assert [line.count("|") for line in table.splitlines()] == [6] * 4
    assert table.splitlines()[-1] == "| 4/1/256 | bfloat16 | 1,024 |  | 1.2x (50%) |"
    file = tmp_path / "cpu_path.jsonl"
    file.write_text("".join(json.dumps(row | {"machine": machine(torch.device("cpu"))}) + "\n" for row in rows))
    source = plots.load(file)
    assert source.label == "measured on a CPU" and source.slug == "cpu-path"
    best = suite.best(suite.pick(source.rows, context=512), sparse=False)
    assert best["seconds"]["median"] == min(rows[0]["seconds"][way] for way in rows[0]["seconds"] if way != "sparse")


def test_a_suite_out_of_time_keeps_what_it_has(tmp_path):
    about = {"machine": "here"}
    run = suite.Suite(
        tmp_path / "bench.json",
        timing.Environment(torch.device("cpu"), 1e9, about),
        label="a test",
        impl="torch",
        budget=-1.0,
        seconds_per_workload=0.0,
    )
    run.measure("late", [(BENCH, gpu.tiny(64, 1))], share=1.0)
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["sections"] == [{"section": "late", "seconds": 0.0, "done": 0, "wanted": 1}] and written["rows"] == []
    run.one(BENCH, gpu.tiny(0, 1), ("graph",))  # no context: nothing can be built
    assert run.failures and json.loads((tmp_path / "bench.json").read_text())["failures"] == run.failures


def test_only_plans_that_passed_are_timed():
    tests = [f"perf/check_plans.py::test[{i}-{plan}]" for i, _ in enumerate(check_plans.WORKLOADS) for plan in PLANS[1:]]
    assert gpu.trusted_plans("\n".join(f"{test} PASSED [ 9%]" for test in tests)) == PLANS
    hung = [f"[gw1] [ 9%] PASSED {test} " for test in tests if "ticket" not in test]
    assert gpu.trusted_plans("\n".join(hung)) == ("separate", "two", "row")
    assert gpu.trusted_plans("") == ("separate",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="perf/check_plans.py takes the GPU that is there")
def test_the_gpu_script_runs_end_to_end_without_a_gpu(tmp_path, monkeypatch, capsys):
    arguments = ["perf.gpu", "--dry-run-device", "cpu", "--seconds", "0", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    gpu.main()
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["failures"] == [] and written["plans"]["status"] == 0 and written["timed_plans"] == list(PLANS)
    assert {(s["section"], s["done"] == s["wanted"]) for s in written["sections"]} == {
        ("plans", True),
        ("decode", True),
        ("stages", True),
    }
    assert {row["stage"] for row in written["rows"]} == {"append", "score", "select", "attend", "decode"}
    assert all("dry run" in row["label"] and "samples" not in row for row in written["rows"])
    assert "NOT MEASURED" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_script_refuses_to_pretend(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["perf.gpu"])
    with pytest.raises(SystemExit, match="needs a GPU"):
        gpu.main()


def test_the_sections_of_a_gpu_run_hold_every_goal():
    work = gpu.work_of(BENCH, dry=False)
    named = {(bench.stage, workload.name) for _, _, pairs in work.values() for bench, workload in pairs}
    assert {("decode", name) for name in targets.NAMES} <= named
    assert ("select", "llama-3.1-8b-128k-b1-t2048-s16-minmax") in named
    contexts = {w.context for _, w in work["break-even"][2]}
    assert min(contexts) < 9 * 1024 < max(contexts)


def test_ways_that_are_compared_give_the_same_numbers(monkeypatch):
    monkeypatch.setattr(cpu_products, "PAGES", 40)
    terms = cpu_products.PARTS * cpu_products.DIM
    for what, tensors, ways in cpu_products._pairs():
        results = [way(tensors[0]) for way in ways.values()]
        first, *others = (torch.stack(r) if isinstance(r, list) else r for r in results)
        for other in others:
            assert_close(other, first.double(), magnitude=2.0 * terms, what=what)
