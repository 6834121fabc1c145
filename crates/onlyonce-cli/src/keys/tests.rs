use clap::Parser;
use onlyonce_core::{Claimed, Engine, Fingerprint, Grant, Operation};
use serde_json::Value;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection};
use tempfile::TempDir;

use super::*;
use crate::store::StoreUrl;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: KeysCommand,
}

/// A store in a file of its own, with the engine that a proxy would have on it.
struct Fixture {
    _folder: TempDir,
    url: StoreUrl,
    store: OpenStore,
}

impl Fixture {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = StoreUrl::file(folder.path().join("keys.db"));
        let store = OpenStore::open(&url, false, Duration::ZERO).await.unwrap();
        Self { _folder: folder, url, store }
    }

    async fn claim(&self, caller: &str, key: &str, lease: Duration, retention: Duration) -> Grant {
        let operation = Operation::new("default", "POST /payments", caller, Key::new(key).unwrap());
        let policy = Policy { lease, retention, on_lapse: Lapse::Hold };
        let engine = Engine::new(self.store.store());
        let claimed = engine.claim(&operation, Fingerprint { target: [1; 32], body: [2; 32] }, &policy).await;
        let Ok(Claimed::Execute(grant)) = claimed else { panic!("{claimed:?}") };
        grant
    }

    async fn running(&self, caller: &str, key: &str) -> Grant {
        self.claim(caller, key, MINUTE, MINUTE).await
    }

    async fn lapsed(&self, key: &str) {
        drop(self.claim("", key, TICK, MINUTE).await);
        tokio::time::sleep(2 * TICK).await;
    }

    async fn done(&self, key: &str) {
        let response = Response { status: StatusCode::CREATED, body: "paid".into(), ..Response::default() };
        let outcome = Recorded::Response(response).encode();
        self.running("", key).await.finish(Verdict::Keep(outcome)).await.unwrap();
    }

    async fn damage(&self, key: &str) {
        let OpenStore::Sqlite(store) = &self.store else { panic!("the tests are on a file") };
        let path = store.path().unwrap();
        let mut connection = SqliteConnectOptions::new().filename(path).connect().await.unwrap();
        let damage = sqlx::query("UPDATE idempotency_keys SET attempt = -1 WHERE key = ?").bind(key);
        assert_eq!(damage.execute(&mut connection).await.unwrap().rows_affected(), 1);
        connection.close().await.unwrap();
    }

    async fn run(&self, arguments: &[&str]) -> (Result<(), Failure>, String) {
        let url = self.url.to_string();
        let line = ["keys"].iter().chain(arguments).copied().chain(["--store", &url]);
        let mut out = Vec::new();
        let ended = run(Cli::parse_from(line).command, &mut out).await;
        (ended, String::from_utf8(out).unwrap())
    }

    async fn json(&self, arguments: &[&str]) -> Vec<Value> {
        let (ended, text) = self.run(arguments).await;
        assert_eq!(ended, Ok(()));
        serde_json::from_str(&text).unwrap()
    }

    async fn code(&self, arguments: &[&str]) -> (u8, String) {
        let failure = self.run(arguments).await.0.expect_err("a failure");
        (failure.code, failure.message.unwrap_or_default())
    }
}

const MINUTE: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(30);

#[tokio::test]
async fn what_a_function_returned_is_shown_without_a_status() {
    let fixture = Fixture::new().await;
    for (key, is_error) in [("k-value", false), ("k-error", true)] {
        let value = onlyonce_core::outcome::Value { attempt: 1, is_error, json: "{}".into() };
        let outcome = Recorded::Value(value).encode();
        fixture.running("", key).await.finish(Verdict::Keep(outcome)).await.unwrap();
    }
    let rows = fixture.json(&["list", "--json"]).await;
    assert_eq!((&rows[0]["outcome"], &rows[0]["status"]), (&Value::from("value"), &Value::Null));
    assert_eq!((&rows[1]["outcome"], &rows[1]["body_bytes"]), (&Value::from("error"), &Value::from(2)));
    let (_, table) = fixture.run(&["list"]).await;
    assert!(table.lines().any(|line| line.starts_with("done   1        value")), "{table}");
    let (_, details) = fixture.run(&["show", "k-error"]).await;
    assert!(details.lines().any(|line| line == "outcome       error"), "{details}");
    assert!(details.lines().any(|line| line == "status        -"), "{details}");
}

