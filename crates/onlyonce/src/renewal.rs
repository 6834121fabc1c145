//! A grant that is renewed for as long as its work goes on.

use std::pin::Pin;
use std::time::Duration;

use metrics::counter;
use onlyonce_core::{Finished, Grant, Id, StoreError, Verdict};
use tokio::time::{Instant, sleep_until};
use tracing::{error, warn};

use crate::work::{LOST_LEASES, RECORD_FAILURES};

/// The lease is renewed after this part of it, so that there is time to try again.
const RENEW_AFTER: u32 = 3;

/// And after this part of it if that failed.
const RENEW_AGAIN_AFTER: u32 = 12;

/// A grant, and when it is renewed next.
pub(crate) struct Renewal {
    operation: Id,
    lease: Duration,
    held: Held,
    /// Never, once the key is another's.
    due: Option<Instant>,
}

/// The grant, or the renewal that has it in hand: a slow store must not hold up what the work does.
enum Held {
    Grant(Grant),
    Renewing(Pin<Box<dyn Future<Output = Renewed> + Send>>),
}

type Renewed = (Grant, Result<bool, StoreError>);

impl Renewal {
    pub(crate) fn new(operation: Id, grant: Grant, lease: Duration) -> Self {
        let due = Some(due(&grant, lease));
        Self { operation, lease, held: Held::Grant(grant), due }
    }

    /// Takes the work to its end, and keeps the grant renewed meanwhile.
    pub(crate) async fn during<F: Future>(&mut self, work: F) -> F::Output {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                output = &mut work => return output,
                () = self.step() => {}
            }
        }
    }

    /// The end of the lease, at the latest.
    pub(crate) fn lease_ends(&self) -> Instant {
        match &self.held {
            Held::Grant(grant) => grant.lease_ends(),
            Held::Renewing(_) => Instant::now() + self.lease,
        }
    }

    /// The grant, after the renewal that may have it in hand. It is not renewed until the work goes on.
    pub(crate) async fn settled(&mut self) -> &mut Grant {
        while let Held::Renewing(_) = self.held {
            self.step().await;
        }
        match &mut self.held {
            Held::Grant(grant) => grant,
            Held::Renewing(_) => unreachable!("it was settled"),
        }
    }

    /// Ends the grant, after the renewal that may have it in hand. `None` if the store did not take it before the
    /// lease ended.
    pub(crate) async fn finish(self, verdict: Verdict) -> Option<Finished> {
        let operation = self.operation;
        let grant = match self.held {
            Held::Grant(grant) => grant,
            Held::Renewing(renewing) => renewing.await.0,
        };
        match grant.finish(verdict).await {
            Ok(Finished::Written) => Some(Finished::Written),
            Ok(Finished::LeaseLost) => {
                counter!(LOST_LEASES).increment(1);
                error!(%operation, "the lease was lost to another holder; its record stands");
                Some(Finished::LeaseLost)
            }
            Err(error) => {
                counter!(RECORD_FAILURES).increment(1);
                error!(%operation, %error, "the outcome could not be recorded within the lease");
                None
            }
        }
    }

    /// Waits for what comes next and does it. Dropped while it waits, it has done nothing.
    pub(crate) async fn step(&mut self) {
        match &mut self.held {
            Held::Grant(_) => {
                at(self.due).await;
                self.renew();
            }
            Held::Renewing(renewing) => {
                let renewed = renewing.await;
                self.renewed(renewed);
            }
        }
    }

    fn renew(&mut self) {
        // Replaced at once; the placeholder is never polled.
        let held = std::mem::replace(&mut self.held, Held::Renewing(Box::pin(std::future::pending())));
        self.held = match held {
            Held::Grant(mut grant) => Held::Renewing(Box::pin(async move {
                let renewed = grant.renew().await;
                (grant, renewed)
            })),
            renewing @ Held::Renewing(_) => renewing,
        };
    }

    fn renewed(&mut self, (grant, renewed): Renewed) {
        let operation = self.operation;
        self.due = match renewed {
            Ok(true) => Some(due(&grant, self.lease)),
            Ok(false) => {
                warn!(%operation, "the lease was lost while the work was still going on");
                None
            }
            Err(error) => {
                warn!(%operation, %error, "the lease could not be renewed");
                Some(Instant::now() + self.lease / RENEW_AGAIN_AFTER)
            }
        };
        self.held = Held::Grant(grant);
    }
}

/// When the first third of the lease is over.
fn due(grant: &Grant, lease: Duration) -> Instant {
    let left_over = lease - lease / RENEW_AFTER;
    grant.lease_ends().checked_sub(left_over).unwrap_or_else(Instant::now)
}

/// Never, if there is no such moment.
pub(crate) async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
