//! Which answers are kept, which free the key, and which leave it to the lease.

use std::fmt;
use std::ops::RangeInclusive;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};

use crate::problem::{Code, REFUSED};

/// What becomes of a key when its work was answered with some status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Recorded; every retry is given this answer.
    Keep,
    /// Not recorded; the next retry runs the work again.
    Release,
    /// Nobody knows whether the work happened: the key stays held until its lease ends.
    Unknown,
}

/// Two lists of statuses: those to keep and those that say nothing about the work. The rest is released.
///
/// An entry is a class (`2xx`), a code (`404`) or either with a `!` in front, which takes it out again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeepRules {
    keep: Statuses,
    unknown: Statuses,
}

/// What is kept unless a route says otherwise. A 5xx may pass, and so may a missing login, a rate
/// limit or a server that asks to try again: none of them is an outcome.
pub const KEEP_DEFAULT: &[&str] = &["2xx", "3xx", "4xx", "!401", "!407", "!408", "!421", "!425", "!429"];

/// What is unknown unless a route says otherwise: these may come from a gateway behind which the work
/// went on.
pub const UNKNOWN_DEFAULT: &[&str] = &["502", "504"];

impl Default for KeepRules {
    fn default() -> Self {
        Self::new(KEEP_DEFAULT, UNKNOWN_DEFAULT).expect("the defaults do not overlap")
    }
}

impl KeepRules {
    /// Reads the two lists.
    ///
    /// # Errors
    /// Refuses an entry that is no status from 200 to 599, and a status that is in both lists.
    pub fn new<S: AsRef<str>>(keep: &[S], unknown: &[S]) -> Result<Self, KeepError> {
        let rules =
            Self { keep: Statuses::parse("keep", keep)?, unknown: Statuses::parse("unknown", unknown)? };
        rules.check()?;
        Ok(rules)
    }

    pub(crate) fn set_keep<S: AsRef<str>>(
        &mut self,
        entries: impl IntoIterator<Item = S>,
    ) -> Result<(), KeepError> {
        self.keep = Statuses::parse("keep", entries)?;
        Ok(())
    }

    pub(crate) fn set_unknown<S: AsRef<str>>(
        &mut self,
        entries: impl IntoIterator<Item = S>,
    ) -> Result<(), KeepError> {
        self.unknown = Statuses::parse("unknown", entries)?;
        Ok(())
    }

    /// Checks the two lists against each other.
    pub(crate) fn check(&self) -> Result<(), KeepError> {
        match (200..=599).find(|status| self.keep.has(*status) && self.unknown.has(*status)) {
            Some(status) => Err(KeepError::Both { status }),
            None => Ok(()),
        }
    }

    /// What becomes of a key that was answered like this. A gRPC answer that failed at its head counts as its
    /// own status says, since its HTTP status is always 200.
    ///
    /// Another guard behind this one may say that somebody is at it, or that an operator is to decide: that passes,
    /// and is no outcome.
    pub(crate) fn of_head(&self, status: StatusCode, headers: &HeaderMap) -> Disposition {
        let passing = [Code::InProgress, Code::OutcomeUnknown];
        if headers.get(REFUSED).is_some_and(|code| passing.iter().any(|passing| code == passing.as_str())) {
            return Disposition::Release;
        }
        self.of(grpc_status(headers, headers).unwrap_or(status))
    }

    /// The same at the end of an answer whose head says to keep it: a gRPC stream says there how it ended.
    pub(crate) fn of_end(&self, headers: &HeaderMap, trailers: &HeaderMap) -> Disposition {
        grpc_status(headers, trailers).map_or(Disposition::Keep, |status| self.of(status))
    }

    /// What becomes of a key that was answered with this status.
    #[must_use]
    pub fn of(&self, status: StatusCode) -> Disposition {
        if self.keep.has(status.as_u16()) {
            Disposition::Keep
        } else if self.unknown.has(status.as_u16()) {
            Disposition::Unknown
        } else {
            Disposition::Release
        }
    }
}

