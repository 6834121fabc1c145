//! Every refusal: RFC 9457 problem details, told apart from an application's own 409 or 422 by their
//! `type` and the `Onlyonce-Refused` header.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use onlyonce_core::Refusal;

/// The response header that names the code of a refusal.
pub const REFUSED: HeaderName = HeaderName::from_static("onlyonce-refused");

/// Gives a refusal another body: its content type and its bytes.
pub type RefusalBody = Arc<dyn Fn(&Problem) -> (HeaderValue, Bytes) + Send + Sync>;

/// What was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Code {
    /// No key, and the rule requires one.
    KeyMissing,
    /// The key is not 1 to 255 printable ASCII characters, or there is more than one.
    KeyMalformed,
    /// The key was first used for a different request.
    KeyReused,
    /// The first request with this key is still running.
    InProgress,
    /// Nobody can be told to be the caller.
    CallerUnresolved,
    /// The caller's token does not verify.
    CallerUnverified,
    /// The service behind was not reached; nothing was sent.
    UpstreamUnreachable,
    /// The service behind was sent the request and its answer was lost.
    UpstreamLost,
    /// The service behind did not answer in time.
    UpstreamTimeout,
    /// The holder of the key went silent, and nobody knows whether the work happened.
    OutcomeUnknown,
    /// The work was done and its answer could not be kept.
    ResponseNotKept,
    /// The request's body is over the limit.
    RequestTooLarge,
    /// The request's body did not arrive in time.
    RequestTooSlow,
    /// The request's body is malformed, or its connection ended.
    RequestIncomplete,
    /// A request that asks for an upgrade cannot be replayed.
    NotGuardable,
    /// The store cannot say who holds the key.
    StoreUnavailable,
    /// The transaction with the work in it was rolled back: nothing was done.
    NotCommitted,
}

impl Code {
    /// The code as it stands in the problem type and the `Onlyonce-Refused` header.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::KeyMissing => "idempotency-key-missing",
            Self::KeyMalformed => "idempotency-key-malformed",
            Self::KeyReused => "idempotency-key-reused",
            Self::InProgress => "request-in-progress",
            Self::CallerUnresolved => "caller-unresolved",
            Self::CallerUnverified => "caller-unverified",
            Self::UpstreamUnreachable => "upstream-unreachable",
            Self::UpstreamLost => "upstream-lost",
            Self::UpstreamTimeout => "upstream-timeout",
            Self::OutcomeUnknown => "outcome-unknown",
            Self::ResponseNotKept => "response-not-kept",
            Self::RequestTooLarge => "request-too-large",
            Self::RequestTooSlow => "request-too-slow",
            Self::RequestIncomplete => "request-incomplete",
            Self::NotGuardable => "not-guardable",
            Self::StoreUnavailable => "store-unavailable",
            Self::NotCommitted => "not-committed",
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Self::KeyMissing
            | Self::KeyMalformed
            | Self::CallerUnresolved
            | Self::RequestIncomplete
            | Self::NotGuardable => StatusCode::BAD_REQUEST,
            Self::CallerUnverified => StatusCode::UNAUTHORIZED,
            Self::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::InProgress | Self::OutcomeUnknown | Self::ResponseNotKept => StatusCode::CONFLICT,
            Self::UpstreamUnreachable | Self::UpstreamLost => StatusCode::BAD_GATEWAY,
            Self::UpstreamTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::RequestTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::RequestTooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::StoreUnavailable | Self::NotCommitted => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// What happened, in a few words that are always the same.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::KeyMissing => "An Idempotency-Key is required",
            Self::KeyMalformed => "The Idempotency-Key is malformed",
            Self::KeyReused => "The Idempotency-Key was used for a different request",
            Self::InProgress => "The first request with this Idempotency-Key is still running",
            Self::CallerUnresolved => "The caller is unknown",
            Self::CallerUnverified => "The caller's token does not verify",
            Self::UpstreamUnreachable => "The service was not reached",
            Self::UpstreamLost => "The service's answer was lost",
            Self::UpstreamTimeout => "The service did not answer in time",
            Self::OutcomeUnknown => "The outcome is unknown",
            Self::ResponseNotKept => "The work was done and its response was not kept",
            Self::RequestTooLarge => "The request body is too large",
            Self::RequestTooSlow => "The request body is too slow",
            Self::RequestIncomplete => "The request body did not arrive whole",
            Self::NotGuardable => "The request cannot be guarded",
            Self::StoreUnavailable => "The idempotency store is unavailable",
            Self::NotCommitted => "The work was rolled back",
        }
    }
}

