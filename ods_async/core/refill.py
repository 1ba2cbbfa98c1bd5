"""When the next generation is requested, and who has to wait for whom (B31–B33)."""

from __future__ import annotations

from typing import Final

__all__ = ["POLICIES", "RefillRule"]

POLICIES: Final = ("sample_threshold", "manual", "continuous")


class RefillRule:
    """One of three policies; the same calls for all of them.

    * ``sample_threshold``: a generation is due when ``threshold * buffer_size`` windows have been drawn since the last
      request and none is outstanding.
    * ``manual``: never due by itself.
    * ``continuous``: due whenever none is outstanding. With ``samples_per_insert`` the two sides are kept together:
      after the first generation, windows drawn may differ by ``tolerance`` from ``samples_per_insert`` times episodes
      published. Beyond it the producers ahead pause, or the consumers ahead wait; never both at once.

    The caller reports what happens (:meth:`requested`, :meth:`published`, :meth:`completed`, :meth:`drawn`) and
    requests a generation whenever :attr:`due` says so.

    Args:
        policy: one of :data:`POLICIES`.
        threshold: draws per slot for ``sample_threshold``.
        buffer_size: slots.
        samples_per_insert: for ``continuous``: windows to be drawn per published episode; None does not bound anything.
        tolerance: windows either side may be ahead; by default what one whole buffer is worth.
    """

    def __init__(
        self,
        policy: str,
        threshold: int,
        buffer_size: int,
        samples_per_insert: float | None = None,
        tolerance: float | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"refill policy {policy!r} is unknown; known: {', '.join(POLICIES)}")
        bound = samples_per_insert if policy == "continuous" else None
        if bound is not None and not bound > 0:
            raise ValueError(f"samples_per_insert must be positive, found {bound}")
        if tolerance is not None and not tolerance > 0:
            raise ValueError(
                f"the tolerance must be positive, or both sides could wait for each other; found {tolerance}"
            )
        self.policy = policy
        self.windows_per_request = threshold * buffer_size
        self.samples_per_insert = bound
        self.tolerance = tolerance if tolerance is not None else max(1.0, (bound or 0.0) * buffer_size)
        self._outstanding = False
        self._insisted = False
        self._balancing = False  # from the first completed generation on
        self._since_request = 0
        self._drawn = 0
        self._published = 0

    # --- what happens -----------------------------------------------------------------------------------------------

    def requested(self) -> None:
        """A generation was requested, by this rule or by hand: it is outstanding now, and the count restarts."""
        self._outstanding = True
        self._since_request = 0

    def insist(self) -> None:
        """Someone asked for a generation by hand (B32): the outstanding one, or else the next, has no pause."""
        self._insisted = True

    def published(self, episodes: int) -> None:
        """So many episodes were published."""
        if self._balancing:
            self._published += episodes

    def completed(self) -> bool:
        """The outstanding generation is complete; whether the next one is due already."""
        self._outstanding = False
        self._insisted = False
        self._balancing = True
        return self.due

    def drawn(self, windows: int) -> bool:
        """So many windows were drawn; whether the next generation is due now."""
        self._since_request += windows
        if self._balancing:
            self._drawn += windows
        return self.due

    # --- what follows -----------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> bool:
        """Whether a requested generation is not complete yet."""
        return self._outstanding

    @property
    def due(self) -> bool:
        """Whether the next generation should be requested now."""
        if self._outstanding or self.policy == "manual":
            return False
        if self.policy == "sample_threshold":
            return self._since_request >= self.windows_per_request
        return not self.production_pause

    @property
    def counts_draws(self) -> bool:
        """Whether it matters when a window is drawn: a draw may request a generation, or have to wait."""
        return self.policy == "sample_threshold" or self.samples_per_insert is not None

    @property
    def reason(self) -> str:
        """Why this rule requests generations: what ``GenerationRequested.reason`` says."""
        return {"sample_threshold": "threshold", "continuous": "continuous"}.get(self.policy, "manual")

    @property
    def ahead(self) -> float:
        """Windows the producers are ahead by (negative: the consumers are); 0 where nothing is bounded."""
        return (self.samples_per_insert or 0.0) * self._published - (self._drawn if self.samples_per_insert else 0)

    @property
    def production_pause(self) -> str:
        """Why no further rollout should be begun, in words; empty: go on."""
        if self.samples_per_insert is None or self._insisted or self.ahead < self.tolerance:
            return ""
        return self._sentence("producers are ahead", "they pause until more windows are drawn")

    @property
    def sampling_pause(self) -> str:
        """Why a draw has to wait for new episodes, in words; empty: go on.

        It looks at what was drawn, not at the draw to come: a batch larger than the tolerance is let through, too, and
        those after it wait.
        """
        if self.samples_per_insert is None or self.ahead > -self.tolerance:
            return ""
        return self._sentence("consumers are ahead", "they wait until more episodes are published")

    def _sentence(self, who: str, then: str) -> str:
        return (
            f"{who}: {self._drawn} windows drawn for {self._published} episodes since the first generation, "
            f"samples_per_insert={self.samples_per_insert:g} asks for "
            f"{self._published * (self.samples_per_insert or 0.0):g} with a tolerance of {self.tolerance:g}; {then}"
        )
