"""Choosing a configuration for a model and a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tsattn.config import SparseConfig


def calibrate(
    model: Any,
    token_ids: Any,
    *,
    tokenizer: Any = None,
    candidates: Iterable[SparseConfig] | None = None,
    contexts: Sequence[int] = (4096, 8192),
    max_kl: float = 0.04,
    max_missed: int = 0,
    pass_keys: int = 8,
    continued: int = 96,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = True,
) -> SparseConfig:
    """Find the configuration that reads the fewest bytes per step while its answers stay those of dense attention.

    Candidates (kinds of summary, parts, their storage, sharing, budgets, dense layers) are measured on the first half of the
    text: KL divergence of next-token distributions where the text goes on, and pass keys hidden in it. Those that
    stay within the tolerance are then tried on the second half, cheapest first (of equal bytes the one with fewer missed keys,
    then with a lower KL), with other pass keys; the first that holds is returned.

    Parameters
    ----------
    model : PreTrainedModel
        A Transformers decoder, in evaluation mode. Needs the extra ``tsattn[hf]``; pictures need matplotlib.
    token_ids : sequence of int or torch.Tensor
        [L] or [1, L], a text of your own, without pass keys. At least twice the largest context and ``continued``; of each half
        no more than that is read, from its beginning. A first token that begins texts is left out, and put where it belongs.
    tokenizer : PreTrainedTokenizer, optional
        For the pass keys; None loads the one of ``model.name_or_path``.
    candidates : iterable of SparseConfig, optional
        Default: :func:`tsattn.evaluation.calibrate.default_candidates`.
    contexts : sequence of int
        Tokens of context to measure at, that the model can read.
    max_kl : float
        Largest mean KL divergence from dense attention, in nats, at every context.
    max_missed : int
        Pass keys, of those that dense attention finds, that may be missed at every context.
    pass_keys : int
        Pass keys per context and half, at as many depths.
    continued : int
        Tokens of continued text per context and half.
    seed : int
        Of pass keys.
    out : path, optional
        Folder for config.json (:meth:`SparseConfig.from_dict` reads it), report.md, the picture of the frontier, and
        rows.jsonl, with which an interrupted run goes on. A config.json of something else there is refused.
    progress : bool
        Show bars.

    Returns
    -------
    SparseConfig

    Raises
    ------
    ValueError
        If the text is too short, or no candidate stays within the tolerance; the message names the nearest one.

    Warns
    -----
    UserWarning
        If dense attention finds no pass key at all: then only KL decides.

    Notes
    -----
    A 270M model on two CPU cores takes minutes per context. Bytes are those of a 16-bit cache: keys, values and statistics of
    the full-attention layers. Nothing is tuned per head; centroids are measured without a metric.
    """
    from tsattn.evaluation.calibrate import Tolerance, run

    return run(
        model,
        token_ids,
        tokenizer=tokenizer,
        candidates=candidates,
        contexts=contexts,
        tolerance=Tolerance(max_kl, max_missed),
        pass_keys=pass_keys,
        continued=continued,
        seed=seed,
        out=None if out is None else Path(out),
        progress=progress,
    )
