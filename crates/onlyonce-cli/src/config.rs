//! What the proxy is told: flags, environment, file, in this order of precedence.
//!
//! 1. A flag, or else its `ONLYONCE_*` variable.
//! 2. The file that `--config` names.
//! 3. For the store only: `DATABASE_URL`.
//! 4. The default.
//!
//! Every error is one line that names the place (file and line, or flag) and what is allowed. No error
//! repeats a store's URL as it was given, because there may be a password in it.

mod file;

use std::fmt;
use std::path::Path;
use std::time::Duration;

use http::HeaderName;
use onlyonce::NAMESPACE_DEFAULT;
use onlyonce::rules::Route;
use onlyonce::settings::{DURATION_MAX, Settings};

use crate::cli::{ProxyArgs, StoreArgs};
use crate::forward::HostRule;
use crate::jwt::JwtSettings;
use crate::store::StoreUrl;
use crate::upstream::Upstream;

/// Where the proxy listens unless it is told otherwise.
pub const LISTEN_DEFAULT: &str = "127.0.0.1:8080";

/// Where `/healthz`, `/readyz` and `/metrics` are unless it is told otherwise.
pub const ADMIN_DEFAULT: &str = "127.0.0.1:8081";

/// The store unless anything names one.
pub const STORE_DEFAULT: &str = "sqlite:onlyonce.db";

/// Everything that the proxy is told. The durations are on its own monotonic clock.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// Host and port to listen on; port 0 takes a free one.
    pub listen: String,
    /// Host and port of the admin server.
    pub admin: String,
    /// Where requests go.
    pub upstream: Upstream,
    /// Where keys are kept.
    pub store: StoreUrl,
    /// Who asks.
    pub caller: CallerSetting,
    /// Which API this is.
    pub namespace: String,
    /// How long a finished answer is held back while its outcome cannot be recorded.
    pub record_grace: Duration,
    /// How long guarded work may go on after a signal to stop.
    pub shutdown_grace: Duration,
    /// How often expired keys are removed.
    pub sweep_every: Duration,
    /// Whether a store may be used that can forget what it acknowledged.
    pub allow_volatile: bool,
    /// How long to wait at start for a store that is away.
    pub store_start_wait: Duration,
    /// What the upstream is told as the host.
    pub host: HostRule,
    /// The settings where no route says otherwise.
    pub defaults: Settings,
    /// The first that matches wins.
    pub routes: Vec<Route>,
}

impl ProxyConfig {
    /// The defaults, for this upstream and store.
    #[must_use]
    pub fn new(upstream: Upstream, store: StoreUrl) -> Self {
        Self {
            listen: LISTEN_DEFAULT.to_owned(),
            admin: ADMIN_DEFAULT.to_owned(),
            upstream,
            store,
            caller: CallerSetting::Implicit,
            namespace: NAMESPACE_DEFAULT.to_owned(),
            record_grace: Duration::from_secs(2),
            shutdown_grace: Duration::from_secs(60),
            sweep_every: Duration::from_secs(60),
            allow_volatile: false,
            store_start_wait: Duration::from_secs(30),
            host: HostRule::default(),
            defaults: Settings::default(),
            routes: Vec::new(),
        }
    }