#[tokio::test]
async fn a_listing_has_the_documented_fields() {
    let fixture = Fixture::new().await;
    let _grant = fixture.running("ann", "k-running").await;
    fixture.lapsed("k-lapsed").await;
    fixture.done("k-done").await;

    let rows = fixture.json(&["list", "--json"]).await;
    let fields: Vec<_> = rows[0].as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected = [
        "id",
        "namespace",
        "endpoint",
        "caller",
        "key",
        "state",
        "attempt",
        "created_at",
        "lease_until",
        "completed_at",
        "expires_at",
        "outcome",
        "status",
        "body_bytes",
    ];
    expected.sort_unstable();
    assert_eq!(fields, expected);
    let states: Vec<_> = rows.iter().map(|row| (row["key"].as_str(), row["state"].as_str())).collect();
    assert_eq!(
        states,
        [
            (Some("k-lapsed"), Some("lapsed")),
            (Some("k-running"), Some("running")),
            (Some("k-done"), Some("done"))
        ]
    );
    assert_eq!(rows[0]["namespace"], "default");
    assert_eq!((&rows[1]["caller"], &rows[1]["attempt"]), (&Value::from("ann"), &Value::from(1)));
    assert_eq!((&rows[2]["status"], &rows[2]["body_bytes"]), (&Value::from(201), &Value::from(4)));
    assert_eq!((&rows[0]["status"], &rows[2]["lease_until"]), (&Value::Null, &Value::Null));
    assert_eq!((&rows[0]["outcome"], &rows[2]["outcome"]), (&Value::Null, &Value::from("response")));
    for field in ["created_at", "expires_at", "lease_until"] {
        rows[0][field].as_str().unwrap().parse::<jiff::Timestamp>().expect(field);
    }
}

#[tokio::test]
async fn a_listing_can_be_narrowed() {
    let fixture = Fixture::new().await;
    let _ann = fixture.running("ann", "k").await;
    let _bob = fixture.running("bob", "k").await;
    fixture.done("k2").await;
    for (arguments, count) in [
        (&["list", "--json", "--state", "done"][..], 1),
        (&["list", "--json", "--state", "lapsed"], 0),
        (&["list", "--json", "--caller", "ann"], 1),
        (&["list", "--json", "--caller", ""], 1),
        (&["list", "--json", "--endpoint", "POST /payments"], 3),
        (&["list", "--json", "--endpoint", "POST /refunds"], 0),
        (&["list", "--json", "--namespace", "other"], 0),
        (&["list", "--json", "--limit", "2"], 2),
        (&["list", "--json", "--limit", "0"], 3),
        (&["show", "--json", "k"], 2),
        (&["show", "--json", "\"k2\""], 1),
    ] {
        assert_eq!(fixture.json(arguments).await.len(), count, "{arguments:?}");
    }
    let id = fixture.json(&["show", "k2", "--json"]).await[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(fixture.json(&["list", "--json", "--id", &id]).await.len(), 1);
}

#[tokio::test]
async fn a_listing_goes_on_after_its_first_page() {
    let fixture = Fixture::new().await;
    let count = PAGE_ROWS as usize * 2 + 1;
    for number in 0..count {
        drop(fixture.running("", &format!("k{number}")).await);
    }
    let mut keys: Vec<String> = fixture
        .json(&["list", "--json"])
        .await
        .iter()
        .map(|row| row["key"].as_str().unwrap().to_owned())
        .collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), count, "every key, and none twice");
    let (_, table) = fixture.run(&["list"]).await;
    assert_eq!(table.lines().count(), 101, "a heading and 100 keys");
    assert!(table.starts_with("STATE    ATTEMPT  STATUS"), "{table}");
}

#[tokio::test]
async fn an_expired_key_counts_as_never_seen_and_is_purged() {
    let fixture = Fixture::new().await;
    fixture.done("stays").await;
    drop(fixture.claim("", "goes", TICK, TICK).await);
    tokio::time::sleep(4 * TICK).await;
    assert_eq!(fixture.json(&["list", "--json"]).await.len(), 1);
    assert_eq!(fixture.code(&["show", "goes"]).await.0, 1);
    assert_eq!(fixture.run(&["purge"]).await.1, "removed 1 expired key\n");
    assert_eq!(fixture.run(&["purge", "--json"]).await.1, "{\"removed\":0}\n");
    assert_eq!(fixture.json(&["list", "--json"]).await.len(), 1);
}

#[tokio::test]
async fn an_absent_key_is_exit_code_1() {
    let fixture = Fixture::new().await;
    for command in ["show", "release", "complete"] {
        let (code, message) = fixture.code(&[command, "nope"]).await;
        assert_eq!((code, message.as_str()), (1, "there is no such key: nope"));
    }
}

