"""Rate limits by the token bucket algorithm. Pure: time is an argument."""

from __future__ import annotations

from collections import OrderedDict


class RateLimit:
    """Allows `per_s` units per second on average and `burst` units at once.

    Rejected attempts may be charged, too: a caller that ignores rejections gets into debt, up to `burst`.
    """

    __slots__ = ("_available_units", "_burst_units", "_units_per_s", "_updated_s")

    def __init__(self, *, units_per_s: float, burst_units: float, now_s: float) -> None:
        self._units_per_s = units_per_s
        self._burst_units = burst_units
        self._available_units = burst_units
        self._updated_s = now_s

    def take_units_or_get_wait_s(
        self, units: float, *, now_s: float, units_if_rejected: float = 0.0
    ) -> float:
        """Take the units and return 0.0; or take `units_if_rejected` and return the seconds until a retry."""
        level = min(self._available_units + (now_s - self._updated_s) * self._units_per_s, self._burst_units)
        self._updated_s = now_s
        if level >= units:
            self._available_units = level - units
            return 0.0
        self._available_units = max(level - units_if_rejected, -self._burst_units)
        return (units - self._available_units) / self._units_per_s

    @property
    def is_debt_at_max(self) -> bool:
        """Whether the debt is at its maximum: the caller has ignored rejections."""
        return self._available_units <= -self._burst_units


class RateLimits:
    """One rate limit per key. Forgets the least recently used keys beyond `keys_max`."""

    def __init__(self, *, units_per_s: float, burst_units: float, keys_max: int) -> None:
        self._units_per_s = units_per_s
        self._burst_units = burst_units
        self._keys_max = keys_max
        self._limit_by_key: OrderedDict[str, RateLimit] = OrderedDict()

    def get_limit(self, key: str, *, now_s: float) -> RateLimit:
        found = self._limit_by_key.get(key)
        if found is None:
            found = RateLimit(units_per_s=self._units_per_s, burst_units=self._burst_units, now_s=now_s)
            self._limit_by_key[key] = found
            if len(self._limit_by_key) > self._keys_max:
                self._limit_by_key.popitem(last=False)
        else:
            self._limit_by_key.move_to_end(key)
        return found
