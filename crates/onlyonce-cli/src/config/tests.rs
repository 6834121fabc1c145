use std::time::Duration;

use http::StatusCode;
use onlyonce::keep::Disposition;
use onlyonce::settings::{KeyRule, OnConcurrent};
use onlyonce_core::{BodyMode, Lapse};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn args() -> ProxyArgs {
    ProxyArgs { upstream: Some("http://up:3000".into()), ..ProxyArgs::default() }
}

/// The arguments of a proxy whose file has this text.
fn with_file(text: &str) -> (tempfile::TempDir, ProxyArgs) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("onlyonce.toml");
    std::fs::write(&path, text).unwrap();
    let store = StoreArgs { config: Some(path), ..StoreArgs::default() };
    (folder, ProxyArgs { store, ..ProxyArgs::default() })
}

#[test]
fn every_default_is_as_documented() {
    let config = ProxyConfig::load(&args()).unwrap();
    assert_eq!(config.listen, "127.0.0.1:8080");
    assert_eq!(config.admin, "127.0.0.1:8081");
    assert_eq!(config.upstream.to_string(), "http://up:3000");
    assert_eq!(config.store.to_string(), "sqlite:onlyonce.db");
    assert!(matches!(config.caller, CallerSetting::Implicit));
    assert_eq!(config.namespace, "default");
    assert_eq!(config.record_grace, 2 * SECOND);
    assert_eq!(config.shutdown_grace, 60 * SECOND);
    assert_eq!(config.sweep_every, 60 * SECOND);
    assert!(!config.allow_volatile);
    assert_eq!(config.store_start_wait, 30 * SECOND);
    assert_eq!(config.host, HostRule::Preserve);
    assert!(config.routes.is_empty());
    let settings = config.defaults;
    assert_eq!(settings.timeout, 60 * SECOND);
    assert_eq!(settings.lease(), 75 * SECOND);
    assert_eq!(settings.retention, 86_400 * SECOND);
    assert_eq!(settings.request_timeout, 30 * SECOND);
    assert_eq!(settings.idle_timeout, 60 * SECOND);
    assert_eq!(settings.stream_after, SECOND);
    assert_eq!(settings.key, KeyRule::Optional);
    assert_eq!(settings.body, BodyMode::Raw);
    assert_eq!(settings.on_concurrent, OnConcurrent::Reject);
    assert_eq!(settings.wait, 10 * SECOND);
    assert_eq!(settings.on_lapse, Lapse::Rerun);
    assert_eq!(settings.keep, onlyonce::KeepRules::default());
    assert!(settings.fingerprint_headers.is_empty());
    assert_eq!(settings.request_body_bytes_max, 1_048_576);
    assert_eq!(settings.response_body_bytes_max, 1_048_576);
    assert!(!settings.record_cookies);
}

#[test]
fn every_setting_is_read() {
    let (_folder, args) = with_file(
        r#"
        listen   = "0.0.0.0:80"
        admin    = "127.0.0.1:81"
        upstream = "https://up/v1"
        store    = "sqlite:/var/keys.db"
        caller   = { header = "X-User-Id" }
        namespace = "payments"
        record_grace = "0s"
        shutdown_grace = "5m"
        sweep_every = "500ms"
        allow_volatile = true
        store_start_wait = "1s"
        host = "upstream"

        [defaults]
        timeout = "1s"
        lease = "2s"
        retention = "7d"
        request_timeout = "3s"
        idle_timeout = "4s"
        stream_after = "0s"
        key = "required"
        body = "auto"
        on_concurrent = "wait"
        wait = "5s"
        on_lapse = "hold"
        keep = ["2xx"]
        unknown = ["503"]
        fingerprint_headers = ["Content-Type", "x-tenant"]
        request_body_bytes_max = 1
        response_body_bytes_max = 2
        record_cookies = true
        "#,
    );
    let config = ProxyConfig::load(&args).unwrap();
    assert_eq!((config.listen.as_str(), config.admin.as_str()), ("0.0.0.0:80", "127.0.0.1:81"));
    assert_eq!(config.upstream.to_string(), "https://up/v1");
    assert_eq!(config.store.to_string(), "sqlite:/var/keys.db");
    assert!(matches!(&config.caller, CallerSetting::Header(name) if name == "x-user-id"));
    assert_eq!(config.namespace, "payments");
    assert_eq!(config.record_grace, Duration::ZERO);
    assert_eq!(config.shutdown_grace, 300 * SECOND);
    assert_eq!(config.sweep_every, SECOND / 2);
    assert!(config.allow_volatile);
    assert_eq!(config.store_start_wait, SECOND);
    assert_eq!(config.host, HostRule::Upstream);
    let settings = config.defaults;
    assert_eq!((settings.timeout, settings.lease), (SECOND, Some(2 * SECOND)));
    assert_eq!(settings.retention, 7 * 86_400 * SECOND);
    assert_eq!((settings.request_timeout, settings.idle_timeout), (3 * SECOND, 4 * SECOND));
    assert_eq!((settings.stream_after, settings.wait), (Duration::ZERO, 5 * SECOND));
    assert_eq!((settings.key, settings.body), (KeyRule::Required, BodyMode::Auto));
    assert_eq!((settings.on_concurrent, settings.on_lapse), (OnConcurrent::Wait, Lapse::Hold));
    assert_eq!(settings.keep.of(StatusCode::NOT_FOUND), Disposition::Release);
    assert_eq!(settings.keep.of(StatusCode::SERVICE_UNAVAILABLE), Disposition::Unknown);
    assert_eq!(settings.fingerprint_headers, ["content-type", "x-tenant"]);
    assert_eq!((settings.request_body_bytes_max, settings.response_body_bytes_max), (1, 2));
    assert!(settings.record_cookies);
}