/// The status of a gRPC answer, which stands in its trailers or, if it has no more than a head, in that; as HTTP
/// would say it: by the comments of `google/rpc/code.proto`, except that a cancelled call says nothing about its
/// work.
fn grpc_status(headers: &HeaderMap, said_in: &HeaderMap) -> Option<StatusCode> {
    let is_grpc = headers.get(CONTENT_TYPE)?.as_bytes().starts_with(b"application/grpc");
    let status = match said_in.get("grpc-status").filter(|_| is_grpc)?.as_bytes() {
        b"0" => StatusCode::OK,
        b"1" | b"4" => StatusCode::GATEWAY_TIMEOUT,
        b"3" | b"9" | b"11" => StatusCode::BAD_REQUEST,
        b"5" => StatusCode::NOT_FOUND,
        b"6" | b"10" => StatusCode::CONFLICT,
        b"7" => StatusCode::FORBIDDEN,
        b"8" => StatusCode::TOO_MANY_REQUESTS,
        b"12" => StatusCode::NOT_IMPLEMENTED,
        b"14" => StatusCode::SERVICE_UNAVAILABLE,
        b"16" => StatusCode::UNAUTHORIZED,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    Some(status)
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Statuses {
    included: Vec<RangeInclusive<u16>>,
    excluded: Vec<RangeInclusive<u16>>,
}

impl Statuses {
    fn parse<S: AsRef<str>>(
        list: &'static str,
        entries: impl IntoIterator<Item = S>,
    ) -> Result<Self, KeepError> {
        let mut statuses = Self { included: Vec::new(), excluded: Vec::new() };
        for entry in entries {
            let entry = entry.as_ref();
            let (into, text) = match entry.strip_prefix('!') {
                Some(text) => (&mut statuses.excluded, text),
                None => (&mut statuses.included, entry),
            };
            let range = range(text).ok_or_else(|| KeepError::Entry { list, entry: entry.to_owned() })?;
            into.push(range);
        }
        if statuses.included.is_empty() && !statuses.excluded.is_empty() {
            return Err(KeepError::OnlyExclusions { list });
        }
        Ok(statuses)
    }

    fn has(&self, status: u16) -> bool {
        self.included.iter().any(|range| range.contains(&status))
            && !self.excluded.iter().any(|range| range.contains(&status))
    }
}

fn range(text: &str) -> Option<RangeInclusive<u16>> {
    if let Some(class) = text.strip_suffix("xx") {
        let class: u16 = class.parse().ok().filter(|class| (2..=5).contains(class))?;
        return Some(class * 100..=class * 100 + 99);
    }
    let status: u16 = text.parse().ok().filter(|status| text.len() == 3 && (200..=599).contains(status))?;
    Some(status..=status)
}

/// Why keep rules were refused.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeepError {
    /// An entry is not a status.
    Entry {
        /// `keep` or `unknown`.
        list: &'static str,
        /// The entry as written.
        entry: String,
    },
    /// A list takes statuses out and puts none in.
    OnlyExclusions {
        /// `keep` or `unknown`.
        list: &'static str,
    },
    /// A status cannot be both.
    Both {
        /// The first status that is in both lists.
        status: u16,
    },
}

impl fmt::Display for KeepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entry { list, entry } => write!(
                f,
                "`{list}` has the entry \"{entry}\"; allowed are classes (\"2xx\" to \"5xx\"), codes (\"200\" to \"599\") and exclusions (\"!404\")"
            ),
            Self::OnlyExclusions { list } => write!(
                f,
                "`{list}` has only exclusions, so nothing would be in it; put a class or code before them"
            ),
            Self::Both { status } => write!(
                f,
                "{status} is in both `keep` and `unknown`; take it out of one of them (\"!{status}\")"
            ),
        }
    }
}

impl std::error::Error for KeepError {}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn of(rules: &KeepRules, status: u16) -> Disposition {
        rules.of(StatusCode::from_u16(status).expect("a status"))
    }

    #[test]
    fn the_defaults_keep_outcomes_and_nothing_that_may_pass() {
        let rules = KeepRules::default();
        for status in [200, 201, 204, 299, 301, 400, 404, 409, 422, 451] {
            assert_eq!(of(&rules, status), Disposition::Keep, "{status}");
        }
        for status in [401, 407, 408, 421, 425, 429, 500, 501, 503, 505, 599] {
            assert_eq!(of(&rules, status), Disposition::Release, "{status}");
        }
        for status in [502, 504] {
            assert_eq!(of(&rules, status), Disposition::Unknown, "{status}");
        }
    }

    #[test]
    fn a_grpc_answer_counts_as_its_own_status_says() {
        let of = |content_type: &'static str, status: &'static str| {
            let headers = [
                (CONTENT_TYPE, HeaderValue::from_static(content_type)),
                (HeaderName::from_static("grpc-status"), HeaderValue::from_static(status)),
            ];
            KeepRules::default().of_head(StatusCode::OK, &HeaderMap::from_iter(headers))
        };
        for (status, expected) in [
            // OK, INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, FAILED_PRECONDITION, ABORTED
            (["0", "3", "5", "6", "7", "9", "10"].as_slice(), Disposition::Keep),
            // UNKNOWN, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED
            (&["2", "8", "12", "13", "14", "15", "16", "99"], Disposition::Release),
            // CANCELLED, DEADLINE_EXCEEDED
            (&["1", "4"], Disposition::Unknown),
        ] {
            for status in status {
                assert_eq!(of("application/grpc+proto", status), expected, "{status}");
            }
        }
        assert_eq!(of("text/plain", "14"), Disposition::Keep, "a header of somebody else");
    }

    #[test]
    fn lists_replace_the_defaults() {
        let rules = KeepRules::new(&["2xx", "500", "!202"], &[]).expect("valid");
        assert_eq!(of(&rules, 201), Disposition::Keep);
        assert_eq!(of(&rules, 202), Disposition::Release);
        assert_eq!(of(&rules, 500), Disposition::Keep);
        assert_eq!(of(&rules, 404), Disposition::Release);
        assert_eq!(of(&rules, 502), Disposition::Release);
    }

    #[test]
    fn a_wrong_list_is_refused_with_its_entry() {
        for entry in ["1xx", "6xx", "2XX", "20x", "99", "600", "+200", "0200", "", "!", "all"] {
            assert!(matches!(KeepRules::new(&[entry], &[]), Err(KeepError::Entry { .. })), "{entry}");
        }
        assert_eq!(KeepRules::new(&["5xx"], &["502"]), Err(KeepError::Both { status: 502 }));
        assert!(KeepRules::new(&["5xx", "!502"], &["502"]).is_ok());
        assert_eq!(KeepRules::new(&["!404"], &[]), Err(KeepError::OnlyExclusions { list: "keep" }));
    }
}
