"""Device time of a program, between events on its stream."""

from __future__ import annotations

from pyruntime.driver.program import Program
from pyruntime.driver.stream import Event, Stream


def time_program(
    program: Program, stream: Stream, *, rounds: int = 9, runs: int = 1, warmup: int = 2
) -> list[float]:
    """Milliseconds per run in each of `rounds` rounds of `runs` back-to-back runs."""
    device = stream.device
    started, ended = Event(device), Event(device)
    times = []
    with device.current():
        for _ in range(warmup):
            program.run(stream)
        for _ in range(rounds):
            started.record(stream)
            for _ in range(runs):
                program.run(stream)
            ended.record(stream)
            ended.synchronize()
            times.append(ended.milliseconds_since(started) / runs)
    started.close()
    ended.close()
    return times
