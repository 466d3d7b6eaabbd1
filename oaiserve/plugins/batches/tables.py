"""The tables of files and batches, in the database of responses."""

from __future__ import annotations

# The triggers maintain the totals of owners, which would otherwise be counted for each file.
SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS stored_files (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    created_at REAL NOT NULL,
    purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, -- that count for the limit of the store
    object BLOB NOT NULL,
    batch TEXT, -- whose answers are the content; NULL: the content is in file_pieces
    failed INTEGER, -- whether those that failed
    is_deleted INTEGER NOT NULL DEFAULT 0 -- 1: it stays until the batches that read it have ended
)
""",
    "CREATE INDEX IF NOT EXISTS files_of_owner ON stored_files (owner, number)",
    "CREATE INDEX IF NOT EXISTS files_by_purpose ON stored_files (owner, purpose, number)",
    "CREATE INDEX IF NOT EXISTS files_by_time ON stored_files (created_at)",
    "CREATE INDEX IF NOT EXISTS files_of_batch ON stored_files (batch)",
    "CREATE INDEX IF NOT EXISTS deleted_files ON stored_files (number) WHERE is_deleted",
    """
CREATE TABLE IF NOT EXISTS file_pieces (
    file INTEGER NOT NULL,
    start INTEGER NOT NULL, -- a multiple of PIECE_BYTES
    content BLOB NOT NULL,
    UNIQUE (file, start)
)
""",
    """
CREATE TRIGGER IF NOT EXISTS file_dropped AFTER DELETE ON stored_files BEGIN
    DELETE FROM file_pieces WHERE file = old.number;
END
""",
    """
CREATE TABLE IF NOT EXISTS stored_batches (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    created_at REAL NOT NULL,
    is_open INTEGER NOT NULL,
    file INTEGER NOT NULL, -- the number of its input file
    num_bytes INTEGER NOT NULL, -- of it and its lines and answers, that count for the limit of the store
    object BLOB NOT NULL
)
""",
    "CREATE INDEX IF NOT EXISTS batches_of_owner ON stored_batches (owner, number)",
    "CREATE INDEX IF NOT EXISTS batches_by_time ON stored_batches (created_at)",
    "CREATE INDEX IF NOT EXISTS open_batches ON stored_batches (owner, file) WHERE is_open",
    """
CREATE TABLE IF NOT EXISTS stored_lines (
    batch TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    start INTEGER NOT NULL, -- in the input file
    num_bytes INTEGER NOT NULL,
    failed INTEGER,
    done INTEGER, -- its place in the order in which lines were done
    result BLOB, -- NULL: it is not done. Last, so that the others are read without it
    PRIMARY KEY (batch, number)
)
""",
    "CREATE INDEX IF NOT EXISTS lines_by_done ON stored_lines (batch, done)",
    "CREATE TABLE IF NOT EXISTS file_owners (owner TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL)",
    *(
        f"""
CREATE TRIGGER IF NOT EXISTS {table}_{event} AFTER {change} ON {table} BEGIN
    INSERT INTO file_owners VALUES ({row}.owner, {num_bytes})
        ON CONFLICT DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes;
    DELETE FROM file_owners WHERE owner = {row}.owner AND num_bytes = 0;
END
"""
        for table in ("stored_files", "stored_batches")
        for event, change, row, num_bytes in (
            ("added", "INSERT", "new", "new.num_bytes"),
            ("resized", "UPDATE OF num_bytes", "new", "new.num_bytes - old.num_bytes"),
            ("removed", "DELETE", "old", "-old.num_bytes"),
        )
    ),
)
