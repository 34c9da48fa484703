"""What a peer still knows after a crash, a full disk, or a damaged file; and loops that live and die together."""

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest

from protocols.delivery import Queued
from swarm.storage import AcceptedGroup, PeerStore, StepRecord, Store, TrainerStore
from swarm.tasks import run_loops


def accepted(number: int, producer: str = "p", body: bytes = b"body") -> AcceptedGroup:
    return AcceptedGroup(Queued(bytes([number]) * 32, producer, number, 0), body, b"rewards")


def record(step: int, *digests: int, announcement: tuple[int, bytes] | None = None) -> StepRecord:
    return StepRecord(step, f"step-{step}", bytes(32), tuple(bytes([each]) * 32 for each in digests), announcement)


async def everything(store: TrainerStore) -> tuple[dict[str, int], list[tuple[int, str, bytes]], list[bytes]]:
    return await store.counts(), await store.steps(10), await store.chain()


# ---------------------------------------------------------------------- all or nothing


async def test_a_step_is_one_transaction(tmp_path: Path) -> None:
    store = TrainerStore(tmp_path / "t.sqlite")
    await store.add_groups([accepted(number) for number in range(3)])
    await store.commit_step(record(1, 0, 1, announcement=(1, b"v1")))
    assert await everything(store) == ({"trained": 2, "queued": 1}, [(1, "step-1", bytes(32))], [b"v1"])
    assert await store.consumed(0, 1) == [(bytes([n]) * 32, "p", 0, 0) for n in (0, 1)]
    store.close()


@pytest.mark.parametrize("at", ["groups", "steps", "chain"])
async def test_a_step_that_stops_half_way_has_not_happened(tmp_path: Path, at: str) -> None:
    # Goal: wherever a commit stops, a restart finds all of it or none. Method: fail at each of its three statements.
    path = tmp_path / "t.sqlite"
    store = TrainerStore(path)
    await store.add_groups([accepted(number) for number in range(3)])
    await store.commit_step(record(1, 0, announcement=(1, b"v1")))
    before = await everything(store)
    bad = {
        "groups": record(2, 1, 0),  # 0 is trained already
        "steps": record(1, 1, announcement=(2, b"v2")),
        "chain": record(2, 1, announcement=(1, b"another v1")),
    }[at]
    with pytest.raises(sqlite3.IntegrityError):
        await store.commit_step(bad)
    assert await everything(store) == before
    store.close()
    again = TrainerStore(path)
    assert await everything(again) == before
    await again.commit_step(record(2, 1, 2, announcement=(2, b"v2")))
    assert (await everything(again))[2] == [b"v1", b"v2"]
    again.close()


