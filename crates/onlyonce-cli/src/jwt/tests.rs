use std::sync::RwLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::routing::get;
use jsonwebtoken::{EncodingKey, Header, encode, get_current_timestamp};
use serde_json::json;

use super::*;

/// Made for these tests with `openssl genpkey`, and used nowhere else.
const P256_A: &[u8] = include_bytes!("keys/p256-a.pem");
const P256_B: &[u8] = include_bytes!("keys/p256-b.pem");
const RSA: &[u8] = include_bytes!("keys/rsa.pem");
const ED25519: &[u8] = include_bytes!("keys/ed25519.pem");

fn signer(pem: &[u8], algorithm: Algorithm) -> EncodingKey {
    let key = match algorithm {
        Algorithm::ES256 => EncodingKey::from_ec_pem(pem),
        Algorithm::EdDSA => EncodingKey::from_ed_pem(pem),
        _ => EncodingKey::from_rsa_pem(pem),
    };
    key.unwrap()
}

fn jwk(pem: &[u8], algorithm: Algorithm, id: &str) -> Value {
    let mut jwk = Jwk::from_encoding_key(&signer(pem, algorithm), algorithm).unwrap();
    jwk.common.key_id = Some(id.to_owned());
    serde_json::to_value(jwk).unwrap()
}

fn token(pem: &[u8], algorithm: Algorithm, id: Option<&str>, claims: &Value) -> String {
    let header = Header { kid: id.map(str::to_owned), ..Header::new(algorithm) };
    encode(&header, claims, &signer(pem, algorithm)).unwrap()
}

fn ann() -> Value {
    json!({ "sub": "ann", "exp": get_current_timestamp() + 600 })
}

fn settings(jwks: Source) -> JwtSettings {
    JwtSettings { header: AUTHORIZATION, claim: "sub".into(), jwks, issuer: None, audience: None }
}

/// A caller whose key set is a file with these keys.
fn caller_with(keys: &[Value], change: impl FnOnce(&mut JwtSettings)) -> (tempfile::TempDir, JwtCaller) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jwks.json");
    std::fs::write(&path, json!({ "keys": keys }).to_string()).unwrap();
    let mut settings = settings(Source::File(path));
    change(&mut settings);
    (folder, JwtCaller::new(settings).unwrap())
}

fn caller(keys: &[Value]) -> (tempfile::TempDir, JwtCaller) {
    caller_with(keys, |_| {})
}

async fn tell(caller: &JwtCaller, name: &str, lines: &[&str]) -> Result<Option<String>, CallerError> {
    let mut request = Request::builder().uri("/");
    for line in lines {
        request = request.header(name, *line);
    }
    caller.resolve(&request.body(()).unwrap().into_parts().0).await
}

async fn bearer(caller: &JwtCaller, token: &str) -> Result<Option<String>, CallerError> {
    tell(caller, "authorization", &[&format!("Bearer {token}")]).await
}

#[track_caller]
fn assert_unverified(told: Result<Option<String>, CallerError>, says: &str) {
    match told {
        Err(CallerError::Unverified(reason)) => assert!(reason.contains(says), "{reason}"),
        other => panic!("{other:?} should be unverified: {says}"),
    }
}

#[tokio::test]
async fn a_verified_claim_is_the_caller_whatever_the_kind_of_key() {
    let (_folder, caller) = caller(&[
        jwk(P256_A, Algorithm::ES256, "ec"),
        jwk(RSA, Algorithm::RS256, "rsa"),
        jwk(ED25519, Algorithm::EdDSA, "ed"),
    ]);
    for (pem, algorithm, id) in
        [(P256_A, Algorithm::ES256, "ec"), (RSA, Algorithm::RS256, "rsa"), (ED25519, Algorithm::EdDSA, "ed")]
    {
        for id in [Some(id), None] {
            let token = token(pem, algorithm, id, &ann());
            assert_eq!(bearer(&caller, &token).await, Ok(Some("ann".into())), "{algorithm:?} {id:?}");
        }
    }
}

#[tokio::test]
async fn a_refreshed_token_is_the_same_caller() {
    let (_folder, caller) = caller(&[jwk(P256_A, Algorithm::ES256, "a")]);
    let now = get_current_timestamp();
    let tokens = [600, 700].map(|left| {
        token(P256_A, Algorithm::ES256, Some("a"), &json!({ "sub": "ann", "exp": now + left, "jti": left }))
    });
    assert_ne!(tokens[0], tokens[1]);
    assert_eq!(bearer(&caller, &tokens[0]).await, bearer(&caller, &tokens[1]).await);
}

