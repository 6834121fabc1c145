//! A layer's configuration as it is written in code. The names are those of the configuration file.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use onlyonce_core::{BodyMode, Lapse};

use crate::caller::Caller;
use crate::layer::Config;
use crate::problem::Problem;
use crate::rules::Route;
use crate::settings::{KeyRule, OnConcurrent, Settings, SettingsError};

/// Builds a layer; see [`OnlyonceLayer::builder`](crate::OnlyonceLayer::builder).
///
/// What is set twice is as it was set last. Nothing is checked before [`build`](Self::build).
#[must_use]
pub struct Builder<L> {
    config: Config,
    defaults: Vec<Say>,
    routes: Vec<(String, Say)>,
    finish: Box<dyn FnOnce(Config) -> Result<L, SettingsError> + Send>,
}

/// What is said about a rule, once it is known what it is without that.
type Say = Box<dyn FnOnce(Rule) -> Rule + Send>;

impl<L> Builder<L> {
    /// Starts from `config`; `finish` makes the layer.
    pub(crate) fn new(
        config: Config,
        finish: impl FnOnce(Config) -> Result<L, SettingsError> + Send + 'static,
    ) -> Self {
        Self { config, defaults: Vec::new(), routes: Vec::new(), finish: Box::new(finish) }
    }

    /// One API; [`NAMESPACE_DEFAULT`](crate::NAMESPACE_DEFAULT) unless it is set. Two APIs on one store set
    /// their own.
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.config.namespace = name.into();
        self
    }

    /// How the caller of a request is told: the same key from two callers is two operations.
    pub fn caller(mut self, caller: Caller) -> Self {
        self.config.caller = caller;
        self
    }

    /// How long a finished answer is held back while its outcome cannot be recorded, on the local monotonic
    /// clock; 2 seconds.
    pub fn record_grace(mut self, grace: Duration) -> Self {
        self.config.record_grace = grace;
        self
    }

    /// How often expired records are removed from the store, on the local monotonic clock; every 60 seconds.
    /// `None` leaves it to somebody else.
    pub fn sweep_every(mut self, every: impl Into<Option<Duration>>) -> Self {
        self.config.sweep_every = every.into();
        self
    }

    /// Gives every refusal another body: its content type and its bytes. Its status, `Onlyonce-Refused` and
    /// `Retry-After` stay, because clients go by them.
    pub fn refusal_body<F>(mut self, body: F) -> Self
    where
        F: Fn(&Problem) -> (HeaderValue, Bytes) + Send + Sync + 'static,
    {
        self.config.refusal_body = Some(Arc::new(body));
        self
    }

    /// The settings where no route says otherwise.
    pub fn defaults(mut self, say: impl FnOnce(Rule) -> Rule + Send + 'static) -> Self {
        self.defaults.push(Box::new(say));
        self
    }

    /// Other settings for the requests that match `pattern`, for example `POST /payments`,
    /// `POST,PUT /payments/{id}/refunds` or `* /admin/{*rest}`; see [`Route::new`]. Of several routes that
    /// match, the first wins.
    pub fn route(
        mut self,
        pattern: impl Into<String>,
        say: impl FnOnce(Rule) -> Rule + Send + 'static,
    ) -> Self {
        self.routes.push((pattern.into(), Box::new(say)));
        self
    }

    /// The layer.
    ///
    /// # Errors
    /// Names the setting that cannot be, its route, and what is allowed.
    pub fn build(self) -> Result<L, SettingsError> {
        let Self { mut config, defaults, routes, finish } = self;
        for say in defaults {
            config.defaults = say(Rule::new(config.defaults)).settings()?;
        }
        for (pattern, say) in routes {
            let route = say(Rule::new(config.defaults.clone())).route(&pattern);
            config.routes.push(route.map_err(|error| error.in_route(&pattern))?);
        }
        finish(config)
    }
}

impl<L> fmt::Debug for Builder<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let patterns: Vec<_> = self.routes.iter().map(|(pattern, _)| pattern).collect();
        f.debug_struct("Builder")
            .field("config", &self.config)
            .field("routes", &patterns)
            .finish_non_exhaustive()
    }
}

