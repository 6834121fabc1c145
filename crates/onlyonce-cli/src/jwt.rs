//! The caller as a claim of a verified token, so that a refreshed token is the same caller.
//!
//! 1. No token: the anonymous caller.
//! 2. The algorithm is the key's, never the token's: a key set holds public keys only, each usable with
//!    the algorithms of its own kind. `none` and HMAC match no key.
//! 3. The signature must verify, and `exp` and `nbf` must hold where they are present, with
//!    [`LEEWAY`] for clocks that differ.
//! 4. The claim must be a string or a number.
//!
//! Whether the token is *for* this API is the API's own affair: it sees every request that executes. A
//! replay it does not see, so `issuer` and `audience` can be pinned for keys that sign for several.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::request::Parts;
use http::{HeaderName, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use onlyonce::caller::{CallerError, ResolveCaller, Resolving};
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, warn};

use crate::connect::Connector;
use crate::upstream::redact;

/// How much the issuer's clock may differ from this machine's.
pub const LEEWAY: Duration = Duration::from_secs(60);

/// How often keys are fetched at most, however many tokens name an unknown one. On the local clock, from
/// start to start.
pub const FETCH_EVERY_MIN: Duration = Duration::from_secs(10);

/// How old keys become before they are fetched again, so that a withdrawn key does not stay. On the
/// local clock.
pub const KEYS_AGE_MAX: Duration = Duration::from_secs(600);

/// How soon after its start a failed fetch is tried again, on the local clock.
const RETRY_EVERY_MIN: Duration = Duration::from_secs(1);

/// How long a fetch is waited for, from its start and on the local clock, by whoever has a key that is only
/// old.
const REFRESH_WAIT_MAX: Duration = Duration::from_millis(500);

const FETCH_TIME_MAX: Duration = Duration::from_secs(5);
const JWKS_BYTES_MAX: usize = 1 << 20;

/// Where the token is, what is taken from it, and who signs it.
#[derive(Clone, Debug)]
pub struct JwtSettings {
    /// The header with the token; in `authorization`, behind `Bearer`.
    pub header: HeaderName,
    /// The claim that names the caller.
    pub claim: String,
    /// The keys.
    pub jwks: Source,
    /// What `iss` must be, if it is pinned.
    pub issuer: Option<String>,
    /// What `aud` must have, if it is pinned.
    pub audience: Option<String>,
}

/// Where a key set (RFC 7517) is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// In a file, read again like a URL is fetched again.
    File(PathBuf),
    /// At an `http` or `https` URL.
    Url(Uri),
}

impl Source {
    /// Reads a path or a URL.
    ///
    /// # Errors
    /// Refuses another URL than `http` and `https`, and one with credentials.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.contains("://") {
            return if text.is_empty() { Err("`jwks` is empty".into()) } else { Ok(Self::File(text.into())) };
        }
        match text.parse::<Uri>() {
            Ok(uri)
                if matches!(uri.scheme_str(), Some("http" | "https"))
                    && uri.authority().is_some_and(|authority| !authority.as_str().contains('@')) =>
            {
                Ok(Self::Url(uri))
            }
            _ => Err(format!(
                "{:?} is no place for keys; a file or an http or https URL without credentials is allowed",
                redact(text)
            )),
        }
    }

    fn is_https(&self) -> bool {
        matches!(self, Self::Url(uri) if uri.scheme_str() == Some("https"))
    }
}

/// Tells the caller of a request by its token.
pub struct JwtCaller {
    settings: JwtSettings,
    key_set: Arc<KeySet>,
}

/// The issuer's keys, and the one fetch of them that may be under way.
struct KeySet {
    source: Source,
    client: Client<Connector, Empty<Bytes>>,
    state: Mutex<State>,
}

struct State {
    keys: Arc<Keys>,
    tried: Option<Try>,
}

/// The latest fetch.
#[derive(Clone)]
struct Try {
    started: Instant,
    failed: bool,
    /// Closed when it has ended, however it did.
    under_way: watch::Receiver<()>,
}

#[derive(Default)]
struct Keys {
    known: Vec<Known>,
    fetched_at: Option<Instant>,
}

#[derive(Clone)]
struct Known {
    id: Option<String>,
    algorithms: Vec<Algorithm>,
    key: DecodingKey,
}

impl JwtCaller {
    /// A caller told by these settings. A key set in a file is read now.
    ///
    /// # Errors
    /// If the file has no keys, or the system's certificates cannot be loaded for an https URL.
    pub fn new(settings: JwtSettings) -> std::io::Result<Self> {
        let mut keys = Keys::default();
        if let Source::File(path) = &settings.jwks {
            let explain = |reason: &dyn std::fmt::Display| {
                std::io::Error::other(format!("the key set {}: {reason}", path.display()))
            };
            let bytes = std::fs::read(path).map_err(|error| explain(&error))?;
            keys.known = read(&bytes).map_err(|error| explain(&error))?;
            keys.fetched_at = Some(Instant::now());
        }
        let key_set = KeySet {
            source: settings.jwks.clone(),
            client: Client::builder(TokioExecutor::new())
                .pool_max_idle_per_host(0)
                .build(Connector::new(settings.jwks.is_https())?),
            state: Mutex::new(State {
                tried: keys.fetched_at.map(|started| Try {
                    started,
                    failed: false,
                    under_way: watch::channel(()).1,
                }),
                keys: Arc::new(keys),
            }),
        };
        Ok(Self { settings, key_set: Arc::new(key_set) })
    }

