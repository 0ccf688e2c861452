# SPDX-License-Identifier: Apache-2.0
"""Runs a command written in Python and maps errors to exit codes."""

import os
import traceback

from ..errors import InputError
from .console import clipped, say, write
from .signals import Stopped, stops_raise


def run_command(name, work):
    """Runs work() as `espalier NAME` and returns the exit code: 0 done, 1 failed (with a one-line message), 130
    interrupted, 128 + N ended by signal N. Wrong arguments raise SystemExit."""
    def failed(message, exit_code=1):
        if os.environ.get("ESPALIER_TRACEBACK", "") not in ("", "0"):
            write(traceback.format_exc())
        say(f"espalier {name}: {message}")
        return exit_code

    try:
        with stops_raise():
            work()
        return 0
    except SystemExit:
        raise
    except InputError as error:
        return failed(str(error))
    except OSError as error:
        return failed(str(error) if error.filename else f"cannot write the output: {error.strerror or error}")
    except MemoryError:
        return failed("out of memory")
    except KeyboardInterrupt:
        return failed("interrupted", 130)
    except Stopped as error:
        return failed(f"stopped by {error}", 128 + error.number)
    except BaseException as error:
        return failed(
            f"internal error: {type(error).__name__}: {clipped(str(error))} (ESPALIER_TRACEBACK=1 shows where)")
