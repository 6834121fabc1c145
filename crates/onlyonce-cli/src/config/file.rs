//! The TOML file: its tables, read with their positions, and checked.

use std::ops::Range;
use std::time::Duration;

use http::HeaderName;
use onlyonce::keep::{KEEP_DEFAULT, KeepRules, UNKNOWN_DEFAULT};
use onlyonce::rules::Route;
use onlyonce::settings::{KeyRule, OnConcurrent, Settings};
use onlyonce_core::{BodyMode, Lapse};
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use toml::Spanned;

use super::{CALLER_ALLOWED, CallerSetting, FileConfig, address, check_duration, check_namespace};
use crate::duration;
use crate::forward::HostRule;
use crate::jwt::{self, JwtSettings};
use crate::store::StoreUrl;
use crate::upstream::Upstream;

/// What is wrong, and at which byte.
#[derive(Debug)]
pub(super) struct FileError {
    pub(super) at: Option<usize>,
    pub(super) reason: String,
}

impl FileError {
    fn at(span: Range<usize>, reason: impl Into<String>) -> Self {
        Self { at: Some(span.start), reason: reason.into() }
    }
}

/// Reads and checks the file.
pub(super) fn parse(text: &str) -> Result<FileConfig, FileError> {
    let file: File = toml::from_str(text).map_err(|error| FileError {
        at: error.span().map(|span| span.start),
        reason: error.message().to_owned(),
    })?;
    let (defaults, lists) = file.defaults.over(&Settings::default(), &StatusLists::default())?;
    defaults.check().map_err(|error| {
        // `[defaults]` is not at fault for what it leaves out; then no line can be named.
        FileError { at: file.defaults.span(error.setting).map(|span| span.start), reason: error.to_string() }
    })?;
    let routes =
        file.route.into_iter().map(|route| route.read(&defaults, &lists)).collect::<Result<_, _>>()?;
    Ok(FileConfig {
        listen: checked("listen", file.listen, |text| address(&text))?,
        admin: checked("admin", file.admin, |text| address(&text))?,
        upstream: checked("upstream", file.upstream, |url| {
            Upstream::parse(&url).map_err(|error| error.to_string())
        })?,
        store: checked("store", file.store, |url| StoreUrl::parse(&url))?,
        caller: file.caller,
        namespace: checked("namespace", file.namespace, check_namespace)?,
        record_grace: duration("record_grace", file.record_grace)?,
        shutdown_grace: duration("shutdown_grace", file.shutdown_grace)?,
        sweep_every: duration("sweep_every", file.sweep_every)?,
        store_start_wait: duration("store_start_wait", file.store_start_wait)?,
        allow_volatile: file.allow_volatile,
        host: file.host,
        defaults,
        routes,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    listen: Option<Spanned<String>>,
    admin: Option<Spanned<String>>,
    upstream: Option<Spanned<String>>,
    store: Option<Spanned<String>>,
    #[serde(default, deserialize_with = "caller")]
    caller: Option<CallerSetting>,
    namespace: Option<Spanned<String>>,
    record_grace: Option<Spanned<Text<Duration>>>,
    shutdown_grace: Option<Spanned<Text<Duration>>>,
    sweep_every: Option<Spanned<Text<Duration>>>,
    allow_volatile: Option<bool>,
    store_start_wait: Option<Spanned<Text<Duration>>>,
    #[serde(default, deserialize_with = "host")]
    host: Option<HostRule>,
    #[serde(default)]
    defaults: Defaults,
    #[serde(default)]
    route: Vec<RouteTable>,
}

/// The settings stand in two tables; serde cannot flatten one into the other and still name what is
/// unknown.
macro_rules! settings_tables {
    ($($field:ident: $type:ty),* $(,)?) => {
        #[derive(Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Defaults {
            $($field: Option<Spanned<$type>>,)*
        }

        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct RouteTable {
            r#match: Spanned<String>,
            endpoint: Option<Spanned<String>>,
            $($field: Option<Spanned<$type>>,)*
        }

        impl RouteTable {
            fn split(self) -> (Spanned<String>, Option<Spanned<String>>, Defaults) {
                (self.r#match, self.endpoint, Defaults { $($field: self.$field,)* })
            }
        }

        impl Defaults {
            /// Where a setting stands.
            fn span(&self, setting: &str) -> Option<Range<usize>> {
                match setting {
                    $(stringify!($field) => self.$field.as_ref().map(Spanned::span),)*
                    _ => None,
                }
            }
        }
    };
}

settings_tables! {
    timeout: Text<Duration>,
    lease: Text<Duration>,
    retention: Text<Duration>,
    request_timeout: Text<Duration>,
    idle_timeout: Text<Duration>,
    stream_after: Text<Duration>,
    key: Text<KeyRule>,
    body: Text<BodyMode>,
    on_concurrent: Text<OnConcurrent>,
    wait: Text<Duration>,
    on_lapse: Text<Lapse>,
    keep: Vec<String>,
    unknown: Vec<String>,
    fingerprint_headers: Vec<Text<HeaderName>>,
    request_body_bytes_max: usize,
    response_body_bytes_max: usize,
    record_cookies: bool,
}

/// The two lists as they are written: a route may change one and inherit the other.
struct StatusLists {
    keep: Vec<String>,
    unknown: Vec<String>,
}

impl Default for StatusLists {
    fn default() -> Self {
        let owned = |list: &[&str]| list.iter().map(|entry| (*entry).to_owned()).collect();
        Self { keep: owned(KEEP_DEFAULT), unknown: owned(UNKNOWN_DEFAULT) }
    }
}

impl Defaults {
    /// These settings laid over others.
    fn over(&self, base: &Settings, lists: &StatusLists) -> Result<(Settings, StatusLists), FileError> {
        let mut settings = base.clone();
        for (to, from) in [
            (&mut settings.timeout, &self.timeout),
            (&mut settings.retention, &self.retention),
            (&mut settings.request_timeout, &self.request_timeout),
            (&mut settings.idle_timeout, &self.idle_timeout),
            (&mut settings.stream_after, &self.stream_after),
            (&mut settings.wait, &self.wait),
        ] {
            lay(to, from);
        }
        if let Some(lease) = &self.lease {
            settings.lease = Some(lease.get_ref().0);
        }
        lay(&mut settings.key, &self.key);
        lay(&mut settings.body, &self.body);
        lay(&mut settings.on_concurrent, &self.on_concurrent);
        lay(&mut settings.on_lapse, &self.on_lapse);
        lay_plain(&mut settings.request_body_bytes_max, &self.request_body_bytes_max);
        lay_plain(&mut settings.response_body_bytes_max, &self.response_body_bytes_max);
        lay_plain(&mut settings.record_cookies, &self.record_cookies);
        if let Some(headers) = &self.fingerprint_headers {
            settings.fingerprint_headers = headers.get_ref().iter().map(|name| name.0.clone()).collect();
        }
        let list = |mine: &Option<Spanned<Vec<String>>>, base: &Vec<String>| {
            mine.as_ref().map_or_else(|| base.clone(), |mine| mine.get_ref().clone())
        };
        let lists =
            StatusLists { keep: list(&self.keep, &lists.keep), unknown: list(&self.unknown, &lists.unknown) };
        settings.keep = KeepRules::new(&lists.keep, &lists.unknown).map_err(|error| {
            let place = self.keep.as_ref().or(self.unknown.as_ref());
            FileError { at: place.map(|place| place.span().start), reason: error.to_string() }
        })?;
        Ok((settings, lists))
    }
}

fn lay<T: Clone>(to: &mut T, from: &Option<Spanned<Text<T>>>) {
    if let Some(from) = from {
        to.clone_from(&from.get_ref().0);
    }
}

fn lay_plain<T: Copy>(to: &mut T, from: &Option<Spanned<T>>) {
    if let Some(from) = from {
        *to = *from.get_ref();
    }
}

impl RouteTable {
    fn read(self, defaults: &Settings, lists: &StatusLists) -> Result<Route, FileError> {
        let (pattern, endpoint, mine) = self.split();
        let (settings, _) = mine.over(defaults, lists)?;
        settings.check().map_err(|error| {
            // What the route inherits can contradict what it sets; then the route itself is named.
            let span = mine.span(error.setting).unwrap_or_else(|| pattern.span());
            FileError::at(span, format!("in the route {:?}, {error}", pattern.get_ref()))
        })?;
        let span = pattern.span();
        let route = Route::new(pattern.get_ref(), settings)
            .map_err(|error| FileError::at(span, format!("`match` {error}")))?;
        match endpoint {
            None => Ok(route),
            Some(endpoint) => {
                let span = endpoint.span();
                route
                    .endpoint(endpoint.into_inner())
                    .map_err(|error| FileError::at(span, format!("`endpoint` {error}")))
            }
        }
    }
}

fn checked<T, U>(
    name: &str,
    setting: Option<Spanned<T>>,
    check: impl FnOnce(T) -> Result<U, String>,
) -> Result<Option<U>, FileError> {
    let Some(setting) = setting else { return Ok(None) };
    let span = setting.span();
    check(setting.into_inner()).map(Some).map_err(|reason| FileError::at(span, format!("`{name}` {reason}")))
}

fn duration(name: &str, setting: Option<Spanned<Text<Duration>>>) -> Result<Option<Duration>, FileError> {
    checked(name, setting, |duration| check_duration(name, duration.0))
}

/// A setting that is written as a string.
struct Text<T>(T);

trait FromText: Sized {
    /// For a value that is no string at all.
    const EXPECTED: &'static str;

    fn from_text(text: &str) -> Result<Self, String>;
}

impl<'de, T: FromText> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read<T>(std::marker::PhantomData<T>);
        impl<T: FromText> Visitor<'_> for Read<T> {
            type Value = T;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(T::EXPECTED)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
                T::from_text(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Read(std::marker::PhantomData)).map(Self)
    }
}

