"""The processes behind the ranks: whether a peer's still runs, and ending one that is silent for good.

A stopped process (SIGSTOP, a debugger, a hung driver) stays for ever, and so does a launcher that waits for it. Its peers on
the same host end it. They may do that only to exactly the process that it has said it is.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Identity(NamedTuple):
    """A process, told apart from any other: process ids are used again, and mean something within one namespace only."""

    boot: str
    namespace: str
    pid: int
    born: int  # clock ticks from boot to the start of the process

    @classmethod
    def of_this_process(cls) -> Identity | None:
        """None where the system does not tell (no /proc, or that of another namespace)."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            return None
        status = _status(os.getpid())
        if status is None or os.readlink("/proc/self") != str(os.getpid()):
            return None
        return cls(boot, namespace, os.getpid(), status.born)


class _Status(NamedTuple):
    state: str
    born: int


def _status(pid: int) -> _Status | None:
    """State letter and start time of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold blanks and brackets
    return _Status(fields[0], int(fields[19]))


class Fence:
    """What this process may know of, and do to, the processes of its peers: those on its own host only."""

    def __init__(self) -> None:
        self.me = Identity.of_this_process()

    def is_gone(self, process: Identity) -> bool:
        """Whether a process of this host has ended. False for one of another host: nothing is known about it."""
        if not self._is_near(process):
            return False
        status = _status(process.pid)
        return status is None or status.born != process.born or status.state in "ZX"

    def is_stopped(self, process: Identity) -> bool:
        """Whether a process of this host is stopped, by a signal or by a debugger."""
        status = _status(process.pid) if self._is_near(process) else None
        return status is not None and status.born == process.born and status.state in "Tt"

    def kill(self, process: Identity) -> bool:
        """SIGKILL exactly this process. Returns whether it was there to be killed."""
        if not self._is_near(process):
            return False
        with suppress(OSError):  # it ended by itself, or belongs to another user
            handle = os.pidfd_open(process.pid)
            try:  # whatever the handle holds now cannot be replaced by another process any more
                status = _status(process.pid)
                if status is not None and status.born == process.born and status.state not in "ZX":
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    return True
            finally:
                os.close(handle)
        return False

    def _is_near(self, process: Identity) -> bool:
        me = self.me
        return me is not None and (me.boot, me.namespace) == (process.boot, process.namespace) and me.pid != process.pid