/// The settings of one route, or of all that no route changes. What is left out stays as it is by default.
///
/// Durations are on the local monotonic clock, except [`lease`](Self::lease) and
/// [`retention`](Self::retention), which the store adds to its own.
#[derive(Clone, Debug)]
#[must_use]
pub struct Rule {
    settings: Settings,
    endpoint: Option<String>,
    /// The first thing said that cannot be.
    wrong: Option<SettingsError>,
}

/// One method for each setting that is taken as it is.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        $(
            $(#[$doc])*
            pub fn $name(mut self, $name: $type) -> Self {
                self.settings.$name = $name;
                self
            }
        )*
    };
}

impl Rule {
    fn new(settings: Settings) -> Self {
        Self { settings, endpoint: None, wrong: None }
    }

    setters! {
        /// Whether a request must carry a key; by default it may.
        key: KeyRule,
        /// How long the work may take from the claim to the head of its answer; 60 seconds. The caller is then
        /// told 504, while the work goes on until the lease ends.
        timeout: Duration,
        /// How long an outcome is remembered, from completion; 24 hours. At least the lease.
        retention: Duration,
        /// How long a guarded request's body may take to arrive; 30 seconds.
        request_timeout: Duration,
        /// How long an answer may pause between two of its bytes; 60 seconds.
        idle_timeout: Duration,
        /// How long an answer is gathered before its beginning is passed on, from its head; 1 second.
        stream_after: Duration,
        /// What counts as the same body; by default the same bytes.
        body: BodyMode,
        /// What a copy is told while the first is still running.
        on_concurrent: OnConcurrent,
        /// How long a copy waits under [`OnConcurrent::Wait`]; 10 seconds.
        wait: Duration,
        /// What becomes of a key whose holder went silent; by default the work runs again.
        on_lapse: Lapse,
        /// The largest guarded request body, in bytes; 1 MiB. It is held in memory.
        request_body_bytes_max: usize,
        /// The largest answer that is recorded, in bytes; 1 MiB. It is held in memory.
        response_body_bytes_max: usize,
        /// Whether `Set-Cookie` is recorded; by default it is not, because a replayed session cookie rolls a
        /// session back.
        record_cookies: bool,
    }

    /// How long a key is held without a renewal; 15 seconds longer than [`timeout`](Self::timeout), which it
    /// must exceed.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = Some(lease);
        self
    }

    /// Which answers are kept, instead of [`KEEP_DEFAULT`](crate::keep::KEEP_DEFAULT): classes (`2xx`), codes
    /// (`404`), or either with a `!` in front, which takes it out again.
    pub fn keep<S: AsRef<str>>(mut self, statuses: impl IntoIterator<Item = S>) -> Self {
        let kept = self.settings.keep.set_keep(statuses);
        self.check(kept.map_err(|error| SettingsError::new("keep", error.to_string())))
    }

    /// Which answers say nothing about whether the work happened, instead of
    /// [`UNKNOWN_DEFAULT`](crate::keep::UNKNOWN_DEFAULT); written as in [`keep`](Self::keep).
    pub fn unknown<S: AsRef<str>>(mut self, statuses: impl IntoIterator<Item = S>) -> Self {
        let unknown = self.settings.keep.set_unknown(statuses);
        self.check(unknown.map_err(|error| SettingsError::new("unknown", error.to_string())))
    }

    /// Request headers that must be equal in a retry.
    pub fn fingerprint_headers<S: AsRef<str>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        let parsed: Result<_, SettingsError> =
            names.into_iter().map(|name| header_name(name.as_ref())).collect();
        let set = parsed.map(|names| self.settings.fingerprint_headers = names);
        self.check(set)
    }

    /// A stable name for the endpoint, which stands for the path in the identity of a key; see
    /// [`Route::endpoint`]. Only a route has one.
    pub fn endpoint(mut self, name: impl Into<String>) -> Self {
        self.endpoint = Some(name.into());
        self
    }

    fn check(mut self, said: Result<(), SettingsError>) -> Self {
        self.wrong = self.wrong.or(said.err());
        self
    }

    fn settings(self) -> Result<Settings, SettingsError> {
        let endpoint =
            self.endpoint.map(|_| SettingsError::new("endpoint", "is a route's own; say it there"));
        if let Some(wrong) = self.wrong.or(endpoint) {
            return Err(wrong);
        }
        let keep = self.settings.keep.check();
        keep.map_err(|error| SettingsError::new("keep", error.to_string()))?;
        self.settings.check()?;
        Ok(self.settings)
    }

    fn route(mut self, pattern: &str) -> Result<Route, SettingsError> {
        let endpoint = self.endpoint.take();
        let refused = |setting| move |error| SettingsError::new(setting, format!("{error}"));
        let route = Route::new(pattern, self.settings()?).map_err(refused("route"))?;
        match endpoint {
            Some(endpoint) => route.endpoint(endpoint).map_err(refused("endpoint")),
            None => Ok(route),
        }
    }
}