impl FromText for Duration {
    const EXPECTED: &'static str = "a duration in quotes, such as \"500ms\", \"60s\" or \"24h\"";

    fn from_text(text: &str) -> Result<Self, String> {
        duration::parse(text).map_err(|error| error.to_string())
    }
}

impl FromText for HeaderName {
    const EXPECTED: &'static str = "a header name in quotes";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("{text:?} is no header name, such as \"content-type\""))
    }
}

/// A setting with a few names for values.
macro_rules! choice {
    ($type:ty, $first:literal => $default:expr $(, $text:literal => $value:expr)+) => {
        impl FromText for $type {
            const EXPECTED: &'static str = concat!("one of \"", $first, "\"" $(, ", \"", $text, "\"")+);

            fn from_text(text: &str) -> Result<Self, String> {
                match text {
                    $first => Ok($default),
                    $($text => Ok($value),)+
                    _ => Err(format!("{text:?} is not allowed here, {} is", Self::EXPECTED)),
                }
            }
        }
    };
}

choice!(KeyRule, "optional" => Self::Optional, "required" => Self::Required, "off" => Self::Off);
choice!(OnConcurrent, "reject" => Self::Reject, "wait" => Self::Wait);
choice!(Lapse, "rerun" => Self::Rerun, "hold" => Self::Hold);
choice!(HostRule, "preserve" => Self::Preserve, "upstream" => Self::Upstream);
choice!(
    BodyMode,
    "raw" => Self::Raw,
    "json" => Self::Json,
    "form" => Self::Form,
    "multipart" => Self::Multipart,
    "auto" => Self::Auto
);

