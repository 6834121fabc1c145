//! Who asks. The same key from two callers is two operations, and neither sees the other's answer.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use http::header::{AUTHORIZATION, COOKIE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue};
use sha2::{Digest, Sha256};
use tracing::warn;

/// Headers whose values are secrets by their names. Of any other it is not known, and a readable caller
/// is worth much to whoever looks after the keys.
const CREDENTIALS: [&str; 8] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "x-api-key",
    "api-key",
    "apikey",
    "x-auth-token",
    "x-access-token",
];

/// How the caller of a request is told.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Caller {
    /// As [`Caller::Authorization`], because nobody said otherwise: a request with cookies and without
    /// Authorization is refused, since its session is who asks and all sessions would share one caller.
    #[default]
    Implicit,
    /// SHA-256 of the Authorization header; without it, the anonymous caller.
    Authorization,
    /// A header that a trusted gateway sets, or that holds an API key. A request without it is refused.
    /// The value is the readable caller, but SHA-256 of it where the header is for a credential:
    /// `authorization`, `proxy-authorization`, `cookie`, `x-api-key`, `api-key`, `apikey`, `x-auth-token`,
    /// `x-access-token`.
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
#[non_exhaustive]
pub enum CallerError {
    /// The request does not say who asks.
    Unresolved(String),
    /// The request says it in a way that does not verify.
    Unverified(String),
    /// Whoever could verify it is away.
    Unavailable(String),
}

impl Caller {
    /// [`Caller::Header`] by its name, in whatever case.
    ///
    /// # Panics
    /// If this is no header name. For one that comes from a configuration, parse it:
    /// `Caller::Header(name.parse()?)`.
    #[must_use]
    pub fn header(name: &str) -> Self {
        match name.parse() {
            Ok(name) => Self::Header(name),
            Err(_) => panic!("{name:?} is no header name, such as \"x-user-id\""),
        }
    }

    /// A request extension of type `T`, which the application's authentication left there; `name` is how the
    /// caller is told from others. A request without it is refused, and logged: the layer must stand inside of
    /// what authenticates.
    ///
    /// ```
    /// use onlyonce::Caller;
    ///
    /// #[derive(Clone)]
    /// struct User {
    ///     id: u64,
    /// }
    ///
    /// let caller = Caller::extension(|user: &User| user.id.to_string());
    /// ```
    pub fn extension<T, F>(name: F) -> Self
    where
        T: Send + Sync + 'static,
        F: Fn(&T) -> String + Send + Sync + 'static,
    {
        Self::from_request(move |request| match request.extensions.get::<T>() {
            Some(caller) => Ok(Some(name(caller))),
            None => {
                let missing = std::any::type_name::<T>();
                warn!(
                    missing,
                    "a guarded request has no such extension; is the layer inside of what authenticates?"
                );
                Err(CallerError::Unresolved("the application does not say who asks".into()))
            }
        })
    }

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

fn authorization(headers: &HeaderMap) -> String {
    let mut values = headers.get_all(AUTHORIZATION).iter().peekable();
    if values.peek().is_none() { String::new() } else { hashed(values.map(HeaderValue::as_bytes)) }
}

/// Hashed, so that no credential is ever stored or listed.
fn hashed<'a>(values: impl Iterator<Item = &'a [u8]>) -> String {
    let mut digest = Sha256::new();
    for value in values {
        digest.update((value.len() as u64).to_be_bytes());
        digest.update(value);
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
            Ok(value) if !value.trim().is_empty() => {
                let value = value.trim();
                let credential = CREDENTIALS.contains(&name.as_str());
                Ok(if credential { hashed([value.as_bytes()].into_iter()) } else { value.to_owned() })
            }
            Ok(_) => unresolved("is empty"),
            Err(_) => unresolved("is not printable ASCII"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &'static str, value: &'static str) -> Result<String, CallerError> {
        let name = HeaderName::from_static(name);
        header(&HeaderMap::from_iter([(name.clone(), HeaderValue::from_static(value))]), &name)
    }

    #[test]
    fn a_credential_is_hashed_whichever_header_it_comes_in() {
        for name in CREDENTIALS {
            let caller = told(name, "hunter2").expect("a caller");
            assert!(caller.starts_with("sha256:") && !caller.contains("hunter2"), "{name}: {caller}");
            assert_eq!(told(name, " hunter2 ").expect("a caller"), caller, "white space says nothing");
            assert_ne!(told(name, "hunter3").expect("a caller"), caller);
        }
        let headers = HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static("Bearer x"))]);
        assert_eq!(
            told("authorization", "Bearer x").as_ref(),
            Ok(&authorization(&headers)),
            "however it is set"
        );
    }

    #[test]
    fn a_header_is_named_in_any_case_and_must_be_one() {
        let Caller::Header(name) = Caller::header("X-User-Id") else { panic!("a header") };
        assert_eq!(name, "x-user-id");
        assert!(std::panic::catch_unwind(|| Caller::header("user id")).is_err());
    }

    #[test]
    fn any_other_header_is_the_readable_caller() {
        assert_eq!(told("x-user-id", " ann "), Ok("ann".to_owned()));
        assert!(told("x-api-key", "").is_err() && told("x-user-id", " ").is_err());
    }
}
