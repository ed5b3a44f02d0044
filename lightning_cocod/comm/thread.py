"""The communication thread: jobs run one after the other, in the order in which they were submitted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lightning_cocod.comm.beside import beside_training

T = TypeVar("T")


class Handle(Generic[T]):
    """A job that has been submitted. It keeps the job, and so the job's inputs, alive until it is done."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._result: T | None = None
        self._error: BaseException | None = None

    @classmethod
    def of(cls, result: T) -> Handle[T]:
        """Of a job that has ended with this result."""
        handle = cls(lambda: result)
        handle._settle(result, None)
        return handle

    def _settle(self, result: T | None, error: BaseException | None) -> None:
        with self._lock:  # the first outcome stands: a late result never replaces a failure already seen
            if not self._done.is_set():
                self._result, self._error, self._work = result, error, None
                self._done.set()

    def done(self) -> bool:
        """Whether the job has ended, well or not. Never blocks."""
        return self._done.is_set()

    @property
    def ended(self) -> threading.Event:
        """Set once it has."""
        return self._done

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds. Returns whether the job has ended well; raises nothing."""
        return self._done.wait(timeout) and self._error is None

    def wait(self) -> T:
        """Block until the job has ended.

        Returns:
            What the job returned.

        Raises:
            BaseException: what the job raised, or what ended the thread before it came to the job.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set together with the event


class CommunicationThread:
    """One daemon thread, one order.

    After a job has raised, no later job runs: the workers would no longer agree on what comes next. All of them raise the
    first error instead.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Handle[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._closed = False
        self._open: set[Handle[Any]] = set()
        self._thread = beside_training(self._run, name)

    def submit(self, work: Callable[[], T]) -> Handle[T]:
        """Queue a job.

        Raises:
            BaseException: the error that ended the thread, or RuntimeError after close().
        """
        handle = Handle(work)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise RuntimeError("the communication thread is closed")
            self._open.add(handle)
            self._jobs.put(handle)
        return handle

    def fail(self, error: BaseException) -> None:
        """End every open and every later job with this error. A job that is stuck in the transport is left to itself."""
        with self._lock:
            self._error = self._error or error
            stuck, self._open = self._open, set()
        for handle in stuck:
            handle._settle(None, self._error)

    @property
    def error(self) -> BaseException | None:
        """What ended the thread, if anything did."""
        return self._error

    def close(self, timeout: float) -> bool:
        """Refuse new jobs, let the queued ones end, and join. Idempotent; never takes longer than ``timeout`` seconds.

        Returns:
            Whether the thread has ended. A thread that is stuck in the transport is a daemon: it delays no exit.
        """
        with self._lock:
            self._closed = True
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (handle := self._jobs.get()) is not None:
            work = handle._work
            if work is None:  # settled by fail() while it was queued
                continue
            try:
                handle._settle(work(), None)
            except BaseException as error:  # handed to the training thread, which raises it at its next verb
                handle._settle(None, error)
                self.fail(error)
            finally:
                with self._lock:
                    self._open.discard(handle)
                del handle, work