fn header_name(name: &str) -> Result<HeaderName, SettingsError> {
    name.parse().map_err(|_| {
        let reason = format!("{name:?} is no header name, such as \"content-type\"");
        SettingsError::new("fingerprint_headers", reason)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(say: impl FnOnce(Builder<Config>) -> Builder<Config>) -> Result<Config, String> {
        say(Builder::new(Config::default(), Ok)).build().map_err(|error| error.to_string())
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_route_starts_from_the_defaults_in_whatever_order_they_are_said() {
        let config = built(|builder| {
            builder
                .route("POST /payments", |rule| rule.key(KeyRule::Required).keep(["2xx", "!202"]))
                .defaults(|rule| rule.timeout(SECOND * 5).unknown(["500"]))
                .namespace("payments")
                .sweep_every(None)
        });
        let config = config.expect("valid");
        assert_eq!((config.namespace.as_str(), config.sweep_every), ("payments", None));
        assert_eq!((config.defaults.timeout, config.defaults.lease()), (SECOND * 5, SECOND * 20));
        let expected = Settings {
            key: KeyRule::Required,
            keep: crate::KeepRules::new(&["2xx", "!202"], &["500"]).expect("valid"),
            ..config.defaults
        };
        let expected = Route::new("POST /payments", expected).expect("valid");
        assert_eq!(format!("{:?}", config.routes), format!("{:?}", [expected]));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_route() {
        let refused =
            |say: fn(Rule) -> Rule| built(|builder| builder.route("POST /x", say)).expect_err("refused");
        for (say, expected) in [
            (
                (|rule| rule.lease(SECOND)) as fn(Rule) -> Rule,
                "in the route \"POST /x\", `lease`: 1s must exceed timeout = 60s",
            ),
            (|rule| rule.retention(SECOND), "in the route \"POST /x\", `retention`: 1s must be at least"),
            (|rule| rule.keep(["2xx", "6xx"]), "in the route \"POST /x\", `keep`: "),
            (|rule| rule.unknown(["4xx"]), "in the route \"POST /x\", `keep`: 400 is in both"),
            (
                |rule| rule.fingerprint_headers(["no name"]),
                "in the route \"POST /x\", `fingerprint_headers`: ",
            ),
            (|rule| rule.endpoint("/x"), "in the route \"POST /x\", `endpoint`: "),
            // The first mistake is told, and a later one does not undo it.
            (|rule| rule.unknown(["x"]).keep(["y"]), "in the route \"POST /x\", `unknown`: "),
        ] {
            let error = refused(say);
            assert!(error.starts_with(expected), "{error}");
        }
        let error = built(|builder| builder.route("GET /x", |rule| rule)).expect_err("refused");
        assert!(error.starts_with("in the route \"GET /x\", `route`: \"GET /x\" names GET"), "{error}");
        let error = built(|builder| builder.defaults(|rule| rule.endpoint("x"))).expect_err("refused");
        assert!(error.starts_with("`endpoint`: "), "{error}");
        let error = built(|builder| builder.defaults(|rule| rule.wait(Duration::MAX))).expect_err("refused");
        assert!(error.starts_with("`wait`: "), "{error}");
    }
}
