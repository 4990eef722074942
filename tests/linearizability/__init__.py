"""Linearizability of recorded histories: the checker, the models, and histories of real clients.

    from tests.linearizability.checker import Operation, check_linearizable
    from tests.linearizability.models import LOCKS

    assert check_linearizable(LOCKS, history) is None

A history is a list of `Operation`; `recorder.HistoryRecorder` records one.
"""
