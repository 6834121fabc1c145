//! Which rule a request falls under.
//!
//! Patterns are matched on a normalised path, so that `//payments` or `/pay%6Dents/` cannot slip past a
//! rule for `/payments`. The request itself keeps its path as sent.

use std::fmt;
use std::sync::Arc;

use http::Method;

use crate::settings::{KeyRule, Settings, SettingsError};

/// One rule: what it matches, and the settings there.
#[derive(Clone, Debug)]
pub struct Route {
    methods: Methods,
    pattern: Vec<Segment>,
    endpoint: Option<String>,
    settings: Arc<Settings>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Methods {
    /// Every method that can be guarded.
    All,
    Some(Vec<Method>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(String),
    /// `{name}`: exactly one segment.
    One,
    /// `{*name}`: all that is left, even if nothing is.
    Rest,
}

impl Route {
    /// A rule for `pattern`, for example `POST,PUT /payments/{id}/refunds` or `* /admin/{*rest}`.
    ///
    /// Before the space stand the methods, or `*` for all that can be guarded. `{id}` matches one
    /// segment, `{*rest}` all that are left, even none.
    ///
    /// # Errors
    /// Refuses a pattern that cannot match, and GET, HEAD, OPTIONS, TRACE and CONNECT, which are never
    /// guarded.
    pub fn new(pattern: &str, settings: Settings) -> Result<Self, RouteError> {
        let refuse = |reason: String| RouteError { pattern: pattern.to_owned(), reason };
        settings.check().map_err(|error| refuse(error.to_string()))?;
        let (methods, path) =
            pattern.split_once(' ').filter(|(_, path)| path.starts_with('/')).ok_or_else(|| {
                refuse("must be methods, one space and a path, as in \"POST /payments\"".into())
            })?;
        Ok(Self {
            methods: parse_methods(methods).map_err(refuse)?,
            pattern: parse_pattern(path).map_err(refuse)?,
            endpoint: None,
            settings: Arc::new(settings),
        })
    }

    /// Gives the endpoint a stable name, which stands for the path in the identity of a key. Requests
    /// whose paths differ then share their keys, and the path still counts as part of the request.
    ///
    /// # Errors
    /// Refuses an empty name and one that starts with a slash, which could be taken for a path.
    pub fn endpoint(mut self, name: impl Into<String>) -> Result<Self, RouteError> {
        let name = name.into();
        if name.is_empty() || name.starts_with('/') || name.chars().any(char::is_control) {
            return Err(RouteError {
                pattern: name,
                reason: "is no endpoint name; it must not be empty or start with a slash".into(),
            });
        }
        self.endpoint = Some(name);
        Ok(self)
    }

    fn matches(&self, method: &Method, path: &[String]) -> bool {
        let method = match &self.methods {
            Methods::All => true,
            Methods::Some(methods) => methods.contains(method),
        };
        method && matches(&self.pattern, path)
    }
}

/// Why a rule was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteError {
    pattern: String,
    reason: String,
}

impl fmt::Display for RouteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" {}", self.pattern, self.reason)
    }
}

impl std::error::Error for RouteError {}

/// All rules: the first that matches wins, and the defaults apply to `POST` and `PATCH` elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    routes: Vec<Route>,
    defaults: Arc<Settings>,
}

/// The rule that a request falls under.
pub(crate) struct Matched<'a> {
    pub(crate) settings: &'a Arc<Settings>,
    /// The method and the path as sent, or the stable name that the rule gives it.
    pub(crate) endpoint: String,
}

impl Rules {
    pub(crate) fn new(routes: Vec<Route>, defaults: Settings) -> Result<Self, SettingsError> {
        defaults.check()?;
        Ok(Self { routes, defaults: Arc::new(defaults) })
    }

    /// `None` if the request is not to be guarded, with or without a key.
    pub(crate) fn find(&self, method: &Method, path: &str) -> Option<Matched<'_>> {
        if !can_be_guarded(method) {
            return None;
        }
        let route = if self.routes.is_empty() {
            None
        } else {
            let segments = normalise(path);
            self.routes.iter().find(|route| route.matches(method, &segments))
        };
        let (settings, name) = match route {
            Some(route) => (&route.settings, route.endpoint.as_deref()),
            None if matches!(*method, Method::POST | Method::PATCH) => (&self.defaults, None),
            None => return None,
        };
        (settings.key != KeyRule::Off)
            .then(|| Matched { settings, endpoint: format!("{method} {}", name.unwrap_or(path)) })
    }
}

