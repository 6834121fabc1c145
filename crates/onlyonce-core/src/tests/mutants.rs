//! Rules that look right and are not. The walk or the tables must refuse each of them, or they prove
//! less than they seem to.

use super::boundaries::{table, writes};
use super::model::{Config, Rules, explore};
use crate::machine::{self, Claim, Finish, Lapse, Policy, Verdict};
use crate::record::{Fingerprint, NewState, Record, Revision, Seen, State, Timestamp, Write};

const REAL: Rules = Rules::REAL;

/// Who refuses a mutant.
#[derive(Clone, Copy)]
enum Refused {
    /// The walk, under this policy.
    Walk(Lapse),
    /// Only the tables: no order of events shows it.
    Tables,
}

const RERUN: Refused = Refused::Walk(Lapse::Rerun);
const HOLD: Refused = Refused::Walk(Lapse::Hold);
const TABLES: Refused = Refused::Tables;

#[rustfmt::skip]
const MUTANTS: [(&str, Refused, Rules); 40] = [
    // Revisions.
    ("a counter is the revision", RERUN, Rules {
        grant: |fingerprint, _, policy| machine::grant(fingerprint, Revision(1), policy),
        claim: |seen, fingerprint, _, policy| {
            let next = if seen.record.expires_at <= seen.now { Revision(1) } else { following(&seen.record) };
            machine::claim(seen, fingerprint, next, policy)
        },
        renew: |held, _, policy| machine::renew(held, following(held), policy),
        finish: |held, verdict, _, policy| machine::finish(held, verdict, following(held), policy),
        ..REAL
    }),
    ("the attempt is the revision", RERUN, Rules {
        grant: |fingerprint, _, policy| machine::grant(fingerprint, Revision(1), policy),
        claim: |seen, f, r, p| taken_by(seen, f, r, p, |write| write.revision = Revision(write.attempt.into())),
        renew: |held, _, policy| machine::renew(held, Revision(held.attempt.into()), policy),
        finish: |held, verdict, _, policy| machine::finish(held, verdict, Revision(held.attempt.into()), policy),
        ..REAL
    }),
    ("a completion keeps the revision", RERUN, Rules {
        finish: |held, verdict, _, policy| machine::finish(held, verdict, held.revision, policy), ..REAL
    }),
    ("a take-over keeps the revision", RERUN, Rules {
        claim: |seen, fingerprint, _, policy| machine::claim(seen, fingerprint, seen.record.revision, policy), ..REAL
    }),
    ("a renewal keeps the revision", RERUN, Rules {
        renew: |held, _, policy| machine::renew(held, held.revision, policy), ..REAL
    }),

    // Boundaries.
    ("the lease includes its end", RERUN, Rules { claim: |seen, f, r, p| lease_moved(seen, 1, f, r, p), ..REAL }),
    ("the lease ends early", RERUN, Rules { claim: |seen, f, r, p| lease_moved(seen, -1, f, r, p), ..REAL }),
    ("the lease never ends", RERUN, Rules { claim: |seen, f, r, p| lease_moved(seen, 9, f, r, p), ..REAL }),
    ("retention includes its end", RERUN, Rules { claim: |seen, f, r, p| expiry_moved(seen, 1, f, r, p), ..REAL }),
    ("retention ends early", RERUN, Rules { claim: |seen, f, r, p| expiry_moved(seen, -1, f, r, p), ..REAL }),
    ("an expired key is in use", RERUN, Rules { claim: |seen, f, r, p| expiry_moved(seen, 9, f, r, p), ..REAL }),

    // Fingerprints.
    ("in flight comes before mismatch", RERUN, Rules {
        claim: |seen, fingerprint, revision, policy| {
            let held = matches!(seen.record.state, State::Running { lease_until } if seen.now < lease_until);
            machine::claim(seen, if held { seen.record.fingerprint } else { fingerprint }, revision, policy)
        },
        ..REAL
    }),
    ("a replay comes before mismatch", RERUN, Rules {
        claim: |seen, fingerprint, revision, policy| {
            let done = matches!(seen.record.state, State::Done { .. }) && seen.now < seen.record.expires_at;
            machine::claim(seen, if done { seen.record.fingerprint } else { fingerprint }, revision, policy)
        },
        ..REAL
    }),
    ("unknown comes before mismatch", HOLD, Rules {
        claim: |seen, fingerprint, revision, policy| {
            let lapsed = matches!(seen.record.state, State::Running { lease_until } if lease_until <= seen.now)
                && seen.now < seen.record.expires_at;
            machine::claim(seen, if lapsed { seen.record.fingerprint } else { fingerprint }, revision, policy)
        },
        ..REAL
    }),
    ("mismatch comes before expiry", RERUN, Rules {
        claim: |seen, fingerprint, revision, policy| {
            let differs = seen.record.fingerprint != fingerprint;
            expiry_moved(seen, if differs { 9 } else { 0 }, fingerprint, revision, policy)
        },
        ..REAL
    }),
    ("the body does not count", RERUN, Rules {
        claim: |seen, fingerprint, revision, policy| {
            machine::claim(seen, Fingerprint { body: seen.record.fingerprint.body, ..fingerprint }, revision, policy)
        },
        ..REAL
    }),
    ("the target does not count", TABLES, Rules {
        claim: |seen, fingerprint, revision, policy| {
            machine::claim(seen, Fingerprint { target: seen.record.fingerprint.target, ..fingerprint }, revision, policy)
        },
        ..REAL
    }),
    ("a completion drops the fingerprint", RERUN, Rules {
        finish: |held, verdict, revision, policy| {
            completed(held, verdict, revision, policy, |write| write.fingerprint = Fingerprint { target: [0; 32], body: [0; 32] })
        },
        ..REAL
    }),

    // Lapse.
    ("hold is ignored", HOLD, Rules {
        claim: |seen, f, r, policy| machine::claim(seen, f, r, &Policy { on_lapse: Lapse::Rerun, ..*policy }), ..REAL
    }),
    ("rerun is ignored", RERUN, Rules {
        claim: |seen, f, r, policy| machine::claim(seen, f, r, &Policy { on_lapse: Lapse::Hold, ..*policy }), ..REAL
    }),

    // What is carried from write to write.
    ("a take-over keeps the attempt", RERUN, Rules {
        claim: |seen, f, r, p| taken_by(seen, f, r, p, |write| write.attempt = write.attempt.max(2) - 1), ..REAL
    }),
    ("a take-over forgets since when", RERUN, Rules {
        claim: |seen, f, r, p| taken_by(seen, f, r, p, |write| write.created_at = None), ..REAL
    }),
    ("a grant over an expired key counts on", RERUN, Rules {
        claim: |seen, f, r, p| {
            let attempt = seen.record.attempt + 1;
            taken_by(seen, f, r, p, |write| write.attempt = attempt)
        },
        ..REAL
    }),
    ("a renewal is an attempt", RERUN, Rules {
        renew: |held, r, p| Write { attempt: held.attempt + 1, ..machine::renew(held, r, p) }, ..REAL
    }),
    ("a renewal restarts the attempt", RERUN, Rules {
        renew: |held, r, p| Write { granted_at: None, ..machine::renew(held, r, p) }, ..REAL
    }),
    ("a renewal restarts the key", RERUN, Rules {
        renew: |held, r, p| Write { created_at: None, ..machine::renew(held, r, p) }, ..REAL
    }),
    ("a completion forgets the attempt", RERUN, Rules {
        finish: |held, v, r, p| completed(held, v, r, p, |write| write.attempt = 1), ..REAL
    }),
    ("a completion keeps the key held", RERUN, Rules {
        finish: |held, v, r, p| completed(held, v, r, p, |write| write.state = NewState::Running { lease: p.lease }), ..REAL
    }),
    ("an unknown outcome releases", TABLES, Rules {
        finish: |held, verdict, r, p| {
            machine::finish(held, if verdict == Verdict::Leave { Verdict::Release } else { verdict }, r, p)
        },
        ..REAL
    }),
    ("a release leaves the key held", TABLES, Rules {
        finish: |held, verdict, r, p| {
            machine::finish(held, if verdict == Verdict::Release { Verdict::Leave } else { verdict }, r, p)
        },
        ..REAL
    }),

    ("an attempt that is over keeps its lease", RERUN, Rules {
        finish: |held, v, r, p| match v {
            Verdict::Again => Finish::Complete(machine::renew(held, r, p)),
            v => machine::finish(held, v, r, p),
        },
        ..REAL
    }),
    ("an attempt that is over does not count", TABLES, Rules {
        finish: |held, verdict, r, p| {
            machine::finish(held, if verdict == Verdict::Again { Verdict::Release } else { verdict }, r, p)
        },
        ..REAL
    }),

    // The register.
    ("an insert overwrites", RERUN, Rules { inserts_over: |_| true, ..REAL }),
    ("a replace does not compare", RERUN, Rules { replaces: |_, _| true, ..REAL }),
    ("a remove does not compare", RERUN, Rules { removes: |_, _| true, ..REAL }),
    ("a sweep takes lapsed keys", HOLD, Rules {
        sweeps: |record, now| matches!(record.state, State::Running { lease_until } if lease_until <= now), ..REAL
    }),
    ("a sweep takes keys early", RERUN, Rules { sweeps: |record, now| record.expires_at.0 <= now.0 + 1, ..REAL }),

    // The engine.
    ("a claim whose answer was lost is taken for granted", RERUN, Rules { settles: false, ..REAL }),
    ("a claim that loses to nothing runs", RERUN, Rules { claims_again: false, ..REAL }),
    ("a renewal whose answer was lost is not recognised", RERUN, Rules { adopts: false, ..REAL }),
];

