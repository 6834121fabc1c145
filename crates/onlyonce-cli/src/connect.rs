//! Connections to other servers: TCP, and TLS where the URL says so.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use tokio::time::timeout;
use tower_service::Service;

/// How long a connection may take to come about, on the local clock: name, TCP and TLS together.
pub(crate) const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// After how long a silent connection is asked whether it still exists, on the local clock. What is not
/// guarded has no timeout, and a peer that vanished without a word would be waited for for ever.
pub(crate) const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(60);

/// Connects to HTTP servers within [`CONNECT_TIME_MAX`]. It offers HTTP/1.1 only: with one request on a
/// connection at a time it is always known whether a request was sent.
#[derive(Clone)]
pub(crate) struct Connector(HttpsConnector<HttpConnector>);

impl Connector {
    /// `https` says whether the system's certificates are needed.
    ///
    /// # Errors
    /// If they are and cannot be loaded.
    pub(crate) fn new(https: bool) -> io::Result<Self> {
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let builder = if https {
            HttpsConnectorBuilder::new().with_provider_and_native_roots(provider)?
        } else {
            let config = rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .map_err(io::Error::other)?
                .with_root_certificates(rustls::RootCertStore::empty())
                .with_no_client_auth();
            HttpsConnectorBuilder::new().with_tls_config(config)
        };
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(KEEP_ALIVE_AFTER));
        tcp.enforce_http(false);
        Ok(Self(builder.https_or_http().enable_http1().wrap_connector(tcp)))
    }
}

type Inner = HttpsConnector<HttpConnector>;
type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Service<Uri> for Connector {
    type Response = <Inner as Service<Uri>>::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            timeout(CONNECT_TIME_MAX, connecting)
                .await
                .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
        })
    }
}
