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
    /// On the heap, for it goes through many hands and all of them are futures.
    Grant(Box<Grant>),
    Renewing(Pin<Box<dyn Future<Output = Renewed> + Send>>),
}

type Renewed = (Box<Grant>, Result<bool, StoreError>);

impl Renewal {
    pub(crate) fn new(operation: Id, grant: impl Into<Box<Grant>>, lease: Duration) -> Self {
        let grant = grant.into();
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
    pub(crate) fn finish(self, verdict: Verdict) -> impl Future<Output = Option<Finished>> + Send {
        // Taken apart outside of the block: an `async fn` would keep everything twice.
        let Self { operation, held, .. } = self;
        async move {
            let grant = match held {
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
    }

    /// Waits for what comes next and does it. Dropped while it waits, it has done nothing.
    pub(crate) async fn step(&mut self) {
        match self.due() {
            Some(due) => {
                sleep_until(due).await;
                self.renew();
            }
            None => self.renewing().await,
        }
    }

    /// When [`renew`](Self::renew) is due; `None` while a renewal is on its way, and once the key is another's.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self.held {
            Held::Grant(_) => self.due,
            Held::Renewing(_) => None,
        }
    }

    /// Waits for the renewal that is on its way; for ever, if there is none.
    pub(crate) async fn renewing(&mut self) {
        match &mut self.held {
            Held::Grant(_) => std::future::pending().await,
            Held::Renewing(renewing) => {
                let renewed = renewing.await;
                self.renewed(renewed);
            }
        }
    }

    /// Sends a renewal on its way.
    pub(crate) fn renew(&mut self) {
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