fn can_be_guarded(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::CONNECT)
}

fn parse_methods(text: &str) -> Result<Methods, String> {
    if text == "*" {
        return Ok(Methods::All);
    }
    let methods = text.split(',').map(|name| {
        let method =
            Method::from_bytes(name.as_bytes()).map_err(|_| format!("has \"{name}\" for a method"))?;
        if name.bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Err(format!("has the method {name}; methods are written in capitals"));
        }
        if can_be_guarded(&method) {
            Ok(method)
        } else {
            Err(format!("names {method}, which is never guarded; leave it out, it is always passed on"))
        }
    });
    Ok(Methods::Some(methods.collect::<Result<_, _>>()?))
}

fn parse_pattern(path: &str) -> Result<Vec<Segment>, String> {
    if path.contains(['?', '#', ' ']) {
        return Err("has a query, fragment or space; a pattern is a path only".into());
    }
    let segments: Vec<Segment> = normalise(path)
        .into_iter()
        .map(|segment| match segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            Some("" | "*") => Err(format!("has {segment} without a name")),
            Some(name) if name.starts_with('*') => Ok(Segment::Rest),
            Some(_) => Ok(Segment::One),
            None if segment.contains(['{', '}']) => {
                Err(format!("has \"{segment}\"; braces must enclose a whole segment"))
            }
            None if segment.contains('*') => {
                Err(format!("has \"{segment}\"; write {{*rest}} for all that is left"))
            }
            None => Ok(Segment::Literal(segment)),
        })
        .collect::<Result<_, String>>()?;
    match segments.iter().position(|segment| *segment == Segment::Rest) {
        Some(at) if at + 1 < segments.len() => Err("has something after {*rest}".into()),
        _ => Ok(segments),
    }
}

fn matches(pattern: &[Segment], path: &[String]) -> bool {
    match pattern {
        [] => path.is_empty(),
        [Segment::Rest, ..] => true,
        [Segment::One, pattern @ ..] => !path.is_empty() && matches(pattern, &path[1..]),
        [Segment::Literal(want), pattern @ ..] => path.first() == Some(want) && matches(pattern, &path[1..]),
    }
}

/// The path's segments: unreserved characters decoded (RFC 3986, section 6.2.2.2), `.` and `..`
/// resolved, empty segments dropped. Whatever stays encoded is in capitals; `%2F` is no separator.
fn normalise(path: &str) -> Vec<String> {
    let mut segments: Vec<String> = Vec::new();
    for segment in path.split('/') {
        match decode_unreserved(segment).as_str() {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment.to_owned()),
        }
    }
    segments
}

