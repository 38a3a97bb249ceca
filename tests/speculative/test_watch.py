"""Whether a drafting model follows a text: as long as drafts pay, then now and then."""

from __future__ import annotations

from speculative.adaptive import FIRST_NAP, LONGEST_NAP, PATIENCE, Watch


def steps_until(watch: Watch, awake: bool, paid: bool = False) -> int:
    """Steps until it is awake, or asleep."""
    steps = 0
    while watch.is_awake != awake:
        watch.step(paid)
        steps += 1
    return steps


def test_it_begins_awake_and_hopeful() -> None:
    watch = Watch()
    assert watch.is_awake
    assert watch.pays


def test_it_stays_awake_while_drafts_pay_now_and_then() -> None:
    watch = Watch()
    for _ in range(20):
        for _ in range(PATIENCE):
            watch.step(False)
        assert watch.is_awake
        watch.step(True)
        assert watch.pays


def test_naps_grow_where_drafts_do_not_pay() -> None:
    watch = Watch()
    naps = []
    for _ in range(8):
        assert steps_until(watch, awake=False) == PATIENCE + 1
        assert not watch.pays
        naps.append(steps_until(watch, awake=True))
    assert naps[:3] == [FIRST_NAP, 2 * FIRST_NAP, 4 * FIRST_NAP]
    assert naps[-1] == LONGEST_NAP


def test_a_draft_that_pays_wakes_it_and_forgets_the_naps() -> None:
    watch = Watch()
    steps_until(watch, awake=False)
    steps_until(watch, awake=True)
    steps_until(watch, awake=False)
    watch.step(True)
    assert watch.is_awake
    steps_until(watch, awake=False)
    assert steps_until(watch, awake=True) == FIRST_NAP


def test_a_new_text_is_followed_if_others_are() -> None:
    everyone = Watch()
    assert Watch(everyone).is_awake
    steps_until(everyone, awake=False)
    one = Watch(everyone)
    assert steps_until(one, awake=True) == FIRST_NAP
