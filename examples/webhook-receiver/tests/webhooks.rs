//! The README is true, and each event is acted upon once, however it is delivered.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::HashSet;
use std::net::Shutdown;
use std::path::Path;
use std::process::Command;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use onlyonce_testkit::{Curl, Example};
use sha2::Sha256;

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn start(folder: &Path) -> Example {
    let mut command = Command::new(env!("CARGO_BIN_EXE_webhook-receiver"));
    command.current_dir(folder).env("LISTEN", "127.0.0.1:0");
    Example::start(command.env("WEBHOOK_SECRETS", "acme=whsec_demo,other=whsec_other"))
}

fn delivery(provider: &str, id: &str) -> String {
    let secret = if provider == "acme" { "whsec_demo" } else { "whsec_other" };
    let body =
        format!("{{\"id\": \"{id}\", \"type\": \"invoice.paid\", \"invoice\": \"inv-7\", \"amount\": 100}}");
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    mac.update(body.as_bytes());
    let signature = hex::encode(mac.finalize().into_bytes());
    let arguments = format!(
        "http://127.0.0.1:3000/webhooks/{provider} -H 'X-Signature-256: sha256={signature}' -d '{body}'"
    );
    Curl::parse(&arguments).request
}

/// The mails of this folder: the key of each.
fn mails(folder: &Path) -> Vec<String> {
    let lines = std::fs::read_to_string(folder.join("receipts.txt")).unwrap_or_default();
    lines.lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect()
}

fn retry_after(answer: &str) -> u64 {
    answer.lines().find_map(|line| line.strip_prefix("retry-after: ")).unwrap().parse().unwrap()
}

/// Delivers until it is done; what the deliveries before were told.
fn until_done(receiver: &Example, delivery: &str) -> Vec<String> {
    let (delivering, mut told) = (Instant::now(), Vec::new());
    loop {
        let answer = receiver.ask(delivery);
        if answer.starts_with("HTTP/1.1 200 ") {
            return told;
        }
        assert!(delivering.elapsed() < PATIENCE, "{answer}");
        told.push(answer);
        sleep(Duration::from_millis(100));
    }
}

#[test]
fn does_what_the_readme_says() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = start(folder.path());
    let curls = Curl::all(include_str!("../README.md"));
    assert!(curls.len() >= 8, "only {} commands were found", curls.len());
    curls.iter().for_each(|curl| curl.check(&receiver));
    assert_eq!(mails(folder.path()).len(), 1);
}

#[test]
fn many_deliveries_at_once_are_one_mail() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = start(folder.path());
    let (acme, other) = (delivery("acme", "evt_1"), delivery("other", "evt_1"));
    scope(|scope| {
        for at in 0..24 {
            let delivery = if at % 3 == 0 { &other } else { &acme };
            let receiver = &receiver;
            scope.spawn(move || {
                for told in until_done(receiver, delivery) {
                    assert!(told.starts_with("HTTP/1.1 409 ") && retry_after(&told) >= 1, "{told}");
                }
            });
        }
    });
    // One for each provider: the same id from another one is another event.
    let mails = mails(folder.path());
    assert_eq!((mails.len(), mails.iter().collect::<HashSet<_>>().len()), (2, 2), "{mails:?}");
    assert!(receiver.ask(&acme).contains("idempotent-replayed: true"));
}

#[test]
fn work_goes_on_when_the_provider_hangs_up() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = start(folder.path());
    let delivery = delivery("acme", "evt_1");
    let first = receiver.send(&delivery);
    sleep(Duration::from_millis(200));
    first.shutdown(Shutdown::Both).unwrap();
    drop(first);
    until_done(&receiver, &delivery);
    assert!(receiver.ask(&delivery).contains("idempotent-replayed: true"));
    assert_eq!(mails(folder.path()).len(), 1);
}

#[test]
fn an_event_whose_receiver_was_killed_is_done_after_the_lease() {
    let folder = tempfile::tempdir().unwrap();
    let mut receiver = start(folder.path());
    let delivery = delivery("acme", "evt_1");
    let _first = receiver.send(&delivery);
    sleep(Duration::from_millis(200));
    let busy = receiver.ask(&delivery).starts_with("HTTP/1.1 409 ");
    receiver.kill();

    let restarted = start(folder.path());
    let told = until_done(&restarted, &delivery);
    let keys = mails(folder.path());
    // On a machine that took longer than the work it was mailed before, and under the same key.
    assert!((1..=2).contains(&keys.len()), "{keys:?}");
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), 1, "{keys:?}");
    assert!(told.iter().all(|told| told.starts_with("HTTP/1.1 409 ")), "{told:?}");
    assert_eq!(told.is_empty(), !busy, "it was killed in its work: the lease has to end first");
    assert!(restarted.ask(&delivery).contains("idempotent-replayed: true"));
}

#[test]
fn an_error_that_says_nothing_is_left_to_the_lease_and_then_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = start(folder.path());
    let delivery = delivery("acme", "evt_1");
    std::fs::create_dir(folder.path().join("receipts.txt")).unwrap();
    let failed = receiver.ask(&delivery);
    assert!(failed.starts_with("HTTP/1.1 503 ") && (1..=10).contains(&retry_after(&failed)), "{failed}");
    assert!(failed.ends_with("not known to be done; send it again\n"), "{failed}");
    std::fs::remove_dir(folder.path().join("receipts.txt")).unwrap();
    let told = until_done(&receiver, &delivery);
    assert!(told.iter().all(|told| told.starts_with("HTTP/1.1 409 ")), "{told:?}");
    assert_eq!(mails(folder.path()).len(), 1);
}

#[test]
fn a_forged_delivery_does_not_use_up_the_id() {
    let folder = tempfile::tempdir().unwrap();
    let receiver = start(folder.path());
    let genuine = delivery("acme", "evt_1");
    for forged in [
        genuine.replace("webhooks/acme", "webhooks/other"),
        genuine.replace("webhooks/acme", "webhooks/nobody"),
        genuine.replace("\"amount\": 100", "\"amount\": 900"),
        genuine.replace("sha256=", "sha256=00"),
        genuine.replace("sha256=", "sha1="),
    ] {
        assert_ne!(forged, genuine);
        let answer = receiver.ask(&forged);
        assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    }
    let answer = receiver.ask(&genuine);
    assert!(answer.starts_with("HTTP/1.1 200 ") && !answer.contains("idempotent-replayed"), "{answer}");
}

#[test]
fn without_a_secret_it_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_webhook-receiver"));
    let output = command.current_dir(folder.path()).env_remove("WEBHOOK_SECRETS").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("webhook-receiver: set WEBHOOK_SECRETS to provider=secret"), "{said}");
}
