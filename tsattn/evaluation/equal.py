"""Budgets with which policies read as many bytes as one of them does.

What a policy reads depends on its statistics, on lists that overlap, on what it keeps of the answer: so it is measured on a
task, and the budget is corrected until the bytes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from tsattn.evaluation.chunk import score_chunk
from tsattn.evaluation.reading import Prefiller
from tsattn.evaluation.specs import Spec
from tsattn.evaluation.tasks import Task, readings
from tsattn.policies.kept_tokens import KeptTokens

CLOSE = 0.005
"""Of the bytes aimed at: near enough."""
_TRIES = 7


def budget_for(share: Callable[[int], float], goal: float, first: int, *, step: int, least: int, most: int) -> int:
    """The multiple of ``step`` whose ``share``, which rises with it, is nearest to ``goal`` of those that were tried.

    Parameters
    ----------
    share : callable
        Of a budget.
    goal : float
    first : int
        The budget to begin with.
    step, least, most : int
        Budgets that there are.
    """
    tried: dict[int, float] = {}
    budget = first
    for _ in range(_TRIES):
        budget = max(least, min(most, round(budget / step) * step))
        if budget in tried:
            break
        tried[budget] = share(budget)
        if abs(tried[budget] - goal) <= CLOSE * goal:
            break
        below = max((b for b in tried if tried[b] < goal), default=None)
        above = min((b for b in tried if tried[b] >= goal), default=None)
        if below is None or above is None:  # as if bytes were in proportion to tokens
            budget = round(budget * goal / tried[budget])
        else:
            budget = below + round((above - below) * (goal - tried[below]) / (tried[above] - tried[below]))
    return min(tried, key=lambda budget: abs(tried[budget] - goal))


def equal_bytes(
    model: Any, task: Task, specs: Sequence[Spec], *, prefill_chunk: int = 1024, progress: bool = True
) -> list[Spec]:
    """The policies with budgets that read about as many bytes on a task's tokens as the first of them, which stays as it is.

    A policy that can't (``full``, one whose least budget reads more) comes as near as it can; the report says what was read.
    """
    observe = any(spec.policy().observes for spec in specs)
    context = Prefiller(model, prefill_chunk, progress=progress, observe=observe).read(task.context)

    def share(spec: Spec) -> float:
        chunk = score_chunk(model, context.cache, task.chunk, spec.policy(), keep=1, observed=context.observed)
        return float(readings(chunk)["bytes_share"])

    goal = share(specs[0])
    found = [specs[0]]
    for spec in tqdm(specs[1:], desc="Budgets of equal bytes", unit="policy", disable=not progress, leave=False):
        if spec.name == "full":
            found.append(spec)
            continue
        config, by_page = spec.config, not isinstance(spec.policy(), KeptTokens)

        def read(budget: int, spec: Spec = spec) -> float:
            return share(replace(spec, config=replace(spec.config, token_budget=budget)))

        step = config.page_size if by_page else 1
        least = step * (config.sink_pages + config.recent_pages + 1) if by_page else 1
        most = len(task.context) if config.refine_pages is None else config.refine_pages * config.page_size
        first = min(specs[0].config.token_budget, most)
        budget = budget_for(read, goal, first, step=step, least=least, most=max(least, most))
        found.append(replace(spec, config=replace(config, token_budget=budget)))
    return found