fn decode_unreserved(segment: &str) -> String {
    let mut decoded = String::with_capacity(segment.len());
    let mut rest = segment;
    while let Some(at) = rest.find('%') {
        decoded.push_str(&rest[..at]);
        let escape = rest.get(at + 1..at + 3).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match escape.map(char::from) {
            Some(c) if c.is_ascii_alphanumeric() || "-._~".contains(c) => decoded.push(c),
            Some(_) => decoded.push_str(&rest[at..at + 3].to_ascii_uppercase()),
            None => {
                decoded.push('%');
                rest = &rest[at + 1..];
                continue;
            }
        }
        rest = &rest[at + 3..];
    }
    decoded.push_str(rest);
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(pattern: &str) -> Route {
        let required = Settings { key: KeyRule::Required, ..Settings::default() };
        Route::new(pattern, required).unwrap_or_else(|error| panic!("{error}"))
    }

    fn finds(pattern: &str, method: &Method, path: &str) -> bool {
        let rules = Rules::new(vec![route(pattern)], Settings::default()).expect("valid");
        rules.find(method, path).is_some_and(|found| found.settings.key == KeyRule::Required)
    }

    #[test]
    fn no_spelling_of_a_path_slips_past_its_rule() {
        for path in [
            "/payments",
            "//payments",
            "/payments/",
            "/./payments",
            "/x/../payments",
            "/pay%6Dents",
            "/pay%6dents//",
            "/%2e%2E/payments",
            "/../../payments",
        ] {
            assert!(finds("POST /payments", &Method::POST, path), "{path}");
        }
        for path in ["/Payments", "/payments/1", "/payments%2F", "/payments%2f1", "/", "/pay", "/payments%"] {
            assert!(!finds("POST /payments", &Method::POST, path), "{path}");
        }
        assert!(finds("POST /a%2fb", &Method::POST, "/a%2Fb"));
        assert!(!finds("POST /a%2fb", &Method::POST, "/a/b"));
    }

    #[test]
    fn wildcards_take_one_segment_or_the_rest() {
        assert!(finds("POST /payments/{id}/refunds", &Method::POST, "/payments/7/refunds"));
        assert!(!finds("POST /payments/{id}/refunds", &Method::POST, "/payments/7/8/refunds"));
        assert!(!finds("POST /payments/{id}/refunds", &Method::POST, "/payments/refunds"));
        for path in ["/admin", "/admin/", "/admin/a", "/admin/a/b"] {
            assert!(finds("* /admin/{*rest}", &Method::DELETE, path), "{path}");
        }
        assert!(finds("* /{*rest}", &Method::PUT, "/"));
        assert!(!finds("* /admin/{*rest}", &Method::DELETE, "/administrator"));
    }

    #[test]
    fn safe_methods_are_never_guarded_and_put_and_delete_only_by_a_rule() {
        for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE, Method::CONNECT] {
            assert!(!finds("* /{*rest}", &method, "/x"), "{method}");
            let error = Route::new(&format!("POST,{method} /x"), Settings::default()).expect_err("refused");
            assert!(error.to_string().contains(method.as_str()), "{error}");
        }
        let rules = Rules::new(vec![], Settings::default()).expect("valid");
        for (method, guarded) in
            [(Method::POST, true), (Method::PATCH, true), (Method::PUT, false), (Method::DELETE, false)]
        {
            assert_eq!(rules.find(&method, "/x").is_some(), guarded, "{method}");
        }
    }

    #[test]
    fn the_first_match_wins_and_off_means_unguarded() {
        let off = Settings { key: KeyRule::Off, ..Settings::default() };
        let open = Route::new("POST /open/{*rest}", off).expect("valid");
        let rules = Rules::new(vec![open, route("POST /{*rest}")], Settings::default()).expect("valid");
        assert!(rules.find(&Method::POST, "/open/x").is_none());
        assert!(rules.find(&Method::POST, "/x").is_some());
    }

    #[test]
    fn the_endpoint_is_the_path_as_sent_or_the_rules_name_never_its_pattern() {
        let named = route("POST /payments/{id}/refunds").endpoint("refunds").expect("valid");
        let rules = Rules::new(vec![named, route("POST /p/{id}")], Settings::default()).expect("valid");
        let endpoint = |path| rules.find(&Method::POST, path).map(|found| found.endpoint);
        assert_eq!(endpoint("/payments/7/refunds").as_deref(), Some("POST refunds"));
        assert_eq!(endpoint("//p/7").as_deref(), Some("POST //p/7"));
        assert!(route("POST /x").endpoint("/y").is_err());
        assert!(route("POST /x").endpoint("").is_err());
    }

    #[test]
    fn a_pattern_that_cannot_match_is_refused() {
        for pattern in [
            "",
            "/payments",
            "POST",
            "POST payments",
            "post /x",
            "POST, /x",
            "P(ST /x",
            "POST /x?y=1",
            "POST /a b",
            "POST /{}",
            "POST /{*}",
            "POST /{*a}/b",
            "POST /a{b}",
            "POST /*",
            "POST  /x",
        ] {
            assert!(Route::new(pattern, Settings::default()).is_err(), "{pattern}");
        }
        let short = Settings { lease: Some(Settings::default().timeout), ..Settings::default() };
        assert!(Route::new("POST /x", short).is_err());
    }
}
