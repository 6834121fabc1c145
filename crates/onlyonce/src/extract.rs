//! What an axum handler can ask for.

use axum_core::extract::{FromRequestParts, OptionalFromRequestParts};
use axum_core::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;
use onlyonce_core::Transactional;
use tracing::error;

use crate::admit::IDEMPOTENCY_KEY;
use crate::layer::Execution;
use crate::problem::Problem;
use crate::transactional::{NoTransaction, Tx};

/// Why a handler that asks for an [`Execution`] was not called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unguarded {
    /// The request carries no key, and its route takes such requests: 400 `idempotency-key-missing`. With
    /// [`KeyRule::Required`](crate::KeyRule::Required) the layer says so itself.
    NoKey,
    /// The request carries a key, and no layer guards it: 500. Either there is none around the route, or none
    /// of its rules covers the method.
    NoLayer,
}

impl<S: Sync> FromRequestParts<S> for Execution {
    type Rejection = Unguarded;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Unguarded> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| {
            if parts.headers.contains_key(IDEMPOTENCY_KEY) {
                let (method, path) = (&parts.method, parts.uri.path());
                error!(%method, path, "the handler asks for an Execution, and no layer guards the request");
                Unguarded::NoLayer
            } else {
                Unguarded::NoKey
            }
        })
    }
}

/// `None` on a request that is not guarded.
impl<S: Sync> OptionalFromRequestParts<S> for Execution {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get().cloned())
    }
}

impl IntoResponse for Unguarded {
    fn into_response(self) -> Response {
        match self {
            Self::NoKey => Problem::key_missing().into_response().map(Into::into),
            Self::NoLayer => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

impl<S: Sync, T: Transactional> FromRequestParts<S> for Tx<T> {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoTransaction> {
        let taken = Self::take(&parts.extensions);
        taken.inspect_err(|error| {
            let (method, path) = (&parts.method, parts.uri.path());
            error!(%method, path, %error, "the handler asks for a transaction");
        })
    }
}

impl IntoResponse for NoTransaction {
    fn into_response(self) -> Response {
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}