#[tokio::test]
async fn no_token_is_anonymous_and_anything_else_is_not() {
    let (_folder, caller) = caller(&[jwk(P256_A, Algorithm::ES256, "a")]);
    assert_eq!(tell(&caller, "authorization", &[]).await, Ok(None));
    let good = format!("Bearer {}", token(P256_A, Algorithm::ES256, Some("a"), &ann()));
    assert_eq!(
        tell(&caller, "authorization", &[&good.replace("Bearer", "bearer")]).await,
        Ok(Some("ann".into()))
    );
    for lines in
        [&["Basic YW5uOng="][..], &[""], &["Bearer "], &["Bearer"], &["Bearer x.y.z"], &[&good, &good]]
    {
        assert_unverified(tell(&caller, "authorization", lines).await, "");
    }
}

#[tokio::test]
async fn a_forged_signature_does_not_verify() {
    let (_folder, caller) = caller(&[jwk(P256_A, Algorithm::ES256, "a")]);
    assert_unverified(
        bearer(&caller, &token(P256_B, Algorithm::ES256, Some("a"), &ann())).await,
        "not verify",
    );
    let good = token(P256_A, Algorithm::ES256, Some("a"), &ann());
    let forged = token(P256_A, Algorithm::ES256, Some("a"), &json!({ "sub": "bob" }));
    let (mut good, forged): (Vec<_>, Vec<_>) = (good.split('.').collect(), forged.split('.').collect());
    good[1] = forged[1];
    assert_unverified(bearer(&caller, &good.join(".")).await, "not verify");
}

