# SPDX-License-Identifier: Apache-2.0
"""The engine process and the process that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """Kill this process once its parent is gone; does nothing in a process of its own.

    A parent that ends in order has stopped its engine before. One that was killed has not, and
    its engine would keep the accelerator's memory (vllm issue 55510). Workers of an engine watch
    the engine themselves.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
