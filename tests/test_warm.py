"""Warm interpreters, tested: they run what new ones run, start their own children, and end as new ones do."""

import signal
import subprocess
import sys
import textwrap

import pytest
from support.faults import gone
from support.warm import Warm


def ended(*arguments, spares=0, **options):
    with Warm([sys.executable, "-B", *arguments], spares=spares, stdout=subprocess.PIPE, text=True, **options) as process:
        output, _ = process.communicate(timeout=240)
    return process.returncode, output.splitlines()


@pytest.mark.parametrize(
    ("code", "exit"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('a reason')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 128 + signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os._exit(3)", 3),
    ],
)
def test_exit_codes_are_those_of_an_interpreter(code, exit):
    assert ended("-c", code, stderr=subprocess.DEVNULL) == (exit, [])


def test_an_uncaught_exception_is_shown_and_the_end_is_that_of_an_interpreter():
    code = """
        import atexit, threading, time
        class Last:
            def __del__(self):
                print("destroyed")
        kept = Last()
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
        raise ValueError("my own")
    """
    exit, lines = ended("-c", textwrap.dedent(code), stderr=subprocess.STDOUT)
    assert exit == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-4:] == ["ValueError: my own", "thread ended", "at exit", "destroyed"]


STARTS = """
    import multiprocessing, os, subprocess, sys

    def say(word):
        assert multiprocessing.parent_process() is not None
        print(word, os.getppid() == int(os.environ["PARENT"]), "torch" in sys.modules, flush=True)
        os._exit(5)

    if __name__ == "__main__":
        os.environ["PARENT"] = str(os.getpid())
        assert multiprocessing.parent_process() is None
        process = multiprocessing.get_context("spawn").Process(target=say, args=("spawned",))
        process.start()
        process.join()
        code = 'import os, sys; print("started", os.getppid(), "torch" in sys.modules, os.environ["X"]); sys.exit(6)'
        for _ in range(2):  # one more than there are spares
            child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "X": "y"}, stdout=subprocess.PIPE)
            assert child.communicate()[0].decode().split()[::3] == ["started", "y"]
            print(child.wait())
        print(process.exitcode, sys.argv, child.args[0] == sys.executable)
"""


def test_what_a_script_starts_comes_from_its_spares_and_is_its_child(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(STARTS))
    exit, lines = ended(path, "an argument", spares=2, cwd=tmp_path)
    assert exit == 0
    assert lines == ["spawned True True", "6", "6", f"5 {[str(path), 'an argument']} True"]


def test_spares_that_are_not_used_end_with_the_script():
    code = "import os, psutil; print(*[child.pid for child in psutil.Process().children()])"
    exit, (pids,) = ended("-c", code, spares=2)
    assert exit == 0
    assert len(pids.split()) == 2
    assert gone([int(pid) for pid in pids.split()])
