"""Try to break toolkit: ``python -m tests.faults [--quick] [-j N] [--only WAY[:SUBJECT[:SEED]] ...]``.

What was tried is kept in build/faults/trials.jsonl, so that a second start continues. At the end faults.json and
tutorials/reliability.md have the counts.
"""

import argparse
import datetime
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import zip_longest

from helpers.surroundings import default_signals

from tests.faults import core
from tests.faults.page import write_page
from tests.faults.shim import preloaded_processes
from tests.faults.states import KINDS, QUICK_KINDS
from tests.faults.ways import WAYS, make, seeds_of


def planned(pool: ProcessPoolExecutor, only: list[str], quick: bool, limit: int | None) -> Iterator[core.Trial]:
    """Yield the trials, in turns between ways and subjects, so that an interrupted start has tried all of them.

    Those with the fewest tries at all commits are first in a turn. A subject's trials are in random order, so that its
    first ones are from all parts of a run.
    """
    plans: dict[tuple[str, str], list[int] | Future[list[int]]] = {}
    wanted = [name.split(":") for name in only]
    for way in WAYS.values():
        for subject in way.subjects():
            if quick and subject in KINDS and subject not in QUICK_KINDS:
                continue
            matches = [w for w in wanted if way.name == w[0] and subject in (w[1:2] or [subject])]
            if only and not matches:
                continue
            seeds = [int(w[2]) for w in matches if len(w) > 2]
            plans[way.name, subject] = seeds or pool.submit(seeds_of, way.name, subject, quick)
    tries: Counter[tuple[str, str]] = Counter()
    for row in core.read_rows():
        tries[row["way"], row["subject"]] += row["count"]
    series = []
    for name, subject in sorted(plans, key=tries.__getitem__):
        plan = plans[name, subject]
        seeds = plan if isinstance(plan, list) else plan.result()
        drawn = random.Random(f"{name}:{subject}").sample(seeds, len(seeds))[:limit]
        series.append([core.Trial(name, subject, seed) for seed in drawn])
    for turn in zip_longest(*series):
        yield from filter(None, turn)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the form of 15 minutes")
    parser.add_argument("-j", type=int, default=max(1, len(os.sched_getaffinity(0))), help="trials at a time")
    parser.add_argument("--only", nargs="*", default=[], metavar="WAY[:SUBJECT[:SEED]]")
    parser.add_argument("--limit", type=int, help="trials of each subject, drawn at random")
    parser.add_argument("--minutes", type=float, help="start no trial later than this")
    options = parser.parse_args()
    default_signals()
    commit, machine, started_at = core.commit(), core.machine(), time.monotonic()
    core.TRIALS.parent.mkdir(parents=True, exist_ok=True)
    done = {(t["way"], t["subject"], t["seed"]) for t in core.read_trials() if t["commit"] == commit}
    broken = made = without = reported_at = 0
    with core.TRIALS.open("a") as ledger, preloaded_processes(options.j) as pool:
        trials = [t for t in planned(pool, options.only, options.quick, options.limit) if tuple(t) not in done]
        print(f"{len(trials)} trials to make, {len(done)} made at {commit}", flush=True)
        waiting, pending = iter(trials), set()
        while True:
            is_late = options.minutes is not None and time.monotonic() - started_at > 60 * options.minutes
            while not is_late and len(pending) < options.j and (trial := next(waiting, None)) is not None:
                pending.add(pool.submit(make, trial))
            if not pending:
                break
            future = next(as_completed(pending))
            pending.remove(future)
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            line = future.result() | {"commit": commit, "machine": machine, "date": now}
            ledger.write(json.dumps(line) + "\n")
            ledger.flush()
            made += 1
            without += line["count"] == 0
            if (minute := int(time.monotonic() - started_at) // 60) > reported_at:
                reported_at = minute
                print(f"{made} of {len(trials)} trials made, {broken} failures, {minute} min", flush=True)
            if line["failure"]:
                broken += 1
                print(f"BROKEN {line['way']}:{line['subject']}:{line['seed']}: {line['failure']}", flush=True)
    rows = core.summarize([t for t in core.read_trials() if not t["commit"].endswith("-dirty")], core.read_rows())
    core.SUMMARY.write_text(json.dumps(rows, indent=1) + "\n")
    write_page(rows)
    print(f"{without} of {made} trials had no fault, because the run had ended before; they do not count")
    print(f"{time.monotonic() - started_at:.0f} s, {broken} failures; tutorials/reliability.md has the counts")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
