"""What all tests share."""

import signal
import threading

# A shell without job control starts what it puts into the background with Ctrl-C ignored, and everything that the tests
# start would inherit that: the tests of Ctrl-C would wait for ever.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