#[tokio::test]
async fn an_ambiguous_key_is_exit_code_2_with_the_candidates() {
    let fixture = Fixture::new().await;
    let _ann = fixture.running("ann", "k").await;
    let _bob = fixture.running("bob", "k").await;
    for command in ["release", "complete"] {
        let (code, message) = fixture.code(&[command, "k", "--force"]).await;
        assert_eq!(code, 2);
        assert!(message.contains("caller ann") && message.contains("caller bob"), "{message}");
        assert!(message.contains("--id "), "{message}");
    }
    let (ended, _) = fixture.run(&["release", "k", "--caller", "ann", "--force"]).await;
    assert_eq!(ended, Ok(()));
    let left = fixture.json(&["show", "k", "--json"]).await;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0]["caller"], "bob");
}

#[tokio::test]
async fn running_work_is_decided_about_only_by_force() {
    let fixture = Fixture::new().await;
    for command in ["release", "complete"] {
        let _grant = fixture.running("", command).await;
        let (code, message) = fixture.code(&[command, command]).await;
        assert_eq!(code, 2);
        assert!(message.contains("--force"), "{message}");
        assert_eq!(fixture.run(&[command, command, "--force"]).await.0, Ok(()));
    }
}

#[tokio::test]
async fn a_released_key_can_be_claimed_and_its_old_holder_changes_nothing() {
    let fixture = Fixture::new().await;
    let old = fixture.running("", "k").await;
    assert_eq!(fixture.run(&["release", "k", "--force"]).await.0, Ok(()));
    let new = fixture.running("", "k").await;
    assert_eq!(new.attempt(), 1, "nobody knows it any more");
    assert_eq!(old.finish(Verdict::Release).await.unwrap(), onlyonce_core::Finished::LeaseLost);
    assert_eq!(fixture.json(&["show", "k", "--json"]).await[0]["state"], "running");
}

#[tokio::test]
async fn a_completed_key_gives_its_retries_what_the_operator_wrote() {
    let fixture = Fixture::new().await;
    fixture.lapsed("k").await;
    let rows = fixture
        .json(&[
            "complete",
            "k",
            "--status",
            "202",
            "--body",
            "{\"id\":7}",
            "--header",
            "Content-Type: application/json",
            "--retention",
            "2h",
            "--json",
        ])
        .await;
    assert_eq!((&rows[0]["state"], &rows[0]["status"]), (&Value::from("done"), &Value::from(202)));
    let time = |field: &str| rows[0][field].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    assert_eq!(time("expires_at").duration_since(time("completed_at")).as_secs(), 7_200);

    let operation = Operation::new("default", "POST /payments", "", Key::new("k").unwrap());
    let policy = Policy { lease: MINUTE, retention: MINUTE, on_lapse: Lapse::Hold };
    let fingerprint = Fingerprint { target: [1; 32], body: [2; 32] };
    let claimed = Engine::new(fixture.store.store()).claim(&operation, fingerprint, &policy).await.unwrap();
    let Claimed::Replay(outcome) = claimed else { panic!("{claimed:?}") };
    let Ok(Recorded::Response(response)) = Recorded::decode(&outcome) else { panic!("unreadable") };
    assert_eq!((response.status.as_u16(), &response.body[..]), (202, &b"{\"id\":7}"[..]));
    assert_eq!(response.headers["content-type"], "application/json");
}

#[tokio::test]
async fn an_outcome_is_replaced_only_by_force() {
    let fixture = Fixture::new().await;
    fixture.done("k").await;
    let (code, message) = fixture.code(&["complete", "k"]).await;
    assert_eq!(code, 2);
    assert!(message.contains("--force"), "{message}");
    assert_eq!(fixture.json(&["show", "k", "--json"]).await[0]["status"], 201);
    assert_eq!(fixture.run(&["complete", "k", "--status", "204", "--force"]).await.0, Ok(()));
    assert_eq!(fixture.json(&["show", "k", "--json"]).await[0]["status"], 204);
}

#[tokio::test]
async fn a_body_can_come_from_a_file() {
    let fixture = Fixture::new().await;
    let path = fixture._folder.path().join("answer");
    std::fs::write(&path, b"\0\xff").unwrap();
    fixture.lapsed("k").await;
    let body = format!("@{}", path.display());
    assert_eq!(fixture.json(&["complete", "k", "--body", &body, "--json"]).await[0]["body_bytes"], 2);
    fixture.lapsed("k2").await;
    assert_eq!(fixture.code(&["complete", "k2", "--body", "@/no/such/file"]).await.0, 2);
}

#[tokio::test]
async fn an_absent_store_is_exit_code_1_and_is_not_created() {
    let fixture = Fixture::new().await;
    let path = fixture._folder.path().join("absent.db");
    let fixture = Fixture { url: StoreUrl::file(&path), ..fixture };
    let (code, message) = fixture.code(&["list"]).await;
    assert_eq!(code, 1);
    assert!(message.contains("absent.db"), "{message}");
    assert!(!path.exists());
}

