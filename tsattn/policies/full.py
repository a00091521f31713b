"""Full attention through the library's own dense decoding: what every other policy is held against."""

from __future__ import annotations

from dataclasses import dataclass

from tsattn.attention import dense_decode
from tsattn.config import SparseConfig
from tsattn.policies.base import UNSERVED, Attended, Step


@dataclass(frozen=True)
class Full:
    """Reads everything; the configuration's budget and summary have no say."""

    config: SparseConfig
    observes = False

    def __post_init__(self) -> None:
        default = SparseConfig()
        for name in UNSERVED:
            if getattr(self.config, name) != getattr(default, name):
                raise ValueError(f"full attention has no {name}")

    def begin(self) -> None:
        """Nothing is remembered."""

    def attend(self, step: Step) -> Attended:
        """Attend to all tokens."""
        pages = step.pages(self.config.page_size)
        out = dense_decode(step.q, pages.k_cache, pages.v_cache, pages.page_table, step.seq_lens, **step.options)
        return Attended(out, None, self.config.page_size, 0.0)  # type: ignore[arg-type]
