//! What a reader of the sources relies on.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The core's modules without clock, randomness or I/O; they import only each other.
const PURE: [&str; 8] =
    ["record", "machine", "identity", "digest", "downstream", "fingerprint", "outcome", "backoff"];

/// Pure as well, over a calendar and the rules of a time zone that are given to them.
const PURE_OVER_ZONES: [&str; 2] =
    ["crates/onlyonce/src/period/calendar.rs", "crates/onlyonce/src/period/cron.rs"];

/// What `jiff` would ask the machine for: its clock and its zone.
const IMPURE_OF_ZONES: [&str; 3] = ["now", "system", "try_system"];

/// Crates that a pure module may use.
const PURE_CRATES: [&str; 11] = [
    "std",
    "core",
    "bytes",
    "form_urlencoded",
    "http",
    "serde",
    "serde_json",
    "serde_json_canonicalizer",
    "sfv",
    "sha2",
    "uuid",
];

/// Names that are not pure, whichever way they came in.
const IMPURE: [&str; 12] = [
    "tokio",
    "getrandom",
    "rand",
    "tracing",
    "Instant",
    "SystemTime",
    "fs",
    "net",
    "env",
    "io",
    "process",
    "thread",
];

const ARCHITECTURE_LINES_MAX: usize = 250;

/// Marks of unfinished work; in pieces, because this file is searched as well.
const UNFINISHED: [&str; 4] =
    [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("#[ign", "ore"), concat!("FIX", "ME")];

/// Every broken rule, as a sentence.
pub(crate) fn violations(root: &Path, metadata: &Value) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for module in PURE {
        let path = root.join("crates/onlyonce-core/src").join(format!("{module}.rs"));
        found.extend(impurities(&read(&path)?).into_iter().map(|why| format!("core module {module}: {why}")));
    }
    for path in PURE_OVER_ZONES {
        let source = read(&root.join(path))?;
        found.extend(impurities_over_zones(&source).into_iter().map(|why| format!("{path}: {why}")));
    }
    match read(&root.join("ARCHITECTURE.md")) {
        Ok(text) => found.extend(too_long(&text)),
        Err(error) => found.push(error),
    }
    found.extend(undescribed(metadata));
    let mut code = String::new();
    for path in files(root, &["crates", "examples", "xtask"], &["rs", "toml"])? {
        let text = read(&path)?;
        found.extend(unfinished(&text).into_iter().map(|why| format!("{}:{why}", shown(root, &path))));
        code += &text;
    }
    let known = words(&code);
    for path in files(root, &["docs", "examples", "README.md"], &["md"])? {
        let document = read(&path)?;
        let names = unknown_tests(&document, &known);
        found.extend(names.into_iter().map(|name| format!("{}: there is no {name}", shown(root, &path))));
    }
    Ok(found)
}

fn shown(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).display().to_string()
}

/// What a pure module may not contain; its tests may.
fn impurities(source: &str) -> Vec<String> {
    impurities_but(source, &PURE_CRATES, &IMPURE)
}

fn impurities_over_zones(source: &str) -> Vec<String> {
    let crates = [&PURE_CRATES[..], &["jiff"]].concat();
    impurities_but(source, &crates, &[&IMPURE[..], &IMPURE_OF_ZONES].concat())
}

fn impurities_but(source: &str, crates: &[&str], impure: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    for line in code.lines().map(|line| line.split("//").next().unwrap_or_default()) {
        let words: Vec<&str> =
            line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2).filter(|_| line.contains("crate::")) {
            if pair[0] == "crate" && !PURE.contains(&pair[1]) {
                found.push(format!("imports crate::{}, which is not pure", pair[1]));
            }
        }
        if let ["use", name, ..] | ["pub", "use", name, ..] = words.as_slice()
            && !matches!(*name, "crate" | "super" | "self")
            && !crates.contains(name)
        {
            found.push(format!("imports {name}"));
        }
        found.extend(words.iter().filter(|word| impure.contains(word)).map(|word| format!("names {word}")));
    }
    found
}

fn too_long(architecture: &str) -> Option<String> {
    let lines = architecture.lines().count();
    (lines > ARCHITECTURE_LINES_MAX)
        .then(|| format!("ARCHITECTURE.md has {lines} lines, more than {ARCHITECTURE_LINES_MAX}"))
}

/// Published crates without the fields that their page on a registry shows.
fn undescribed(metadata: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let members = metadata["workspace_members"].as_array().cloned().unwrap_or_default();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        // `publish = false` is an empty list of registries.
        let published = package["publish"].as_array().is_none_or(|registries| !registries.is_empty());
        if !published || !members.contains(&package["id"]) {
            continue;
        }
        for field in ["readme", "description", "license", "repository"] {
            if package[field].as_str().is_none_or(str::is_empty) {
                found.push(format!("{} has no {field} in its Cargo.toml", package["name"]));
            }
        }
    }
    found
}

