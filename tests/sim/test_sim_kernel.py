"""The scheduler, processes, links and streams of the simulator itself."""

from __future__ import annotations

from planaria.sim.kernel import Kernel, Process
from planaria.sim.network import End, Links, Stream


def drain(kernel: Kernel, until: float = 1e9) -> None:
    kernel.run(until, lambda: False)


def test_things_happen_in_the_order_of_their_times() -> None:
    kernel, seen = Kernel(0), []
    for delay in (3.0, 1.0, 2.0):
        kernel.after(delay, lambda delay=delay: seen.append((kernel.now, delay)))  # type: ignore[misc]
    drain(kernel)
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_equal_times_keep_the_order_in_which_they_were_asked_for() -> None:
    kernel, seen = Kernel(0), []
    for name in "abc":
        kernel.after(1.0, lambda name=name: seen.append(name))  # type: ignore[misc]
    drain(kernel)
    assert seen == ["a", "b", "c"]


def test_a_run_ends_at_its_limit_or_when_it_is_done() -> None:
    kernel, seen = Kernel(0), []
    for at in range(10):
        kernel.after(float(at), lambda at=at: seen.append(at))  # type: ignore[misc]
    assert kernel.run(100.0, lambda: len(seen) == 3)
    assert not kernel.run(5.5, lambda: False)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert not kernel.run(100.0, lambda: False), "out of events"


def test_equal_seeds_give_equal_chances() -> None:
    a, b, c = Kernel(7), Kernel(7), Kernel(8)
    draws = [[k.between(0.0, 1.0) for _ in range(5)] for k in (a, b, c)]
    assert draws[0] == draws[1] != draws[2]


def test_a_stopped_process_does_everything_in_order_when_it_is_continued() -> None:
    kernel, seen = Kernel(0), []
    process = Process(kernel, "p")
    process.pause()
    process.post(lambda: seen.append("first"))
    process.after(1.0, lambda: seen.append("second"))
    drain(kernel)
    assert seen == []
    process.resume()
    assert seen == ["first", "second"]


def test_a_process_that_stops_again_while_it_catches_up_keeps_the_rest() -> None:
    kernel, seen = Kernel(0), []
    process = Process(kernel, "p")
    process.pause()
    process.post(process.pause)
    process.post(lambda: seen.append("late"))
    process.resume()
    assert seen == []
    process.resume()
    assert seen == ["late"]


def test_a_dead_process_does_nothing_and_dies_once() -> None:
    kernel, seen = Kernel(0), []
    process = Process(kernel, "p")
    process.on_death.append(lambda: seen.append("death"))
    process.after(1.0, lambda: seen.append("never"))
    process.die()
    process.die()
    process.post(lambda: seen.append("never"))
    drain(kernel)
    assert seen == ["death"]


class Line:
    """A stream between two processes, and what arrived at either end."""

    def __init__(self, seed: int = 0) -> None:
        self.kernel = Kernel(seed)
        self.links = Links()
        self.here, self.there = Process(self.kernel, "agent"), Process(self.kernel, "lighthouse")
        self.near, self.far = End(self.here, "node 0"), End(self.there, "lighthouse")
        self.heard: list[object] = []
        self.far.on_message = self.heard.append
        self.far.on_lost = lambda: self.heard.append("lost")
        self.near.on_lost = lambda: self.heard.append("lost here")
        self.stream = Stream(self.kernel, self.links, self.near, self.far)

    def send(self, *messages: object) -> None:
        for message in messages:
            self.stream.send(self.near, message)


def test_a_stream_keeps_order_whatever_the_delays() -> None:
    for seed in range(20):
        line = Line(seed)
        line.send(*range(50))
        drain(line.kernel)
        assert line.heard == list(range(50))


def test_a_partition_holds_messages_back_and_then_lets_them_through_in_order() -> None:
    line = Line()
    line.send(1)
    drain(line.kernel)
    line.links.cut("node 0", "lighthouse")
    line.send(2, 3)
    drain(line.kernel)
    assert line.heard == [1]
    line.links.restore("node 0", "lighthouse")
    line.send(4)
    drain(line.kernel)
    assert line.heard == [1, 2, 3, 4]


def test_partitions_that_overlap_end_with_the_last() -> None:
    links = Links()
    links.cut("a", "b")
    links.cut("b", "a")
    links.restore("a", "b")
    assert not links.reach("a", "b")
    links.restore("a", "b")
    assert links.reach("a", "b")
    assert links.reach("a", "a")


def test_a_connection_that_snaps_loses_what_is_under_way_and_both_learn_of_it() -> None:
    line = Line()
    line.send(1)
    line.stream.snap()
    line.send(2)
    drain(line.kernel)
    assert sorted(map(str, line.heard)) == ["lost", "lost here"]


def test_what_a_process_sent_before_it_died_still_arrives_and_then_the_end() -> None:
    line = Line()
    line.send(1, 2)
    line.here.die()
    drain(line.kernel)
    assert line.heard == [1, 2, "lost"]


def test_a_stream_that_one_side_closes_ends_for_the_other_and_is_deaf_here() -> None:
    line = Line()
    line.send(1)
    line.stream.close(line.near)
    line.send(2)
    line.stream.send(line.far, "an answer")
    drain(line.kernel)
    assert line.heard == [1, "lost"]