    /// Reads the file that the flags name, and lays the flags over it.
    ///
    /// # Errors
    /// Names what is wrong, where, and what is allowed.
    pub fn load(args: &ProxyArgs) -> Result<Self, ConfigError> {
        let file = FileConfig::load(args.store.config.as_deref())?;
        let upstream = match (&args.upstream, file.upstream) {
            (Some(flag), _) => Upstream::parse(flag)
                .map_err(|error| ConfigError::new("--upstream or ONLYONCE_UPSTREAM", error))?,
            (None, Some(upstream)) => upstream,
            (None, None) => {
                return Err(ConfigError::new(
                    "upstream",
                    "is not set; give --upstream URL, ONLYONCE_UPSTREAM or `upstream` in the --config file",
                ));
            }
        };
        let flag = |value: &Option<String>, name: &'static str| match value {
            Some(value) => address(value).map(Some).map_err(|reason| ConfigError::new(name, reason)),
            None => Ok(None),
        };
        let store = store(&args.store, file.store)?;
        let mut config = Self {
            listen: flag(&args.listen, "--listen or ONLYONCE_LISTEN")?
                .or(file.listen)
                .unwrap_or_else(|| LISTEN_DEFAULT.to_owned()),
            admin: flag(&args.admin, "--admin or ONLYONCE_ADMIN")?
                .or(file.admin)
                .unwrap_or_else(|| ADMIN_DEFAULT.to_owned()),
            allow_volatile: args.store.allow_volatile || file.allow_volatile.unwrap_or(false),
            host: file.host.unwrap_or_default(),
            defaults: file.defaults,
            routes: file.routes,
            ..Self::new(upstream, store)
        };
        if let Some(caller) = &args.caller {
            config.caller = CallerSetting::parse_flag(caller)
                .map_err(|reason| ConfigError::new("--caller or ONLYONCE_CALLER", reason))?;
        } else if let Some(caller) = file.caller {
            config.caller = caller;
        }
        if let Some(namespace) = args.namespace.clone() {
            config.namespace = check_namespace(namespace)
                .map_err(|reason| ConfigError::new("--namespace or ONLYONCE_NAMESPACE", reason))?;
        } else if let Some(namespace) = file.namespace {
            config.namespace = namespace;
        }
        for (to, from) in [
            (&mut config.record_grace, file.record_grace),
            (&mut config.shutdown_grace, file.shutdown_grace),
            (&mut config.sweep_every, file.sweep_every),
            (&mut config.store_start_wait, file.store_start_wait),
        ] {
            *to = from.unwrap_or(*to);
        }
        if config.listen == config.admin && !config.listen.ends_with(":0") {
            return Err(ConfigError::new(
                "admin",
                format!(
                    "and listen are both {}; the admin server needs an address of its own, such as {ADMIN_DEFAULT}",
                    config.listen
                ),
            ));
        }
        Ok(config)
    }
}

/// Who asks, as it is configured.
#[derive(Clone, Debug, Default)]
pub enum CallerSetting {
    /// Nobody said: [`Caller::Implicit`](onlyonce::Caller::Implicit).
    #[default]
    Implicit,
    /// [`Caller::Authorization`](onlyonce::Caller::Authorization).
    Authorization,
    /// [`Caller::Everyone`](onlyonce::Caller::Everyone).
    Everyone,
    /// [`Caller::Header`](onlyonce::Caller::Header).
    Header(HeaderName),
    /// A claim of a verified token.
    Jwt(JwtSettings),
}

/// What `caller` may be, for error messages.
const CALLER_ALLOWED: &str = "\"authorization\", \"none\", { header = \"NAME\" } and \
     { jwt = { header = \"authorization\", claim = \"sub\", jwks = \"FILE or URL\" } } are allowed";

impl CallerSetting {
    fn parse_name(name: &str) -> Result<Self, String> {
        match name {
            "authorization" => Ok(Self::Authorization),
            "none" => Ok(Self::Everyone),
            _ => Err(format!("{name:?} is no caller; {CALLER_ALLOWED}")),
        }
    }

    /// A flag says less than the file: it has no place for a token's settings.
    fn parse_flag(text: &str) -> Result<Self, String> {
        let allowed = "authorization, none and header:NAME are allowed, and a jwt in the --config file";
        match text.strip_prefix("header:") {
            Some(name) => match name.parse() {
                Ok(name) => Ok(Self::Header(name)),
                Err(_) => Err(format!("{name:?} is no header name; {allowed}")),
            },
            None => Self::parse_name(text).map_err(|_| format!("{text:?} is no caller; {allowed}")),
        }
    }
}

/// The store that a command works on: by flag, environment, file, `DATABASE_URL`, default.
///
/// # Errors
/// Names what is wrong, where, and what is allowed.
pub fn load_store(args: &StoreArgs) -> Result<(StoreUrl, FileConfig), ConfigError> {
    let mut file = FileConfig::load(args.config.as_deref())?;
    Ok((store(args, file.store.take())?, file))
}

