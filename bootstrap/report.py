"""The report of a run, from the files that its processes left (DESIGN section 12).

    metrics.jsonl of every peer + the trainer's ledger --report_run, build_report--> one JSON object

Nothing is taken from what the simulation thinks it did. What nobody reported is null, never 0. Counts are
of groups, as the trainer counted them at its door and when it consumed them:

    received = accepted + stale + duplicate + invalid                       (at the door)
    accepted + resumed = trained + no_signal + stale_in_queue + disowned + unused + queued + lost

`resumed` groups waited on disk when the trainer started, `queued` ones when it stopped before the run's end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bootstrap.audit_command import audit_fields, audit_file
from bootstrap.config import RunConfig
from bootstrap.events import Event, read_events
from bootstrap.home import METRICS_FILE
from bootstrap.state import Led, led_by
from bootstrap.view import duration, number, percent, size
from protocols.ledger import Audit

FORMAT = 1
_AT_THE_DOOR = ("received", "accepted", "stale", "duplicate", "invalid")
_BECAME = ("trained", "no_signal", "stale_in_queue", "disowned", "unused", "queued")
_SWITCH = ("t", "mode", "term", "groups_per_s", "needed_per_s", "batch_groups", "step_s", "refresh_s")
_COUNTED = (*_AT_THE_DOOR, "resumed", *_BECAME)


@dataclass(frozen=True, slots=True)
class About:
    """What the metrics do not say: what was asked for, and how long it took from start to end."""

    run: str
    mode: str
    model: str
    environment: str
    seed: int
    max_lag: int
    steps_wanted: int
    wall_s: float
    warnings: tuple[str, ...] = ()


def about_run(config: RunConfig, run: str, wall_s: float, warnings: tuple[str, ...] = ()) -> About:
    """What the run's own configuration says."""
    return About(
        run=run,
        mode=config.coordination.mode,
        model=config.model.name,
        environment=config.environment.name,
        seed=config.seed,
        max_lag=config.max_lag,
        steps_wanted=config.max_steps,
        wall_s=wall_s,
        warnings=warnings,
    )


def report_run(about: About, homes: Sequence[Path], since_s: float = 0.0) -> dict[str, Any]:
    """The report of the peers that kept their files in these folders; events before `since_s` are left out."""
    peers = [[event for event in read_events(home / METRICS_FILE) if event["t"] >= since_s] for home in homes]
    ledgers = [event["ledger"] for events in peers for event in events if "ledger" in event]
    return build_report(about, peers, audit_file(Path(ledgers[-1]), about.run) if ledgers else None)


def build_report(about: About, peers: Sequence[Sequence[Event]], audit: Audit | None) -> dict[str, Any]:
    """The report. `peers` holds the events of each process that wrote any; `audit` is None without a ledger."""
    roles = [events[0]["role"] for events in peers if events]
    trainer = [event for events in peers for event in events if event["role"] == "trainer"]
    inference = [events for events in peers if events and events[0]["role"] == "inference"]
    steps = [event for event in trainer if event["event"] == "step"]
    final = _last(trainer, "final")
    rewards = [event.get("reward") for event in steps]
    return {
        "format": FORMAT,
        "run": about.run,
        "mode": about.mode,
        "model": about.model,
        "environment": about.environment,
        "seed": about.seed,
        "max_lag": about.max_lag,
        "steps": final.get("steps", steps[-1]["step"] if steps else None),
        "steps_wanted": about.steps_wanted,
        "wall_s": round(about.wall_s, 3),
        "time": {key: final.get(key) for key in ("wall_s", "train_s", "wait_s", "check_s", "publish_s")},
        "peers": {role: roles.count(role) for role in ("bootstrap", "trainer", "inference")},
        "reward": {"per_step": rewards, "first": _tenth(rewards, first=True), "last": _tenth(rewards, first=False)},
        "eval": _evaluation(trainer),
        "rollouts": _rollouts(final, inference),
        "lag": {
            "max_consumed": audit.max_lag if audit else None,
            "histogram": {str(lag): count for lag, count in sorted(audit.histogram.items())} if audit else None,
            "door_max": _max([event.get("lag_door_max") for event in steps]),
            "queue_max": _max([event.get("lag_queue_max") for event in steps]),
        },
        "coordinator": _coordinator([event for events in peers for event in events], final.get("t", math.inf)),
        "agreement": _agreement(trainer),
        "rounds": _rounds([event for event in trainer if event["event"] == "round"]),
        "idle": {"trainer": _share(final.get("wait_s"), final.get("wall_s")), "inference": _idle(inference)},
        "bytes": {key: (final.get("bytes") or {}).get(key) for key in ("adapters", "rollouts", "gossip")},
        "audit": audit_fields(audit) if audit else {"ok": None, "problems": ["no ledger was written"]},
        "warnings": [
            *about.warnings,
            *(event["text"] for events in peers for event in events if event["event"] == "warning"),
        ],
    }


