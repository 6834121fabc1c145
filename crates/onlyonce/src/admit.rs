//! What happens to a request before its key is claimed.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, UPGRADE};
use http::{HeaderMap, HeaderName, Request, Response, StatusCode, Version, request};
use http_body::Body;
use http_body_util::BodyExt;
use onlyonce_core::identity::MalformedKey;
use onlyonce_core::{Fingerprint, Key, Operation, fingerprint};
use tokio::time::timeout;

use crate::body::{BoxError, Collected, ResponseBody, Whole};
use crate::caller::{Caller, CallerError};
use crate::problem::{Code, Problem, RefusalBody};
use crate::rules::{Matched, Rules};
use crate::settings::{KeyRule, Settings};

/// The request header that carries the client's key.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// What a caller is told to wait when something that Onlyonce itself needs is away.
pub(crate) const RETRY_STORE_AFTER: Duration = Duration::from_secs(1);

/// Which requests are guarded, who asks, and how a refusal looks.
pub(crate) struct Front {
    pub(crate) rules: Rules,
    pub(crate) caller: Caller,
    pub(crate) namespace: String,
    pub(crate) refusal_body: Option<RefusalBody>,
}

/// Whether and how a request is guarded, told from its head alone.
pub(crate) enum Plan {
    /// No rule covers it.
    Pass,
    /// A rule covers it and it carries no key, which the rule allows.
    Unkeyed {
        settings: Arc<Settings>,
    },
    Refuse(Problem),
    Guard(Guarded),
}

/// A request that carries a key, and what its rule says.
pub(crate) struct Guarded {
    pub(crate) key: Key,
    pub(crate) endpoint: String,
    pub(crate) settings: Arc<Settings>,
}

/// A guarded request, read whole.
pub(crate) struct Admitted {
    pub(crate) operation: Arc<Operation>,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) settings: Arc<Settings>,
}

impl Front {
    pub(crate) fn plan<B>(&self, request: &Request<B>) -> Plan {
        let Some(Matched { settings, endpoint }) = self.rules.find(request.method(), request.uri().path())
        else {
            return Plan::Pass;
        };
        match key(request.headers()) {
            None if settings.key == KeyRule::Required => Plan::Refuse(Problem::key_missing()),
            None => Plan::Unkeyed { settings: Arc::clone(settings) },
            Some(Err(malformed)) => {
                Plan::Refuse(Problem::new(Code::KeyMalformed, format!("Nothing was done: {malformed}.")))
            }
            Some(Ok(_)) if asks_for_upgrade(request.headers()) => Plan::Refuse(Problem::new(
                Code::NotGuardable,
                "A connection that changes its protocol cannot be replayed; send the request without an Idempotency-Key.",
            )),
            Some(Ok(key)) => Plan::Guard(Guarded { key, endpoint, settings: Arc::clone(settings) }),
        }
    }

    /// Finds out who asks, and reads the request's body whole.
    pub(crate) async fn admit<B>(
        &self,
        head: &request::Parts,
        body: Pin<&mut B>,
        guarded: Guarded,
    ) -> Result<(Admitted, Whole), Problem>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        let caller = self.caller.resolve(head).await.map_err(unresolved)?;
        let whole = read(&head.headers, body, &guarded.settings).await?;
        let Guarded { key, endpoint, settings } = guarded;
        let path_and_query = head.uri.path_and_query().map_or("/", |target| target.as_str());
        let counted = &settings.fingerprint_headers;
        let fingerprint =
            fingerprint::fingerprint(path_and_query, &head.headers, counted, whole.data(), settings.body);
        let operation = Arc::new(Operation::new(self.namespace.clone(), endpoint, caller, key));
        Ok((Admitted { operation, fingerprint, settings }, whole))
    }

    /// The answer to a request that is refused.
    pub(crate) fn refusal<ResB>(&self, problem: Problem) -> Response<ResponseBody<ResB>> {
        let replaced = self.refusal_body.as_ref().map(|body| body(&problem));
        let mut response = problem.into_response();
        if let Some((content_type, body)) = replaced {
            response.headers_mut().insert(CONTENT_TYPE, content_type);
            *response.body_mut() = body;
        }
        response.map(|body| ResponseBody::whole(body, HeaderMap::new()))
    }
}

/// Whether the caller's protocol ends an answer by closing the connection (HTTP/1.0): it could not tell a
/// cut answer from a whole one, so it is sent whole ones.
pub(crate) fn ends_by_closing<B>(request: &Request<B>) -> bool {
    request.version() < Version::HTTP_11
}

/// `None` if there is no key.
fn key(headers: &HeaderMap) -> Option<Result<Key, MalformedKey>> {
    let mut lines = headers.get_all(IDEMPOTENCY_KEY).iter();
    let line = lines.next()?;
    Some(match lines.next() {
        Some(_) => Err(MalformedKey::Repeated),
        None => Key::from_field(line.as_bytes()),
    })
}

/// Some clients offer `h2c` on every request; nobody has to take it up.
fn asks_for_upgrade(headers: &HeaderMap) -> bool {
    let protocols =
        headers.get_all(UPGRADE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    protocols
        .map(<[u8]>::trim_ascii)
        .any(|protocol| !protocol.is_empty() && !protocol.eq_ignore_ascii_case(b"h2c"))
}

fn unresolved(error: CallerError) -> Problem {
    match error {
        CallerError::Unresolved(reason) => {
            Problem::new(Code::CallerUnresolved, format!("Nothing was done: {reason}."))
        }
        CallerError::Unverified(reason) => {
            Problem::new(Code::CallerUnverified, format!("Nothing was done: {reason}."))
        }
        CallerError::Unavailable(reason) => {
            Problem::new(Code::CallerUnverified, format!("Nothing was done: {reason}."))
                .status(StatusCode::SERVICE_UNAVAILABLE)
                .retry_after(RETRY_STORE_AFTER)
        }
    }
}

/// Reads a request's body into memory, within its limits of size and time.
pub(crate) async fn read<B>(
    headers: &HeaderMap,
    mut body: Pin<&mut B>,
    settings: &Settings,
) -> Result<Whole, Problem>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let bytes_max = settings.request_body_bytes_max;
    let too_large = || {
        Problem::new(
            Code::RequestTooLarge,
            format!(
                "Nothing was done: a request with an Idempotency-Key may have a body of at most {bytes_max} bytes."
            ),
        )
    };
    let announced = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|bytes| bytes > bytes_max as u64) || body.size_hint().lower() > bytes_max as u64
    {
        return Err(too_large());
    }
    let reading = async {
        let mut collected = Collected::default();
        let mut trailers = HeaderMap::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| {
                let error: BoxError = error.into();
                Problem::new(
                    Code::RequestIncomplete,
                    format!("Nothing was done: the request's body did not arrive whole ({error})."),
                )
            })?;
            match frame.into_data() {
                Ok(data) => {
                    collected.push(data);
                    if collected.len() > bytes_max {
                        return Err(too_large());
                    }
                }
                Err(frame) => trailers.extend(frame.into_trailers().unwrap_or_default()),
            }
        }
        Ok(Whole::new(collected.into_bytes(), trailers))
    };
    timeout(settings.request_timeout, reading).await.unwrap_or_else(|_| {
        let limit = settings.request_timeout;
        Err(Problem::new(
            Code::RequestTooSlow,
            format!("Nothing was done: the request's body did not arrive within {limit:?}."),
        ))
    })
}
