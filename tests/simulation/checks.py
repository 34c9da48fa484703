"""The invariants of DESIGN section 11, asked of a seed. An AssertionError names the broken one.

at every moment          S5, S6 at the peer itself; one leader a term, no orders of one whose lease has run out
when the storm is over   L2 within a beat and a transfer, L1 within two lease times
after the blow           L1 again
after the cull           L3: steps rise
at the end               S1 S2 S3 S4, everybody at the head, the ledger's audit
"""

from protocols.ledger import audit
from protocols.presence import BEAT_S
from tests.simulation.candidate import Candidate
from tests.simulation.node import Member
from tests.simulation.producer import FETCH_RETRY_S, Producer
from tests.simulation.trainer import Trainer
from tests.simulation.world import CALL_S, RUN, World


def l2_s(world: World) -> float:
    """One heartbeat and the transfer: a call that was lost in the storm's last moment, a beat, chain, adapter."""
    return CALL_S + FETCH_RETRY_S + 1.1 * BEAT_S + 12 * world.plan.delay_s


def check_heads(world: World, trainer: Trainer, version: int) -> None:
    """L2: everybody alive knows the version that was the head when the calm began, and holds it or a newer one."""
    if world.plan.forks or not trainer.up:
        return
    for node in world.all:
        if not isinstance(node, Member) or not node.up or node.stopped or not node.honest:
            continue
        assert node.chain.version >= version, f"L2: {node.index} knows v{node.chain.version}, the head was v{version}"
        if isinstance(node, Producer):
            held = node.held.version if node.held is not None else -1
            assert held >= version, f"L2: {node.index} holds v{held}, the head was v{version}"


def check_growth(world: World, risen: int) -> None:
    """L3: training goes on. Where rounds are called, each liar costs a stall of 18 s, and in a small swarm a slow peer
    may have all the work."""
    plan = world.plan
    slow = plan.num_peers < 20 or (plan.num_liars and plan.mode != "async")
    assert risen >= (1 if slow else 3) or plan.forks, f"L3: {risen} steps since most peers went"


def check_leader(world: World) -> Candidate:
    """L1: one candidate leads, and everybody alive obeys it."""
    leaders = [node for node in world.all if isinstance(node, Candidate) and node.leads and not node.stopped]
    assert len(leaders) == 1, f"L1: {len(leaders)} leaders"
    leader = leaders[0]
    for node in world.all:
        if not isinstance(node, Member) or not node.up or node.stopped or not node.honest:
            continue
        orders = node.orders
        assert orders.leads(leader.peer_id, leader.led_term), (
            f"L1: {node.index} obeys term {orders.term}, not {leader.led_term}"
        )
        assert not orders.alone(node.steady_s), f"L1: {node.index} has not heard of its coordinator"
    return leader


def check_end(world: World, trainer: Trainer, producers: list[Producer]) -> None:
    """What must be true when everything has settled."""
    max_lag, rows = world.plan.max_lag, trainer.rows
    oldest = {digest: version for producer in producers for digest, version in producer.true_oldest.items()}
    for digest, step in trainer.trained:
        lag = step - oldest[digest]
        assert 0 <= lag <= max_lag, f"S1: lag {lag} over {max_lag}"
    assert len({digest for digest, _ in trainer.trained}) == len(trainer.trained), "S2: a group was trained twice"
    for producer in producers:
        check_groups(trainer, producer)
    assert {row.state for row in rows.values()} <= {"queued", "trained", "no_signal", "stale"}, "S3: state"
    check_chains(world, trainer)
    report = audit(trainer.ledger(), RUN)
    assert report.ok, f"audit: {report.problems}"
    assert report.groups == sum(row.state == "trained" for row in rows.values()) or not report.ended, "audit: groups"


def check_groups(trainer: Trainer, producer: Producer) -> None:
    """S3: what a receipt accepted is on the trainer's disk, and what a producer deleted is accounted for."""
    for digest, outcomes in producer.receipts.items():
        words = {outcome for outcome, _ in outcomes}
        known, reused = digest in trainer.rows, ("duplicate", "counter used") in outcomes
        assert known or not words & {"accepted"}, "S3: an accepted group disappeared"
        assert known or digest not in producer.finished or words & {"stale", "invalid"} or reused, "S3: lost"
        if known and producer.honest:
            assert "invalid" not in words, "an honest group was accepted and refused"
            assert not reused or producer.wiped, "an honest counter was called used"


def check_chains(world: World, trainer: Trainer) -> None:
    """S4: prefixes of one another, or somebody holds the proof of equivocation. L2: without one, all at the head."""
    members = [node for node in world.all if isinstance(node, Member)]
    longest = max((node.chain for node in members), key=lambda chain: len(chain.entries))
    whole = [entry.raw for entry in longest.entries]
    prefixes = all([entry.raw for entry in node.chain.entries] == whole[: len(node.chain.entries)] for node in members)
    if not prefixes:
        assert any(node.chain.equivocations for node in members), "S4: chains differ and nobody knows"
    elif not world.plan.forks:
        for node in members:
            at_head = node.chain.version == trainer.chain.version
            assert at_head or not node.up or not trainer.up, f"L2: {node.index} is not at the head"
    accused = any(node.chain.equivocations for node in members)
    assert world.plan.forks or not accused, "S4: an honest trainer was accused"