/// The settings that a route ends up with show only in what it refuses and in how it is printed.
#[test]
fn a_route_takes_over_what_it_does_not_set() {
    let file = FileConfig::parse(
        "f",
        r#"
        [defaults]
        timeout = "10s"
        keep = ["2xx", "4xx"]
        record_cookies = true
        [[route]]
        match = "POST,PUT /payments/{id}/refunds"
        endpoint = "refunds"
        timeout = "20s"
        unknown = ["500"]
        [[route]]
        match = "* /admin/{*rest}"
        key = "off"
        "#,
    )
    .unwrap();
    let [refunds, admin] = file.routes.as_slice() else { panic!("two routes") };
    let (refunds, admin) = (format!("{refunds:?}"), format!("{admin:?}"));
    for (route, parts) in [
        (&refunds, ["timeout: 20s", "lease: None", "record_cookies: true", "Some(\"refunds\")", "500..=500"]),
        (&admin, ["timeout: 10s", "key: Off", "record_cookies: true", "endpoint: None", "400..=499"]),
    ] {
        for part in parts {
            assert!(route.contains(part), "{part} in {route}");
        }
    }
}

#[test]
fn every_caller_is_read() {
    let caller = |text: &str| FileConfig::parse("f", text).unwrap().caller.unwrap();
    assert!(matches!(caller("caller = \"authorization\""), CallerSetting::Authorization));
    assert!(matches!(caller("caller = \"none\""), CallerSetting::Everyone));
    let CallerSetting::Jwt(jwt) = caller("caller = { jwt = { jwks = \"keys.json\" } }") else { panic!() };
    assert_eq!((jwt.header.as_str(), jwt.claim.as_str()), ("authorization", "sub"));
    let CallerSetting::Jwt(jwt) = caller(
        "caller.jwt = { header = \"x-token\", claim = \"uid\", jwks = \"https://id/keys\", issuer = \"i\", audience = \"a\" }",
    ) else {
        panic!()
    };
    assert_eq!((jwt.header.as_str(), jwt.claim.as_str()), ("x-token", "uid"));
    assert_eq!((jwt.issuer.as_deref(), jwt.audience.as_deref()), (Some("i"), Some("a")));
}

