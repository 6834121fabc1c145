use clap::Parser;
use serde_json::Value;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection};

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: DoctorArgs,
}

async fn doctor(arguments: &[&str]) -> (Result<(), Failure>, Vec<Value>) {
    let args = Cli::parse_from(["doctor", "--json"].iter().chain(arguments)).args;
    let mut out = Vec::new();
    let ended = run(&args, &mut out).await;
    (ended, serde_json::from_slice(&out).unwrap())
}

fn result<'a>(lines: &'a [Value], check: &str) -> &'a str {
    let line = lines.iter().find(|line| line["check"] == check);
    line.and_then(|line| line["result"].as_str()).unwrap_or("absent")
}

#[tokio::test]
async fn a_sound_store_is_ok_and_left_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let url = StoreUrl::file(folder.path().join("keys.db"));
    OpenStore::open(&url, false, Duration::ZERO).await.unwrap().close().await.unwrap();
    let upstream = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", upstream.local_addr().unwrap());
    let (ended, lines) = doctor(&["--store", &url.to_string(), "--upstream", &address]).await;
    assert_eq!(ended, Ok(()));
    for check in ["clock", "config", "durable", "schema", "store", "keys", "upstream"] {
        assert_eq!(result(&lines, check), "ok", "{lines:?}");
    }
    assert_ne!(result(&lines, "write"), "fail", "slow disks are a warning");
    let store = OpenStore::open_existing(&url, false).await.unwrap();
    assert_eq!(store.facts().await.unwrap().records, Some(0));
}

#[tokio::test]
async fn what_is_wrong_fails_and_what_is_absent_warns() {
    let folder = tempfile::tempdir().unwrap();
    let (text, absent) = (folder.path().join("notes.txt"), folder.path().join("absent.db"));
    std::fs::write(&text, "not a database ".repeat(99)).unwrap();
    let (ended, lines) = doctor(&["--store", &format!("sqlite:{}", text.display())]).await;
    assert_eq!(ended.unwrap_err().code, 2);
    assert_eq!(result(&lines, "store"), "fail");

    let absent_url = format!("sqlite:{}", absent.display());
    let (ended, lines) = doctor(&["--store", &absent_url]).await;
    assert_eq!(ended, Ok(()));
    assert_eq!((result(&lines, "schema"), result(&lines, "upstream")), ("warn", "warn"));
    assert!(!absent.exists(), "it looks and does not create");

    let (ended, lines) = doctor(&["--store", &format!("{absent_url}?synchronous=off")]).await;
    assert_eq!(ended.unwrap_err().code, 2);
    assert_eq!(result(&lines, "durable"), "fail");

    let (ended, lines) = doctor(&["--store", &absent_url, "--upstream", "http://127.0.0.1:1"]).await;
    assert_eq!(ended.unwrap_err().code, 1);
    assert_eq!(result(&lines, "upstream"), "fail");

    let (ended, lines) = doctor(&["--store", "mysql://x"]).await;
    assert_eq!(ended.unwrap_err().code, 2);
    assert_eq!(result(&lines, "config"), "fail");

    let (ended, lines) = doctor(&["--store", &absent_url, "--upstream", "ftp://x"]).await;
    assert_eq!(ended.unwrap_err().code, 2);
    assert_eq!(result(&lines, "upstream"), "fail");
}

#[tokio::test]
async fn a_damaged_record_fails() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.db");
    let url = StoreUrl::file(&path);
    let store = OpenStore::open(&url, false, Duration::ZERO).await.unwrap();
    let policy = Policy { lease: SLOW_WRITE, retention: SLOW_WRITE, on_lapse: Lapse::Rerun };
    let write = machine::grant(Fingerprint { target: [0; 32], body: [0; 32] }, Revision::fresh(), &policy);
    let operation = Operation::new("default", "POST /payments", "", Key::new("k").unwrap());
    store.store().insert(&operation, write).await.unwrap();
    let mut connection = SqliteConnectOptions::new().filename(&path).connect().await.unwrap();
    sqlx::query("UPDATE idempotency_keys SET attempt = -1").execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();

    let (ended, lines) = doctor(&["--store", &url.to_string()]).await;
    assert_eq!(ended.unwrap_err().code, 1);
    assert_eq!(result(&lines, "keys"), "fail", "{lines:?}");
    store.close().await.unwrap();
}
