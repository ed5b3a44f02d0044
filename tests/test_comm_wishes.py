"""Wishes of ranks out of step; what happens to them under Lightning is in test_work_sharing.py."""

from lightning_cocod.comm.wishes import Wishes


def test_a_wish_is_granted_once_and_others_stay():
    wishes = Wishes()
    for what in ("stop", "checkpoint", "stop"):
        wishes.request(what)
    assert wishes.wishes == ("stop", "checkpoint")
    wishes.granted(["stop", "never wished"])
    assert wishes.wishes == ("checkpoint",)
    assert wishes.reached(0) == "checkpoint"


def test_the_list_that_a_signal_handler_may_be_adding_to_is_kept():
    wishes = Wishes()
    wishes.request("checkpoint")
    looked_up = wishes._own  # by the handler, which is about to append
    wishes.granted(["checkpoint"])
    looked_up.append("stop")
    assert wishes.wishes == ("stop",)


def test_a_wish_that_two_handlers_have_added_is_granted_as_one():
    wishes = Wishes()
    wishes._own += ["stop", "stop"]  # neither has seen the other's
    wishes.granted(["stop"])
    assert wishes.wishes == ()
