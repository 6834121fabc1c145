use std::time::Duration;

use clap::Parser;
use onlyonce_core::outcome::Value;
use onlyonce_core::{Claimed, Engine, Fingerprint, Key, Lapse, Operation, Policy, Recorded, Verdict};
use tempfile::TempDir;

use super::*;
use crate::store::{OpenStore, StoreUrl};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: InboxCommand,
}

const HOUR: Duration = Duration::from_secs(3_600);

/// A store in a file of its own, as consumers leave it.
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

    async fn claim(&self, operation: &Operation) -> Claimed {
        let policy = Policy { lease: HOUR, retention: HOUR, on_lapse: Lapse::Rerun };
        let print = Fingerprint { target: [1; 32], body: [2; 32] };
        Engine::new(self.store.store()).claim(operation, print, &policy).await.unwrap()
    }

    async fn end(&self, endpoint: &str, key: Key, verdict: Verdict) {
        let operation = Operation::new("default", endpoint, "", key);
        let Claimed::Execute(grant) = self.claim(&operation).await else { panic!("it is held") };
        grant.finish(verdict).await.unwrap();
    }

    async fn processed(&self, consumer: &str, id: &str, is_error: bool) {
        let json = if is_error { "\"no such account\"" } else { "7" };
        let value = Value { attempt: 1, is_error, json: json.into() };
        let keep = Verdict::Keep(Recorded::Value(value).encode());
        self.end(&endpoint_of(consumer), key_of(id).unwrap(), keep).await;
    }

    async fn run(&self, arguments: &[&str]) -> (Result<(), Failure>, String) {
        let url = self.url.to_string();
        let line = ["inbox"].iter().chain(arguments).copied().chain(["--store", &url]);
        let mut out = Vec::new();
        let ended = run(Cli::parse_from(line).command, &mut out).await;
        (ended, String::from_utf8(out).unwrap())
    }

    async fn json(&self, arguments: &[&str]) -> Vec<serde_json::Value> {
        let (ended, out) = self.run(&[arguments, &["--json"]].concat()).await;
        ended.unwrap();
        serde_json::from_str(&out).unwrap()
    }

    async fn refused(&self, arguments: &[&str]) -> (u8, String) {
        let failure = self.run(arguments).await.0.unwrap_err();
        (failure.code, failure.message.unwrap())
    }
}

#[tokio::test]
async fn messages_are_listed_and_other_keys_are_not() {
    let fixture = Fixture::new().await;
    fixture.processed("billing", "order-1", false).await;
    fixture.processed("billing", "order-2", true).await;
    fixture.processed("shipping", "order-1", false).await;
    fixture.end(&endpoint_of("billing"), key_of("order-3").unwrap(), Verdict::Again).await;
    fixture.end("POST /payments", Key::new("order-1").unwrap(), Verdict::Leave).await;
    let told = async |arguments: &[&str]| {
        let rows = fixture.json(arguments).await;
        rows.iter()
            .map(|row| format!("{} {} {}", row["endpoint"], row["key"], row["state"]))
            .collect::<Vec<_>>()
    };
    assert_eq!(told(&["list"]).await.len(), 4);
    assert_eq!(told(&["list", "--consumer", "shipping"]).await, [r#""inbox shipping" "order-1" "done""#]);
    assert_eq!(told(&["list", "--state", "lapsed"]).await, [r#""inbox billing" "order-3" "lapsed""#]);
    assert_eq!(told(&["show", "order-1"]).await.len(), 2);
    let rows = fixture.json(&["show", "order-2"]).await;
    assert_eq!((rows.len(), &rows[0]["outcome"]), (1, &"error".into()));
}

#[tokio::test]
async fn a_released_message_is_processed_when_it_comes_again() {
    let fixture = Fixture::new().await;
    for consumer in ["billing", "shipping"] {
        fixture.processed(consumer, "order-1", true).await;
    }
    let (code, message) = fixture.refused(&["release", "order-1"]).await;
    assert_eq!(code, 2);
    assert!(
        message.starts_with("2 messages match; say which with --id, --namespace or --consumer"),
        "{message}"
    );
    let (ended, out) = fixture.run(&["release", "order-1", "--consumer", "billing"]).await;
    ended.unwrap();
    assert_eq!(out, "released: the message is processed when it is delivered again\n");
    let of = |consumer| Operation::new("default", endpoint_of(consumer), "", key_of("order-1").unwrap());
    let Claimed::Execute(grant) = fixture.claim(&of("billing")).await else { panic!("it is not released") };
    assert_eq!(grant.attempt(), 1);
    assert!(matches!(fixture.claim(&of("shipping")).await, Claimed::Replay(_)));
    // A worker is at it now.
    let (code, message) = fixture.refused(&["release", "order-1", "--consumer", "billing"]).await;
    assert!(code == 2 && message.contains("--force"), "{message}");
    fixture.run(&["release", "order-1", "--consumer", "billing", "--force"]).await.0.unwrap();
    let (code, message) = fixture.refused(&["show", "order-1", "--consumer", "billing"]).await;
    assert_eq!((code, message.as_str()), (1, "there is no such message: order-1"));
}

/// Some ids are kept under a digest. Both that and the id itself lead to the message.
#[tokio::test]
async fn any_id_is_found_as_the_producer_set_it_and_as_it_is_listed() {
    let fixture = Fixture::new().await;
    for id in ["bestellung-\u{fc}", "\"quoted\"", "sha256:order", "a id, with everything"] {
        fixture.processed("billing", id, false).await;
        let rows = fixture.json(&["show", id]).await;
        assert_eq!(rows.len(), 1, "{id}");
        let listed = rows[0]["key"].as_str().unwrap();
        assert_eq!(fixture.json(&["show", listed]).await, rows, "{listed}");
    }
    assert_eq!(fixture.refused(&["show", ""]).await.0, 2);
}