async def test_work_that_raises_leaves_nothing(tmp_path: Path) -> None:
    store = PeerStore(tmp_path / "p.sqlite")

    def work(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO meta VALUES ('a', x'00')")
        raise LookupError("killed between two statements")

    with pytest.raises(LookupError):
        await store.run(work)
    assert await store.meta("a") is None
    await store.set_meta("a", b"1")
    assert await store.meta("a") == b"1"
    store.close()


async def test_a_group_comes_in_once_and_a_batch_of_groups_is_whole(tmp_path: Path) -> None:
    store = TrainerStore(tmp_path / "t.sqlite")
    await store.add_groups([accepted(1)])
    with pytest.raises(sqlite3.IntegrityError):
        await store.add_groups([accepted(2), accepted(1)])
    assert [group.counter for group in await store.groups("queued")] == [1]
    assert await store.next_counters() == {"p": 2}
    store.close()


async def test_ending_no_groups_at_all_is_no_error(tmp_path: Path) -> None:
    store = TrainerStore(tmp_path / "t.sqlite")
    await store.set_state([], "unused", 3)
    await store.commit_step(record(1))
    assert (await everything(store))[0] == {}
    store.close()


async def test_when_a_group_arrived_is_known_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    groups = [Queued(bytes([number]) * 32, "p", number, 3, arrived) for number, arrived in ((1, 4), (2, None), (0, 5))]
    store = TrainerStore(path)
    await store.add_groups([AcceptedGroup(each, b"body", b"rewards") for each in groups])
    store.close()
    again = TrainerStore(path)
    assert await again.groups("queued") == groups, "in order of arrival"
    again.close()


# ---------------------------------------------------------------------- older schemas

SCHEMA_1 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE chain (version INTEGER PRIMARY KEY, envelope BLOB NOT NULL);
CREATE TABLE evidence (trainer TEXT NOT NULL, version INTEGER NOT NULL, first BLOB NOT NULL,
    second BLOB NOT NULL, PRIMARY KEY (trainer, version));
CREATE TABLE outbox (counter INTEGER PRIMARY KEY, body BLOB NOT NULL);
"""
TRAINER_SCHEMA_1 = """
CREATE TABLE groups (digest BLOB PRIMARY KEY, producer TEXT NOT NULL, counter INTEGER NOT NULL,
    oldest INTEGER NOT NULL, state TEXT NOT NULL, step INTEGER, body BLOB, rewards BLOB,
    UNIQUE (producer, counter));
CREATE INDEX groups_by_state ON groups (state, step);
CREATE TABLE steps (step INTEGER PRIMARY KEY, checkpoint TEXT NOT NULL, digest BLOB NOT NULL);
INSERT INTO groups VALUES (x'01', 'p', 1, 0, 'trained', 0, NULL, NULL);
INSERT INTO groups VALUES (x'02', 'p', 2, 1, 'queued', NULL, x'aa', x'bb');
INSERT INTO steps VALUES (1, 'step-1', x'00');
INSERT INTO chain VALUES (1, x'11');
"""


def write_old(path: Path, *scripts: str) -> None:
    db = sqlite3.connect(path)
    for script in scripts:
        db.executescript(script)
    db.close()


def schema_of(path: Path) -> tuple[int, list[str]]:
    """Its number, and the columns of `groups`."""
    db = sqlite3.connect(path)
    number = db.execute("PRAGMA user_version").fetchone()[0]
    columns = [column[1] for column in db.execute("PRAGMA table_info(groups)")]
    db.close()
    return number, columns


@pytest.mark.parametrize("stopped_after", ["", "ALTER TABLE groups ADD COLUMN arrived INTEGER;"])
async def test_a_trainers_home_of_schema_1_goes_on(tmp_path: Path, stopped_after: str) -> None:
    # Goal: what an older version stored is still there, and the new column is used. Method: also a migration that
    # was killed between its two statements.
    path = tmp_path / "t.sqlite"
    write_old(path, SCHEMA_1, TRAINER_SCHEMA_1, "PRAGMA user_version=1;", stopped_after)
    for _ in range(2):  # the second start finds it migrated
        store = TrainerStore(path)
        assert await store.groups("queued") == [Queued(b"\x02", "p", 2, 1, None)], "unknown is not 0"
        store.close()
    fresh = TrainerStore(tmp_path / "new.sqlite")
    fresh.close()
    assert schema_of(path)[0] == schema_of(tmp_path / "new.sqlite")[0] == 2
    assert set(schema_of(path)[1]) == set(schema_of(tmp_path / "new.sqlite")[1])
    store = TrainerStore(path)
    assert await store.bodies([b"\x02"]) == [(b"\xaa", b"\xbb")]
    await store.add_groups([AcceptedGroup(Queued(b"\x03", "p", 3, 1, 1), b"body", b"rewards")])
    await store.commit_step(StepRecord(2, "step-2", bytes(32), (b"\x02", b"\x03"), (2, b"v2")))
    assert await store.groups("trained") == [
        Queued(b"\x01", "p", 1, 0),
        Queued(b"\x02", "p", 2, 1),
        Queued(b"\x03", "p", 3, 1, 1),
    ]
    assert await store.consumed(0, 2) == [(b"\x01", "p", 0, 0), (b"\x02", "p", 1, 1), (b"\x03", "p", 1, 1)]
    assert await store.chain() == [b"\x11", b"v2"]
    store.close()


async def test_a_producers_home_of_schema_1_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    write_old(path, SCHEMA_1, "INSERT INTO outbox VALUES (7, x'07');", "PRAGMA user_version=1;")
    store = PeerStore(path)
    assert await store.outbox() == [(7, b"\x07")]
    store.close()
    assert schema_of(path)[0] == 2


# ---------------------------------------------------------------------- full disks and damaged files


async def test_b35_a_full_disk_is_an_os_error_that_says_so_and_passes(tmp_path: Path) -> None:
    store = TrainerStore(tmp_path / "t.sqlite")
    await store.add_groups([accepted(1)])

    def limit(pages: int):  # type: ignore[no-untyped-def]
        return lambda db: db.execute(f"PRAGMA max_page_count={pages}").fetchone()

    (pages,) = await store.run(lambda db: db.execute("PRAGMA page_count").fetchone())
    store._thread.submit(lambda: limit(pages + 1)(store._db)).result()
    big = [accepted(number, body=bytes(50_000)) for number in range(2, 5)]
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            await store.add_groups(big)
    assert [group.counter for group in await store.groups("queued")] == [1]
    store._thread.submit(lambda: limit(1_000_000)(store._db)).result()
    await store.add_groups(big)
    assert [group.counter for group in await store.groups("queued")] == [1, 2, 3, 4]
    store.close()


@pytest.mark.parametrize(
    "content", [b"not a database at all, but longer than a header" * 50, b"SQLite format 3\0" * 300]
)
def test_a_file_that_is_no_database_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be used") as error:
        PeerStore(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


async def test_a_database_that_is_damaged_inside_is_an_os_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    store = PeerStore(path)
    await store.extend_chain([(version, bytes(3000)) for version in range(50)])
    store.close()
    assert os.listdir(tmp_path) == ["p.sqlite"], "closed means closed: the log is in the file"
    whole = bytearray(path.read_bytes())
    for at in range(4096, len(whole), 4096):  # every page but the first, which holds the schema
        whole[at : at + 100] = b"\xff" * 100
    path.write_bytes(whole)
    with pytest.raises((ValueError, OSError), match="malformed") as error:
        await PeerStore(path).chain()
    assert str(path) in str(error.value)


def test_a_file_of_another_schema_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.execute("CREATE TABLE theirs (a)")
    db.close()
    with pytest.raises(ValueError, match="another version of echo-swarm"):
        PeerStore(path)
    db = sqlite3.connect(path)
    assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    assert db.execute("PRAGMA user_version").fetchone() == (99,)
    db.close()


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        PeerStore(tmp_path / "nowhere" / "p.sqlite")


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "p.sqlite")
    store.close()
    store.close()


# ---------------------------------------------------------------------- chain, evidence, outbox


async def test_evidence_takes_the_disputed_head_out_of_the_chain_and_nothing_else(tmp_path: Path) -> None:
    store = PeerStore(tmp_path / "p.sqlite")
    await store.extend_chain([(version, b"v%d" % version) for version in range(3)])
    await store.add_evidence("t", 1, b"a", b"b")
    assert await store.chain() == [b"v0", b"v1", b"v2"]
    await store.add_evidence("t", 2, b"c", b"d")
    assert await store.chain() == [b"v0", b"v1"]
    await store.add_evidence("t", 2, b"other", b"proof")
    assert await store.evidence() == [("t", 1, b"a", b"b"), ("t", 2, b"c", b"d")]
    store.close()


async def test_the_outbox_outlives_its_process_and_counters_are_never_used_again(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    store = PeerStore(path)
    await store.add_to_outbox([(7, b"seven"), (8, b"eight")], 9)
    store.close()
    again = PeerStore(path)
    assert await again.outbox() == [(7, b"seven"), (8, b"eight")]
    assert await again.meta("next_counter") == (9).to_bytes(8, "big")
    assert await again.outbox_bodies([8, 7]) == [b"eight", b"seven"]
    await again.remove_from_outbox([7])
    assert await again.outbox() == [(8, b"eight")]
    again.close()


# ---------------------------------------------------------------------- loops


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_failing_loop_comes_out_itself_and_ends_the_others() -> None:
    ended: list[str] = []

    async def other() -> None:
        try:
            await forever()
        finally:
            ended.append("other")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("the reason")

    with pytest.raises(LookupError, match="the reason") as error:
        await run_loops({"other": other, "fails": fails}, asyncio.Event())
    assert ended == ["other"]
    assert any(entry.name == "fails" for entry in error.traceback), "with its traceback"


async def test_the_done_event_ends_all_loops_without_an_error() -> None:
    done, ended = asyncio.Event(), []

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def finishes() -> None:
        done.set()

    await run_loops({"slow": slow_to_end, "finishes": finishes}, done)
    assert ended == [True]


async def test_an_error_in_a_groups_group_comes_out_itself() -> None:
    async def nested() -> None:
        async def fails() -> None:
            raise LookupError("deep")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forever())
            tasks.create_task(fails())

    with pytest.raises(LookupError, match="deep"):
        await run_loops({"nested": nested}, asyncio.Event())


async def test_an_error_counts_more_than_the_end_in_the_same_instant() -> None:
    done = asyncio.Event()

    async def fails() -> None:
        done.set()
        raise LookupError("the reason")

    with pytest.raises(LookupError):
        await run_loops({"fails": fails}, done)


async def test_cancelling_from_outside_is_a_cancellation() -> None:
    ended: list[bool] = []

    async def loop() -> None:
        try:
            await forever()
        finally:
            ended.append(True)

    task = asyncio.create_task(run_loops({"loop": loop}, asyncio.Event()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    assert task.cancelled()
