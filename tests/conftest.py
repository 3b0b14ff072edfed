"""What all tests share."""

import signal
import threading

import pytest

# A shell without job control starts what it puts into the background with Ctrl-C ignored, and everything that the tests
# start would inherit that: the tests of Ctrl-C would wait for ever.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def upgd(capsys):
    """Run the command in this process: exit code, what it printed, what it complained about."""
    from upgd import cli

    def run(*arguments):
        with pytest.raises(SystemExit) as exited:
            cli.main(list(arguments))
        printed = capsys.readouterr()
        return exited.value.code, printed.out, printed.err

    return run
