"""Retries: number of attempts, retried errors, and pauses."""

from __future__ import annotations

import math

import pytest

from genie.errors import LoginRefusedError, UnreachableError, UsageError
from genie.grid import retry
from genie.grid.backoff import backoff_s


class FlakyFunction:
    """Raises these errors one after the other, then returns the number of calls."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return self.calls


def test_plain_function_is_retried_after_retryable_errors() -> None:
    flaky = FlakyFunction(UnreachableError("away"), TimeoutError(), ConnectionResetError())
    assert retry(base_s=0)(flaky)() == 4


async def test_async_function_is_retried_and_stays_async() -> None:
    flaky = FlakyFunction(UnreachableError("away"))

    @retry(base_s=0)
    async def call(word: str) -> str:
        """Its own docstring."""
        return f"{word} {flaky()}"

    assert await call("try") == "try 2"
    assert call.__doc__ == "Its own docstring."


def test_decorator_without_parentheses_uses_defaults() -> None:
    @retry
    def call(number: int) -> int:
        return number + 1

    assert call(1) == 2


@pytest.mark.parametrize("error", [LoginRefusedError("no"), ValueError("no"), KeyboardInterrupt()])
def test_other_errors_are_not_retried(error: BaseException) -> None:
    flaky = FlakyFunction(error)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        retry(base_s=0)(flaky)()
    assert flaky.calls == 1


def test_last_error_is_raised_after_max_retries() -> None:
    errors = [ValueError(str(number)) for number in range(10)]
    flaky = FlakyFunction(*errors)
    calls: list[tuple[str, float]] = []
    decorate = retry(
        max_retries=2, base_s=0, when=(ValueError,), on_retry=lambda error, s: calls.append((str(error), s))
    )
    with pytest.raises(ValueError, match="2"):
        decorate(flaky)()
    assert (flaky.calls, calls) == (3, [("0", 0.0), ("1", 0.0)])


def test_predicate_selects_retried_errors() -> None:
    flaky = FlakyFunction(ValueError("again"), ValueError("stop"))
    with pytest.raises(ValueError, match="stop"):
        retry(base_s=0, when=lambda error: str(error) == "again")(flaky)()


def test_pauses_grow_to_a_maximum_with_jitter() -> None:
    for attempt, high_s in ((0, 0.1), (1, 0.2), (3, 0.8), (20, 5.0), (2000, 5.0)):
        pauses = [backoff_s(attempt) for _ in range(50)]
        assert high_s / 2 <= min(pauses) < max(pauses) <= high_s


@pytest.mark.parametrize(
    "wrong",
    [
        *({"max_retries": value} for value in (-1, 10**9, "3", 1.5)),
        *({"base_s": -1}, {"max_s": -1}, {"base_s": math.nan}, {"max_s": math.nan}),
        *({"when": value} for value in (None, [OSError], ("OSError",), int)),
    ],
)
def test_invalid_bounds_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        retry(**wrong)  # type: ignore[call-overload]


def test_positional_retry_count_is_rejected() -> None:
    with pytest.raises(UsageError, match="max_retries=3"):
        retry(3)  # type: ignore[call-overload]


def test_exception_type_as_condition_selects_retried_errors() -> None:
    calls: list[int] = []

    @retry(base_s=0, when=OSError)
    def fail(error: Exception) -> None:
        calls.append(1)
        raise error

    with pytest.raises(ValueError, match="mine"):
        fail(ValueError("mine"))
    assert len(calls) == 1
    with pytest.raises(OSError, match="passing"):
        fail(OSError("passing"))
    assert len(calls) == 5