/// The public key as an HMAC secret, and no signature at all: the classic confusions.
#[tokio::test]
async fn the_algorithm_is_the_keys_and_never_the_tokens() {
    let jwk_a = jwk(P256_A, Algorithm::ES256, "a");
    let secret = json!({ "kty": "oct", "kid": "s", "alg": "HS256", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LTEyMzQ" });
    let (_folder, caller) = caller(&[jwk_a.clone(), jwk(RSA, Algorithm::RS256, "rsa"), secret]);
    for secret in [jwk_a["x"].as_str().unwrap().as_bytes(), b"secret-secret-secret-secret-1234"] {
        let header = Header { kid: Some("s".into()), ..Header::new(Algorithm::HS256) };
        let token = encode(&header, &ann(), &EncodingKey::from_secret(secret).unwrap()).unwrap();
        assert_unverified(bearer(&caller, &token).await, "not allowed");
    }
    // {"alg":"none"} and {"sub":"ann"}.
    assert_unverified(bearer(&caller, "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4ifQ.").await, "");
    // The key says RS256, and the token is signed with the same key and another algorithm.
    assert_unverified(
        bearer(&caller, &token(RSA, Algorithm::PS256, Some("rsa"), &ann())).await,
        "unknown key",
    );
}

#[tokio::test]
async fn a_token_holds_from_nbf_to_exp() {
    let (_folder, caller) = caller(&[jwk(P256_A, Algorithm::ES256, "a")]);
    let now = get_current_timestamp();
    let (leeway, slack) = (LEEWAY.as_secs(), 30);
    for (claims, good) in [
        (json!({ "sub": "ann" }), true),
        (json!({ "sub": "ann", "exp": now - leeway + slack }), true),
        (json!({ "sub": "ann", "exp": now - leeway - slack }), false),
        (json!({ "sub": "ann", "nbf": now + leeway - slack }), true),
        (json!({ "sub": "ann", "nbf": now + leeway + slack }), false),
        (json!({ "sub": "ann", "exp": "tomorrow" }), false),
    ] {
        let told = bearer(&caller, &token(P256_A, Algorithm::ES256, Some("a"), &claims)).await;
        if good {
            assert_eq!(told, Ok(Some("ann".into())), "{claims}");
        } else {
            assert_unverified(told, "");
        }
    }
}

#[tokio::test]
async fn the_claim_is_a_string_or_a_number() {
    let (_folder, caller) = caller_with(&[jwk(P256_A, Algorithm::ES256, "a")], |settings| {
        settings.claim = "uid".into();
        settings.header = HeaderName::from_static("x-token");
    });
    for (claims, expected) in [
        (json!({ "uid": "u1" }), Some("u1")),
        (json!({ "uid": 42 }), Some("42")),
        (json!({ "uid": "" }), None),
        (json!({ "uid": null }), None),
        (json!({ "uid": ["u1"] }), None),
        (json!({ "sub": "ann" }), None),
    ] {
        let token = token(P256_A, Algorithm::ES256, Some("a"), &claims);
        match (tell(&caller, "x-token", &[&token]).await, expected) {
            (Ok(Some(told)), Some(expected)) => assert_eq!(told, expected),
            (Err(CallerError::Unresolved(reason)), None) => assert!(reason.contains("`uid`"), "{reason}"),
            (told, _) => panic!("{claims}: {told:?}"),
        }
    }
}

#[tokio::test]
async fn issuer_and_audience_can_be_pinned() {
    let (_folder, caller) = caller_with(&[jwk(P256_A, Algorithm::ES256, "a")], |settings| {
        settings.issuer = Some("https://id".into());
        settings.audience = Some("payments".into());
    });
    for (claims, good) in [
        (json!({ "sub": "ann", "iss": "https://id", "aud": "payments" }), true),
        (json!({ "sub": "ann", "iss": "https://id", "aud": ["x", "payments"] }), true),
        (json!({ "sub": "ann", "iss": "https://id", "aud": "x" }), false),
        (json!({ "sub": "ann", "iss": "https://evil", "aud": "payments" }), false),
        (json!({ "sub": "ann", "aud": "payments" }), false),
        (json!({ "sub": "ann", "iss": "https://id" }), false),
    ] {
        let told = bearer(&caller, &token(P256_A, Algorithm::ES256, Some("a"), &claims)).await;
        assert_eq!(told.is_ok(), good, "{claims}: {told:?}");
    }
}

/// A server of key sets that counts how often it was asked; it fails while it has no keys.
async fn serve(keys: Arc<RwLock<Vec<Value>>>) -> (Uri, Arc<AtomicUsize>) {
    let (uri, asked, _) = serve_slowly(keys).await;
    (uri, asked)
}

/// As [`serve`]; it takes its time as long as it is told to.
async fn serve_slowly(keys: Arc<RwLock<Vec<Value>>>) -> (Uri, Arc<AtomicUsize>, Arc<RwLock<Duration>>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let uri = format!("http://{}/keys", listener.local_addr().unwrap()).parse().unwrap();
    let (asked, delay) = (Arc::new(AtomicUsize::new(0)), Arc::new(RwLock::new(Duration::ZERO)));
    let (count, wait) = (Arc::clone(&asked), Arc::clone(&delay));
    let answer = move || {
        count.fetch_add(1, Ordering::SeqCst);
        let (keys, wait) = (keys.read().unwrap().clone(), *wait.read().unwrap());
        async move {
            tokio::time::sleep(wait).await;
            match keys.is_empty() {
                true => (StatusCode::SERVICE_UNAVAILABLE, String::new()),
                false => (StatusCode::OK, json!({ "keys": keys }).to_string()),
            }
        }
    };
    tokio::spawn(async { axum::serve(listener, Router::new().route("/keys", get(answer))).await.unwrap() });
    (uri, asked, delay)
}

#[tokio::test]
async fn keys_are_fetched_once_and_again_for_a_new_one_but_not_for_every_unknown_one() {
    let keys = Arc::new(RwLock::new(vec![jwk(P256_A, Algorithm::ES256, "a")]));
    let (uri, asked) = serve(Arc::clone(&keys)).await;
    let caller = JwtCaller::new(settings(Source::Url(uri))).unwrap();
    let a = token(P256_A, Algorithm::ES256, Some("a"), &ann());
    let (first, second) = tokio::join!(bearer(&caller, &a), bearer(&caller, &a));
    assert_eq!((first, second), (Ok(Some("ann".into())), Ok(Some("ann".into()))));
    assert_eq!(asked.load(Ordering::SeqCst), 1, "two at once share a fetch, and the next needs none");

    // A key that is not there yet is not asked for again and again …
    let b = token(P256_B, Algorithm::ES256, Some("b"), &ann());
    for _ in 0..3 {
        assert_unverified(bearer(&caller, &b).await, "unknown key");
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1, "the keys were fetched a moment ago");
    // … and is found once enough time has passed.
    keys.write().unwrap().push(jwk(P256_B, Algorithm::ES256, "b"));
    age(&caller, FETCH_EVERY_MIN);
    assert_eq!(bearer(&caller, &b).await, Ok(Some("ann".into())));
    assert_eq!(asked.load(Ordering::SeqCst), 2);

    // A withdrawn key does not stay for ever.
    keys.write().unwrap().remove(0);
    assert_eq!(bearer(&caller, &a).await, Ok(Some("ann".into())));
    age(&caller, KEYS_AGE_MAX);
    assert_unverified(bearer(&caller, &a).await, "unknown key");
}

#[tokio::test]
async fn keys_that_cannot_be_fetched_are_unavailable_until_they_can() {
    let keys = Arc::new(RwLock::new(Vec::new()));
    let (uri, asked) = serve(Arc::clone(&keys)).await;
    let caller = JwtCaller::new(settings(Source::Url(uri))).unwrap();
    let a = token(P256_A, Algorithm::ES256, Some("a"), &ann());
    for _ in 0..3 {
        assert!(matches!(bearer(&caller, &a).await, Err(CallerError::Unavailable(_))));
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1, "a failing server is not asked for every request");
    keys.write().unwrap().push(jwk(P256_A, Algorithm::ES256, "a"));
    age(&caller, RETRY_EVERY_MIN);
    assert_eq!(bearer(&caller, &a).await, Ok(Some("ann".into())));

    // Known keys stay while the server is away.
    keys.write().unwrap().clear();
    age(&caller, KEYS_AGE_MAX);
    assert_eq!(bearer(&caller, &a).await, Ok(Some("ann".into())));
    let unreachable =
        JwtCaller::new(settings(Source::Url("http://127.0.0.1:1/keys".parse().unwrap()))).unwrap();
    assert!(matches!(bearer(&unreachable, &a).await, Err(CallerError::Unavailable(_))));
}

/// Callers give up long before the issuer answers, and others come.
#[tokio::test]
async fn callers_that_hang_up_do_not_make_the_issuer_be_asked_again() {
    let keys = Arc::new(RwLock::new(vec![jwk(P256_A, Algorithm::ES256, "a")]));
    let (uri, asked, delay) = serve_slowly(keys).await;
    *delay.write().unwrap() = Duration::from_millis(400);
    let caller = JwtCaller::new(settings(Source::Url(uri))).unwrap();
    let a = token(P256_A, Algorithm::ES256, Some("a"), &ann());
    for _ in 0..5 {
        assert!(timeout(Duration::from_millis(40), bearer(&caller, &a)).await.is_err());
    }
    assert_eq!(bearer(&caller, &a).await, Ok(Some("ann".into())), "the fetch went on without them");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn old_keys_are_used_while_the_issuer_hangs() {
    let keys = Arc::new(RwLock::new(vec![jwk(P256_A, Algorithm::ES256, "a")]));
    let (uri, asked, delay) = serve_slowly(keys).await;
    let caller = JwtCaller::new(settings(Source::Url(uri))).unwrap();
    let a = token(P256_A, Algorithm::ES256, Some("a"), &ann());
    assert_eq!(bearer(&caller, &a).await, Ok(Some("ann".into())));

    *delay.write().unwrap() = Duration::from_secs(60);
    age(&caller, KEYS_AGE_MAX);
    let started = Instant::now();
    for _ in 0..5 {
        assert_eq!(bearer(&caller, &a).await, Ok(Some("ann".into())));
    }
    assert!(started.elapsed() < FETCH_TIME_MAX, "{:?}", started.elapsed());
    assert_eq!(asked.load(Ordering::SeqCst), 2, "they share one fetch");
}

/// Lets this much time pass for the keys.
fn age(caller: &JwtCaller, by: Duration) {
    let mut state = caller.key_set.lock();
    let earlier = |at: Instant| at.checked_sub(by).expect("the machine has been up for longer");
    state.keys =
        Arc::new(Keys { known: state.keys.known.clone(), fetched_at: state.keys.fetched_at.map(earlier) });
    if let Some(tried) = &mut state.tried {
        tried.started = earlier(tried.started);
    }
}

#[test]
fn a_file_without_usable_keys_is_refused_at_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jwks.json");
    for text in ["", "{}", "{\"keys\":[]}", "{\"keys\":[{\"kty\":\"oct\",\"k\":\"c2VjcmV0\"}]}"] {
        std::fs::write(&path, text).unwrap();
        let error = JwtCaller::new(settings(Source::File(path.clone()))).err().expect(text);
        assert!(error.to_string().contains("jwks.json"), "{error}");
    }
    assert!(JwtCaller::new(settings(Source::File("/no/such/file".into()))).is_err());
}
