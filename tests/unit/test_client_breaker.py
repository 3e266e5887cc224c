from kvstored_client.breaker import BACKOFF_MAX_S, BACKOFF_MIN_S, Breaker


class Time:
    now = 100.0

    def __call__(self):
        return self.now


def broken(times, jitter=1.0):
    time = Time()
    breaker = Breaker(time, lambda: jitter)
    for _ in range(times):
        breaker.failure()
    return breaker, time


def test_a_closed_breaker_lets_everybody_through():
    breaker, _ = broken(0)
    assert breaker.allow()
    assert breaker.allow()
    assert breaker.closed


def test_after_a_failure_one_caller_per_period_may_try():
    breaker, time = broken(1)
    assert not breaker.allow()
    time.now += BACKOFF_MIN_S
    assert breaker.allow()
    assert not breaker.allow()


def test_periods_double_up_to_the_limit():
    waits = []
    for failures in range(1, 12):
        breaker, time = broken(failures)
        start = time.now
        while breaker.waiting:
            time.now += BACKOFF_MIN_S / 4
        waits.append(round(time.now - start, 3))
    assert waits[:4] == [BACKOFF_MIN_S, 2 * BACKOFF_MIN_S, 4 * BACKOFF_MIN_S, 8 * BACKOFF_MIN_S]
    assert waits[-1] == BACKOFF_MAX_S


def test_jitter_takes_off_at_most_half():
    breaker, time = broken(1, jitter=0.0)
    time.now += BACKOFF_MIN_S / 2
    assert breaker.allow()


def test_a_success_closes_it_and_forgets_the_failures():
    breaker, time = broken(6)
    breaker.success()
    assert breaker.allow()
    breaker.failure()
    time.now += BACKOFF_MIN_S
    assert breaker.allow()
