"""The command: what it asks for, that its launches run, what it prints, and that it says when there is no GPU."""

import argparse
import os
import subprocess
import sys

import pytest
import torch

from tsattn import tune
from tsattn.__main__ import main
from tsattn.tuning import search, space


def options(*argv):
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args(argv)


SMALL = ("--rows", "1", "--context", "70", "--budget", "48", "--head-dim", "32", "--group", "2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_that_it_needs_one(capsys):
    assert main(["tune"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_every_key_is_asked_for_once():
    args = options("--dtype", "bf16", "fp16", "fp8", "--head-dim", "64", "128", "--stage", "score", "attend")
    names = [(stage, dtype.itemsize, dim) for stage, dtype, dim, _ in tune.choices(args)]
    # Statistics beside fp8 keys are bf16, and bf16 and fp16 are one key.
    assert sorted(names) == [(s, e, d) for s, e in (("attend", 1), ("attend", 2), ("score", 2)) for d in (64, 128)]


def test_it_tunes_every_stage_that_has_a_choice():
    assert set(tune.BUILDERS) == {stage for stage in space.STAGES if len(space.candidates(stage)) > 1}


@pytest.mark.parametrize("dtype", tune.DTYPES)
def test_the_launches_run(dtype):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seen = []
    for workload in tune.workloads(options(*SMALL, "--dtype", dtype), device):
        for launch in workload.launches:
            launch()
        seen.append(workload.stage)
    assert seen == list(tune.BUILDERS)


def test_launches_share_no_tensor():
    """A stage that writes in place works on scratch tensors of its own."""

    def pointers(launch):
        return {cell.cell_contents.data_ptr() for cell in launch.__closure__ if isinstance(cell.cell_contents, torch.Tensor)}

    (workload,) = tune.workloads(options(*SMALL, "--rows", "1", "2", "--stage", "append"), torch.device("cpu"))
    first, second = map(pointers, workload.launches)
    assert len(first) >= 5 and not first & second


def test_winners_and_their_gain_are_printed():
    configs = space.candidates("attend")
    workload = search.Workload("attend", 2, 128, 16, ())
    trials = (
        search.Trial(configs[0], (30.0, 60.0)),
        search.Trial(configs[1], (20.0, 40.0)),
        search.Trial(configs[2], (), "spills"),
    )
    text = tune.table(
        [
            search.Result(workload, configs[1], 1.5, trials),
            search.Result(search.Workload("score", 2, 64, 16, ()), space.candidates("score")[0], 1.0, ()),
        ]
    )
    head, first, second = text.splitlines()
    assert head.split()[:3] == ["stage", "and", "shape"]
    for part in ("attend e2 d128 s16", "w4 s5", "30.0 60.0", "20.0 40.0", "1.50x", "3 tried, 1 dropped"):
        assert part in first
    assert "known already" in second


INSPECT = """
import sys, tempfile, pathlib
import torch
from tsattn import tune
from tsattn.testing import aot
from tsattn.tuning import search
import argparse
parser = argparse.ArgumentParser()
tune.add_arguments(parser)
args = parser.parse_args(sys.argv[1:])
with aot.compile_only("sm_90"):
    workloads = list(tune.workloads(args, torch.device("cpu")))
    seen = []
    def inspect(launch):
        seen.extend(tune.inspect(launch))
        return seen[-1:]
    path = pathlib.Path(tempfile.mkdtemp()) / "t.json"
    search.tune(workloads, search.Gpu("Test", "sm_90", "x"), path=path, timer=lambda launch: 1.0, inspect=inspect)
print(sorted({kernel.num_warps for kernel in seen}), all(kernel.registers > 16 for kernel in seen), path.exists())
"""


def test_what_a_candidate_takes_is_known_before_it_runs(tmp_path):
    """Compiled for a GPU that isn't there, in a process that doesn't interpret: every candidate of append."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", INSPECT, *SMALL, "--stage", "append"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[0] == "[2, 4] True True", done.stdout + done.stderr[-2000:]
