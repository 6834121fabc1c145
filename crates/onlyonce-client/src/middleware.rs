//! The layer for `reqwest-middleware`.

use std::sync::Arc;

use http::Extensions;
use onlyonce_core::Key;
use reqwest::{Request, Response};
use reqwest_middleware::{Middleware, Next};

use crate::decide::Loss;
use crate::error::Error;
use crate::send::{Lost, Sender, Transport};
use crate::settings::{Settings, SettingsError};

/// Says that a POST or PATCH is to go without a key, as an extension of its request. It is then sent once.
#[derive(Clone, Copy, Debug)]
pub struct Keyless;

/// Why there is no client.
#[derive(Debug)]
#[non_exhaustive]
pub enum BuildError {
    /// The settings contradict each other.
    Settings(SettingsError),
    /// The HTTP client could not be set up.
    Http(reqwest::Error),
    /// TLS could not be set up.
    Tls(rustls::Error),
}

/// A client whose every call is one operation: one key for all of its attempts. Further middleware is added
/// to what is returned; this layer stays outermost, so that each attempt passes through the others.
///
/// The settings of `http` for redirects and retries are replaced. reqwest would carry the key to another
/// origin, and send a request again on its own. Its default headers go along on every redirect, to another
/// origin too: set no credentials there.
///
/// Every call is its own operation, and so is that of a cloned request. To make two calls one operation, give
/// both the same key: in the `Idempotency-Key` header, or as a [`Key`] among the request's extensions. The
/// response's [`Receipt`](crate::Receipt) tells the key; an error is found with [`Error::of`].
///
/// ```
/// use onlyonce_client::{Settings, http, layered, mint};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let client = layered(http()?, Settings::default())?.build();
/// // A fresh key for this call …
/// let call = client.post("https://api.example/payments").body("amount=10");
/// // … and one key for both of these.
/// let call = client.post("https://api.example/payments").body("amount=10").with_extension(mint());
/// let again = call.try_clone();
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// If the settings contradict each other or `http` cannot be built.
pub fn layered(
    http: reqwest::ClientBuilder,
    settings: Settings,
) -> Result<reqwest_middleware::ClientBuilder, BuildError> {
    let layer = Layer(Arc::new(Sender::new(settings).map_err(BuildError::Settings)?));
    let http = sends_once(http).build().map_err(BuildError::Http)?;
    Ok(reqwest_middleware::ClientBuilder::new(http).with(layer))
}

/// A builder for reqwest's client that trusts what the system trusts. reqwest's own wants a process-wide
/// choice of cryptography first, unless one of its TLS features is on.
///
/// # Errors
/// If TLS cannot be set up.
pub fn http() -> Result<reqwest::ClientBuilder, BuildError> {
    use rustls_platform_verifier::BuilderVerifierExt;

    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(BuilderVerifierExt::with_platform_verifier)
        .map_err(BuildError::Tls)?
        .with_no_client_auth();
    // reqwest leaves this to whoever brings their own configuration.
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(reqwest::Client::builder().tls_backend_preconfigured(tls))
}

/// Whoever sends below the loop sends once, and where it is told.
pub(crate) fn sends_once(http: reqwest::ClientBuilder) -> reqwest::ClientBuilder {
    http.redirect(reqwest::redirect::Policy::none()).retry(reqwest::retry::never())
}

struct Layer(Arc<Sender>);

#[async_trait::async_trait]
impl Middleware for Layer {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let keyless = extensions.get::<Keyless>().is_some();
        let given = extensions.get::<Key>().cloned();
        let frozen = self
            .0
            .freeze(request, given.as_ref(), keyless)
            .await
            .map_err(reqwest_middleware::Error::middleware)?;
        // What carries no key may be a long download: it is passed on as it arrives.
        let gather = frozen.key.is_some();
        let mut below = Below { next, extensions };
        match self.0.run(&mut below, frozen, gather).await {
            Ok(reply) => Ok(reply.into_response()),
            Err(error) => Err(reqwest_middleware::Error::middleware(error)),
        }
    }
}

/// The layers below and the client.
struct Below<'a> {
    next: Next<'a>,
    extensions: &'a mut Extensions,
}

impl Transport for Below<'_> {
    async fn send(&mut self, request: Request) -> Result<Response, Lost> {
        self.next.clone().run(request, self.extensions).await.map_err(|error| match error {
            reqwest_middleware::Error::Reqwest(error) => Lost::from(error),
            reqwest_middleware::Error::Middleware(error) => {
                Lost { loss: Loss::Foreign, source: Some(error.into()) }
            }
        })
    }
}

impl std::fmt::Display for BuildError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Settings(error) => write!(f, "{error}"),
            Self::Http(error) => write!(f, "the HTTP client could not be set up: {error}"),
            Self::Tls(error) => write!(f, "TLS could not be set up: {error}"),
        }
    }
}

impl std::error::Error for BuildError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Settings(error) => Some(error),
            Self::Http(error) => Some(error),
            Self::Tls(error) => Some(error),
        }
    }
}

impl From<SettingsError> for BuildError {
    fn from(error: SettingsError) -> Self {
        Self::Settings(error)
    }
}

impl From<Error> for reqwest_middleware::Error {
    fn from(error: Error) -> Self {
        Self::middleware(error)
    }
}
