//! Any async function, run once for each key: for webhook handlers, workers and scripts.
//!
//! ```text
//! run(key, input, work) ─▶ claim ─▶ work, on a task of its own ─▶ record ─▶ its value
//!                            │
//!                            ├ done: the recorded value or error
//!                            └ another input, still running, the store is away: a RunError, nothing runs
//! ```
//!
//! | the work ended with | the key | every later call |
//! |---|---|---|
//! | a value | done | is given it |
//! | [`Failed::keep`] | done | is given the same error |
//! | [`Failed::release`], a panic | released | runs the work |
//! | [`Failed::unknown`], any other error that `?` passed on | left to its lease | after it, what [`on_lapse`](FunctionConfig::on_lapse) says |
//!
//! An error that nobody classified says nothing about what was done before it: a charge may have been made
//! and its answer lost. So `?` leaves the key to its lease. Release it only where nothing was done yet.
//!
//! The work goes on when its caller is gone, and its lease is renewed for as long as it runs: work that can
//! hang needs a timeout of its own, and work that blocks its thread belongs on `tokio::task::spawn_blocking`, or it
//! may hold up the renewal. The lease is what others wait for after this process has died.
//!
//! A value is kept in JSON. The input is compared in its canonical JSON, so a field that is added to it makes
//! retries of earlier calls a [`RunError::Mismatch`]; leave it out while it has its default.
//!
//! For a side effect that its provider can dedupe, derive the key of that call:
//! [`Execution::downstream`](crate::Execution::downstream).
//!
//! # Example
//!
//! ```
//! use onlyonce::{Failed, FunctionConfig, Once, RunError};
//! use onlyonce_core::{Key, MemoryStore};
//!
//! async fn mail(receipt: &str, address: &str, dedupe_on: String) -> std::io::Result<usize> {
//!     // …
//! #   let _ = (address, dedupe_on);
//!     Ok(receipt.len())
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(async {
//! let once = Once::new(MemoryStore::new(), "send receipt", FunctionConfig::default())?;
//! let key = Key::new("order-4711")?;
//! let send = |address: &'static str| {
//!     once.run(key.clone(), address, move |execution| async move {
//!         // The mailer is told the same key on every attempt.
//!         let bytes = mail("100 EUR", address, execution.downstream("receipt").uuid()).await?;
//!         Ok(format!("sent {bytes} bytes to {address}"))
//!     })
//! };
//!
//! let first = send("ann@example.com").await?;
//! assert!(!first.replayed);
//!
//! // A redelivery is given the first result; the receipt is sent once.
//! let again = send("ann@example.com").await?;
//! assert!(again.replayed);
//! assert_eq!(again.value, first.value);
//!
//! // The same key for something else is refused.
//! assert!(matches!(send("bob@example.com").await, Err(RunError::Mismatch)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, StatusCode};
use onlyonce_core::outcome::Value;
use onlyonce_core::{
    BodyMode, Claimed, Engine, Fingerprint, Finished, Grant, IntoStore, Key, Lapse, Operation, Outcome,
    Policy, Recorded, Refusal, Verdict, fingerprint,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use tracing::{Instrument, debug, error};

use crate::claim::claim;
use crate::layer::{Config, Execution};
use crate::renewal::Renewal;
use crate::settings::{OnConcurrent, Settings, SettingsError, check_durations, check_retention};
use crate::sweeper::Sweeper;
use crate::work::InFlight;

use error::Fate;
pub use error::{Failed, KeptError, NotReplayable, RunError};

/// Everything about guarded functions but their store. The names and defaults are those of
/// [`Config`] and [`Settings`].
#[derive(Clone, Debug)]
pub struct FunctionConfig {
    /// One application. Two applications on one store set their own.
    pub namespace: String,
    /// How long a key is held without a renewal, on the store's clock. Others wait for so long after a process
    /// has died; the work itself may take longer.
    pub lease: Duration,
    /// How long an outcome is remembered, on the store's clock, from completion.
    pub retention: Duration,
    /// What a copy is told while the first is still running.
    pub on_concurrent: OnConcurrent,
    /// How long a copy waits under [`OnConcurrent::Wait`], on the local monotonic clock.
    pub wait: Duration,
    /// What becomes of a key whose holder went silent.
    pub on_lapse: Lapse,
    /// How long a result is held back while it cannot be recorded, on the local monotonic clock.
    pub record_grace: Duration,
    /// How often expired records are removed from the store, on the local monotonic clock. `None` leaves it to
    /// somebody else.
    pub sweep_every: Option<Duration>,
}

impl Default for FunctionConfig {
    fn default() -> Self {
        let Config { namespace, record_grace, sweep_every, defaults, .. } = Config::default();
        let lease = defaults.lease();
        let Settings { retention, on_concurrent, wait, on_lapse, .. } = defaults;
        Self { namespace, lease, retention, on_concurrent, wait, on_lapse, record_grace, sweep_every }
    }
}

impl FunctionConfig {
    /// Checks the settings against each other.
    ///
    /// # Errors
    /// Names the setting that contradicts another, and what is allowed.
    pub fn check(&self) -> Result<(), SettingsError> {
        if self.namespace.is_empty() {
            return Err(SettingsError::new("namespace", "must not be empty"));
        }
        check_durations(&[
            ("lease", self.lease),
            ("retention", self.retention),
            ("wait", self.wait),
            ("record_grace", self.record_grace),
        ])?;
        if let Some(every) = self.sweep_every {
            check_durations(&[("sweep_every", every)])?;
        }
        check_retention(self.retention, self.lease)
    }

    fn policy(&self) -> Policy {
        Policy { lease: self.lease, retention: self.retention, on_lapse: self.on_lapse }
    }

    fn wait(&self) -> Duration {
        match self.on_concurrent {
            OnConcurrent::Reject => Duration::ZERO,
            OnConcurrent::Wait => self.wait,
        }
    }
}

/// Runs a function once for each key.
///
/// Cheap to clone; clones share the store and the running work. While there is one, expired records are removed
/// from the store every [`sweep_every`](FunctionConfig::sweep_every).
#[derive(Clone)]
pub struct Once {
    shared: Arc<Shared>,
    caller: String,
}

struct Shared {
    engine: Engine,
    name: String,
    config: FunctionConfig,
    tasks: TaskTracker,
    sweeper: Sweeper,
}

/// What the work returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Returned<T> {
    /// The value.
    pub value: T,
    /// Whether it was recorded before, and the work has not run for this call.
    pub replayed: bool,
    /// The attempt that returned it; see [`Execution::attempt`].
    pub attempt: u32,
}

impl Once {
    /// A guard for the function with this name, on this store.
    ///
    /// The name is part of each key's identity: two functions have two names, and a renamed one forgets what was
    /// done.
    ///
    /// # Errors
    /// Names the setting that cannot be, and what is allowed.
    pub fn new(
        store: impl IntoStore,
        name: impl Into<String>,
        config: FunctionConfig,
    ) -> Result<Self, SettingsError> {
        let name = name.into();
        if name.is_empty() {
            return Err(SettingsError::new("name", "must not be empty"));
        }
        config.check()?;
        let store = store.into_store();
        let shared = Shared {
            engine: Engine::new(Arc::clone(&store)),
            name,
            tasks: TaskTracker::new(),
            sweeper: Sweeper::new(store, config.sweep_every),
            config,
        };
        Ok(Self { shared: Arc::new(shared), caller: String::new() })
    }

    /// The same function on behalf of `caller`: a tenant, a provider, a user. The same key from two callers is two
    /// operations.
    #[must_use]
    pub fn for_caller(&self, caller: impl Into<String>) -> Self {
        Self { shared: Arc::clone(&self.shared), caller: caller.into() }
    }

    /// Runs the work, unless it was run under this key before; its value is then given again.
    ///
    /// The work goes on if this future is dropped, and its value is recorded.
    ///
    /// # Errors
    /// See [`RunError`]: each says whether the work may have run.
    ///
    /// # Panics
    /// If the work panics. The key is released.
    pub fn run<I, W, F, T>(
        &self,
        key: Key,
        input: &I,
        work: W,
    ) -> impl Future<Output = Result<Returned<T>, RunError>> + Send + use<I, W, F, T>
    where
        I: Serialize + ?Sized,
        W: FnOnce(Execution) -> F + Send + 'static,
        F: Future<Output = Result<T, Failed>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        let (namespace, name) = (shared.config.namespace.clone(), shared.name.clone());
        let operation = Arc::new(Operation::new(namespace, name, self.caller.clone(), key));
        let fingerprint = fingerprint_of(input);
        async move {
            let fingerprint = fingerprint.map_err(|error| RunError::Input(error.into()))?;
            let tasks = shared.tasks.clone();
            // When the caller gives up, this future is dropped; the work must not be.
            let (reply, answer) = oneshot::channel();
            shared.sweeper.start();
            tasks.spawn(Job { shared, operation }.run(fingerprint, work, reply).in_current_span());
            match answer.await {
                Ok(Ended::Returned(returned)) => returned,
                // As it would have been without us.
                Ok(Ended::Panicked(panic)) => std::panic::resume_unwind(panic),
                Err(_) => Err(RunError::Interrupted),
            }
        }
    }

    /// Waits until no guarded work is running, its outcome recorded or its lease ended, and removes no more expired
    /// records. For a graceful shutdown, after the last call.
    pub async fn drained(&self) {
        self.shared.sweeper.stop();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

/// How one call ended.
enum Ended<T> {
    Returned(Result<Returned<T>, RunError>),
    Panicked(Box<dyn Any + Send>),
}

struct Job {
    shared: Arc<Shared>,
    operation: Arc<Operation>,
}

impl Job {
    async fn run<W, F, T>(self, fingerprint: Fingerprint, work: W, mut reply: oneshot::Sender<Ended<T>>)
    where
        W: FnOnce(Execution) -> F + Send + 'static,
        F: Future<Output = Result<T, Failed>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let Shared { engine, config, .. } = &*self.shared;
        let (policy, wait) = (config.policy(), config.wait());
        let claimed = claim(engine, &self.operation, fingerprint, &policy, wait, reply.closed()).await;
        let ended = match claimed {
            None => return,
            Some(Ok(Claimed::Execute(grant))) => self.execute(grant, work).await,
            Some(Ok(Claimed::Replay(outcome))) => Ended::Returned(replayed(&outcome)),
            Some(Ok(Claimed::Refused(refusal))) => Ended::Returned(Err(refused(refusal))),
            Some(Err(error)) => {
                error!(operation = %self.operation.id(), %error, "the store cannot say who holds the key");
                Ended::Returned(Err(RunError::StoreUnavailable(error)))
            }
        };
        // A caller that is gone gets nothing.
        let _ = reply.send(ended);
    }

    async fn execute<W, F, T>(&self, grant: Grant, work: W) -> Ended<T>
    where
        W: FnOnce(Execution) -> F + Send + 'static,
        F: Future<Output = Result<T, Failed>> + Send + 'static,
        T: Serialize + Send + 'static,
    {
        let _in_flight = InFlight::enter();
        let (attempt, id) = (grant.attempt(), self.operation.id());
        let execution = Execution { operation: Arc::clone(&self.operation), attempt };
        let mut renewal = Renewal::new(id, grant, self.shared.config.lease);
        // On a task of its own: if it keeps its thread for long, another can renew the lease.
        let working = tokio::spawn(async move { work(execution).await }.in_current_span());
        Ended::Returned(match renewal.during(working).await {
            Ok(Ok(value)) => {
                let recorded = recorded(attempt, false, serde_json::to_vec(&value));
                match self.record(renewal, Verdict::Keep(recorded.encode())).await {
                    Some(Finished::LeaseLost) => Err(RunError::LeaseLost),
                    _ => Ok(Returned { value, replayed: false, attempt }),
                }
            }
            Ok(Err(Failed(Fate::Keep(json)))) => {
                let recorded = recorded(attempt, true, json);
                match self.record(renewal, Verdict::Keep(recorded.clone().encode())).await {
                    Some(Finished::LeaseLost) => Err(RunError::LeaseLost),
                    _ => Err(kept(recorded, false)),
                }
            }
            Ok(Err(Failed(Fate::Release(error)))) => {
                self.record(renewal, Verdict::Release).await;
                Err(RunError::Released(error))
            }
            Ok(Err(Failed(Fate::Unknown(error)))) => {
                debug!(operation = %id, %error, "the work failed; the key is left to its lease");
                let lease_left = renewal.lease_ends().saturating_duration_since(Instant::now());
                Err(RunError::Failed { error, lease_left })
            }
            Err(ended) => match ended.try_into_panic() {
                Ok(panic) => {
                    error!(operation = %id, "the work panicked; the key is released");
                    self.record(renewal, Verdict::Release).await;
                    return Ended::Panicked(panic);
                }
                // The runtime shuts down.
                Err(_) => Err(RunError::Interrupted),
            },
        })
    }

    /// Ends the grant and waits for it, but no longer than `record_grace`: the store is then tried on until the
    /// lease ends, while the caller gets the result.
    async fn record(&self, renewal: Renewal, verdict: Verdict) -> Option<Finished> {
        let Shared { config, tasks, .. } = &*self.shared;
        let finishing = tasks.spawn(renewal.finish(verdict).in_current_span());
        timeout(config.record_grace, finishing).await.ok()?.ok()?
    }
}

/// Through a value, so that a map which iterates in another order each time is the same input even where a number
/// keeps it from the canonical form.
fn fingerprint_of<I: Serialize + ?Sized>(input: &I) -> Result<Fingerprint, serde_json::Error> {
    let json = match serde_json::to_value(input) {
        Ok(mut value) => {
            value.sort_all_objects();
            serde_json::to_vec(&value)?
        }
        // It has a number that a value cannot hold.
        Err(_) => serde_json::to_vec(input)?,
    };
    Ok(fingerprint::fingerprint("", &HeaderMap::new(), &[], &json, BodyMode::Json))
}

/// What is recorded of a value or an error. If it does not serialise it is lost, but the work was done: a mark says
/// so, and it is not run again.
pub(crate) fn recorded(attempt: u32, is_error: bool, json: Result<Vec<u8>, serde_json::Error>) -> Recorded {
    match json {
        Ok(json) => Recorded::Value(Value { attempt, is_error, json: json.into() }),
        Err(error) => {
            error!(%error, "what the work returned does not serialise; later calls cannot be given it");
            Recorded::NotKept { status: StatusCode::OK }
        }
    }
}

/// The recorded value, as every later call is given it.
pub(crate) fn replayed<T: DeserializeOwned>(outcome: &Outcome) -> Result<Returned<T>, RunError> {
    let unreadable = |error| RunError::NotReplayable(NotReplayable::Unreadable(error));
    match Recorded::decode(outcome).map_err(unreadable)? {
        Recorded::Value(Value { attempt, is_error: false, json }) => match serde_json::from_slice(&json) {
            Ok(value) => Ok(Returned { value, replayed: true, attempt }),
            Err(error) => Err(RunError::NotReplayable(NotReplayable::OtherType(error.into()))),
        },
        recorded => Err(kept(recorded, true)),
    }
}

/// A finished key that has no value to give.
fn kept(recorded: Recorded, replayed: bool) -> RunError {
    match recorded {
        Recorded::Value(Value { attempt, json, .. }) => RunError::Kept(KeptError { replayed, attempt, json }),
        Recorded::NotKept { .. } => RunError::NotReplayable(NotReplayable::NotKept),
        Recorded::Response(response) => {
            RunError::NotReplayable(NotReplayable::Response { status: response.status.as_u16() })
        }
    }
}

fn refused(refusal: Refusal) -> RunError {
    match refusal {
        Refusal::Mismatch { .. } => RunError::Mismatch,
        Refusal::InFlight { running_for, lease_left } => RunError::InFlight { running_for, lease_left },
        Refusal::Unknown => RunError::OutcomeUnknown,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// A changed fingerprint would refuse every retry of an earlier call.
    #[test]
    fn the_fingerprint_of_an_input_never_changes() {
        let fingerprint = fingerprint_of(&("order-4711", 100)).expect("it serialises");
        let hex = |digest: [u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(
            hex(fingerprint.target),
            "c0253ae09dc898c54524d2ea60bae231c3b29cbd9a6917251a4ec6bd0d64f826"
        );
        assert_eq!(hex(fingerprint.body), "cc8d5ff9dd59a33820f736fe187138ced1256a1c57c783be4481c6a14bca6aaa");
    }

    #[test]
    fn a_map_is_the_same_input_in_any_order() {
        let numbers =
            |count: u64| (0..count).map(|n| (n.to_string(), u64::MAX - n)).collect::<HashMap<_, _>>();
        let one = fingerprint_of(&numbers(64)).expect("it serialises");
        // A map of its own has an order of its own.
        assert_eq!(one, fingerprint_of(&numbers(64)).expect("it serialises"));
        assert_ne!(one, fingerprint_of(&numbers(63)).expect("it serialises"));
        assert_ne!(
            fingerprint_of(&u128::MAX).expect("it serialises"),
            fingerprint_of(&(u128::MAX - 1)).expect("too")
        );
    }
}
