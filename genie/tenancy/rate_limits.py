"""Rate limits by the token bucket algorithm. Pure: time is an argument."""

from __future__ import annotations

from collections import OrderedDict


class RateLimit:
    """Allows `per_s` units per second on average and `burst` units at once.

    Rejected attempts may be charged, too: a caller that ignores rejections gets into debt, up to `burst`.
    """

    __slots__ = ("_at_s", "_burst", "_level", "_per_s")

    def __init__(self, *, per_s: float, burst: float, now_s: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at_s = now_s

    def try_take(self, units: float, *, now_s: float, rejected_units: float = 0.0) -> float:
        """Take the units and return 0.0; or take `rejected_units` and return the seconds until a retry."""
        level = min(self._level + (now_s - self._at_s) * self._per_s, self._burst)
        self._at_s = now_s
        if level >= units:
            self._level = level - units
            return 0.0
        self._level = max(level - rejected_units, -self._burst)
        return (units - self._level) / self._per_s

    @property
    def is_exhausted(self) -> bool:
        """Whether the debt is at its maximum: the caller has ignored rejections."""
        return self._level <= -self._burst


class RateLimits:
    """One rate limit per key. Forgets the least recently used keys beyond `keys_max`."""

    def __init__(self, *, per_s: float, burst: float, keys_max: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._keys_max = keys_max
        self._limits: OrderedDict[str, RateLimit] = OrderedDict()

    def of(self, key: str, *, now_s: float) -> RateLimit:
        found = self._limits.get(key)
        if found is None:
            found = RateLimit(per_s=self._per_s, burst=self._burst, now_s=now_s)
            self._limits[key] = found
            if len(self._limits) > self._keys_max:
                self._limits.popitem(last=False)
        else:
            self._limits.move_to_end(key)
        return found
