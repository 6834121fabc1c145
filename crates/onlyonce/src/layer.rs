//! The layer: its configuration, and what all its services share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{Downstream, Engine, IntoStore, Operation};
use tokio_util::task::TaskTracker;
use tower_layer::Layer;

use crate::admit::Front;
use crate::builder::Builder;
use crate::caller::Caller;
use crate::problem::RefusalBody;
use crate::rules::{Route, Rules};
use crate::service::OnlyonceService;
use crate::settings::{Settings, SettingsError, check_durations};
use crate::sweeper::Sweeper;

/// Everything about a layer but its store, as a program has read it; a [`Builder`] fills one.
#[derive(Clone)]
pub struct Config {
    /// One API. Two APIs on one store set their own.
    pub namespace: String,
    /// How the caller of a request is told.
    pub caller: Caller,
    /// How long a finished answer is held back while its outcome cannot be recorded, on the local
    /// monotonic clock.
    pub record_grace: Duration,
    /// How often expired records are removed from the store, on the local monotonic clock; `None` leaves it to
    /// somebody else.
    pub sweep_every: Option<Duration>,
    /// The settings where no route says otherwise.
    pub defaults: Settings,
    /// The first that matches wins.
    pub routes: Vec<Route>,
    /// The body of every refusal, instead of RFC 9457 problem details. Its status, `Onlyonce-Refused` and
    /// `Retry-After` stay: clients go by them.
    pub refusal_body: Option<RefusalBody>,
}

/// The namespace of whoever set none.
pub const NAMESPACE_DEFAULT: &str = "default";

impl Default for Config {
    fn default() -> Self {
        Self {
            namespace: NAMESPACE_DEFAULT.to_owned(),
            caller: Caller::default(),
            record_grace: Duration::from_secs(2),
            sweep_every: Some(Duration::from_secs(60)),
            defaults: Settings::default(),
            routes: Vec::new(),
            refusal_body: None,
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, caller, record_grace, sweep_every, defaults, routes, refusal_body } = self;
        f.debug_struct("Config")
            .field("namespace", namespace)
            .field("caller", caller)
            .field("record_grace", record_grace)
            .field("sweep_every", sweep_every)
            .field("defaults", defaults)
            .field("routes", routes)
            .field("refusal_body", &refusal_body.is_some())
            .finish()
    }
}

impl Front {
    pub(crate) fn new(config: Config) -> Result<Self, SettingsError> {
        let Config { namespace, caller, record_grace, sweep_every, defaults, routes, refusal_body } = config;
        if namespace.is_empty() {
            return Err(SettingsError::new("namespace", "must not be empty"));
        }
        check_durations(&[("record_grace", record_grace)])?;
        if let Some(every) = sweep_every {
            check_durations(&[("sweep_every", every)])?;
        }
        Ok(Self { rules: Rules::new(routes, defaults)?, caller, namespace, refusal_body })
    }
}

/// Guards a service: each operation runs once, and every retry gets its answer.
///
/// Cheap to clone; clones share the store and the running work. While there is one, or a service that it
/// guards, expired records are removed from the store every [`sweep_every`](Config::sweep_every).
#[derive(Clone)]
pub struct OnlyonceLayer {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) front: Front,
    pub(crate) engine: Engine,
    pub(crate) record_grace: Duration,
    pub(crate) tasks: TaskTracker,
    pub(crate) sweeper: Sweeper,
}

impl OnlyonceLayer {
    /// Starts a layer on this store.
    ///
    /// ```
    /// use std::time::Duration;
    /// use onlyonce::{Caller, KeyRule, MemoryStore, OnConcurrent, OnlyonceLayer};
    ///
    /// let layer = OnlyonceLayer::builder(MemoryStore::new())
    ///     .namespace("payments")
    ///     .caller(Caller::header("x-user-id"))
    ///     .defaults(|rule| rule.timeout(Duration::from_secs(20)))
    ///     .route("POST /payments", |rule| rule.key(KeyRule::Required))
    ///     .route("POST,PUT /payments/{id}/refunds", |rule| {
    ///         rule.endpoint("refunds").on_concurrent(OnConcurrent::Wait).keep(["2xx", "4xx", "!404"])
    ///     })
    ///     .build()?;
    /// # Ok::<(), onlyonce::SettingsError>(())
    /// ```
    pub fn builder(store: impl IntoStore) -> Builder<Self> {
        let store = store.into_store();
        Builder::new(Config::default(), move |config| Self::new(store, config))
    }

    /// A layer on this store, for a program that read its configuration from somewhere. In code,
    /// [`builder`](Self::builder) says the same in fewer words.
    ///
    /// # Errors
    /// Names the setting that cannot be, and what is allowed.
    pub fn new(store: impl IntoStore, config: Config) -> Result<Self, SettingsError> {
        let store = store.into_store();
        let (record_grace, sweep_every) = (config.record_grace, config.sweep_every);
        let shared = Shared {
            front: Front::new(config)?,
            engine: Engine::new(Arc::clone(&store)),
            record_grace,
            tasks: TaskTracker::new(),
            sweeper: Sweeper::new(store, sweep_every),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Waits until no guarded work is running, its outcome recorded or its lease ended, and removes no more
    /// expired records. For a graceful shutdown, after the last request was accepted.
    pub async fn drained(&self) {
        self.shared.sweeper.stop();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

impl<S> Layer<S> for OnlyonceLayer {
    type Service = OnlyonceService<S>;

    fn layer(&self, inner: S) -> OnlyonceService<S> {
        OnlyonceService::new(inner, Arc::clone(&self.shared))
    }
}

/// A request extension: the inner service finds it on every guarded request. With the feature `axum`, a handler
/// can ask for it, or for an `Option` of it.
#[derive(Clone, Debug)]
pub struct Execution {
    /// Who asks for what under which key.
    pub operation: Arc<Operation>,
    /// Which attempt this is since the key was last free; the first is 1. On a later one the work may
    /// have happened before, wholly or in part.
    pub attempt: u32,
}

impl Execution {
    /// The key of the side effect that the work calls `label`, for its provider to dedupe on; the same on
    /// every attempt. See [`onlyonce_core::downstream`].
    #[must_use]
    pub fn downstream(&self, label: &str) -> Downstream {
        self.operation.downstream(label)
    }
}

/// A response extension: by it the inner service says that it could not do the work. The layer then
/// answers for it, and the rest of the response does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// Nothing was sent to whoever does the work, so it did not happen: the key is released.
    NotSent,
    /// The request was sent and the answer lost: the key stays held until its lease ends.
    Lost,
    /// The database undid the work because of a concurrent transaction (a serialization failure, a
    /// deadlock), and nothing else was done: the key is released. A
    /// [`TransactionalLayer`](crate::TransactionalLayer) may run the work again at once.
    Conflict,
}
