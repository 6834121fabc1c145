-- Run at every start.
CREATE TABLE IF NOT EXISTS invoices (
    id       TEXT PRIMARY KEY,
    customer TEXT NOT NULL,
    amount   INTEGER NOT NULL,
    -- The event that paid it.
    paid_by  TEXT
) STRICT;

INSERT INTO invoices (id, customer, amount)
VALUES ('inv-7', 'ann@example.com', 100), ('inv-8', 'bob@example.com', 250)
ON CONFLICT DO NOTHING;