def _rollouts(final: Mapping[str, Any], inference: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """Groups, by what became of them, on both sides of the wire."""
    counts = final.get("counts")
    # The trainer leaves out what it never counted, so without a count it is 0; without counts nothing is known.
    rollouts: dict[str, Any] = {name: None if counts is None else counts.get(name, 0) for name in _COUNTED}
    accounted = sum(rollouts[name] or 0 for name in _BECAME)
    rollouts["lost"] = None if counts is None else rollouts["accepted"] + rollouts["resumed"] - accounted
    finals = [_last(events, "final") for events in inference]
    rollouts["generated"] = _sum([_generated(events) for events in inference])
    rollouts["outbox"] = _sum([end.get("outbox") for end in finals])
    receipts = [end.get("receipts") for end in finals]
    known = [receipt for receipt in receipts if receipt is not None]
    complete = bool(known) and len(known) == len(receipts)
    keys = ("accepted", "stale", "duplicate", "invalid")
    rollouts["receipts"] = {key: sum(one.get(key, 0) for one in known) if complete else None for key in keys}
    rollouts["without_receipt"] = None
    if complete and rollouts["generated"] is not None:
        rollouts["without_receipt"] = rollouts["generated"] - sum(rollouts["receipts"].values())
    return rollouts


def _generated(events: Sequence[Event]) -> int | None:
    """Groups that one peer made: as it said at its end, or the last time it said so before it died."""
    final = _last(events, "final").get("generated")
    return final if final is not None else _last(events, "generated").get("groups")


def _coordinator(events: Sequence[Event], ended_s: float) -> dict[str, Any]:
    """Elections as all peers saw them, and the switches of mode; null when no peer said anything of either.

    A trainer that led and goes at the run's end leaves a vacancy that somebody fills: that is no failover.
    """
    events = [event for event in events if event["t"] <= ended_s]
    switches = sorted((event for event in events if event["event"] == "mode"), key=lambda event: event["t"])
    told = [(led, event["t"]) for event in events if (led := led_by(event)) is not None]
    if not told and not switches:
        return {"terms": None, "failovers": None, "switches": None}
    first_s: dict[Led, float] = {}  # many peers tell the same
    for led, t in told:
        if led.coordinator is not None:
            first_s[led] = min(t, first_s.get(led, t))
    leaders = sorted(first_s, key=lambda led: (led.term, first_s[led]))
    return {
        "terms": len({led.term for led in leaders}),
        "failovers": sum(before.coordinator != after.coordinator for before, after in pairwise(leaders)),
        "switches": [{key: event.get(key) for key in _SWITCH} for event in switches],
    }


def _rounds(rounds: Sequence[Event]) -> dict[str, Any]:
    """Null where no round was complete: asynchronous mode has none."""
    if not rounds:
        return {"count": None, "moved": None, "stalled": None}
    return {
        "count": len(rounds),
        "moved": sum(event["moved"] for event in rounds),
        "stalled": sum(len(event["stalled"]) for event in rounds),
    }


def _agreement(trainer: Sequence[Event]) -> dict[str, Any]:
    """By engine, the trainer's own log-probabilities against the producers'; groups that it could not judge left out.

    Null where it looked at nothing."""
    looks = [look for event in trainer if event["event"] == "agreement" for look in event["groups"] if look["tokens"]]
    engines: dict[str, Any] = {}
    for name in sorted({look["engine"] for look in looks}):
        of_engine = [look for look in looks if look["engine"] == name]
        tokens = sum(look["tokens"] for look in of_engine)
        mean = sum(look["mean"] * look["tokens"] for look in of_engine) / tokens
        engines[name] = {"tokens": tokens, "mean": mean, "max": max(look["max"] for look in of_engine)}
    return {"engines": engines or None}


def _idle(inference: Sequence[Sequence[Event]]) -> float | None:
    """Mean share of their time in which peers did not generate, of those that said so at their end."""
    finals = [_last(events, "final") for events in inference]
    shares = [_share(final.get("idle_s"), final.get("wall_s")) for final in finals]
    known = [share for share in shares if share is not None]
    return round(sum(known) / len(known), 4) if known else None


def _share(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 4) if part is not None and whole else None


def _evaluation(trainer: Sequence[Event]) -> dict[str, Any]:
    measured = [event for event in trainer if event["event"] == "eval"]
    before = next((event for event in measured if event.get("step") == 0), {})
    after = next((event for event in reversed(measured) if event.get("step")), {})
    return {
        "before": before.get("greedy"),
        "after": after.get("greedy"),
        "problems": (before or after).get("problems"),
    }


def _last(events: Sequence[Event], kind: str) -> Mapping[str, Any]:
    """The last event of a kind; empty when there is none."""
    return next((event for event in reversed(events) if event["event"] == kind), {})


def _sum(values: Sequence[int | None]) -> int | None:
    """None if any part is not known, or there is no part."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _max(values: Sequence[int | None]) -> int | None:
    """Of those that are known."""
    return max((value for value in values if value is not None), default=None)


def _tenth(rewards: Sequence[float | None], first: bool) -> float | None:
    """Mean reward of the first or last tenth of the steps (at least one), of those that had one."""
    count = max(1, len(rewards) // 10)
    known = [reward for reward in (rewards[:count] if first else rewards[-count:]) if reward is not None]
    return sum(known) / len(known) if known else None


def summary_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for people, in a few lines."""
    reward, measured, rollouts, lag, audit = (report[key] for key in ("reward", "eval", "rollouts", "lag", "audit"))
    idle = report["idle"]
    verdict = {True: "ok", None: "not possible"}.get(audit["ok"], "FAILED")
    ends = ("no_signal", "stale", "stale_in_queue", "disowned", "duplicate", "invalid", "unused", "lost")
    outcomes = [f"{rollouts[key]} {key}".replace("_", " ") for key in ends if rollouts[key] or key == "lost"]
    problems = "" if measured["problems"] is None else f"   ({measured['problems']} problems, greedy)"
    traffic = [f"{key} {size(count)}" for key, count in report["bytes"].items() if count is not None]
    lines = [
        f"reward     {number(reward['first'], 3)} -> {number(reward['last'], 3)}   (first and last tenth of the steps)",
        f"held-out   {percent(measured['before'])} -> {percent(measured['after'])}{problems}",
        f"steps      {number(report['steps'], 0)} of {report['steps_wanted']} in {duration(report['wall_s'])}, "
        f"mode {report['mode']}",
        f"groups     {number(rollouts['generated'], 0)} generated, {number(rollouts['trained'], 0)} trained"
        + "".join(f", {text}" for text in outcomes),
        f"lag        at most {number(lag['max_consumed'], 0)}, the bound is {report['max_lag']}",
        f"leader     {_elections(report['coordinator'])}",
        f"idle       trainer {percent(idle['trainer'])}, inference {percent(idle['inference'])}",
        f"bytes      {', '.join(traffic) or '-'}",
        f"audit      {verdict}",
    ]
    return lines + [f"           {problem}" for problem in audit["problems"]]


def _elections(coordinator: Mapping[str, Any]) -> str:
    if coordinator["terms"] is None:
        return "-"
    changes = len(coordinator["switches"])
    counts = [_counted(coordinator["terms"], "term"), _counted(coordinator["failovers"], "failover")]
    return ", ".join([*counts, *([_counted(changes, "mode change")] if changes else [])])


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "s")
