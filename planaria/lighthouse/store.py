"""What a lighthouse must not forget: its epoch and the lineage of quorums, in one SQLite file.

Everything else is learnt again from the agents. The file is owned by one lighthouse at a time; a second one
that opens it is turned away.
"""

from __future__ import annotations

import json
import sqlite3
import time
from itertools import pairwise
from pathlib import Path

from planaria.core.messages import Member, QuorumId
from planaria.core.roster import LineageRecord, lineage_after
from planaria.errors import ProtocolError, UsageError
from planaria.files import sync_directory
from planaria.wire.checks import MAX_NUMBER

APPLICATION = 0x504C414E  # "PLAN": tells our files from other people's databases
SCHEMA = 2
# quorums kept per job: enough to see months of failures, and read in a few milliseconds on opening
KEPT = 512

_TABLES = """
CREATE TABLE IF NOT EXISTS epochs (epoch INTEGER PRIMARY KEY, began REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS quorums (
    job TEXT NOT NULL, epoch INTEGER NOT NULL, number INTEGER NOT NULL, members TEXT NOT NULL,
    step INTEGER NOT NULL, previous TEXT NOT NULL, lineage TEXT NOT NULL,
    run_epoch INTEGER NOT NULL, run_number INTEGER NOT NULL,
    PRIMARY KEY (job, epoch, number)
) STRICT, WITHOUT ROWID;
"""
_COLUMNS = "job, epoch, number, members, lineage, step, run_epoch, run_number, previous"
_ADVICE = (
    "Restore it from a backup, or move it away and start the lighthouse with --epoch-floor set to an epoch "
    "that no running job has seen yet (planaria status showed it; any large number will do)"
)


