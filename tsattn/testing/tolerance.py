"""The one judge of closeness.

A result is judged by its error against fp64, and that error by the error which the same computation makes in plain PyTorch in
the low precision (the yardstick): at most ``FACTOR`` times as large, or ``FLOOR_STEPS`` rounding steps of the result's dtype.
Steps of the result, or, where it is a sum that cancels, fp32 steps of the sum's largest terms: the yardstick may be lucky.
So a bound follows from the data and needs no literal in any test. Infinities and NaN must stand in the same places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FACTOR = 4.0
FLOOR_STEPS = 4.0


def _finite_error(actual: Tensor, exact: Tensor) -> float:
    finite = exact.isfinite() & actual.isfinite()
    return float((actual.double() - exact.double())[finite].abs().max()) if bool(finite.any()) else 0.0


def assert_close(
    actual: Tensor, exact: Tensor, yardstick: Tensor | None = None, *, magnitude: Tensor | float = 0.0, what: str = "result"
) -> None:
    """Judge ``actual`` against ``exact`` (fp64).

    Parameters
    ----------
    actual, exact : torch.Tensor
        Of one shape.
    yardstick : torch.Tensor, optional
        The same quantity from plain PyTorch in the precision of the inputs. None leaves only the rounding steps.
    magnitude : torch.Tensor or float
        The largest sum of absolute values of the terms that an element is a sum of, accumulated in fp32.
    what : str
        Names the quantity in the message.

    Raises
    ------
    AssertionError
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    for name, special in (("NaN", torch.isnan), ("infinite", torch.isinf)):
        here, there = special(actual), special(exact)
        if not torch.equal(here, there):
            place = (here != there).nonzero()[0].tolist()
            raise AssertionError(
                f"{what}: {name} values differ, first at {place}: {actual[tuple(place)]} for {exact[tuple(place)]}"
            )
    infinite = torch.isinf(exact)
    if not torch.equal(actual.double()[infinite], exact.double()[infinite]):
        raise AssertionError(f"{what}: infinities of other sign")
    finite = exact[exact.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    allowed = FLOOR_STEPS * torch.finfo(actual.dtype).eps * max(largest, torch.finfo(actual.dtype).tiny)
    allowed = max(allowed, FLOOR_STEPS * torch.finfo(torch.float32).eps * float(magnitude))
    if yardstick is not None:
        allowed = max(allowed, FACTOR * _finite_error(yardstick, exact))
    error = _finite_error(actual, exact)
    if not error <= allowed:
        raise AssertionError(f"{what}: error {error:.3g} against fp64, allowed {allowed:.3g} (largest value {largest:.3g})")


def assert_bound(bound: Tensor, exact: Tensor, magnitude: Tensor, *, what: str = "bound") -> None:
    """Judge that ``bound`` is never below ``exact`` (fp64), but for the rounding of a sum.

    Parameters
    ----------
    bound, exact : torch.Tensor
        Of one shape.
    magnitude : torch.Tensor
        The sum of the absolute values of the terms of ``exact``: a sum rounds in steps of that.

    Raises
    ------
    AssertionError
    """
    slack = FLOOR_STEPS * torch.finfo(bound.dtype).eps * magnitude.double()
    below = bound.double() < exact.double() - slack
    if bool(below.any()):
        place = tuple(below.nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int(below.sum())} are too low, first at {list(place)}: {bound[place]} < {exact[place]}")


def _softmax(logits: Tensor, softcap: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights [G, T] and LSE [G] of scaled logits; a sink enlarges the denominator only."""
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if sinks is not None:
        logits = torch.cat((logits, sinks.to(logits.dtype)[:, None]), dim=1)
    weights = torch.softmax(logits, dim=-1)
    return weights if sinks is None else weights[:, :-1], torch.logsumexp(logits, dim=-1)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The yardstick: attention of heads [G, D] over tokens [T, D] in q's dtype, softmax in fp32; out [G, D], lse [G]."""
    weights, lse = _softmax((q @ k.to(q.dtype).T).float() * scale, softcap, sinks)
    return weights.to(q.dtype) @ v.to(q.dtype), lse


def assert_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None = None,
    what: str = "",
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Judge attention of G heads over an explicit list of tokens.

    Parameters
    ----------
    out, lse : torch.Tensor
        [G, D] and [G], the result.
    q : torch.Tensor
        [G, D].
    keys, values : torch.Tensor
        [T, D], the tokens that the result should have read, dequantised. T = 0 is the empty state.
    scale : float, optional
        Default 1/sqrt(D).
    softcap, sinks
        As in :func:`tsattn.attend_pages`, sinks [G].
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if keys.shape[0] == 0:
        if bool(out.any()) or (lse is not None and not bool((lse == -math.inf).all())):
            raise AssertionError(f"{what}: an empty row must give output 0 and LSE -inf, got {out.flatten()[:4]} and {lse}")
        return
    weights, exact_lse = _softmax((q.double() @ keys.double().T) * scale, softcap, sinks)
    yard_out, yard_lse = plain_attention(q, keys, values, scale, softcap, sinks)
    terms = _largest_terms(q, keys, scale)
    largest = values.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
    assert_close(out, weights @ values.double(), yard_out, magnitude=terms * largest, what=f"{what} out")
    if lse is not None:
        assert_close(lse, exact_lse, yard_lse, magnitude=terms, what=f"{what} lse")


def _largest_terms(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """The largest sum of absolute terms of a logit, whose error is one of the LSE and a relative one of the weights."""
    return (q.double().abs() @ keys.double().abs().T).nan_to_num(nan=0.0, posinf=0.0).max() * scale


def assert_attention_of_lists(
    out: Tensor, lse: Tensor, q: Tensor, tokens: Sequence[tuple[Tensor, Tensor]], what: str = ""
) -> None:
    """Judge attention of the heads of one row, which share ``len(tokens)`` lists.

    The LSE of a list of one head is one number, and a yardstick of one number may be right by chance as no attention of that
    precision is: it counts as if it erred as much, for the size of its logits, as the worst of the row.

    Parameters
    ----------
    out, lse : torch.Tensor
        [HQ, D] and [HQ], the result.
    q : torch.Tensor
        [HQ, D].
    tokens : sequence of (torch.Tensor, torch.Tensor)
        Keys and values [T, D] of each list, as in :func:`assert_attention`.
    """
    scale, group = 1.0 / math.sqrt(q.shape[1]), q.shape[0] // len(tokens)
    judged = []
    for i, (keys, values) in enumerate(tokens):
        heads, where = slice(i * group, (i + 1) * group), f"{what}, list {i}"
        is_empty = keys.shape[0] == 0
        assert_attention(out[heads], lse[heads] if is_empty else None, q[heads], keys, values, what=where)
        if not is_empty:
            _, exact = _softmax((q[heads].double() @ keys.double().T) * scale, 0.0, None)
            _, yard = plain_attention(q[heads], keys, values, scale)
            judged.append((lse[heads], exact, yard, _largest_terms(q[heads], keys, scale), where))
    worst = max((_finite_error(yard, exact) / float(terms) for _, exact, yard, terms, _ in judged if terms > 0), default=0.0)
    for found, exact, _, terms, where in judged:
        assert_close(found, exact, exact + worst * terms, magnitude=terms, what=f"{where} lse")


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Bit-identical, NaN included; -0 differs from +0."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = integers[actual.element_size()]
    here, there = actual.contiguous().view(bits), expected.contiguous().view(bits)
    if actual.is_floating_point():
        both_nan = actual.isnan() & expected.isnan()
        here, there = here.masked_fill(both_nan, 0), there.masked_fill(both_nan, 0)
    if not torch.equal(here, there):
        differ = (here != there).nonzero()
        place = tuple(differ[0].tolist())
        raise AssertionError(
            f"{what}: {len(differ)} values differ, first at {list(place)}: {actual[place]} for {expected[place]}"
        )