fn store(args: &StoreArgs, file: Option<StoreUrl>) -> Result<StoreUrl, ConfigError> {
    let parse = |origin: &'static str, url: &str| {
        StoreUrl::parse(url).map_err(|reason| ConfigError::new(origin, reason))
    };
    match (&args.store, file, &args.database_url) {
        (Some(url), ..) => parse("--store or ONLYONCE_STORE", url),
        (None, Some(store), _) => Ok(store),
        (None, None, Some(url)) => {
            parse("DATABASE_URL (used because no store is set; --store goes before it)", url)
        }
        (None, None, None) => parse("store", STORE_DEFAULT),
    }
}

/// What the file says, checked.
#[derive(Clone, Debug, Default)]
pub struct FileConfig {
    listen: Option<String>,
    admin: Option<String>,
    upstream: Option<Upstream>,
    store: Option<StoreUrl>,
    caller: Option<CallerSetting>,
    namespace: Option<String>,
    record_grace: Option<Duration>,
    shutdown_grace: Option<Duration>,
    sweep_every: Option<Duration>,
    allow_volatile: Option<bool>,
    store_start_wait: Option<Duration>,
    host: Option<HostRule>,
    defaults: Settings,
    routes: Vec<Route>,
}

impl FileConfig {
    /// Reads and checks the file; without one, nothing is set.
    ///
    /// # Errors
    /// Names the file, the line, and what is allowed.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = path else { return Ok(Self::default()) };
        let name = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&name, &text),
            Err(error) => {
                Err(ConfigError::new(name, format!("cannot be read ({error}); give --config a TOML file")))
            }
        }
    }

    /// Reads and checks a file's text; `name` is how errors call it.
    ///
    /// # Errors
    /// Names the file, the line, and what is allowed.
    pub fn parse(name: &str, text: &str) -> Result<Self, ConfigError> {
        file::parse(text).map_err(|error| {
            let line = error.at.map(|at| text[..at.min(text.len())].matches('\n').count() + 1);
            ConfigError::new(
                line.map_or_else(|| name.to_owned(), |line| format!("{name}:{line}")),
                error.reason,
            )
        })
    }

    /// Whether cookies are recorded where no route says otherwise.
    #[must_use]
    pub fn record_cookies(&self) -> bool {
        self.defaults.record_cookies
    }

    /// Where requests go, if the file says so.
    #[must_use]
    pub fn upstream(&self) -> Option<&Upstream> {
        self.upstream.as_ref()
    }

    /// Whether a store may be used that can forget what it acknowledged.
    #[must_use]
    pub fn allow_volatile(&self) -> bool {
        self.allow_volatile.unwrap_or(false)
    }
}

/// Checks `HOST:PORT`.
fn address(text: &str) -> Result<String, String> {
    let valid = text
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok());
    if valid {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is no address; HOST:PORT is allowed, such as {LISTEN_DEFAULT} or 0.0.0.0:8080"))
    }
}

fn check_namespace(namespace: String) -> Result<String, String> {
    if namespace.is_empty() || namespace.chars().any(char::is_control) {
        return Err("must be one or more printable characters, such as \"payments\"".into());
    }
    Ok(namespace)
}

fn check_duration(name: &str, duration: Duration) -> Result<Duration, String> {
    if duration > DURATION_MAX {
        return Err("is too long; at most ten years (3660d)".into());
    }
    // Sweeping without a pause would be a busy loop; the graces and the wait may be nothing.
    if name == "sweep_every" && duration.is_zero() {
        return Err("must be longer than zero".into());
    }
    Ok(duration)
}

/// A setting that cannot be, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    origin: String,
    reason: String,
}

impl ConfigError {
    fn new(origin: impl Into<String>, reason: impl fmt::Display) -> Self {
        Self { origin: origin.into(), reason: reason.to_string() }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A quoted setting may have line breaks of its own.
        write!(f, "{}: {}", self.origin, self.reason.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

impl std::error::Error for ConfigError {}

#[cfg(test)]
mod tests;
