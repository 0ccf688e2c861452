# SPDX-License-Identifier: Apache-2.0
"""For the program: standard input is JSON of what it found, standard output the text. python3 -m espalier.printed KIND"""

import _signal  # type: ignore[import-not-found]  # built in, unlike `signal`, for which files are read

if __name__ == "__main__":  # the program that waits for the text reports both
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)

import gc
import json
import site
import sys
from importlib import import_module

_MAKERS = {"page": "espalier.page.render:page_of", "inspect": "espalier.printed.inspect:report_text",
           "plan": "espalier.printed.plan:plan_text", "table": "espalier.printed.table:table_text",
           "dry_run": "espalier.printed.dry_run:dry_run_text", "bench": "espalier.printed.bench:bench_text",
           "profile": "espalier.printed.profile:profile_text", "verify": "espalier.printed.rows:verify_text",
           "device": "espalier.printed.rows:device_text", "verdicts": "espalier.kernels.report:verdicts_text",
           "tokenizer": "espalier.printed.tokenizer:tokenizer_files",
           "vocabulary": "espalier.vocabulary:vocabulary_message"}  # fmt: skip

if __name__ == "__main__":
    gc.disable()  # millions of lists, of which all stay
    if sys.argv[1] == "verdicts":  # which needs PyTorch
        site.main()
    module, function = _MAKERS[sys.argv[1]].split(":")
    make = getattr(import_module(module), function)
    made = make(**json.loads(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(made if isinstance(made, bytes) else made.encode())
