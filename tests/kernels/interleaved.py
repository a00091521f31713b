"""Programs of an interpreted launch side by side: a stand-in for a GPU that shows races and waiting, not speed.

Every program runs in a thread of its own, one at a time. At each atomic operation and each barrier the next to go on is drawn
by lot among the resident ones: the first `residents` that haven't ended, in an order drawn by lot, too.
"""

import contextlib
import inspect
import random
import threading
from unittest import mock

from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class _Programs:
    """Stands in for the kernel's function: collects the calls of a launch, and runs them at the last one."""

    def __init__(self, fn, residents, dice, switches):
        self.fn, self.residents, self.dice, self.switches = fn, residents, dice, switches
        self.__name__, self.__globals__ = fn.__name__, fn.__globals__
        self.__annotations__, self.__signature__ = fn.__annotations__, inspect.signature(fn)
        self.builder = interpreter.interpreter_builder
        self.waiting, self.errors = [], []
        self.back = threading.Semaphore(0)

    def __call__(self, **arguments):
        self.waiting.append((self.builder.grid_idx, threading.Semaphore(0), arguments))
        x, y, z = self.builder.grid_dim
        if len(self.waiting) == x * y * z:
            self.run_all()

    def run_all(self):
        programs = self.waiting
        self.dice.shuffle(programs)
        threads = [threading.Thread(target=self.run_one, args=program, daemon=True) for program in programs]
        self.current, self.done = None, set()
        for thread in threads:
            thread.start()
        for _ in range(200_000):
            resident = [program for program in programs if program[0] not in self.done][: self.residents]
            if not resident or self.errors:
                break
            self.current = self.dice.choice(resident)
            self.builder.grid_idx = self.current[0]
            self.current[1].release()
            self.back.acquire()
        else:
            raise AssertionError("the programs wait for each other")
        if self.errors:
            raise self.errors[0]

    def run_one(self, index, turn, arguments):
        turn.acquire()
        try:
            self.fn(**arguments)
        except Exception as error:  # told to the thread of the test, which raises it
            self.errors.append(error)
        self.done.add(index)
        self.back.release()

    def switch(self):
        """Let another program go on."""
        turn = self.current[1]
        self.switches.append(self.current[0])
        self.back.release()
        turn.acquire()


@contextlib.contextmanager
def interleaved(residents, seed):
    """Interpret launches inside the block in this way; yields the list of programs that have been interrupted."""
    dice, switches, launch = random.Random(seed), [], {}
    init = GridExecutor.__init__

    def start(self, fn, *args, **kwargs):
        init(self, fn, *args, **kwargs)
        self.fn = launch["current"] = _Programs(self.fn, residents, dice, switches)

    def switching(original):
        def operation(self, *args, **kwargs):
            launch["current"].switch()
            return original(self, *args, **kwargs)

        return operation

    with (
        mock.patch.object(GridExecutor, "__init__", start),
        mock.patch.object(InterpreterBuilder, "create_atomic_rmw", switching(InterpreterBuilder.create_atomic_rmw)),
        mock.patch.object(InterpreterBuilder, "create_barrier", switching(InterpreterBuilder.create_barrier)),
    ):
        yield switches
