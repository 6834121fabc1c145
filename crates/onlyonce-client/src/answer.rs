//! An answer, and what it says about its key.

use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName};
use http::{Extensions, StatusCode, Version};
use onlyonce_core::Key;
use reqwest::{Response, ResponseBuilderExt, Url};
use serde_json::Value;

#[cfg(feature = "journal")]
use crate::decide;
use crate::decide::{Loss, Says, Signs, Work};
#[cfg(feature = "journal")]
use crate::error::{Error, Refused};
use crate::retry_after;

/// Marks an answer that was recorded when the work was done, and is given again.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
const ONLYONCE_REFUSED: &str = "onlyonce-refused";
const STRIPE_SHOULD_RETRY: &str = "stripe-should-retry";

/// The longest body in which a problem is looked for, in bytes.
const PROBLEM_BYTES_MAX: usize = 64 << 10;

/// A whole answer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The header lines.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// How the answer came about.
    pub receipt: Receipt,
    pub(crate) arrived: Arrived,
}

/// How an answer came about. The middleware puts it among the response's extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// The key that every attempt carried.
    pub key: Option<Key>,
    /// How many attempts were made. Redirects are part of an attempt.
    pub attempts: u32,
    /// The server gave the recorded answer of an earlier request (`Idempotent-Replayed: true`).
    pub replayed: bool,
    /// The answer came from the journal, and no request was made.
    pub recorded: bool,
}

impl Receipt {
    /// The receipt of a response that came through the middleware.
    #[must_use]
    pub fn of(response: &Response) -> Option<&Self> {
        response.extensions().get()
    }
}

/// What a response has besides.
#[derive(Clone, Debug)]
pub(crate) struct Arrived {
    url: Url,
    version: Version,
    extensions: Extensions,
    /// Whether it is what a 303 led to.
    pub(crate) result: bool,
    /// Whether the work may have been done, in any of the attempts.
    pub(crate) work: Work,
}

impl Answer {
    /// What a journal kept.
    #[cfg(feature = "journal")]
    pub(crate) fn recorded(response: onlyonce_core::outcome::Response, url: Url, receipt: Receipt) -> Self {
        let onlyonce_core::outcome::Response { status, headers, body, .. } = response;
        let arrived = Arrived {
            url,
            version: Version::HTTP_11,
            extensions: Extensions::new(),
            result: false,
            work: Work::Done,
        };
        Self { status, headers, body, receipt, arrived }
    }

    /// Reads a response to its end.
    ///
    /// # Errors
    /// If it has none within `bytes_max`, or was cut off.
    pub(crate) async fn gather(mut response: Response, bytes_max: usize) -> Result<Self, Unread> {
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await.map_err(Unread::Broken)? {
            if chunk.len() > bytes_max - body.len() {
                return Err(Unread::TooLarge);
            }
            body.extend_from_slice(&chunk);
        }
        let receipt =
            Receipt { key: None, attempts: 0, replayed: is_replay(response.headers()), recorded: false };
        let arrived = Arrived {
            url: response.url().clone(),
            version: response.version(),
            extensions: std::mem::take(response.extensions_mut()),
            result: false,
            work: Work::NotDone,
        };
        let headers = std::mem::take(response.headers_mut());
        Ok(Self { status: response.status(), headers, body: body.freeze(), receipt, arrived })
    }

    /// The URL that answered, after redirects.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.arrived.url
    }

    /// As a response of reqwest, with its body in memory and its [`Receipt`] among the extensions.
    pub(crate) fn into_response(self) -> Response {
        let Arrived { url, version, mut extensions, .. } = self.arrived;
        extensions.insert(self.receipt);
        let builder = http::Response::builder().status(self.status).version(version).url(url);
        let mut response = builder.body(self.body).expect("these parts were a response");
        *response.headers_mut() = self.headers;
        response.extensions_mut().extend(extensions);
        response.into()
    }

    /// What the answer says about its key.
    pub(crate) fn signs(&self, now: SystemTime) -> Signs {
        let says = match self.problem().and_then(|problem| problem.says()) {
            // Such as a token that could not be verified because the signing keys are away.
            Some(Says::Refused(Work::NotDone)) if self.status.is_server_error() => Some(Says::NotRun),
            says => says,
        };
        Signs { says, result: self.arrived.result, ..signs(self.status, &self.headers, now) }
    }

    /// A recorded answer as its call ended: a refusal because the work was done is one again.
    #[cfg(feature = "journal")]
    pub(crate) fn told(self) -> Result<Self, Error> {
        match self.problem() {
            Some(problem) if !self.receipt.replayed && problem.says() == Some(Says::Refused(Work::Done)) => {
                Err(Error::Refused(Box::new(Refused::new(self, problem, Work::Done))))
            }
            _ => Ok(self),
        }
    }

    /// Whether the answer is the last word on its key.
    #[cfg(feature = "journal")]
    pub(crate) fn lasts(&self) -> bool {
        decide::lasts(self.status, is_replay(&self.headers))
    }

    /// An answer that is no error may speak of another's.
    pub(crate) fn problem(&self) -> Option<Problem> {
        let failed = self.status.is_client_error() || self.status.is_server_error();
        failed.then(|| Problem::read(&self.headers, &self.body))?
    }
}

/// Why a response was not read to its end.
pub(crate) enum Unread {
    Broken(reqwest::Error),
    TooLarge,
}

impl Unread {
    pub(crate) fn loss(&self) -> Loss {
        match self {
            Self::Broken(error) if error.is_timeout() => Loss::TimedOut,
            Self::Broken(_) => Loss::Broken,
            Self::TooLarge => Loss::TooLarge,
        }
    }
}