class Store:
    """``epoch`` is the epoch of this life of the lighthouse: higher than any before. Not for several
    threads."""

    def __init__(self, path: Path, database: sqlite3.Connection, epoch: int) -> None:
        self.path = path
        self.epoch = epoch
        self.database = database

    @classmethod
    def open(cls, path: str | Path, epoch_floor: int = 0) -> Store:
        """Open or make the file and take a new epoch, durably, above every stored one and above
        ``epoch_floor``.

        UsageError if the file cannot be used: damaged, of something else, or in use by another lighthouse.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            database = _connect(path)
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UsageError(
                    f"another lighthouse is using the store {path}; stop it or choose another --store"
                ) from None
            raise UsageError(f"cannot open the lighthouse store {path}: {error}") from None
        except sqlite3.DatabaseError as error:
            raise UsageError(f"the lighthouse store {path} is damaged ({error}). {_ADVICE}") from None
        except OSError as error:
            raise UsageError(f"cannot make the directory of the lighthouse store {path}: {error.strerror}") from None
        store = cls(path, database, 0)
        try:
            try:
                store._verify()
            except sqlite3.DatabaseError as error:
                raise UsageError(f"the lighthouse store {path} is damaged ({error}). {_ADVICE}") from None
            sync_directory(path.parent)
            store.bump_epoch(epoch_floor)
        except (sqlite3.Error, OSError) as error:
            database.close()
            raise UsageError(f"cannot write the lighthouse store {path}: {error}") from None
        except BaseException:
            database.close()
            raise
        return store

    def bump_epoch(self, floor: int = 0) -> int:
        """A new epoch, on the disk before it is returned: if it could be lost, two lives might share one."""
        self.database.execute("PRAGMA synchronous = FULL")
        query = "SELECT ifnull(max(epoch), 0) FROM (SELECT epoch FROM epochs UNION SELECT epoch FROM quorums)"
        (stored,) = self.database.execute(query).fetchone()
        epoch = max(int(stored), floor) + 1
        if epoch > MAX_NUMBER:
            raise UsageError(f"the lighthouse store {self.path} would take epoch {epoch}, above {MAX_NUMBER}")
        with self.database:
            self.database.execute("INSERT INTO epochs VALUES (?, ?)", (epoch, time.time()))
        # From here on a process may die, but not lose what it wrote; should the machine lose the last quorums
        # with its power, the higher epoch of the next life keeps their numbers from being used again.
        self.database.execute("PRAGMA synchronous = NORMAL")
        self.epoch = epoch
        return epoch

    def append(self, record: LineageRecord) -> None:
        """Keep ``record``; it survives the death of this process. ProtocolError if it does not continue the
        job's lineage (or begin a new one)."""
        last = self.last(record.job)
        previous = _previous(record, last)
        if previous is None or (last is not None and record.id <= last.id):
            raise ProtocolError(f"job {record.job}: quorum {record.id} does not continue the stored lineage")
        members = json.dumps([[member.group, member.incarnation] for member in record.members])
        run = (record.run.epoch, record.run.number)
        row = (record.job, record.epoch, record.number, members, record.lineage, record.step, *run, previous)
        with self.database:
            self.database.execute(f"INSERT INTO quorums ({_COLUMNS}) VALUES ({', '.join('?' * len(row))})", row)
            if record.number % KEPT == 0:
                self._prune(record.job)

    def last(self, job: str) -> LineageRecord | None:
        """The newest quorum of ``job``."""
        found = self.lineage(job, 1)
        return found[0] if found else None

    def lineage(self, job: str, most: int = KEPT) -> list[LineageRecord]:
        """Up to ``most`` newest quorums of ``job``, oldest first."""
        return [record for record, _ in self._rows(job, most)]

    def jobs(self) -> list[str]:
        return [job for (job,) in self.database.execute("SELECT DISTINCT job FROM quorums ORDER BY job")]

    def close(self) -> None:
        self.database.close()

    def _rows(self, job: str, most: int) -> list[tuple[LineageRecord, str]]:
        """Records with the lineage before each of them, oldest first."""
        query = f"SELECT {_COLUMNS} FROM quorums WHERE job = ? ORDER BY epoch DESC, number DESC LIMIT ?"
        return [_record(row) for row in self.database.execute(query, (job, most))][::-1]

    def _prune(self, job: str) -> None:
        """Forget all but the last KEPT. The first one kept has its predecessor's hash, so it can still be
        verified."""
        oldest = self.lineage(job)[0]
        where = "job = ? AND (epoch, number) < (?, ?)"
        self.database.execute(f"DELETE FROM quorums WHERE {where}", (job, oldest.epoch, oldest.number))

    def _verify(self) -> None:
        """Every stored hash must follow from the one before; DatabaseError if one does not."""
        for job in self.jobs():
            rows = self._rows(job, -1)
            for record, previous in rows:
                if lineage_after(previous, record.id, record.members) != record.lineage:
                    raise sqlite3.DatabaseError(f"quorum {record.id} of job {job} does not match its hash")
            for (before, _), (record, previous) in pairwise(rows):
                if previous not in (before.lineage, ""):
                    raise sqlite3.DatabaseError(f"a quorum of job {job} before {record.id} is missing")


def _connect(path: Path) -> sqlite3.Connection:
    # No timeout: the owner of the lock lives as long as a lighthouse does.
    database = sqlite3.connect(path, timeout=0)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")  # before WAL: then the first write takes the file
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION:
            raise UsageError(f"{path} is the database of another program, not a lighthouse store")
        if tables and schema != SCHEMA:
            raise UsageError(f"the lighthouse store {path} has version {schema}, this release needs {SCHEMA}")
        database.execute("PRAGMA journal_mode = WAL")
        if not tables:
            marks = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA};"
            database.executescript(f"BEGIN IMMEDIATE; {_TABLES} {marks} COMMIT;")
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
    except BaseException:
        database.close()
        raise
    return database


def _record(row: tuple[str, int, int, str, str, int, int, int, str]) -> tuple[LineageRecord, str]:
    job, epoch, number, members, lineage, step, run_epoch, run_number, previous = row
    try:
        parsed = tuple(Member(group, incarnation) for group, incarnation in json.loads(members))
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(f"the members of quorum {epoch}.{number} of job {job} are unreadable") from error
    run = QuorumId(run_epoch, run_number)
    return LineageRecord(job, epoch, number, parsed, lineage, step, run), previous


def _previous(record: LineageRecord, last: LineageRecord | None) -> str | None:
    """The lineage that ``record`` continues: that of ``last``, or "" for the first quorum of a new run."""
    for previous in {last.lineage if last else "", ""}:
        if lineage_after(previous, QuorumId(record.epoch, record.number), record.members) == record.lineage:
            return previous
    return None