fn host<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<HostRule>, D::Error> {
    Text::deserialize(deserializer).map(|text| Some(text.0))
}

fn caller<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<CallerSetting>, D::Error> {
    struct Read;
    impl<'de> Visitor<'de> for Read {
        type Value = CallerSetting;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(CALLER_ALLOWED)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<CallerSetting, E> {
            CallerSetting::parse_name(text).map_err(E::custom)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<CallerSetting, A::Error> {
            let not_allowed = || de::Error::custom(format!("`caller` must have one entry; {CALLER_ALLOWED}"));
            let setting = match map.next_key::<String>()?.as_deref() {
                Some("header") => CallerSetting::Header(map.next_value::<Text<HeaderName>>()?.0),
                Some("jwt") => CallerSetting::Jwt(map.next_value::<JwtTable>()?.into()),
                _ => return Err(not_allowed()),
            };
            if map.next_key::<String>()?.is_some() {
                return Err(not_allowed());
            }
            Ok(setting)
        }
    }
    deserializer.deserialize_any(Read).map(Some)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JwtTable {
    header: Option<Text<HeaderName>>,
    claim: Option<String>,
    jwks: Text<jwt::Source>,
    issuer: Option<String>,
    audience: Option<String>,
}

impl From<JwtTable> for JwtSettings {
    fn from(table: JwtTable) -> Self {
        Self {
            header: table.header.map_or(http::header::AUTHORIZATION, |name| name.0),
            claim: table.claim.unwrap_or_else(|| "sub".to_owned()),
            jwks: table.jwks.0,
            issuer: table.issuer,
            audience: table.audience,
        }
    }
}

impl FromText for jwt::Source {
    const EXPECTED: &'static str = "a file or an http or https URL, in quotes";

    fn from_text(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }
}