#[tokio::test]
async fn a_file_that_is_no_store_is_exit_code_2() {
    let fixture = Fixture::new().await;
    let path = fixture._folder.path().join("notes.txt");
    std::fs::write(
        &path,
        "not a database, and long enough to have a header of one hundred bytes, which it has".repeat(9),
    )
    .unwrap();
    let fixture = Fixture { url: StoreUrl::file(&path), ..fixture };
    assert_eq!(fixture.code(&["list"]).await.0, 2);
}

#[test]
fn a_header_line_is_a_name_and_a_value() {
    assert!(header("content-type: text/plain").is_ok());
    for line in ["no colon", ": x", "a b: c"] {
        assert!(header(line).is_err(), "{line}");
    }
}

#[tokio::test]
async fn what_the_proxy_never_records_is_not_an_operators_to_record() {
    let fixture = Fixture::new().await;
    fixture.lapsed("k").await;
    for line in [
        "Content-Length: 3",
        "transfer-encoding: chunked",
        "connection: close",
        "keep-alive: timeout=5",
        "proxy-connection: close",
        "upgrade: websocket",
        "te: trailers",
        "trailer: x-sum",
        "date: now",
        "set-cookie: session=1",
        "www-authenticate: Basic",
        "server-timing: db;dur=1",
        "idempotent-replayed: false",
        "onlyonce-refused: store-unavailable",
    ] {
        let (code, message) = fixture.code(&["complete", "k", "--header", "etag: 1", "--header", line]).await;
        let name = line.split(':').next().unwrap().to_ascii_lowercase();
        assert!(code == 2 && message.contains(&format!("--header {name}: ")), "{line}: {message}");
    }
    assert_eq!(fixture.json(&["show", "k", "--json"]).await[0]["state"], "lapsed");

    let file = fixture._folder.path().join("onlyonce.toml");
    std::fs::write(&file, "[defaults]\nrecord_cookies = true\n").unwrap();
    let config = file.display().to_string();
    let line = ["complete", "k", "--header", "set-cookie: session=1", "--config", &config];
    assert_eq!(fixture.run(&line).await.0, Ok(()));
}

#[tokio::test]
async fn a_completed_key_is_remembered_for_as_long_as_its_claim_wanted() {
    let fixture = Fixture::new().await;
    for (key, lease, retention) in [("k", TICK, 2 * MINUTE), ("k2", MINUTE, 3 * MINUTE)] {
        drop(fixture.claim("", key, lease, retention).await);
        tokio::time::sleep(2 * TICK).await;
        for _ in 0..2 {
            let row = &fixture.json(&["complete", key, "--force", "--json"]).await[0];
            let time = |field: &str| row[field].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
            let remembered = time("expires_at").duration_since(time("completed_at"));
            assert_eq!(remembered.unsigned_abs(), retention, "{key}");
        }
    }
}

#[tokio::test]
async fn a_damaged_record_does_not_hide_the_others() {
    let fixture = Fixture::new().await;
    let count = PAGE_ROWS as usize + 2;
    for number in 0..count {
        drop(fixture.running("", &format!("k{number}")).await);
    }
    // The first and the last of a page, so that the next one has to start after a damaged record.
    for number in [0, PAGE_ROWS - 1] {
        fixture.damage(&format!("k{number}")).await;
    }
    let (ended, text) = fixture.run(&["list", "--json"]).await;
    let rows: Vec<Value> = serde_json::from_str(&text).unwrap();
    let mut keys: Vec<_> = rows.iter().map(|row| row["key"].as_str().unwrap()).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!((rows.len(), keys.len()), (count - 2, count - 2));
    let failure = ended.unwrap_err();
    assert_eq!(failure.code, 1);
    let message = failure.message.unwrap();
    for number in [0, PAGE_ROWS - 1] {
        let key = Key::new(format!("k{number}")).unwrap();
        let id = Operation::new("default", "POST /payments", "", key).id().to_string();
        assert!(message.contains(&id) && message.contains("attempt -1"), "{message}");
    }
    // Nobody decides about what cannot be read.
    for command in ["show", "release", "complete"] {
        assert_eq!(fixture.code(&[command, "k0"]).await.0, 1);
        assert_eq!(fixture.run(&[command, "k1"]).await.0.is_ok(), command == "show");
    }
}

#[tokio::test]
async fn a_callers_name_cannot_move_the_cursor() {
    let fixture = Fixture::new().await;
    let _grant = fixture.running("\u{1b}[2Jann", "k").await;
    for command in [&["list"][..], &["show", "k"]] {
        let (_, text) = fixture.run(command).await;
        assert!(!text.contains('\u{1b}') && text.contains("\\u{1b}[2Jann"), "{text}");
    }
}
