"""Release one update through the filter of NVIDIA FLARE, and kill the process at a flush of a file to disk.

python crash_release.py ACCOUNT TASK CRASH OUT: CRASH is the number of the flush (0 for none), negative to kill after
it. What left the site is appended to OUT, as the transport would.
"""

import json
import os
import pathlib
import signal
import sys
from types import SimpleNamespace

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext

from wsi_fl.hospitals.flare.ledger_filter import LedgerFilter

_fsync = os.fsync


def make_context(component, job, task, executor=None, result_filter=True, persistor=None):
    """Return a client's context of a task, as FLARE fills it."""
    engine = SimpleNamespace(
        get_all_components=lambda: {"ledger": component},
        get_component=lambda _: persistor,
        fire_event=lambda *_: None,
        handlers=[component, executor],
    )
    scope = SimpleNamespace(task_result_filters={FilterKey.IN: [], FilterKey.OUT: [component] if result_filter else []})
    context = FLContext()
    for key, value in (
        (FLContextKey.TASK_ID, task),
        (FLContextKey.RUNNER, SimpleNamespace(find_executor=lambda _: executor)),
        (FLContextKey.SCOPE_OBJECT, scope),
        (FLContextKey.APP_ROOT, "app"),
    ):
        context.set_prop(key, value, private=True, sticky=False)
    context.get_engine = lambda: engine
    context.get_job_id = lambda default=None: job
    return context


def call_filter(ledger_filter, chain, message, context):
    """Return what a filter makes of a message in one of FLARE's chains."""
    ledger_filter.set_prop(FilterContextKey.CHAIN_TYPE, chain)
    return ledger_filter.process(message, context)


def pass_filter(account, base, result, *, job="job-a", task="t1", kind=DataKind.WEIGHTS, meta=None, component=None):
    """Return what leaves of a result, and the filter, which is called for the task and its result as FLARE does."""
    ledger_filter = component or LedgerFilter(str(account))
    context = make_context(ledger_filter, job, task)
    for chain, dxo in (
        (FilterChainType.TASK_DATA_CHAIN, DXO(DataKind.WEIGHTS, base)),
        (FilterChainType.TASK_RESULT_CHAIN, DXO(kind, result, meta or {})),
    ):
        answer = call_filter(ledger_filter, chain, dxo.to_shareable(), context)
    return from_shareable(answer), ledger_filter


def main(account, task, crash, out):
    left = int(crash)
    flushes = 0

    def flush_or_die(descriptor):
        nonlocal flushes
        flushes += 1
        if flushes == left:
            os.kill(os.getpid(), signal.SIGKILL)
        _fsync(descriptor)
        if flushes == -left:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = flush_or_die
    base = {"w": np.zeros(4, np.float32)}
    answer, _ = pass_filter(account, base, {"w": base["w"] + 1}, task=task)
    with pathlib.Path(out).open("a") as file:
        file.write(json.dumps({"task": task, "values": answer.data["w"].tolist(), "flushes": flushes}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
