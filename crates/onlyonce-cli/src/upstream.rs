//! Where requests go: the upstream's URL, taken apart once.

use std::fmt;

use http::uri::{Authority, PathAndQuery, Scheme, Uri};

/// The service behind the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    scheme: Scheme,
    authority: Authority,
    /// What the URL has for a path, without the slash at its end; it goes before every request's path.
    base: String,
}

impl Upstream {
    /// Reads `http://host:port` or `https://host/base`.
    ///
    /// # Errors
    /// Refuses another scheme, credentials, a query and a fragment. The text never shows credentials.
    pub fn parse(url: &str) -> Result<Self, MalformedUpstream> {
        let refuse = |reason: &'static str| Err(MalformedUpstream { url: redact(url), reason });
        if url.contains('#') {
            return refuse("has a fragment, which is never sent");
        }
        let Ok(uri) = url.parse::<Uri>() else { return refuse("is not a URL") };
        let parts = uri.into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return refuse("has no scheme");
        };
        if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
            return refuse("has another scheme than http and https");
        }
        if authority.as_str().contains('@') {
            return refuse("has credentials in it; let the clients send them");
        }
        if authority.host().is_empty() || (authority.port().is_some() && authority.port_u16().is_none()) {
            return refuse("has no valid host and port");
        }
        let path = parts.path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
        if path.query().is_some() {
            return refuse("has a query; every request brings its own");
        }
        Ok(Self { scheme, authority, base: path.path().trim_end_matches('/').to_owned() })
    }

    /// Where a request for `target` goes. Path and query stay as they were sent, byte for byte. `None` if they
    /// are too long with the base before them: 65,534 bytes are the most that a URI can have.
    #[must_use]
    pub fn uri(&self, target: Option<&PathAndQuery>) -> Option<Uri> {
        let target = target.map_or("/", PathAndQuery::as_str);
        // `OPTIONS *` asks about the server itself, and has no path to put a base before.
        let path = if self.base.is_empty() || target == "*" {
            target.to_owned()
        } else if target.starts_with('?') {
            format!("{}/{target}", self.base)
        } else {
            format!("{}{target}", self.base)
        };
        Uri::builder()
            .scheme(self.scheme.clone())
            .authority(self.authority.clone())
            .path_and_query(path)
            .build()
            .ok()
    }

    /// Host and port as they stand in the URL, for the `Host` header.
    #[must_use]
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Whether the connection is encrypted.
    #[must_use]
    pub fn is_https(&self) -> bool {
        self.scheme == Scheme::HTTPS
    }

    /// Host and port to connect to.
    #[must_use]
    pub fn address(&self) -> String {
        let port = self.authority.port_u16().unwrap_or(if self.is_https() { 443 } else { 80 });
        format!("{}:{port}", self.authority.host())
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority, self.base)
    }
}

/// A URL that cannot be an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedUpstream {
    url: String,
    reason: &'static str,
}

impl fmt::Display for MalformedUpstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} {}; allowed is http://HOST[:PORT][/BASE] or https://HOST[:PORT][/BASE]",
            self.url, self.reason
        )
    }
}

impl std::error::Error for MalformedUpstream {}

/// The URL without whatever may be a secret: all before an `@`, and the query.
#[must_use]
pub fn redact(url: &str) -> String {
    let (scheme, rest) = match url.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        None => (String::new(), url),
    };
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    match rest.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}***@{host}"),
        None => format!("{scheme}{rest}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(upstream: &str, target: &str) -> String {
        let target: PathAndQuery = target.parse().unwrap();
        Upstream::parse(upstream).unwrap().uri(Some(&target)).unwrap().to_string()
    }

    #[test]
    fn the_target_is_kept_byte_for_byte_behind_the_base() {
        for target in ["/", "/a//b/../c/%2F%7e?x=1&&y=%20;z", "/?", "/a?b?c", "/%e2%82%ac", "/a;b=c,d/'(*)"] {
            assert_eq!(uri("http://up:3000", target), format!("http://up:3000{target}"));
            assert_eq!(uri("http://up:3000/", target), format!("http://up:3000{target}"));
            assert_eq!(uri("https://up/v1/", target), format!("https://up/v1{target}"));
        }
        assert_eq!(Upstream::parse("http://up/v1").unwrap().uri(None).unwrap().path(), "/v1/");
        let all = "*".parse().unwrap();
        assert_eq!(Upstream::parse("http://up/v1").unwrap().uri(Some(&all)).unwrap().path(), "*");
    }

    #[test]
    fn a_target_that_is_too_long_behind_the_base_goes_nowhere() {
        let longest: PathAndQuery = format!("/{}", "a".repeat(65_533)).parse().unwrap();
        assert!(Upstream::parse("http://up").unwrap().uri(Some(&longest)).is_some());
        assert!(Upstream::parse("http://up/v1").unwrap().uri(Some(&longest)).is_none());
    }

    #[test]
    fn the_address_has_the_port_of_the_scheme() {
        for (url, address) in [
            ("http://up", "up:80"),
            ("https://up", "up:443"),
            ("https://up:8443/x", "up:8443"),
            ("http://[::1]:3000", "[::1]:3000"),
        ] {
            assert_eq!(Upstream::parse(url).unwrap().address(), address);
        }
    }

    #[test]
    fn what_is_no_upstream_is_refused_without_its_secrets() {
        for url in [
            "",
            "up",
            "up:3000",
            "/x",
            "ftp://up",
            "http://",
            "http://u:s3cret@up",
            "http://up?s3cret",
            "http://up/#a",
        ] {
            let error = Upstream::parse(url).expect_err(url).to_string();
            assert!(error.contains("allowed is http://") && !error.contains("s3cret"), "{error}");
        }
    }
}