    async fn told(&self, request: &Parts) -> Result<Option<String>, CallerError> {
        let Some(token) = self.token(request)? else { return Ok(None) };
        let header = jsonwebtoken::decode_header(token).map_err(|error| unverified(&error))?;
        if symmetric(header.alg) {
            return Err(CallerError::Unverified(format!(
                "the token's algorithm {:?} is not allowed",
                header.alg
            )));
        }
        let candidates = self.candidates(header.kid.as_deref(), header.alg).await?;
        if candidates.is_empty() {
            return Err(CallerError::Unverified("the token is signed with an unknown key".into()));
        }
        let validation = self.validation(header.alg);
        let mut refusal = None;
        for known in candidates {
            match jsonwebtoken::decode::<Map<String, Value>>(token, &known.key, &validation) {
                Ok(data) => return self.claim(&data.claims).map(Some),
                Err(error) => refusal = Some(unverified(&error)),
            }
        }
        Err(refusal.unwrap_or_else(|| CallerError::Unverified("the token does not verify".into())))
    }

    /// `None` if the request has no token. Another scheme than `Bearer` is no token that could be
    /// verified, and not nobody either.
    fn token<'a>(&self, request: &'a Parts) -> Result<Option<&'a str>, CallerError> {
        let name = &self.settings.header;
        let mut lines = request.headers.get_all(name).iter();
        let Some(line) = lines.next() else { return Ok(None) };
        let refuse = |reason: &str| Err(CallerError::Unverified(format!("the header {name} {reason}")));
        if lines.next().is_some() {
            return refuse("is there more than once");
        }
        let Ok(line) = line.to_str() else { return refuse("is not printable ASCII") };
        let token = match line.trim().split_once(' ') {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => token.trim(),
            None if *name != AUTHORIZATION => line.trim(),
            _ => return refuse("has no Bearer token"),
        };
        if token.is_empty() { refuse("has an empty token") } else { Ok(Some(token)) }
    }

    /// The keys that may have signed a token with this header.
    async fn candidates(&self, id: Option<&str>, algorithm: Algorithm) -> Result<Vec<Known>, CallerError> {
        let find = |keys: &Keys| -> Vec<Known> {
            let named = |known: &&Known| id.is_none() || known.id.is_none() || known.id.as_deref() == id;
            let found = keys.known.iter().filter(named);
            found.filter(|known| known.algorithms.contains(&algorithm)).cloned().collect()
        };
        let keys = self.key_set.current();
        let found = find(&keys);
        let fresh = keys.fetched_at.is_some_and(|at| at.elapsed() < KEYS_AGE_MAX);
        if !found.is_empty() && fresh {
            return Ok(found);
        }
        if let Some(Try { started, mut under_way, .. }) = self.key_set.refresh(&keys) {
            let ended = under_way.changed();
            if found.is_empty() {
                let _ = ended.await;
            } else {
                // An old key may have been withdrawn, and an issuer that hangs must not hang everyone.
                let _ = timeout_at(started + REFRESH_WAIT_MAX, ended).await;
            }
        }
        let keys = self.key_set.current();
        match keys.fetched_at {
            Some(_) => Ok(find(&keys)),
            None => Err(CallerError::Unavailable("the keys that verify tokens cannot be fetched".into())),
        }
    }

    fn validation(&self, algorithm: Algorithm) -> Validation {
        let mut validation = Validation::new(algorithm);
        validation.leeway = LEEWAY.as_secs();
        validation.validate_nbf = true;
        validation.validate_aud = self.settings.audience.is_some();
        let mut required = Vec::new();
        if let Some(audience) = &self.settings.audience {
            validation.set_audience(&[audience]);
            required.push("aud");
        }
        if let Some(issuer) = &self.settings.issuer {
            validation.set_issuer(&[issuer]);
            required.push("iss");
        }
        validation.set_required_spec_claims(&required);
        validation
    }

    fn claim(&self, claims: &Map<String, Value>) -> Result<String, CallerError> {
        let name = &self.settings.claim;
        match claims.get(name) {
            Some(Value::String(caller)) if !caller.is_empty() => Ok(caller.clone()),
            Some(Value::Number(caller)) => Ok(caller.to_string()),
            Some(_) => Err(CallerError::Unresolved(format!(
                "the token's claim `{name}` is neither a number nor a string with something in it"
            ))),
            None => Err(CallerError::Unresolved(format!("the token has no claim `{name}`"))),
        }
    }
}

