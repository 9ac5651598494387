-- The database of a stream. `number` counts within the row. Conversations are digests here.
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE rows (id INTEGER PRIMARY KEY, json BLOB);
CREATE TABLE requests (
    sequence INTEGER PRIMARY KEY,
    conversation BLOB, turn INTEGER, time_s REAL, row INTEGER, number INTEGER
);
CREATE TABLE stream (place INTEGER PRIMARY KEY, row INTEGER, number INTEGER, turn INTEGER);

-- Where each request comes. A conversation's times never decrease; equal times are in the order of the files, then of the
-- turns. Turns without a number follow the last numbered one.
CREATE VIEW placed AS
SELECT
    sequence, row, number,
    coalesce(turn, coalesce(max(turn) OVER whole, -1) + row_number() OVER unnumbered) AS turn,
    max(time_s) OVER so_far AS time_s,
    first_value(sequence) OVER so_far AS first,
    max(sequence) OVER so_far AS latest
FROM requests
WINDOW
    whole AS (PARTITION BY conversation),
    unnumbered AS (PARTITION BY conversation, turn IS NULL ORDER BY sequence),
    so_far AS (PARTITION BY conversation ORDER BY turn NULLS LAST, sequence ROWS UNBOUNDED PRECEDING);