fn following(record: &Record) -> Revision {
    Revision(record.revision.0 + 1)
}

/// A claim as the machine answers it when the record's lease ends this much later.
fn lease_moved(seen: &Seen, by: i64, fingerprint: Fingerprint, revision: Revision, policy: &Policy) -> Claim {
    let mut seen = seen.clone();
    if let State::Running { lease_until } = &mut seen.record.state {
        *lease_until = Timestamp(lease_until.0 + by);
    }
    machine::claim(&seen, fingerprint, revision, policy)
}

/// The same for its expiry.
fn expiry_moved(
    seen: &Seen,
    by: i64,
    fingerprint: Fingerprint,
    revision: Revision,
    policy: &Policy,
) -> Claim {
    let mut seen = seen.clone();
    seen.record.expires_at = Timestamp(seen.record.expires_at.0 + by);
    machine::claim(&seen, fingerprint, revision, policy)
}

/// A claim whose grant, if any, is changed.
fn taken_by(
    seen: &Seen,
    fingerprint: Fingerprint,
    revision: Revision,
    policy: &Policy,
    change: impl FnOnce(&mut Write),
) -> Claim {
    let mut claim = machine::claim(seen, fingerprint, revision, policy);
    if let Claim::Take { write, .. } = &mut claim {
        change(write);
    }
    claim
}

/// An end of the work whose completion, if any, is changed.
fn completed(
    held: &Record,
    verdict: Verdict,
    revision: Revision,
    policy: &Policy,
    change: impl FnOnce(&mut Write),
) -> Finish {
    let mut finish = machine::finish(held, verdict, revision, policy);
    if let Finish::Complete(write) = &mut finish {
        change(write);
    }
    finish
}

#[test]
fn every_mutant_is_refused() {
    for (name, refused, rules) in &MUTANTS {
        match refused {
            Refused::Tables => {
                let refusal = table(rules).and_then(|()| writes(rules));
                println!("{name}: {}", refusal.expect_err(name));
            }
            Refused::Walk(on_lapse) => {
                let config =
                    Config { on_lapse: *on_lapse, requests: [1, 1, 2], lost_max: 1, renewals_max: 1 };
                match explore(rules, &config) {
                    Err(violation) => println!("{name}: {violation}"),
                    Ok(worlds) => panic!("{name}: no violation in {worlds} worlds"),
                }
            }
        }
    }
}