impl KeySet {
    fn current(&self) -> Arc<Keys> {
        Arc::clone(&self.lock().keys)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fetch that is under way; one is started unless these keys were replaced, or another was tried, a
    /// moment ago. It runs on a task of its own: callers that hang up would otherwise take their tries with
    /// them, and every one that comes back would ask the issuer again.
    fn refresh(self: &Arc<Self>, seen: &Arc<Keys>) -> Option<Try> {
        let mut state = self.lock();
        if !Arc::ptr_eq(seen, &state.keys) {
            return None;
        }
        if let Some(tried) = &state.tried {
            if tried.under_way.has_changed().is_ok() {
                return Some(tried.clone());
            }
            let pause = if tried.failed { RETRY_EVERY_MIN } else { FETCH_EVERY_MIN };
            if tried.started.elapsed() < pause {
                return None;
            }
        }
        let (ended, under_way) = watch::channel(());
        let tried = Try { started: Instant::now(), failed: true, under_way };
        state.tried = Some(tried.clone());
        let key_set = Arc::clone(self);
        tokio::spawn(async move {
            key_set.fetch().await;
            drop(ended);
        });
        Some(tried)
    }

    /// Fetches the keys. Those that are known stay if it fails.
    async fn fetch(&self) {
        let fetched = timeout(FETCH_TIME_MAX, self.load())
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {FETCH_TIME_MAX:?}")));
        match fetched {
            Ok(known) => {
                debug!(keys = known.len(), "fetched the keys that verify tokens");
                let mut state = self.lock();
                state.keys = Arc::new(Keys { known, fetched_at: Some(Instant::now()) });
                if let Some(tried) = &mut state.tried {
                    tried.failed = false;
                }
            }
            Err(error) => warn!(%error, "the keys that verify tokens cannot be fetched"),
        }
    }

    async fn load(&self) -> Result<Vec<Known>, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        match &self.source {
            Source::File(path) => read(&tokio::fs::read(path).await.map_err(|error| text(&error))?),
            Source::Url(uri) => {
                let mut request = Request::new(Empty::new());
                *request.uri_mut() = uri.clone();
                let response = self
                    .client
                    .request(request)
                    .await
                    .map_err(|error| text(&crate::forward::Chain(&error)))?;
                if response.status() != StatusCode::OK {
                    return Err(format!("the answer was {}", response.status()));
                }
                let body = Limited::new(response.into_body(), JWKS_BYTES_MAX).collect().await;
                read(&body.map_err(|error| text(&error))?.to_bytes())
            }
        }
    }
}

impl ResolveCaller for JwtCaller {
    fn resolve<'a>(&'a self, request: &'a Parts) -> Resolving<'a> {
        Box::pin(self.told(request))
    }
}

fn unverified(error: &jsonwebtoken::errors::Error) -> CallerError {
    CallerError::Unverified(format!("the token does not verify ({error})"))
}

fn symmetric(algorithm: Algorithm) -> bool {
    matches!(algorithm, Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512)
}

/// The usable keys of a set. Others are passed over: sets also hold keys for encryption and kinds to come.
fn read(bytes: &[u8]) -> Result<Vec<Known>, String> {
    let set: Value = serde_json::from_slice(bytes).map_err(|error| format!("not JSON ({error})"))?;
    let keys = set.get("keys").and_then(Value::as_array).ok_or("not a key set: there is no list `keys`")?;
    let known: Vec<Known> = keys
        .iter()
        .filter_map(|key| serde_json::from_value::<Jwk>(key.clone()).ok())
        .filter_map(|key| usable(&key))
        .collect();
    if known.is_empty() { Err("no key in it can verify a signature".into()) } else { Ok(known) }
}

fn usable(jwk: &Jwk) -> Option<Known> {
    use Algorithm::{ES256, ES384, EdDSA, PS256, PS384, PS512, RS256, RS384, RS512};
    if matches!(jwk.common.public_key_use, Some(PublicKeyUse::Encryption)) {
        return None;
    }
    let mut algorithms = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => vec![RS256, RS384, RS512, PS256, PS384, PS512],
        AlgorithmParameters::EllipticCurve(key) => match key.curve {
            EllipticCurve::P256 => vec![ES256],
            EllipticCurve::P384 => vec![ES384],
            _ => return None,
        },
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => vec![EdDSA],
        _ => return None,
    };
    if let Some(only) = jwk.common.key_algorithm {
        let only = only.to_string().parse::<Algorithm>().ok()?;
        algorithms.retain(|algorithm| *algorithm == only);
    }
    let key = DecodingKey::from_jwk(jwk).ok()?;
    (!algorithms.is_empty()).then(|| Known { id: jwk.common.key_id.clone(), algorithms, key })
}

#[cfg(test)]
mod tests;
