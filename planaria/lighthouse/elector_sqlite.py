"""An elector in one SQLite file, for lighthouses of one machine, or with a shared disk whose locks can be relied on.

It is a ``Store`` that several processes have open, with one more table of one row: who leads. A lease lapses when
others have seen it unchanged for its length, each on its own clock.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from planaria.core.leadership import Granted, Held, Lost, Renewed
from planaria.core.roster import LineageRecord
from planaria.lighthouse.elector import PATIENCE, Deposed, StoreAway
from planaria.lighthouse.store import Store

_TABLE = """
CREATE TABLE IF NOT EXISTS leader (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    holder TEXT NOT NULL, address TEXT NOT NULL, beat INTEGER NOT NULL, seconds REAL NOT NULL
) STRICT;
"""


class SqliteElector:
    def __init__(self, path: Path, seconds: float, name: str) -> None:
        """UsageError if the file cannot be used."""
        self._path, self._seconds, self._name = path, seconds, name
        self._lock = threading.Lock()
        self._store = Store.shared(path, PATIENCE * seconds, _TABLE)
        self._file = os.stat(path).st_ino

    @property
    def epoch(self) -> int:
        return self._store.epoch

    def acquire(self, address: str, floor: int, over: str) -> Granted | Held:
        with self._changing() as database:
            row = database.execute("SELECT holder, address, beat, seconds FROM leader").fetchone()
            beat = 0
            if row is not None:
                holder, there, beat, seconds = row
                stamp = f"{holder} {beat}"
                if holder not in ("", self._name) and stamp != over:
                    return Held(there, stamp, seconds)
            self._store.take_epoch(floor)
            values = (self._name, address, beat + 1, self._seconds)
            database.execute("REPLACE INTO leader VALUES (1, ?, ?, ?, ?)", values)
        return Granted(self.epoch)

    def renew(self) -> Renewed | Lost:
        try:
            with self._leading() as database:
                database.execute("UPDATE leader SET beat = beat + 1")
        except Deposed as why:
            return Lost(str(why))
        return Renewed()

    def release(self) -> None:
        with self._leading() as database:
            database.execute("UPDATE leader SET holder = '', beat = beat + 1")

    def append(self, record: LineageRecord) -> None:
        with self._leading():
            self._store.append(record)

    def last(self, job: str) -> LineageRecord | None:
        with self._leading():
            return self._store.last(job)

    def bump_epoch(self) -> int:
        with self._leading():
            return self._store.take_epoch(0)

    def close(self) -> None:
        with self._lock:
            self._store.close()

    @contextmanager
    def _leading(self) -> Iterator[sqlite3.Connection]:
        with self._changing() as database:
            row = database.execute("SELECT holder FROM leader").fetchone()
            if row is None or row[0] != self._name:
                raise Deposed(f"{self._path} holds that another lighthouse leads")
            yield database

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, begun with the write lock: what it reads stays true until it ends."""
        with self._lock:
            database = self._store.database
            epoch = self._store.epoch
            try:
                if os.stat(self._path).st_ino != self._file:
                    raise StoreAway(f"{self._path} was replaced by another file; start the lighthouse again")
                database.execute("BEGIN IMMEDIATE")
                yield database
                database.commit()
            except (sqlite3.Error, OSError) as error:
                self._store.epoch = epoch
                raise StoreAway(f"{self._path} cannot be used ({error})") from None
            finally:
                with suppress(sqlite3.Error):
                    database.rollback()  # of what was not committed
