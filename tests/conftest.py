"""Fixtures shared by all tests."""

import os
import signal
import threading

# Without a GPU, its kernels are tested in Triton's interpreter, which must be selected before Triton is imported.
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine, any example may take long.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell without job control starts background processes with Ctrl-C ignored, nohup with SIGHUP ignored, and everything
# that the tests start would inherit that: the tests of these signals would wait forever.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def upgd(capsys):
    """Run the command in this process; return the exit code, standard output and standard error."""
    from upgd import cli

    def run(*arguments):
        with pytest.raises(SystemExit) as exited:
            cli.main(list(arguments))
        printed = capsys.readouterr()
        return exited.value.code, printed.out, printed.err

    return run


@pytest.fixture
def registered(monkeypatch):
    """Forget the methods that a test registers."""
    from upgd import plugins
    from upgd.methods import registry

    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    monkeypatch.setattr(plugins, "_ORIGINS", dict(plugins._ORIGINS))
