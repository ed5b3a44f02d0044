"""Interpreters that start with their imports done: a user's script and the ranks that it starts, without the eight seconds
of computing in which each of them would import torch and Lightning.

    with Warm([sys.executable, "train.py"], spares=1, stdout=PIPE) as process:  # a subprocess.Popen

Only the `exec` is left out. The script is forked from the process that the warm workers come from, which has never run
anything but imports, and so are `spares` children of it, before its first line. What it then starts with `sys.executable`,
by `subprocess` or by the start method "spawn", is run by the next of these spares: its own child, with a number, a parent,
signals, standard streams and an exit code of its own, and it is finalised as an interpreter is. Once no spare is left, a
new interpreter is started as always.
"""

import ctypes
import fcntl
import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
from multiprocessing import process as processes
from multiprocessing import util
from multiprocessing.reduction import DupFd
from pathlib import Path

from support import pool

PR_SET_PDEATHSIG = 1
HIGH = 200  # above all descriptors that a child is to find under the number which it was told


class Warm(subprocess.Popen):
    """Started by any process, which need not be the parent: the exit code comes from the server that has forked it."""

    def __init__(self, command, *, spares, **options):
        self._spares = spares
        super().__init__(command, **options)

    def _execute_child(self, args, executable, preexec, close, passed, cwd, env, *rest):
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[3:9]
        with open(os.devnull, "rb") as nothing:
            streams = (nothing.fileno() if p2cread == -1 else p2cread), own(c2pwrite, 1), own(errwrite, 2)
            self._forked = Forked(list(map(os.fspath, args)), cwd, env, streams, self._spares)
            pool.start(self._forked)
        self.pid, self._child_created = self._forked.pid, True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *_, **__):
        if self.returncode is None:
            self.returncode = self._forked.exitcode
        return self.returncode

    def _wait(self, timeout):
        self._forked.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def own(number, default):
    return default if number == -1 else number


class Forked(pool.processes.Process):
    def __init__(self, argv, cwd, env, streams, spares):
        super().__init__()
        self.job, self.streams, self.spares = (argv, cwd, dict(os.environ if env is None else env)), streams, spares

    def __getstate__(self):  # called while it starts, which is when a file can be handed on
        return {**self.__dict__, "streams": [DupFd(number) for number in self.streams]}

    def run(self):
        spares = [Spare() for _ in range(self.spares)]
        start_from(spares)
        interpret(*self.job, dict(enumerate(stream.detach() for stream in self.streams)))


class Spare:
    """A child that waits to be told what to run. It ends with its parent, unless it has been told."""

    def __init__(self):
        mine, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            mine.close()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            self._wait_for_job(theirs)
        theirs.close()
        self.channel = mine

    def run(self, argv, cwd, env, descriptors, new_session):
        """`descriptors`: number in the child -> number here."""
        with tempfile.TemporaryFile() as job, self.channel:
            pickle.dump(
                (argv, cwd or os.getcwd(), dict(os.environ if env is None else env), list(descriptors), new_session), job
            )
            job.flush()
            socket.send_fds(self.channel, [b"!"], [job.fileno(), *descriptors.values()])
            self.channel.recv(1)  # it has them
        return self.pid

    def _wait_for_job(self, channel):
        message, numbers, _, _ = socket.recv_fds(channel, 1, 64)
        if not message:  # the parent has ended
            os._exit(0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
        with os.fdopen(numbers.pop(0), "rb") as file:
            file.seek(0)
            argv, cwd, env, targets, new_session = pickle.load(file)
        if new_session:
            os.setsid()
        channel.send(message)
        channel.close()
        interpret(argv, cwd, env, dict(zip(targets, numbers, strict=True)))


def start_from(spares):
    """Have this process start what it starts with `sys.executable` from these, as long as there are any."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    class Popen(subprocess.Popen):
        def _execute_child(self, args, executable, preexec, close, passed, cwd, env, *rest):
            if not (spares and os.fspath(args[0]) == sys.executable and preexec is None):
                return super()._execute_child(args, executable, preexec, close, passed, cwd, env, *rest)
            pipes = rest[3:9]
            descriptors = {0: own(pipes[0], 0), 1: own(pipes[3], 1), 2: own(pipes[5], 2), **{fd: fd for fd in passed}}
            self.pid = spares.pop(0).run(list(map(os.fspath, args)), cwd, env, descriptors, rest[14])
            self._child_created = True
            self._close_pipe_fds(*pipes)

    spawnv_passfds = util.spawnv_passfds

    def spawn(path, args, passed):
        if not (spares and "--multiprocessing-fork" in args):
            return spawnv_passfds(path, args, passed)
        return spares.pop(0).run(list(map(os.fsdecode, args)), None, None, {fd: fd for fd in (0, 1, 2, *passed)}, False)

    subprocess.Popen = subprocess_handler.Popen = Popen
    util.spawnv_passfds = spawn


def interpret(argv, cwd, env, descriptors):
    """Be `argv`, the command line of an interpreter, from its first line to the end of the process."""
    gc.freeze()  # what is imported is not searched for garbage at the end: a second of computing
    moved = {target: fcntl.fcntl(number, fcntl.F_DUPFD, HIGH) for target, number in descriptors.items()}
    for target, number in moved.items():
        os.dup2(number, target)
        os.close(number)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd or ".")
    main_process = next(kind for kind in processes.BaseProcess.__subclasses__() if kind.__name__ == "_MainProcess")
    processes._current_process, processes._parent_process = main_process(), None
    multiprocessing.set_start_method(None, force=True)  # the system's
    ctypes.pythonapi.Py_Exit(ran(argv[1:]))  # finalises: threads, exit functions, streams, modules


def ran(arguments):
    """Run `-c code`, `-m module` or a script as the main module; returns the exit code."""
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        del arguments[0]  # an interpreter's own option, such as -B
    what, code = arguments[0], 0
    of_script = not what.startswith("-")
    sys.argv = list(arguments) if of_script else [what, *arguments[2:]]
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [os.path.dirname(os.path.abspath(what)) if of_script else os.getcwd(), *paths]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if what == "-m":
            runpy._run_module_as_main(arguments[1])  # what an interpreter calls
        else:
            if of_script:
                main.__file__ = what
            code_of = Path(what).read_text() if of_script else arguments[1]
            exec(compile(code_of, what if of_script else "<string>", "exec"), main.__dict__)
    except SystemExit as exit:
        code = exit.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__.tb_next)  # without this frame
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return code