#[test]
fn an_error_names_the_line_and_what_is_allowed() {
    for (text, line, says) in [
        ("\nlisten = \"x\"", Some(2), &["`listen`", "HOST:PORT"][..]),
        ("admin = \":8080\"", Some(1), &["`admin`", "HOST:PORT"]),
        ("upstream = \"ftp://up\"", Some(1), &["`upstream`", "http://HOST"]),
        ("store = \"mysql://ann:hunter2@db/x\"", Some(1), &["`store`", "mysql", "sqlite:PATH"]),
        ("store = \"keys.db\"", Some(1), &["`store`", "sqlite:PATH"]),
        ("namespace = \"\"", Some(1), &["`namespace`"]),
        ("\n\nsweep_every = \"0s\"", Some(3), &["`sweep_every`", "longer than zero"]),
        ("record_grace = \"9999d\"", Some(1), &["`record_grace`", "ten years"]),
        ("shutdown_grace = 60", Some(1), &["integer `60`", "\"60s\""]),
        ("shutdown_grace = \"60\"", Some(1), &["\"60\"", "\"60s\""]),
        ("allow_volatile = \"yes\"", Some(1), &["string \"yes\"", "boolean"]),
        ("host = \"keep\"", Some(1), &["\"keep\"", "\"preserve\"", "\"upstream\""]),
        ("\ncolour = 1", Some(2), &["`colour`", "`listen`", "`store_start_wait`", "`route`"]),
        ("caller = \"cookie\"", Some(1), &["\"cookie\"", "\"authorization\", \"none\"", "header", "jwt"]),
        ("caller = 7", Some(1), &["\"authorization\", \"none\""]),
        ("caller = {}", Some(1), &["one entry", "\"authorization\""]),
        ("caller = { header = \"a\", jwt = { jwks = \"k\" } }", Some(1), &["one entry"]),
        ("caller = { header = \"a b\" }", Some(1), &["\"a b\"", "header name"]),
        ("caller = { jwt = { claim = \"sub\" } }", Some(1), &["`jwks`"]),
        ("caller = { jwt = { jwks = \"ftp://x\" } }", Some(1), &["\"ftp://x\"", "http or https URL"]),
        ("caller = { jwt = { jwks = \"k\", alg = \"none\" } }", Some(1), &["`alg`", "`jwks`"]),
        ("[defaults]\n\ncolour = 1", Some(3), &["`colour`", "`timeout`", "`record_cookies`"]),
        ("[defaults]\nmatch = \"POST /\"", Some(2), &["`match`", "`timeout`"]),
        ("[defaults]\ntimeout = \"1 m\"", Some(2), &["\"1 m\"", "\"500ms\""]),
        ("[defaults]\ntimeout = \"0s\"", Some(2), &["`timeout`", "longer than zero"]),
        ("[defaults]\ntimeout = \"60s\"\nlease = \"60s\"", Some(3), &["`lease`", "exceed timeout"]),
        ("[defaults]\nretention = \"74s\"", Some(2), &["`retention`", "at least lease"]),
        ("[defaults]\nkey = \"must\"", Some(2), &["\"optional\", \"required\", \"off\""]),
        ("[defaults]\nbody = \"xml\"", Some(2), &["\"raw\", \"json\", \"form\", \"multipart\", \"auto\""]),
        ("[defaults]\non_concurrent = \"queue\"", Some(2), &["\"reject\", \"wait\""]),
        ("[defaults]\non_lapse = \"\"", Some(2), &["\"rerun\", \"hold\""]),
        ("[defaults]\nkeep = [\"200-299\"]", Some(2), &["`keep`", "200-299"]),
        ("[defaults]\nkeep = [\"5xx\"]", Some(2), &["502"]),
        ("[defaults]\nunknown = [\"404\"]", Some(2), &["404"]),
        ("[defaults]\nfingerprint_headers = [\"a:\"]", Some(2), &["\"a:\"", "header name"]),
        ("[defaults]\nrequest_body_bytes_max = -1", Some(2), &["integer `-1`"]),
        ("[[route]]\nkey = \"off\"", Some(1), &["`match`"]),
        ("[[route]]\nmatch = \"POST /a\"\ncolour = 1", Some(3), &["`colour`", "`match`", "`endpoint`"]),
        ("[[route]]\nmatch = \"/a\"", Some(2), &["`match`", "\"POST /payments\""]),
        ("[[route]]\nmatch = \"GET /a\"", Some(2), &["`match`", "GET", "never guarded"]),
        ("[[route]]\nmatch = \"POST /{*a}/b\"", Some(2), &["`match`", "{*rest}"]),
        ("[[route]]\nmatch = \"POST /a\"\nendpoint = \"/a\"", Some(3), &["`endpoint`", "slash"]),
        (
            "[[route]]\nmatch = \"POST /a\"\ntimeout = \"9s\"\nlease = \"8s\"",
            Some(4),
            &["\"POST /a\"", "`lease`", "exceed timeout"],
        ),
        (
            "[defaults]\nlease = \"75s\"\n[[route]]\nmatch = \"POST /a\"\ntimeout = \"80s\"",
            Some(4),
            &["\"POST /a\"", "`lease`", "exceed timeout"],
        ),
        ("listen = \"a:1\"\nlisten = \"a:2\"", Some(2), &["duplicate key"]),
        ("listen = ", Some(1), &[]),
        ("[defaults]\ntimeout = \"60s", Some(2), &[]),
    ] {
        let error = FileConfig::parse("onlyonce.toml", text).expect_err(text).to_string();
        let place = line.map_or("onlyonce.toml: ".to_owned(), |line| format!("onlyonce.toml:{line}: "));
        assert!(error.starts_with(&place), "{text:?}: {error}");
        assert!(!error.contains('\n') && !error.contains("hunter2"), "{error}");
        for part in says {
            assert!(error.contains(part), "{text:?} should say {part}: {error}");
        }
    }
}

