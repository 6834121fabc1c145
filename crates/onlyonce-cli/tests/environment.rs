//! What the environment of the command means.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn onlyonce(variables: &[(&str, &str)], arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onlyonce"));
    for (name, _) in std::env::vars() {
        if name.starts_with("ONLYONCE_") || name == "DATABASE_URL" || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command.args(arguments).envs(variables.iter().copied());
    command
}

/// `doctor` on a store in memory, which wants to be allowed.
fn doctor(allow_volatile: &str) -> Output {
    let variables = [("ONLYONCE_ALLOW_VOLATILE", allow_volatile), ("ONLYONCE_STORE", "sqlite::memory:")];
    onlyonce(&variables, &["doctor", "--json"]).output().unwrap()
}

fn result(output: &Output, check: &str) -> String {
    let lines: Vec<Value> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    lines.iter().find(|line| line["check"] == check).unwrap()["result"].as_str().unwrap().to_owned()
}

#[test]
fn a_switch_is_set_in_any_of_the_usual_ways() {
    for (value, expected) in [
        ("1", "warn"),
        ("true", "warn"),
        ("yes", "warn"),
        ("on", "warn"),
        ("0", "fail"),
        ("false", "fail"),
        ("", "fail"),
    ] {
        assert_eq!(result(&doctor(value), "durable"), expected, "{value:?}");
    }
    assert_eq!(doctor("perhaps").status.code(), Some(2));
}

#[test]
fn an_empty_variable_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let empty: Vec<_> = ["STORE", "CONFIG", "UPSTREAM", "LOG_FORMAT", "LOG", "ALLOW_VOLATILE"]
        .map(|name| format!("ONLYONCE_{name}"))
        .into();
    let variables: Vec<_> = empty.iter().map(|name| (name.as_str(), "")).collect();
    let mut command = onlyonce(&variables, &["doctor", "--json"]);
    let output = command.current_dir(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(result(&output, "schema"), "warn", "the store is the default one, and not there yet");

    let empty: Vec<_> =
        ["LISTEN", "ADMIN", "NAMESPACE", "CALLER", "UPSTREAM"].map(|name| format!("ONLYONCE_{name}")).into();
    let variables: Vec<_> = empty.iter().map(|name| (name.as_str(), "")).collect();
    let output = onlyonce(&variables, &["proxy"]).current_dir(folder.path()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && said.contains("upstream: is not set"), "{said}");
}

#[test]
fn where_it_listens_is_said_whatever_the_logs_are_filtered_to() {
    let folder = tempfile::tempdir().unwrap();
    for (filter, lines) in [("error", 1), ("onlyonce_cli=info,warn", 2)] {
        let mut command = onlyonce(
            &[("ONLYONCE_LOG", filter), ("ONLYONCE_LOG_FORMAT", "json")],
            &["proxy", "--upstream=http://127.0.0.1:9", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0"],
        );
        let mut child = command.current_dir(folder.path()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let line: Value = serde_json::from_str(&said.next().unwrap()).unwrap();
        assert_eq!((&line["message"], &line["level"]), (&"listening".into(), &"INFO".into()), "{line}");
        assert!(!line["listen"].as_str().unwrap().ends_with(":0"), "the real port: {line}");
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z'), "{line}");
        assert!(line["store"].as_str().unwrap().contains("onlyonce.db"), "{line}");
        if lines == 2 {
            // The upstream is not there.
            let next: Value = serde_json::from_str(&said.next().unwrap()).unwrap();
            assert_ne!(next["message"], "listening", "it is said once");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
