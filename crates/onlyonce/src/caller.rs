//! Who asks. The same key from two callers is two operations, and neither sees the other's answer.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use http::header::{AUTHORIZATION, COOKIE};
use http::request::Parts;
use http::{HeaderMap, HeaderName};
use sha2::{Digest, Sha256};

/// How the caller of a request is told.
#[derive(Clone, Default)]
pub enum Caller {
    /// As [`Caller::Authorization`], because nobody said otherwise: a request with cookies and without
    /// Authorization is refused, since its session is who asks and all sessions would share one caller.
    #[default]
    Implicit,
    /// SHA-256 of the Authorization header; without it, the anonymous caller.
    Authorization,
    /// A header that a trusted gateway sets. A request without it is refused.
    Header(HeaderName),
    /// Everyone is one caller.
    Everyone,
    /// Asks the application.
    Custom(Arc<dyn ResolveCaller>),
}

/// What resolving a caller gives: its name, or `None` for the anonymous caller.
pub type Resolving<'a> = Pin<Box<dyn Future<Output = Result<Option<String>, CallerError>> + Send + 'a>>;

/// Tells the caller of a request from its head.
pub trait ResolveCaller: Send + Sync + 'static {
    /// The caller's name, or `None` for the anonymous caller. An empty name counts as unresolved.
    fn resolve<'a>(&'a self, request: &'a Parts) -> Resolving<'a>;
}

/// Why nobody can be told to be the caller. The work does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallerError {
    /// The request does not say who asks.
    Unresolved(String),
    /// The request says it in a way that does not verify.
    Unverified(String),
    /// Whoever could verify it is away.
    Unavailable(String),
}

impl Caller {
    /// A caller that the application takes from the request's head, for example from an extension that
    /// its authentication left there.
    pub fn from_request<F>(tell: F) -> Self
    where
        F: Fn(&Parts) -> Result<Option<String>, CallerError> + Send + Sync + 'static,
    {
        struct Closure<F>(F);
        impl<F> ResolveCaller for Closure<F>
        where
            F: Fn(&Parts) -> Result<Option<String>, CallerError> + Send + Sync + 'static,
        {
            fn resolve<'a>(&'a self, request: &'a Parts) -> Resolving<'a> {
                Box::pin(std::future::ready((self.0)(request)))
            }
        }
        Self::Custom(Arc::new(Closure(tell)))
    }

    /// The readable caller of an operation; empty for the anonymous one.
    pub(crate) async fn resolve(&self, request: &Parts) -> Result<String, CallerError> {
        match self {
            Self::Everyone => Ok(String::new()),
            Self::Authorization => Ok(authorization(&request.headers)),
            Self::Implicit => {
                if request.headers.contains_key(COOKIE) && !request.headers.contains_key(AUTHORIZATION) {
                    return Err(CallerError::Unresolved(
                        "the request has cookies and no Authorization header, so its session is who asks, and no \
                         setting says how to tell sessions apart; set `caller`"
                            .into(),
                    ));
                }
                Ok(authorization(&request.headers))
            }
            Self::Header(name) => header(&request.headers, name),
            Self::Custom(custom) => match custom.resolve(request).await? {
                None => Ok(String::new()),
                Some(name) if name.is_empty() => {
                    Err(CallerError::Unresolved("the caller's name is empty".into()))
                }
                Some(name) => Ok(name),
            },
        }
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Implicit => f.write_str("Implicit"),
            Self::Authorization => f.write_str("Authorization"),
            Self::Header(name) => f.debug_tuple("Header").field(name).finish(),
            Self::Everyone => f.write_str("Everyone"),
            Self::Custom(_) => f.write_str("Custom"),
        }
    }
}

/// Hashed, so that no credential is ever stored or listed.
fn authorization(headers: &HeaderMap) -> String {
    let mut values = headers.get_all(AUTHORIZATION).iter().peekable();
    if values.peek().is_none() {
        return String::new();
    }
    let mut digest = Sha256::new();
    for value in values {
        digest.update((value.len() as u64).to_be_bytes());
        digest.update(value.as_bytes());
    }
    let digest = digest.finalize();
    digest.iter().fold("sha256:".to_owned(), |mut text, byte| {
        use fmt::Write;
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn header(headers: &HeaderMap, name: &HeaderName) -> Result<String, CallerError> {
    let mut values = headers.get_all(name).iter();
    let unresolved = |reason: &str| Err(CallerError::Unresolved(format!("the header {name} {reason}")));
    match (values.next(), values.next()) {
        (None, _) => unresolved("is missing; the gateway in front should set it"),
        (Some(_), Some(_)) => unresolved("is there more than once"),
        (Some(value), None) => match value.to_str() {
            Ok(value) if !value.trim().is_empty() => Ok(value.trim().to_owned()),
            Ok(_) => unresolved("is empty"),
            Err(_) => unresolved("is not printable ASCII"),
        },
    }
}