#[test]
fn a_flag_beats_the_file_which_beats_the_default() {
    let (_folder, mut args) = with_file(
        "upstream = \"http://file\"\nlisten = \"127.0.0.1:1\"\nadmin = \"127.0.0.1:2\"\nnamespace = \"file\"\n\
         caller = \"none\"\nstore = \"sqlite:file.db\"",
    );
    args.store.database_url = Some("sqlite:env.db".into());
    let config = ProxyConfig::load(&args).unwrap();
    assert_eq!(config.upstream.to_string(), "http://file");
    assert_eq!((config.listen.as_str(), config.admin.as_str()), ("127.0.0.1:1", "127.0.0.1:2"));
    assert_eq!((config.namespace.as_str(), config.store.to_string().as_str()), ("file", "sqlite:file.db"));
    assert!(matches!(config.caller, CallerSetting::Everyone));

    args.upstream = Some("http://flag".into());
    args.listen = Some("127.0.0.1:3".into());
    args.admin = Some("127.0.0.1:4".into());
    args.namespace = Some("flag".into());
    args.caller = Some("header:x-user".into());
    args.store.store = Some("sqlite:flag.db".into());
    args.store.allow_volatile = true;
    let config = ProxyConfig::load(&args).unwrap();
    assert_eq!(config.upstream.to_string(), "http://flag");
    assert_eq!((config.listen.as_str(), config.admin.as_str()), ("127.0.0.1:3", "127.0.0.1:4"));
    assert_eq!((config.namespace.as_str(), config.store.to_string().as_str()), ("flag", "sqlite:flag.db"));
    assert!(matches!(&config.caller, CallerSetting::Header(name) if name == "x-user"));
    assert!(config.allow_volatile);
}

#[test]
fn database_url_counts_only_where_nothing_names_a_store() {
    let mut args = args();
    args.store.database_url = Some("sqlite:env.db".into());
    assert_eq!(ProxyConfig::load(&args).unwrap().store.to_string(), "sqlite:env.db");
    args.store.store = Some("sqlite:flag.db".into());
    args.store.database_url = Some("mysql://ann:hunter2@db/x".into());
    assert_eq!(ProxyConfig::load(&args).unwrap().store.to_string(), "sqlite:flag.db");
    args.store.store = None;
    let error = ProxyConfig::load(&args).unwrap_err().to_string();
    assert!(error.contains("DATABASE_URL") && error.contains("--store"), "{error}");
    assert!(!error.contains("hunter2"), "{error}");
}

#[test]
fn a_flag_that_cannot_be_is_named() {
    type Change = fn(&mut ProxyArgs);
    let changes: [(Change, &str); 8] = [
        (|args| args.upstream = None, "upstream: is not set; give --upstream URL"),
        (|args| args.upstream = Some("up".into()), "--upstream or ONLYONCE_UPSTREAM: "),
        (|args| args.listen = Some("8080".into()), "--listen or ONLYONCE_LISTEN: "),
        (|args| args.admin = Some("8080".into()), "--admin or ONLYONCE_ADMIN: "),
        (|args| args.caller = Some("jwt".into()), "--caller or ONLYONCE_CALLER: "),
        (|args| args.namespace = Some(String::new()), "--namespace or ONLYONCE_NAMESPACE: "),
        (|args| args.store.store = Some("mysql://x".into()), "--store or ONLYONCE_STORE: "),
        (|args| args.store.config = Some("/no/such/file".into()), "/no/such/file: cannot be read"),
    ];
    for (change, start) in changes {
        let mut args = args();
        change(&mut args);
        let error = ProxyConfig::load(&args).expect_err(start).to_string();
        assert!(error.starts_with(start) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn one_address_cannot_serve_two_servers() {
    let mut args = args();
    args.listen = Some(ADMIN_DEFAULT.into());
    assert!(ProxyConfig::load(&args).unwrap_err().to_string().contains("address of its own"));
    args.listen = Some("127.0.0.1:0".into());
    args.admin = Some("127.0.0.1:0".into());
    assert!(ProxyConfig::load(&args).is_ok(), "port 0 is another port each time");
}
