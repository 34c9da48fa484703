"""SQLite on a thread of its own: what a peer must still know after `kill -9`.

    PeerStore      chain (announcements, evidence, end), manifest, outbox, next counter
    TrainerStore   the same, and groups, steps; one transaction says that a step happened:
                   the groups it consumed, its checkpoint, and the signed announcement (DESIGN section 8)

WAL with synchronous=FULL: a committed transaction survives a power cut. All calls run on one thread, in
order, so the loop never waits for the disk.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from protocols.delivery import Queued

T = TypeVar("T")

SCHEMA_VERSION = 2
READABLE_SCHEMAS = (0, 1, SCHEMA_VERSION)  # 0 is a new file; 1 did not record when a group arrived
_PEER_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS chain (version INTEGER PRIMARY KEY, envelope BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS evidence (trainer TEXT NOT NULL, version INTEGER NOT NULL, first BLOB NOT NULL,
    second BLOB NOT NULL, PRIMARY KEY (trainer, version));
CREATE TABLE IF NOT EXISTS outbox (counter INTEGER PRIMARY KEY, body BLOB NOT NULL);
"""
_TRAINER_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (digest BLOB PRIMARY KEY, producer TEXT NOT NULL, counter INTEGER NOT NULL,
    oldest INTEGER NOT NULL, state TEXT NOT NULL, step INTEGER, body BLOB, rewards BLOB,
    arrived INTEGER, UNIQUE (producer, counter));
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state, step);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, checkpoint TEXT NOT NULL, digest BLOB NOT NULL);
"""


class Store:
    """A database file and its one thread."""

    schema = _PEER_SCHEMA

    def __init__(self, path: Path) -> None:
        self.path = path
        """Raises ValueError, one line with the path, for a file that cannot be used."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite")
        self._closed = False
        try:
            self._db = self._thread.submit(self._open).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def _open(self) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self.path, isolation_level=None)
        except sqlite3.Error as error:
            raise ValueError(f"{self.path} cannot be used: {error}") from error
        try:
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found not in READABLE_SCHEMAS:
                raise ValueError(f"{self.path} was written by another version of echo-swarm (schema {found})")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.executescript(self.schema)
            self._migrate(db)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            db.close()
            raise ValueError(f"{self.path} cannot be used: {error}") from error
        except ValueError:
            db.close()
            raise
        return db

    def _migrate(self, db: sqlite3.Connection) -> None:
        """Bring tables of an older schema up to date. Wherever it is interrupted, the next start goes on with it."""

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` as one transaction: all of it is durable when this returns, or none. OSError when it fails."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._db)
            except BaseException:
                self._roll_back()
                raise
            self._db.execute("COMMIT")
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise  # ours
        except sqlite3.DatabaseError as error:  # disk full, I/O error, read-only file system, damaged file
            self._roll_back()
            raise OSError(f"{self.path}: {error}") from error
        return result

    def _roll_back(self) -> None:
        if self._db.in_transaction:  # some errors have ended it already
            self._db.execute("ROLLBACK")

    async def write(self, query: str, rows: Iterable[tuple[object, ...]]) -> None:
        """Run one statement for each row, as one transaction."""
        values = list(rows)

        def work(db: sqlite3.Connection) -> None:  # a cursor that lived on in the result would keep the file open
            db.executemany(query, values)

        await self.run(work)

    def close(self) -> None:
        """Finish what was begun and close the file. Closing again changes nothing."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._db.close).result()
            self._thread.shutdown()


class PeerStore(Store):
    """What every peer keeps."""

    async def meta(self, name: str) -> bytes | None:
        """A named value."""
        row = await self.run(lambda db: db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone())
        return bytes(row[0]) if row else None

    async def set_meta(self, name: str, value: bytes) -> None:
        """Set a named value."""
        await self.run(lambda db: _set_meta(db, name, value))

    async def chain(self) -> list[bytes]:
        """The envelopes of the chain, oldest first."""
        rows = await self.run(lambda db: db.execute("SELECT envelope FROM chain ORDER BY version").fetchall())
        return [bytes(envelope) for (envelope,) in rows]

    async def extend_chain(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Append verified announcements: (version, envelope)."""
        await self.write("INSERT OR REPLACE INTO chain VALUES (?, ?)", entries)

    async def add_evidence(self, trainer: str, version: int, first: bytes, second: bytes) -> None:
        """Keep the proof of an equivocation, and take the disputed version out of the chain."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR IGNORE INTO evidence VALUES (?, ?, ?, ?)", (trainer, version, first, second))
            db.execute("DELETE FROM chain WHERE version = (SELECT max(version) FROM chain) AND version = ?", (version,))

        await self.run(work)

    async def evidence(self) -> list[tuple[str, int, bytes, bytes]]:
        """Kept proofs: trainer, version, both envelopes."""
        rows = await self.run(lambda db: db.execute("SELECT * FROM evidence").fetchall())
        return [(str(row[0]), int(row[1]), bytes(row[2]), bytes(row[3])) for row in rows]

    async def outbox(self) -> list[tuple[int, bytes]]:
        """Groups without a receipt: (counter, encoded group), oldest first."""
        rows = await self.run(lambda db: db.execute("SELECT counter, body FROM outbox ORDER BY counter").fetchall())
        return [(int(counter), bytes(body)) for counter, body in rows]

    async def add_to_outbox(self, groups: list[tuple[int, bytes]], next_counter: int) -> None:
        """Keep new groups, and never use their counters again."""

        def work(db: sqlite3.Connection) -> None:
            db.executemany("INSERT INTO outbox VALUES (?, ?)", groups)
            _set_meta(db, "next_counter", next_counter.to_bytes(8, "big"))

        await self.run(work)

    async def outbox_bodies(self, counters: list[int]) -> list[bytes]:
        """The encoded groups of these counters, in their order."""

        def work(db: sqlite3.Connection) -> list[bytes]:
            query = "SELECT body FROM outbox WHERE counter = ?"
            return [bytes(db.execute(query, (counter,)).fetchone()[0]) for counter in counters]

        return await self.run(work)

    async def remove_from_outbox(self, counters: list[int]) -> None:
        """These groups have receipts."""
        await self.write("DELETE FROM outbox WHERE counter = ?", [(counter,) for counter in counters])


@dataclass(frozen=True, slots=True)
class AcceptedGroup:
    """A group as the trainer stores it: what it remembers, the encoded group, the rewards it computed itself."""

    queued: Queued
    body: bytes
    rewards: bytes


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, as it is committed."""

    step: int
    checkpoint: str
    digest: bytes
    consumed: tuple[bytes, ...]
    announcement: tuple[int, bytes] | None
    """(version, envelope), when this step publishes."""


class TrainerStore(PeerStore):
    """What the trainer keeps besides."""

    schema = _PEER_SCHEMA + _TRAINER_SCHEMA

    def _migrate(self, db: sqlite3.Connection) -> None:
        if all(column[1] != "arrived" for column in db.execute("PRAGMA table_info(groups)")):
            db.execute("ALTER TABLE groups ADD COLUMN arrived INTEGER")

    async def add_groups(self, groups: list[AcceptedGroup]) -> None:
        """Accepted groups, durable when this returns; only then may the receipt be signed."""
        query = (
            "INSERT INTO groups (digest, producer, counter, oldest, arrived, state, body, rewards) "
            "VALUES (?, ?, ?, ?, ?, 'queued', ?, ?)"
        )
        await self.write(query, [(*_columns(group.queued), group.body, group.rewards) for group in groups])

    async def bodies(self, digests: list[bytes]) -> list[tuple[bytes, bytes]]:
        """(encoded group, rewards) of queued groups, in the order asked for."""

        def work(db: sqlite3.Connection) -> list[tuple[bytes, bytes]]:
            query = "SELECT body, rewards FROM groups WHERE digest = ?"
            rows = [db.execute(query, (digest,)).fetchone() for digest in digests]
            return [(bytes(body), bytes(rewards)) for body, rewards in rows]

        return await self.run(work)

    async def set_state(self, digests: list[bytes], state: str, step: int) -> None:
        """Groups that end without training: `stale`, `no_signal`, `disowned`, `unused`. Their bytes are dropped."""
        await self.run(lambda db: _set_state(db, digests, state, step))

    async def commit_step(self, record: StepRecord) -> None:
        """The step happened: groups, checkpoint and announcement in one transaction."""

        def work(db: sqlite3.Connection) -> None:
            changed = _set_state(db, list(record.consumed), "trained", record.step - 1)
            if changed != len(record.consumed):
                raise sqlite3.IntegrityError(f"step {record.step} consumed groups that were not queued")
            db.execute("INSERT INTO steps VALUES (?, ?, ?)", (record.step, record.checkpoint, record.digest))
            if record.announcement is not None:
                db.execute("INSERT INTO chain VALUES (?, ?)", record.announcement)

        await self.run(work)

    async def steps(self, limit: int) -> list[tuple[int, str, bytes]]:
        """The newest committed steps, newest first: step, checkpoint file, its SHA-256."""
        query = "SELECT step, checkpoint, digest FROM steps ORDER BY step DESC LIMIT ?"
        rows = await self.run(lambda db: db.execute(query, (limit,)).fetchall())
        return [(int(step), str(name), bytes(digest)) for step, name, digest in rows]

    async def groups(self, state: str, since_version: int = 0) -> list[Queued]:
        """Groups in a state, of versions from `since_version` on, in order of arrival."""
        query = (
            "SELECT digest, producer, counter, oldest, arrived FROM groups WHERE state = ? AND oldest >= ? "
            "ORDER BY rowid"
        )
        rows = await self.run(lambda db: db.execute(query, (state, since_version)).fetchall())
        return [Queued(*row) for row in rows]

    async def consumed(self, first_step: int, end_step: int) -> list[tuple[bytes, str, int, int]]:
        """Groups trained at steps first_step .. end_step - 1: digest, producer, oldest version, step."""
        query = (
            "SELECT digest, producer, oldest, step FROM groups WHERE state = 'trained' AND step >= ? AND step < ? "
            "ORDER BY step, digest"
        )
        rows = await self.run(lambda db: db.execute(query, (first_step, end_step)).fetchall())
        return [(bytes(row[0]), str(row[1]), int(row[2]), int(row[3])) for row in rows]

    async def counts(self) -> dict[str, int]:
        """How many groups are in each state."""
        rows = await self.run(lambda db: db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
        return {str(state): int(count) for state, count in rows}

    async def next_counters(self) -> dict[str, int]:
        """For each producer, the lowest counter it has not used."""
        query = "SELECT producer, max(counter) + 1 FROM groups GROUP BY producer"
        rows = await self.run(lambda db: db.execute(query).fetchall())
        return {str(producer): int(counter) for producer, counter in rows}


def _columns(group: Queued) -> tuple[object, ...]:
    return group.digest, group.producer, group.counter, group.oldest_version, group.arrived_step


def _set_meta(db: sqlite3.Connection, name: str, value: bytes) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def _set_state(db: sqlite3.Connection, digests: list[bytes], state: str, step: int) -> int:
    query = "UPDATE groups SET state = ?, step = ?, body = NULL, rewards = NULL WHERE digest = ? AND state = 'queued'"
    return db.executemany(query, [(state, step, digest) for digest in digests]).rowcount