fn unfinished(source: &str) -> Vec<String> {
    let lines = source.lines().enumerate();
    let marked = lines.flat_map(|(i, line)| {
        UNFINISHED.iter().filter(|mark| line.contains(**mark)).map(move |mark| format!("{}: {mark}", i + 1))
    });
    marked.collect()
}

/// What reads like the name of a test, for nothing else has so many words, and is nowhere in the code: a promise
/// that nothing proves any more.
fn unknown_tests<'a>(document: &'a str, known: &HashSet<&str>) -> Vec<&'a str> {
    let quoted = document.split('`').skip(1).step_by(2);
    quoted.filter(|name| name.matches('_').count() >= 4 && is_word(name) && !known.contains(name)).collect()
}

fn words(code: &str) -> HashSet<&str> {
    code.split(|c: char| !is_in_word(c)).collect()
}

fn is_word(name: &str) -> bool {
    name.chars().all(is_in_word)
}

fn is_in_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The files with one of these endings, in these folders or named as such.
fn files(root: &Path, places: &[&str], endings: &[&str]) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    let mut todo: Vec<_> = places.iter().map(|place| root.join(place)).collect();
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            for entry in entries {
                todo.push(entry.map_err(|error| format!("{}: {error}", path.display()))?.path());
            }
        } else if endings.iter().any(|ending| path.extension().is_some_and(|end| end == *ending)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pure_module_may_use_pure_ones() {
        let source = "//! Never tokio, see [`crate::engine`].\nuse std::time::Duration;\n\
                      use bytes::Bytes; // not std::fs\nuse crate::record::{Record, Seen};\n\
                      #[cfg(test)]\nmod tests { use tokio::time::Instant; }";
        assert_eq!(impurities(source), [""; 0]);
    }

    #[test]
    fn what_is_not_pure_is_reported() {
        let cases = [
            ("use tokio::sync::Notify;", vec!["imports tokio", "names tokio"]),
            ("use std::time::{Duration, Instant};", vec!["names Instant"]),
            ("let now = std::time::SystemTime::now();", vec!["names SystemTime"]),
            ("    getrandom::fill(&mut bytes);", vec!["names getrandom"]),
            ("use std::{fs, str};", vec!["names fs"]),
            ("use crate::engine::Engine;", vec!["imports crate::engine, which is not pure"]),
            ("fn f(store: &dyn crate::store::Store) {}", vec!["imports crate::store, which is not pure"]),
            ("pub use jiff::Timestamp;", vec!["imports jiff"]),
        ];
        for (source, expected) in cases {
            assert_eq!(impurities(source), expected, "{source}");
        }
    }

    #[test]
    fn what_is_pure_over_zones_asks_for_no_clock() {
        assert_eq!(impurities_over_zones("use jiff::tz::TimeZone;\nlet next = zone.following(at);"), [""; 0]);
        let asks = "let at = jiff::Timestamp::now();\nlet zone = TimeZone::system();";
        assert_eq!(impurities_over_zones(asks), ["names now", "names system"]);
    }

    #[test]
    fn unfinished_work_is_reported_with_its_line() {
        for mark in UNFINISHED {
            assert_eq!(unfinished(&format!("fn f() {{\n    {mark}\n}}")), [format!("2: {mark}")]);
        }
    }

    #[test]
    fn a_promise_without_its_test_is_reported() {
        let known = words("async fn a_copy_is_given_the_answer() {}");
        let document =
            "`a_copy_is_given_the_answer`, `a_copy_runs_again_and_again`, `on_lapse = \"hold\"`, `wait`";
        assert_eq!(unknown_tests(document, &known), ["a_copy_runs_again_and_again"]);
    }

    #[test]
    fn a_long_architecture_is_reported() {
        assert_eq!(too_long(&"line\n".repeat(250)), None);
        assert!(too_long(&"line\n".repeat(251)).is_some());
    }

    #[test]
    fn a_published_crate_has_its_fields() {
        let package = |name: &str, readme: Option<&str>, publish: Value| {
            json!({"id": name, "name": name, "readme": readme, "description": "d", "license": "MIT",
                   "repository": "https://example.com", "publish": publish})
        };
        let packages = [
            package("good", Some("README.md"), json!(null)),
            package("bare", None, json!(null)),
            package("tool", None, json!([])),
            package("not ours", None, json!(null)),
        ];
        let metadata = json!({"packages": packages, "workspace_members": ["good", "bare", "tool"]});
        assert_eq!(undescribed(&metadata), ["\"bare\" has no readme in its Cargo.toml"]);
    }
}
