"""What a writer of the crash test believes of its blocks."""

from tests.crash.model import Chain, Promise

ASKED_S = 1000.0


def chain(blocks=4):
    return Chain(7, 4096, [bytes([i]) * 8 for i in range(blocks)])


def test_a_put_that_was_not_answered_may_be_there_or_not():
    c = chain()
    c.begin_put(0, 2)
    assert c.promises == [Promise.MAYBE] * 2 + [Promise.GONE] * 2
    assert c.first_unsure() == 0
    c.acknowledged(0, Promise.MEMORY, ASKED_S)
    assert c.first_unsure() == 1


def test_an_acknowledgement_never_takes_a_stronger_one_back():
    c = chain(1)
    c.begin_put(0, 1)
    c.acknowledged(0, Promise.NVME, ASKED_S)
    c.acknowledged(0, Promise.MEMORY, ASKED_S)
    assert c.promises == [Promise.NVME]


def test_a_flush_makes_durable_what_was_acknowledged_and_nothing_else():
    c = chain(3)
    c.begin_put(0, 2)
    c.acknowledged(0, Promise.MEMORY, ASKED_S)
    c.flushed()
    assert c.promises == [Promise.NVME, Promise.MAYBE, Promise.GONE]


def test_what_is_put_after_a_delete_has_other_bytes_and_what_is_put_again_has_the_same():
    c = chain(1)
    (first,) = c.begin_put(0, 1)
    (again,) = c.begin_put(0, 1)
    c.begin_delete(0)
    (unsure,) = c.begin_put(0, 1)
    c.begin_delete(0)
    c.deleted(0)
    (second,) = c.begin_put(0, 1)
    assert first == again == unsure != second


def test_a_delete_that_was_not_answered_leaves_nothing_to_rely_on():
    c = chain(2)
    c.begin_put(0, 2)
    c.acknowledged(0, Promise.NVME, ASKED_S)
    c.begin_delete(0)
    assert c.promises == [Promise.MAYBE, Promise.MAYBE]


def test_what_was_found_is_committed_and_what_was_missed_must_not_come_back():
    c = chain(2)
    c.begin_put(0, 2)
    c.found(0, ASKED_S)
    c.missed(1)
    assert c.promises == [Promise.MEMORY, Promise.GONE]


def test_no_two_blocks_or_versions_share_a_payload():
    chains = [Chain(number, 4096, [b"x" * 8] * 1000) for number in (0, 1)]
    numbers = set()
    for c in chains:
        numbers.update(c.begin_put(0, 1000))
        c.deleted(0)
        numbers.update(c.begin_put(0, 1000))
    assert len(numbers) == 4000


def test_without_the_memory_only_what_is_durable_must_be_there():
    c = chain(3)
    c.begin_put(0, 2)
    c.acknowledged(0, Promise.MEMORY, ASKED_S)
    c.acknowledged(1, Promise.NVME, ASKED_S)
    c.memory_lost()
    assert c.promises == [Promise.MAYBE, Promise.NVME, Promise.GONE]