/// What the head of an answer says.
pub(crate) fn signs(status: StatusCode, headers: &HeaderMap, now: SystemTime) -> Signs {
    let should_retry = match headers.get(STRIPE_SHOULD_RETRY).map(|value| value.as_bytes()) {
        Some(b"true") => Some(true),
        Some(b"false") => Some(false),
        _ => None,
    };
    let retry_after: Option<Duration> = retry_after::read(headers, now);
    Signs { status, says: None, replayed: is_replay(headers), result: false, should_retry, retry_after }
}

pub(crate) fn is_replay(headers: &HeaderMap) -> bool {
    headers.get(IDEMPOTENT_REPLAYED).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"))
}

/// A server's words about a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) code: String,
    pub(crate) detail: String,
    pub(crate) differs: Vec<String>,
    pub(crate) original_status: Option<u16>,
}

impl Problem {
    /// Ours (a field, or the problem's type), or one in Stripe's form.
    fn read(headers: &HeaderMap, body: &Bytes) -> Option<Self> {
        let json = json(headers, body).unwrap_or(Value::Null);
        let field = headers.get(ONLYONCE_REFUSED).and_then(|code| code.to_str().ok());
        let ours = field.or_else(|| json["type"].as_str()?.strip_prefix("urn:onlyonce:problem:"));
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        if let Some(code) = ours {
            let differs = json["differs"].as_array().into_iter().flatten().filter_map(Value::as_str);
            return Some(Self {
                code: code.to_owned(),
                detail: text(&json["detail"]),
                differs: differs.map(str::to_owned).collect(),
                original_status: json["original_status"].as_u64().and_then(|status| status.try_into().ok()),
            });
        }
        let error = &json["error"];
        let code = match (error["code"].as_str(), error["type"].as_str()) {
            (Some(code @ "idempotency_key_in_use"), _) => code,
            (_, Some(kind @ "idempotency_error")) => kind,
            _ => return None,
        };
        Some(Self { code: code.to_owned(), detail: text(&error["message"]), ..Self::default() })
    }

    fn says(&self) -> Option<Says> {
        Some(match self.code.as_str() {
            "request-in-progress" | "idempotency_key_in_use" => Says::InFlight,
            "store-unavailable"
            | "upstream-unreachable"
            | "request-too-slow"
            | "request-incomplete"
            | "not-committed" => Says::NotRun,
            "upstream-lost" | "upstream-timeout" => Says::LostSight,
            "outcome-unknown" => Says::Refused(Work::MayBeDone),
            "response-not-kept" => Says::Refused(Work::Done),
            "idempotency-key-missing"
            | "idempotency-key-malformed"
            | "idempotency-key-reused"
            | "caller-unresolved"
            | "caller-unverified"
            | "request-too-large"
            | "not-guardable"
            | "idempotency_error" => Says::Refused(Work::NotDone),
            _ => return None,
        })
    }
}

fn json(headers: &HeaderMap, body: &Bytes) -> Option<Value> {
    let kind = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let kind = kind.split(';').next()?.trim().to_ascii_lowercase();
    let is_json = kind.starts_with("application/") && (kind.ends_with("/json") || kind.ends_with("+json"));
    (is_json && body.len() <= PROBLEM_BYTES_MAX).then(|| serde_json::from_slice(body).ok())?
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn problem(headers: &[(&'static str, &'static str)], body: &'static str) -> Option<Problem> {
        let headers = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        Problem::read(&headers, &Bytes::from_static(body.as_bytes()))
    }

    const JSON: (&str, &str) = ("content-type", "application/problem+json; charset=utf-8");

    #[test]
    fn our_problems_are_known_by_field_or_by_type() {
        let body = r#"{"type": "urn:onlyonce:problem:idempotency-key-reused", "detail": "No.", "differs": ["body"]}"#;
        let by_type = problem(&[JSON], body).expect("a problem");
        assert_eq!((&*by_type.code, &*by_type.detail), ("idempotency-key-reused", "No."));
        assert_eq!(by_type.differs, ["body"]);
        assert_eq!(by_type.says(), Some(Says::Refused(Work::NotDone)));
        let by_field = problem(&[("onlyonce-refused", "request-in-progress")], "").expect("a problem");
        assert_eq!(by_field.says(), Some(Says::InFlight));
    }

    #[test]
    fn stripes_problems_are_known() {
        let in_use =
            r#"{"error": {"code": "idempotency_key_in_use", "type": "idempotency_error", "message": "m"}}"#;
        assert_eq!(problem(&[JSON], in_use).and_then(|p| p.says()), Some(Says::InFlight));
        let reused =
            r#"{"error": {"type": "idempotency_error", "message": "Keys can only be used with ..."}}"#;
        let reused = problem(&[JSON], reused).expect("a problem");
        assert_eq!(reused.says(), Some(Says::Refused(Work::NotDone)));
        assert_eq!(reused.detail, "Keys can only be used with ...");
    }

    #[test]
    fn an_applications_own_words_are_none_of_these() {
        for body in [
            r#"{"error": "sold out"}"#,
            r#"{"error": {"code": "card_declined", "type": "card_error"}}"#,
            r#"{"type": "https://api.example/conflict", "status": 409}"#,
            r#"["request-in-progress"]"#,
            "not json",
            "",
        ] {
            assert_eq!(problem(&[JSON], body), None, "{body}");
        }
        let ours = r#"{"type": "urn:onlyonce:problem:request-in-progress"}"#;
        assert_eq!(problem(&[("content-type", "text/html")], ours), None);
        // A newer server's word is passed on by its status.
        assert_eq!(problem(&[("onlyonce-refused", "something-new")], "").and_then(|p| p.says()), None);
    }
}
