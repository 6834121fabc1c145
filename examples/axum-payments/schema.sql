-- Run at every start. Instances that start at once wait here for each other.
SELECT pg_advisory_xact_lock(hashtext('axum-payments schema'));

-- What somebody may still spend, or has been paid.
CREATE TABLE IF NOT EXISTS accounts (
    name    text PRIMARY KEY,
    balance bigint NOT NULL CHECK (balance >= 0)
);

CREATE TABLE IF NOT EXISTS payments (
    id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    payer  text NOT NULL REFERENCES accounts,
    payee  text NOT NULL REFERENCES accounts,
    amount bigint NOT NULL CHECK (amount > 0),
    -- What the card provider calls its side of it.
    charge text NOT NULL UNIQUE
);

-- Two entries for each payment; together they are zero.
CREATE TABLE IF NOT EXISTS ledger (
    payment bigint NOT NULL REFERENCES payments,
    account text NOT NULL REFERENCES accounts,
    amount  bigint NOT NULL,
    PRIMARY KEY (payment, account)
);

INSERT INTO accounts VALUES ('ann', 500), ('bob', 500), ('shop', 0) ON CONFLICT DO NOTHING;
