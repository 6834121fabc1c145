//! Claims a key, and waits for whoever holds it if that was asked for.

use std::time::Duration;

use onlyonce_core::backoff::Backoff;
use onlyonce_core::{Claimed, Engine, Fingerprint, Operation, Policy, Refusal, StoreError};
use tokio::time::{Instant, sleep_until};

use crate::work::claimed;

/// The pauses between two looks at a key that somebody holds.
pub(crate) const WAIT_FIRST: Duration = Duration::from_millis(10);
pub(crate) const WAIT_CEILING: Duration = Duration::from_millis(200);

/// Claims the key, again and again while another holds it, but for no longer than `wait`. `None` if the caller
/// `left` meanwhile.
pub(crate) async fn claim(
    engine: &Engine,
    operation: &Operation,
    fingerprint: Fingerprint,
    policy: &Policy,
    wait: Duration,
    left: impl Future<Output = ()>,
) -> Option<Result<Claimed, StoreError>> {
    let mut left = std::pin::pin!(left);
    let wait_ends = Instant::now() + wait;
    let mut waits = Backoff::new(WAIT_FIRST, WAIT_CEILING);
    loop {
        let answer = engine.claim(operation, fingerprint, policy).await;
        let is_held = matches!(answer, Ok(Claimed::Refused(Refusal::InFlight { .. })));
        if !is_held || Instant::now() >= wait_ends {
            claimed(name(&answer));
            return Some(answer);
        }
        // Nobody needs it while this waits.
        drop(answer);
        let next = Instant::now() + waits.next().unwrap_or(WAIT_CEILING);
        tokio::select! {
            () = sleep_until(next.min(wait_ends)) => {}
            () = &mut left => return None,
        }
    }
}

/// As it is counted.
fn name(answer: &Result<Claimed, StoreError>) -> &'static str {
    match answer {
        Ok(Claimed::Execute(_)) => "execute",
        Ok(Claimed::Replay(_)) => "replay",
        Ok(Claimed::Refused(Refusal::Mismatch { .. })) => "mismatch",
        Ok(Claimed::Refused(Refusal::InFlight { .. })) => "in_flight",
        Ok(Claimed::Refused(Refusal::Unknown)) => "unknown",
        Err(_) => "store_error",
    }
}