/// A refusal, ready to be sent.
#[derive(Clone, Debug)]
pub struct Problem {
    code: Code,
    detail: String,
    status: Option<StatusCode>,
    retry_after: Option<Duration>,
    differs: Vec<&'static str>,
    original_status: Option<StatusCode>,
}

impl Problem {
    /// A refusal with this code; `detail` is one sentence that says what to do about it.
    #[must_use]
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self {
            code,
            detail: detail.into(),
            status: None,
            retry_after: None,
            differs: Vec::new(),
            original_status: None,
        }
    }

    /// Adds `Retry-After`, in whole seconds and at least one.
    #[must_use]
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// Answers with another status than the code's own.
    #[must_use]
    pub(crate) fn status(mut self, status: StatusCode) -> Self {
        self.status = Some(status);
        self
    }

    /// The refusal of a request that must carry a key and does not.
    pub(crate) fn key_missing() -> Self {
        Self::new(
            Code::KeyMissing,
            "This request must carry an Idempotency-Key header: one fresh value for each operation, the same for each \
             retry of it.",
        )
    }

    /// The refusal that the machine decided on.
    pub(crate) fn refused(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Mismatch { target, body } => {
                let differs: Vec<_> =
                    [("target", target), ("body", body)].into_iter().filter(|(_, d)| *d).map(|(n, _)| n).collect();
                let detail = format!(
                    "This key was first used for a request with another {}; send the first request unchanged, or use \
                     a new key for a new operation.",
                    differs.join(" and ")
                );
                Self { differs, ..Self::new(Code::KeyReused, detail) }
            }
            Refusal::InFlight { running_for, lease_left } => Self::new(
                Code::InProgress,
                "The work has been started once and will not be started again; retry with the same key for its answer.",
            )
            .retry_after(running_for.min(lease_left)),
            Refusal::Unknown => Self::new(
                Code::OutcomeUnknown,
                "The work was started and nobody knows whether it finished; it will not be started again until an \
                 operator releases or completes the key, or it expires.",
            ),
        }
    }

    /// The refusal to replay what was not kept.
    pub(crate) fn not_kept(original_status: StatusCode) -> Self {
        let detail = format!(
            "The work was done and answered with {}, but the answer was too large or did not end, so it cannot be \
             given again; the work is not run again.",
            original_status.as_u16()
        );
        Self { original_status: Some(original_status), ..Self::new(Code::ResponseNotKept, detail) }
    }

    /// The code.
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }

    /// One sentence for whoever reads the refusal: what happened, and what to do.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// The status that the caller is answered with.
    #[must_use]
    pub fn status_code(&self) -> StatusCode {
        self.status.unwrap_or_else(|| self.code.status())
    }

    /// What differs from the first request, under [`Code::KeyReused`]: `target`, `body` or both.
    #[must_use]
    pub fn differs(&self) -> &[&'static str] {
        &self.differs
    }

    /// What the work was answered with, under [`Code::ResponseNotKept`].
    #[must_use]
    pub fn original_status(&self) -> Option<StatusCode> {
        self.original_status
    }

    /// The response to send.
    #[must_use]
    pub fn into_response(self) -> Response<Bytes> {
        let status = self.status_code();
        let code = self.code.as_str();
        let mut body = serde_json::json!({
            "type": format!("urn:onlyonce:problem:{code}"),
            "title": self.code.title(),
            "status": status.as_u16(),
            "detail": self.detail,
            "code": code,
            "error": format!("{code}: {}", self.detail),
        });
        if !self.differs.is_empty() {
            body["differs"] = self.differs.into();
        }
        if let Some(original) = self.original_status {
            body["original_status"] = original.as_u16().into();
        }
        let mut response = Response::new(Bytes::from(body.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(REFUSED, HeaderValue::from_static(code));
        if status == StatusCode::UNAUTHORIZED {
            // RFC 9110, section 15.5.2, and RFC 6750, section 3.
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer error=\"invalid_token\""));
        }
        if let Some(after) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(after)));
        }
        response
    }
}

/// `Retry-After` has no fractions, and zero would ask for a busy loop.
fn whole_seconds(after: Duration) -> u64 {
    after.as_secs().max(1)
}
