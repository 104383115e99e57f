"""When a worker is started again: at once, then with pauses, then no more."""

from __future__ import annotations

from slipring.runtime.restarts import RestartPolicy


def delays(policy: RestartPolicy, count: int) -> list[float | None]:
    return [policy.next_delay_s(1.0) for _ in range(count)]


def test_a_crash_loop_backs_off_and_ends() -> None:
    assert delays(RestartPolicy(), 8) == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, None, None]


def test_a_token_or_a_long_life_begins_anew() -> None:
    policy = RestartPolicy()
    delays(policy, 4)
    policy.progressed()
    assert delays(policy, 3) == [0.0, 0.0, 0.5]
    policy.serving(10.0)
    assert policy.next_delay_s(20.0) == 1.0
    policy.serving(30.0)
    assert policy.next_delay_s(100.0) == 0.0


def test_condemning_one_after_the_other_without_a_token_is_a_crash_loop() -> None:
    policy = RestartPolicy()
    seen = []
    for _ in range(12):
        policy.learned(condemned=True)
        seen.append(policy.next_delay_s(1.0))
    assert None in seen and seen[:3] == [0.0, 0.0, 0.0]
